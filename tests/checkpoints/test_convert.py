"""What a .bin holds is what its converted copy holds; the copy appears whole or not at all, and in little memory."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from h2o_flexgen.checkpoints import checkpoint as checkpoint_module
from h2o_flexgen.checkpoints import derived
from h2o_flexgen.checkpoints.checkpoint import load_shard, open_checkpoint
from h2o_flexgen.checkpoints.derived import CONVERTED
from h2o_flexgen.checkpoints.model_files import Progress
from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, write_safetensors
from h2o_flexgen.checkpoints.stale_files import writer
from h2o_flexgen.checkpoints.stored_tensors import Sums
from h2o_flexgen.core.environment import cache_folder
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.refusals import one_line

State = dict[str, torch.Tensor]


def convert(folder: Path, cache: Path, progress: Progress | None = None) -> Path:
    return checkpoint_module.convert(folder, cache, progress).path


def random_state(prefix: str) -> State:
    embedding = torch.randn(32, 8).half()
    return {
        f"{prefix}.embed.weight": embedding,
        f"{prefix}.head.weight": embedding,  # tied: one storage, two names
        f"{prefix}.up.weight": torch.randn(8, 16).bfloat16().t(),
        f"{prefix}.norm.weight": torch.randn(8),
        f"{prefix}.attention.bias": torch.ones(4, 4, dtype=torch.bool),
    }


def save_bins(folder: Path, states: list[State]) -> State:
    folder.mkdir()
    owner = {}
    for number, state in enumerate(states, start=1):
        file = f"pytorch_model-{number:05d}-of-{len(states):05d}.bin"
        torch.save(state, folder / file)
        owner.update(dict.fromkeys(state, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": owner}))
    return {name: value for state in states for name, value in state.items()}


def loaded(folder: Path) -> State:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(found: State, wanted: State) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "opt-tiny").mkdir()
    torch.save(random_state("decoder"), tmp_path / "opt-tiny" / "pytorch_model.bin")
    return tmp_path / "opt-tiny"


def test_a_single_file_becomes_a_checkpoint_with_the_same_values(tmp_path: Path, model: Path) -> None:
    checkpoint = open_checkpoint(model, tmp_path / "cache")
    assert checkpoint.place.parent == tmp_path / "cache" and checkpoint.place.name.startswith("opt-tiny-")
    assert_same(loaded(checkpoint.place), torch.load(model / "pytorch_model.bin", weights_only=True))
    assert checkpoint.stored_as("model.decoder.embed.weight").itemsize == 2


def test_shards_become_shards_with_an_index(tmp_path: Path) -> None:
    wanted = save_bins(tmp_path / "model", [random_state("a"), random_state("b"), random_state("c")])
    target = convert(tmp_path / "model", tmp_path / "cache")
    assert_same(loaded(target), wanted)
    owner = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(owner) == set(wanted) and len(set(owner.values())) == 3
    assert open_checkpoint(tmp_path / "model", tmp_path / "cache").stored_as("b.norm.weight").itemsize == 4


def test_of_two_bins_with_the_same_name_the_index_decides(tmp_path: Path) -> None:
    save_bins(tmp_path / "model", [{"a": torch.ones(2), "b": torch.zeros(2)}, {"b": torch.ones(2)}])
    files = sorted(convert(tmp_path / "model", tmp_path / "cache").glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a"], ["b"]]
    assert load_file(files[1])["b"].sum() == 2


def test_old_files_that_are_no_zip_archives_are_converted_too(tmp_path: Path, model: Path) -> None:
    state = random_state("decoder")
    torch.save(state, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert load_shard(model / "pytorch_model.bin")[1] is False
    assert_same(loaded(convert(model, tmp_path / "cache")), state)


def test_safetensors_go_before_bins(tmp_path: Path, model: Path) -> None:
    write_safetensors(model / "model.safetensors", [TensorHeader("a", torch.float32, (2,))], lambda name: torch.ones(2))
    assert open_checkpoint(model, tmp_path / "cache").place == model
    assert not (tmp_path / "cache").exists()


def test_the_second_time_nothing_is_converted(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = convert(model, tmp_path / "cache")
    monkeypatch.setattr(checkpoint_module, "write_safetensors", None)
    monkeypatch.setattr(checkpoint_module, "load_shard", None)
    assert convert(model, tmp_path / "cache") == first


def test_other_contents_are_another_conversion_even_with_the_same_size_and_time(tmp_path: Path, model: Path) -> None:
    first = convert(model, tmp_path / "cache")
    before = (model / "pytorch_model.bin").stat()
    state = random_state("decoder")
    torch.save(state, model / "pytorch_model.bin")
    os.utime(model / "pytorch_model.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (model / "pytorch_model.bin").stat().st_size == before.st_size
    second = convert(model, tmp_path / "cache")
    assert second != first
    assert_same(loaded(second), state)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_conversion_that_fails_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    save_bins(tmp_path / "model", [random_state("a"), random_state("b")])
    written: list[Path] = []

    def failing(path: Path, headers: list[TensorHeader], value: Callable[[str], torch.Tensor]) -> dict[str, Sums]:
        if written:
            path.write_bytes(b"half")
            raise error
        written.append(path)
        return write_safetensors(path, headers, value)

    monkeypatch.setattr(checkpoint_module, "write_safetensors", failing)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        convert(tmp_path / "model", tmp_path / "cache")
    assert written and list((tmp_path / "cache").iterdir()) == []
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left on device" in str(caught.value)


def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance(tmp_path: Path, model: Path) -> None:
    first = convert(model, tmp_path / "cache")
    first.rename(first.with_name(f"{first.name}.partial-{writer()}"))
    convert(model, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_two_at_once_convert_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    fingerprint = derived.fingerprint

    def meeting(files: tuple[Path, ...], asked: str) -> str:
        both.wait()  # neither has looked for the folder yet
        return fingerprint(files, asked)

    def counting(path: Path, headers: list[TensorHeader], value: Callable[[str], torch.Tensor]) -> dict[str, Sums]:
        written.append(path)
        return write_safetensors(path, headers, value)

    monkeypatch.setattr(derived, "fingerprint", meeting)
    monkeypatch.setattr(checkpoint_module, "write_safetensors", counting)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(convert(model, tmp_path / "cache"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and len(written) == 1


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(100, 0, 100))
    message = one_line(lambda: convert(model, tmp_path / "cache"))
    assert str(tmp_path / "cache") in message and "has 100 B free" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unwritable_cache_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert str(tmp_path / "cache") in one_line(lambda: convert(model, tmp_path / "cache"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_bin_is_named(tmp_path: Path, zipped: bool) -> None:
    save_bins(tmp_path / "model", [random_state("a"), random_state("b")])
    path = tmp_path / "model" / "pytorch_model-00002-of-00002.bin"
    torch.save(random_state("b"), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:-700])
    assert str(path) in one_line(lambda: convert(tmp_path / "model", tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path, model: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harmed"),)

    torch.save({"a": torch.ones(2), "b": Evil()}, model / "pytorch_model.bin")
    message = one_line(lambda: convert(model, tmp_path / "cache"))
    assert str(model / "pytorch_model.bin") in message and "not unpickled unsafely" in message
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([torch.ones(2)], "no named tensors"),
        ({"step": 7}, "no named tensors"),
        ({"sparse.weight": torch.eye(3).to_sparse()}, "sparse.weight"),
        ({"complex.weight": torch.ones(2, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_contents_that_are_no_weights_are_refused(tmp_path: Path, model: Path, content: object, told: str) -> None:
    torch.save(content, model / "pytorch_model.bin")
    assert told in one_line(lambda: convert(model, tmp_path / "cache"))


def test_a_missing_bin_and_a_git_lfs_pointer_are_named(tmp_path: Path) -> None:
    save_bins(tmp_path / "model", [random_state("a"), random_state("b")])
    path = tmp_path / "model" / "pytorch_model-00001-of-00002.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    assert "git lfs pull" in one_line(lambda: convert(tmp_path / "model", tmp_path / "cache"))
    path.unlink()
    assert str(path) in one_line(lambda: convert(tmp_path / "model", tmp_path / "cache"))


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    state = save_bins(tmp_path / "model", [random_state("a"), random_state("b")])
    total = sum(value.nbytes for value in state.values())
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "model", tmp_path / "cache", lambda done, of: seen.append((done, of)))
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) == len(state)


def test_the_cache_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(CONVERTED) == tmp_path / "h2o_flexgen" / "converted"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(CONVERTED) == tmp_path / "home" / ".cache" / "h2o_flexgen" / "converted"


def test_the_copy_of_a_hub_snapshot_is_named_after_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--facebook--opt-125m" / "snapshots" / "27dcfa74d334"
    folder.parent.mkdir(parents=True)
    save_bins(folder, [random_state("a")])
    assert convert(folder, tmp_path / "cache").name.startswith("models--facebook--opt-125m-")


def test_the_writer_lets_go_of_each_tensor_before_it_asks_for_the_next(tmp_path: Path) -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def value(name: str) -> torch.Tensor:
        assert all(reference() is None for reference in given)
        tensor = torch.full((64, 64), float(len(given)))
        given.append(weakref.ref(tensor))
        return tensor

    headers = [TensorHeader(f"t{number}", torch.float32, (64, 64)) for number in range(5)]
    write_safetensors(tmp_path / "model.safetensors", headers, value)
    assert len(given) == 5


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell the resident memory")
def test_memory_stays_far_below_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "REOPEN_BYTES", 8 << 20)
    (tmp_path / "model").mkdir()
    torch.save(
        {f"t{number}": torch.full((4 << 20,), number, dtype=torch.int8) for number in range(24)},
        tmp_path / "model/pytorch_model.bin",
    )
    start = resident_bytes()
    peaks: list[int] = []
    convert(tmp_path / "model", tmp_path / "cache", lambda done, total: peaks.append(resident_bytes() - start))
    assert len(peaks) == 24 and max(peaks) < 48 << 20
