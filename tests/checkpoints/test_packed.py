"""Packed checkpoints: what is in them, that they are made once and whole, and what is said when they were touched."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.checkpoints import derived as derived_module
from h2o_flexgen.checkpoints import packed as packed_module
from h2o_flexgen.checkpoints import stored_tensors as reading_module
from h2o_flexgen.checkpoints.checkpoint import open_checkpoint
from h2o_flexgen.checkpoints.derived import PACKED, DerivedFolder
from h2o_flexgen.checkpoints.packed import PackedCheckpoint, stored_values
from h2o_flexgen.checkpoints.stale_files import nbytes_in, remove_leftovers
from h2o_flexgen.checkpoints.stored_tensors import STRETCH_BYTES, StoredTensor
from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.reports import Stage
from h2o_flexgen.formats.grouped import TILE
from h2o_flexgen.formats.table import PLAIN, matrix_format
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import create_model, load_config
from tests.helpers.contract import Checkpoints
from tests.helpers.tiny import save_tiny

CODEC = "group4"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_tiny("llama-gqa", folder, torch.bfloat16, max_shard_size="40KB")
    return folder


def spec_of(folder: Path, format: str = CODEC) -> ModelSpec:
    return create_model(load_config(str(folder)), "float32").spec.packed(format)


def opened(folder: Path, cache: Path, format: str = CODEC) -> PackedCheckpoint:
    return PackedCheckpoint(open_checkpoint(folder), spec_of(folder, format), cache)


def locate_all(source: PackedCheckpoint, folder: Path, format: str = CODEC) -> dict[str, object]:
    return dict(source.locate(spec_of(folder, format).tensors.values()))


def values_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("format", ["group4", "group8"])
def test_what_is_packed_is_what_the_codec_makes_of_the_stored_values(format: str, model: Path, tmp_path: Path) -> None:
    values, spec = values_in(model), spec_of(model, format)
    located = opened(model, tmp_path / "cache", format).locate(spec.tensors.values())
    packed = [tensor for tensor in spec.tensors.values() if tensor.format != PLAIN]
    assert len(packed) >= 10
    for tensor in packed:
        expected = torch.empty(tensor.nbytes, dtype=torch.uint8)
        encode(matrix_format(format), values[tensor.name], expected)
        stored = located[tensor.name]
        assert stored.offset % 4096 == 0, "direct reads start at pages"
        assert stored.file.read_bytes()[stored.offset :][: tensor.nbytes] == expected.numpy().tobytes()


def test_small_tensors_stay_as_they_are_stored(model: Path, tmp_path: Path) -> None:
    spec = spec_of(model)
    plain = [tensor.name for tensor in spec.tensors.values() if tensor.format == PLAIN]
    assert plain and all("norm" in name or name.endswith("bias") for name in plain)
    located = opened(model, tmp_path / "cache").locate(spec.tensors.values())
    assert all(located[name].file.parent == model for name in plain)


TABLES = {"opt": 1, "opt-350m": 1, "qwen2": 1, "neox-tied": 1, "opt-untied": 2, "llama-gqa": 2, "qwen3": 2, "neox-parallel": 2}


@pytest.mark.parametrize("kind", TABLES)
def test_every_matrix_is_packed_and_every_table_of_tokens_tied_or_not(
    kind: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """But for a table of positions."""
    spec, folder = spec_of(checkpoints.folder(kind)), checkpoints.folder(kind)
    two_sided = {tensor.name: tensor for tensor in spec.tensors.values() if len(tensor.shape) == 2}
    assert {name for name, tensor in two_sided.items() if tensor.format == PLAIN} == {
        name for name in two_sided if "embed_positions" in name
    }
    tables = [
        spec.layers[0].packed_tensor(spec.layers[0].token_table),
        spec.layers[-1].packed_tensor(spec.layers[-1].logit_matrix),
    ]
    assert all(table is not None and table.shape[0] == spec.vocab for table in tables)
    assert len(set(tables)) == TABLES[kind]
    source, values = opened(folder, tmp_path / "cache"), values_in(folder)
    for table in filter(None, tables):
        expected = torch.empty(table.nbytes, dtype=torch.uint8)
        encode(matrix_format(CODEC), values[table.name], expected)
        stored = source.locate([table])[table.name]
        assert stored.file.read_bytes()[stored.offset :][: table.nbytes] == expected.numpy().tobytes()


def test_a_folder_without_tables_is_not_taken_for_one_with_them(model: Path, tmp_path: Path) -> None:
    """As one was written before tables were packed."""
    spec = spec_of(model)
    tables = {layer.packed_tensor(name) for layer in spec.layers for name in layer.in_pieces}
    matrices = spec.map_tensors(lambda tensor: replace(tensor, format=PLAIN) if tensor in tables else tensor)
    before = PackedCheckpoint(open_checkpoint(model), matrices, tmp_path / "cache")
    before.locate(matrices.tensors.values())
    after = opened(model, tmp_path / "cache")
    assert before.bytes_to_write == 0 and after.bytes_to_write > 0 and after.folder != before.folder
    assert len(locate_all(after, model)) == len(spec.tensors)


def test_they_are_packed_once_and_read_from_then_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(model, tmp_path / "cache")
    promised = first.bytes_to_write
    assert promised > 0 and not (tmp_path / "cache").exists(), "nothing is written before it is needed"
    locate_all(first, model)
    written = sum(file.stat().st_size for file in first.folder.glob("*.safetensors"))
    assert promised <= written <= promised + 8192
    monkeypatch.setattr(packed_module, "write_safetensors", None)
    second = opened(model, tmp_path / "cache")
    assert second.bytes_to_write == 0
    assert locate_all(second, model) == locate_all(first, model)


def test_parts_and_files_do_not_change_what_is_packed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents(opened(model, tmp_path / "cache"), model)
    monkeypatch.setattr(reading_module, "PART_BYTES", 300)
    monkeypatch.setattr(packed_module, "FILE_BYTES", 9000)
    cut = opened(model, tmp_path / "other")
    assert contents(cut, model) == whole
    assert len(list(cut.folder.glob("*.safetensors"))) > 2


class HarmsWhatItChecked:
    """A check of a file that is damaged as soon as it was checked."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen = b""

    def __call__(self, offset: int, data: memoryview) -> None:
        self.seen += bytes(data)
        self.file.write_bytes(bytes(self.file.stat().st_size))

    def unreadable(self, error: OSError) -> Exception:
        return error


