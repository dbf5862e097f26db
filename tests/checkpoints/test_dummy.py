"""Random weights depend on the seed and the name alone, are the same in memory and on disk, and leave no file behind."""

from __future__ import annotations

import errno
import gc
import os
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h2o_flexgen.checkpoints import dummy as dummy_module
from h2o_flexgen.checkpoints.checkpoint import WeightSource
from h2o_flexgen.checkpoints.dummy import DummySource
from h2o_flexgen.core.model_spec import DTYPE_BYTES, TensorSpec
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.refusals import one_line
from tests.helpers.tiny import tiny_config

MATRIX = "model.layers.3.mlp.up_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"
BIAS = "model.layers.3.q_proj.bias"


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, 4, 4)


def source(folder: Path, seed: int = 0, dtype: str = "float32") -> DummySource:
    return DummySource(seed, dtype, folder)


def filled(made_by: WeightSource, tensor: TensorSpec, dtype: str = "float32") -> torch.Tensor:
    out = torch.full(tensor.shape, torch.nan, dtype=getattr(torch, dtype))
    assert made_by.fill(tensor, out) is True
    assert not out.isnan().any()
    return out


@pytest.fixture(autouse=True)
def small_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_module, "BLOCK_VALUES", 9973)


def test_values_depend_on_seed_and_name_and_not_on_order(tmp_path: Path) -> None:
    one, other = source(tmp_path), source(tmp_path)
    matrix = filled(one, spec(MATRIX, 40, 60))
    norm = filled(one, spec(NORM, 60))
    assert torch.equal(filled(other, spec(NORM, 60)), norm)
    assert torch.equal(filled(other, spec(MATRIX, 40, 60)), matrix)
    assert not torch.equal(filled(one, spec("model.layers.4.mlp.up_proj.weight", 40, 60)), matrix)
    assert not torch.equal(filled(source(tmp_path, seed=1), spec(MATRIX, 40, 60)), matrix)


def test_values_have_the_size_of_trained_ones(tmp_path: Path) -> None:
    weights = source(tmp_path)
    matrix, norm, bias = (filled(weights, spec(*ask)) for ask in ((MATRIX, 80, 100), (NORM, 2000), (BIAS, 2000)))
    assert abs(matrix.mean()) < 0.002 and 0.018 < matrix.std() < 0.022
    assert abs(norm.mean() - 1) < 0.005 and 0.015 < norm.std() < 0.025
    assert abs(bias.mean()) < 0.005 and 0.015 < bias.std() < 0.025


def test_no_two_rows_of_a_matrix_are_equal(tmp_path: Path) -> None:
    matrix = filled(source(tmp_path), spec(MATRIX, 1000, 64))  # several times the block
    assert len({tuple(row) for row in matrix.tolist()}) == 1000


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_what_is_on_disk_is_what_fill_makes(tmp_path: Path, dtype: str) -> None:
    weights = source(tmp_path, dtype=dtype)
    tensors = [spec(MATRIX, 300, 101), spec(NORM, 77), spec(BIAS, 5), spec("lm_head.weight", 64, 64)]
    located = weights.locate(tensors)
    assert set(located) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        stored = located[tensor.name]
        assert stored.offset % 4096 == 0 and stored.shape == tensor.shape and stored.dtype == dtype
        assert stored.nbytes == tensor.numel * weights.stored_as(tensor.name).itemsize
        raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes]
        value = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).view(tensor.shape)
        assert torch.equal(value, filled(weights, tensor, dtype))
    weights.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part_values", [1, 700, 1 << 20])
def test_packed_weights_are_what_the_codec_makes_of_the_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_values: int, dtype: str
) -> None:
    """In however many parts they are encoded, in memory as on disk."""
    monkeypatch.setattr(dummy_module, "PART_VALUES", part_values)
    weights, plain = source(tmp_path, dtype=dtype), spec(MATRIX, 300, 101)
    packed = replace(plain, format="tiles4")
    expected, out = (torch.empty(packed.nbytes, dtype=torch.uint8) for _ in range(2))
    encode("tiles4", filled(weights, plain, dtype), expected)
    assert weights.fill(packed, out) and torch.equal(out, expected)
    stored = weights.locate([packed])[MATRIX]
    assert stored.file.read_bytes()[stored.offset :][: packed.nbytes] == expected.numpy().tobytes()
    weights.close()