@pytest.mark.parametrize("together", [1, TILE])
@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (700, 1501)])
def test_what_is_packed_are_the_bytes_that_were_checked(
    rows: int, columns: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts that end within rows, too."""
    file, values = tmp_path / "copy.bin", torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    file.write_bytes(values.numpy().tobytes())
    monkeypatch.setattr(reading_module, "PART_BYTES", STRETCH_BYTES)
    check = HarmsWhatItChecked(file)
    stored = StoredTensor("matrix", file, 0, values.nbytes, "float32", (rows, columns), check)
    parts = list(stored_values(stored, together))
    assert b"".join(part.numpy().tobytes() for part in parts) == check.seen
    assert torch.equal(parts[0], values[: len(parts[0])])


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("part_bytes", [1, 4 * 7, 4 * 7 * 3 + 5])
def test_rows_are_put_together_from_parts(
    part_bytes: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PART_BYTES", part_bytes)
    file, values = tmp_path / "matrix.bin", torch.arange(70, dtype=torch.float32).view(10, 7)
    file.write_bytes(b"before" + values.numpy().tobytes())
    stored = StoredTensor("matrix", file, 6, values.nbytes, "float32", (10, 7))
    parts = list(stored_values(stored, together))
    assert torch.equal(torch.cat(parts), values) and all(len(part) % together == 0 for part in parts[:-1])


def contents(source: PackedCheckpoint, folder: Path) -> dict[str, bytes]:
    tensors = {tensor.name: tensor for tensor in spec_of(folder).tensors.values() if tensor.format != PLAIN}
    located = source.locate(tensors.values())
    return {name: stored.file.read_bytes()[stored.offset :][: tensors[name].nbytes] for name, stored in located.items()}


def test_other_weights_or_another_codec_are_another_folder(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folders = [opened(model, cache).folder, opened(model, cache, "group8").folder]
    file = sorted(model.glob("*.safetensors"))[0]
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    folders.append(opened(model, cache).folder)
    assert len(set(folders)) == 3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_with_their_tensor(wrong: float, model: Path, tmp_path: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[-1]
    values = load_file(file)
    name = next(name for name, value in values.items() if value.ndim == 2)
    values[name][3, 5] = wrong
    save_file(values, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"^tensor {re.escape(name)} in {re.escape(str(file))} holds NaN, infinity or"
    ) as told:
        locate_all(opened(model, tmp_path / "cache"), model)
    assert "\n" not in str(told.value) and list((tmp_path / "cache").iterdir()) == []


def test_progress_counts_every_byte_once(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = PackedCheckpoint(
        open_checkpoint(model), spec_of(model), tmp_path / "cache", lambda done, total: seen.append((done, total))
    )
    total = source.bytes_to_write
    locate_all(source, model)
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_a_plan_says_what_it_would_write(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with LLM(str(model), weight_codec=CODEC, offload_dir=tmp_path / "offload") as llm:
        assert llm.loaded.packing is not None
        folder, nbytes, _ = llm.loaded.packing
        assert folder.parent == tmp_path / "home" / "h2o_flexgen" / "packed" and nbytes > 0
        assert not folder.exists()
        llm.generate([[1, 2, 3]])
        assert llm.loaded.packing == (folder, 0, 0)
    with LLM(str(model), offload_dir=tmp_path / "offload") as llm:
        assert llm.loaded.packing is None


def test_what_packing_will_write_is_no_room_for_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 0, 10**9))
    with LLM(str(model), offload_dir=tmp_path / "offload") as plain:
        assert plain.limits.disk == 10**9
    with LLM(str(model), weight_codec=CODEC, offload_dir=tmp_path / "offload") as llm:
        assert llm.loaded.packing is not None and llm.limits.disk == 10**9 - llm.loaded.packing[1]


# -- copies of an older layout -------------------------------------------------------------------------------------------


def made_older(model: Path, cache: Path, format: str = CODEC) -> Path:
    """A copy as it was made before matrices lay in tiles: in the same place, row by row."""
    spec = spec_of(model, format)
    rows = [tensor for tensor in spec.tensors.values() if tensor.format != PLAIN]
    asked = json.dumps([1, *((tensor.name, tensor.shape, format) for tensor in rows)])
    checkpoint = open_checkpoint(model)
    older = replace(DerivedFolder.of(checkpoint.place, checkpoint.origins, PACKED, "pack", asked, cache), format=2)
    of_rows = spec.map_tensors(lambda tensor: replace(tensor, format=format) if tensor in rows else tensor)
    older.made(PackedCheckpoint(checkpoint, of_rows, cache)._build)
    return older.path


class Told(list[str]):
    def __call__(self) -> None:
        self.append("renewed")


def told_opening(model: Path, cache: Path, told: Told, format: str = CODEC) -> PackedCheckpoint:
    return PackedCheckpoint(open_checkpoint(model), spec_of(model, format), cache, renewing=told)


def test_a_copy_of_an_older_layout_is_made_again_in_its_place_and_said_once(model: Path, tmp_path: Path) -> None:
    cache, told = tmp_path / "cache", Told()
    expected = contents(opened(model, tmp_path / "other"), model)
    older = made_older(model, cache)
    source = told_opening(model, cache, told)
    assert source.folder == older and source.bytes_to_write > 0 and source.bytes_to_free == nbytes_in(older)
    assert contents(source, model) == expected and contents(told_opening(model, cache, told), model) == expected
    assert told == ["renewed"] and list(cache.iterdir()) == [older]
    assert (source.bytes_to_write, source.bytes_to_free) == (0, 0)


def test_a_copy_in_another_codec_is_not_taken_for_an_older_one(model: Path, tmp_path: Path) -> None:
    cache, told = tmp_path / "cache", Told()
    older = made_older(model, cache, "group8")
    for format in ("group4", "group4", "group8", "group4"):
        locate_all(told_opening(model, cache, told, format), model, format)
        assert len(told) == (format == "group8" or told == ["renewed"])
    assert len(list(cache.iterdir())) == 2 and nbytes_in(older) > 0
    assert [opened(model, cache, format).bytes_to_write for format in ("group4", "group8")] == [0, 0]


def test_a_disk_that_cannot_hold_both_holds_the_new_copy(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    made_older(model, cache)
    size = opened(model, cache).bytes_to_write + 20_000  # headers and a manifest included
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=size - nbytes_in(cache)))
    with pytest.raises(ValueError, match="packing the weights needs"):
        locate_all(opened(model, cache, "group8"), model, "group8")
    locate_all(opened(model, cache), model)
    assert 0 < nbytes_in(cache) <= size


def test_an_older_copy_of_which_a_part_could_not_be_removed_is_a_leftover(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run is killed meanwhile."""
    cache = tmp_path / "cache"
    older = made_older(model, cache)
    with monkeypatch.context() as patch:
        patch.setattr(derived_module.shutil, "rmtree", refuse)
        with pytest.raises(ValueError, match=r"^cannot pack the weights of .*: Input/output error; free some space"):
            locate_all(opened(model, cache), model)
    (left,) = cache.iterdir()
    assert left != older
    leftovers = remove_leftovers(tmp_path, [cache])
    assert leftovers is not None and leftovers.places == [left] and list(cache.iterdir()) == []
    locate_all(opened(model, cache), model)
    assert list(cache.iterdir()) == [older]


def refuse(place: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_an_older_copy_takes_is_room_for_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    older = made_older(model, cache_folder(PACKED))
    held = nbytes_in(older)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=10**9, used=0, free=10**9))
    stages = list[Stage]()
    with LLM(str(model), weight_codec=CODEC, offload_dir=tmp_path, on_stage=lambda stage, *_: stages.append(stage)) as llm:
        assert llm.loaded.packing is not None and llm.loaded.packing.freed == held
        assert llm.limits.disk == 10**9 + held - llm.loaded.packing.nbytes
        assert str(llm.loaded.packing).endswith(f" in {older}, in place of {format_bytes(held)} of an older layout")
        llm.generate([[1, 2, 3]])
        assert llm.loaded.packing == (older, 0, 0)
    assert stages.count(Stage.RENEWING) == 1 and stages.index(Stage.RENEWING) < stages.index(Stage.PACKING)