def test_the_file_is_really_written_and_ends_on_a_whole_page(tmp_path: Path) -> None:
    weights = source(tmp_path)
    stored = weights.locate([spec(MATRIX, 500, 101)])[MATRIX]
    status = stored.file.stat()
    assert status.st_size % 4096 == 0 and status.st_size >= 500 * 101 * 4
    assert status.st_blocks * 512 >= status.st_size
    weights.close()


@pytest.fixture(params=["unnamed", "named"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that opens files again that have no name, and one that cannot."""
    if request.param == "named":
        monkeypatch.setattr(dummy_module, "UNNAMED", "/no/such/{}")
    return str(request.param)


def test_files_have_no_name_where_the_system_allows_it(tmp_path: Path, system: str) -> None:
    """So that nothing stays behind when the process is killed."""
    weights = source(tmp_path)
    files = {weights.locate([spec(name, 10, 10)])[name].file for name in (MATRIX, "lm_head.weight")}
    assert len(files) == 2 and all(file.stat().st_size for file in files)
    assert set(tmp_path.iterdir()) == (files if system == "named" else set())
    weights.close()


def test_close_removes_every_file_and_may_be_called_twice(tmp_path: Path, system: str) -> None:
    weights = source(tmp_path)
    files = [weights.locate([spec(name, 10, 10)])[name].file for name in (MATRIX, "lm_head.weight")]
    weights.close()
    weights.close()
    assert list(tmp_path.iterdir()) == [] and not any(file.exists() for file in files)


def test_a_forgotten_source_takes_its_files_along(tmp_path: Path, system: str) -> None:
    weights = source(tmp_path)
    file = weights.locate([spec(MATRIX, 10, 10)])[MATRIX].file
    assert file.exists()
    del weights
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and not file.exists()


def test_a_process_that_was_forked_leaves_the_files_to_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_module, "UNNAMED", "/no/such/{}")
    weights = source(tmp_path)
    file = weights.locate([spec(MATRIX, 10, 10)])[MATRIX].file
    child = os.fork()
    if not child:
        weights.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert file.exists()
    weights.close()
    assert not file.exists()


def test_nothing_to_locate_writes_nothing(tmp_path: Path) -> None:
    assert source(tmp_path / "not there").locate([]) == {}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_while_writing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def failing(file: object) -> None:
        raise error

    monkeypatch.setattr(dummy_module, "flush_to_disk", failing)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        source(tmp_path).locate([spec(MATRIX, 10, 10)])
    assert list(tmp_path.iterdir()) == []
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left on device" in str(caught.value)


def test_a_file_that_cannot_be_held_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last free descriptor is taken by the file itself."""
    made: list[int] = []

    def refuse(descriptor: int) -> int:
        made.append(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", refuse)
    message = one_line(lambda: source(tmp_path).locate([spec(MATRIX, 10, 10)]))
    assert "Too many open files" in message and list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**10, 0, 5 * 10**9))
    message = one_line(lambda: source(tmp_path).locate([spec(MATRIX, 50_000, 50_000)]))
    assert "10.00 GB" in message and "5.00 GB" in message and str(tmp_path) in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = one_line(lambda: source(tmp_path / "file" / "below").locate([spec(MATRIX, 10, 10)]))
    assert str(tmp_path / "file" / "below") in message


def test_progress_ends_at_all_that_is_written(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights = DummySource(0, "float32", tmp_path, lambda done, total: seen.append((done, total)))
    file = weights.locate([spec(MATRIX, 100, 50), spec(NORM, 50)])[NORM].file
    assert seen == sorted(seen) and len(seen) == 2 and seen[-1] == (file.stat().st_size, file.stat().st_size)
    weights.close()


def test_values_of_32_bits_in_a_model_of_16_are_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    tiny_config("glm4-moe").save_pretrained(tmp_path / "model")
    asked = {"dummy_weights": True, "device": "cpu", "dtype": "bfloat16", "tokenizer": "bytes", "offload_dir": tmp_path}
    said = []
    for percent in ((100, 0, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)):
        with LLM(str(tmp_path / "model"), percent=percent, **asked) as llm:
            assert {tensor.itemsize for tensor in llm.spec.tensors.values()} == {2, 4}
            said.append(llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True)))
    assert [one.token_ids for one in said[0]] == [one.token_ids for one in said[1]]
