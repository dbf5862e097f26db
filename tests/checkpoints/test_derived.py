"""Copies of weights in the cache: a damaged one is made again, whatever was damaged and wherever its weights are to lie, and
the tokens are those of the checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.checkpoints import derived as derived_module
from h2o_flexgen.checkpoints.checkpoint import open_checkpoint
from h2o_flexgen.checkpoints.derived import FORMATS, MANIFEST, Copy, Damaged, model_name
from h2o_flexgen.checkpoints.safetensors_format import raw_header
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.cli.watch import OpeningReport
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Stage
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.samples import first_of
from tests.helpers.tiny import save_tiny

PROMPTS = [[5, 7, 11, 2], [3, 1, 4]]
PARAMS = SamplingParams(max_tokens=5)
IN_MEMORY, ON_DISK, MIXED = (0, 100, 0, 100, 0, 100), (0, 0, 0, 0, 0, 0), (30, 30, 0, 50, 100, 0)
KINDS = {"converted": {}, "packed": {"weight_codec": "group4"}}


class Home:
    """A cache of its own, and models of .bin files whose copies come to lie in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stages: list[Stage] = []

    def model(self, kind: str = "opt", safe: bool = False) -> Path:
        folder = self.folder / f"{kind}-{safe}"
        if not folder.exists():
            save_tiny(kind, folder, torch.float16, max_shard_size="40KB", safe=safe)
        return folder

    def tokens(self, model: Path, percent: tuple[float, ...] = IN_MEMORY, **options: Any) -> list[tuple[int, ...]]:
        self.stages.clear()

        def note(stage: Stage, done: int, total: int) -> None:
            self.stages.append(stage)

        options = {"percent": percent, "offload_dir": self.folder / "offload", "on_stage": note, **options}
        with LLM(str(model), dtype="float32", **options) as llm:
            return [tuple(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)]

    def copies(self, kind: str) -> list[Path]:
        return sorted((self.folder / "cache" / "h2o_flexgen" / kind).iterdir())

    def copy(self, kind: str) -> Path:
        (found,) = self.copies(kind)
        return found

    def weights(self, kind: str) -> list[Path]:
        return sorted(self.copy(kind).glob("*.safetensors"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Home(tmp_path)


def zero_tail(file: Path, nbytes: int) -> None:
    """As a disk may leave a file: of the same size and time."""
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-nbytes] + bytes(nbytes))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("kind", "percent", "model", "device"),
    [
        ("converted", IN_MEMORY, "opt", "cpu"),
        ("converted", ON_DISK, "llama-gqa", "cpu"),
        ("converted", MIXED, "qwen2", "pretended"),
        ("packed", IN_MEMORY, "llama-gqa", "pretended"),
        ("packed", ON_DISK, "qwen2", "cpu"),
        ("packed", MIXED, "neox-parallel", "cpu"),
    ],
)
def test_zeros_where_weights_were_are_noticed_said_once_and_mended(
    kind: str, percent: tuple[float, ...], model: str, device: str, home: Home, pretended: None
) -> None:
    options = {**KINDS[kind], "device": device}
    folder = home.model(model, safe=kind == "packed")
    expected = home.tokens(folder, percent, **options)
    for file in home.weights(kind):
        zero_tail(file, 5000)
    assert home.tokens(folder, percent, **options) == expected
    assert home.stages.count(Stage.MENDING) == 1
    assert home.tokens(folder, percent, **options) == expected
    assert Stage.MENDING not in home.stages and len(home.copies(kind)) == 1


def test_a_copy_is_packed_from_weights_that_were_checked(home: Home) -> None:
    folder = home.model()
    expected = home.tokens(folder, **KINDS["packed"])
    shutil.rmtree(home.copy("packed"))
    for file in home.weights("converted"):
        zero_tail(file, 5000)
    assert home.tokens(folder, **KINDS["packed"]) == expected
    assert home.stages.count(Stage.MENDING) == 1
    assert home.tokens(folder, **KINDS["packed"]) == expected and home.stages.count(Stage.PACKING) == 0


def swap_pages(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-8192:-4096], content[-4096:] = content[-4096:], content[-8192:-4096]
    file.write_bytes(content)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(raw_header(file)) + 10] ^= 1
    file.write_bytes(content)


def rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'.q_proj.weight"', b'.q_proj.weighs"'))


HARMS: list[Callable[[Path], object]] = [
    swap_pages,
    flip_a_bit,
    rename_a_tensor,
    Path.unlink,
    lambda file: file.write_bytes(file.read_bytes()[:-1]),
    lambda file: (file.parent / MANIFEST).write_text("no json"),
    lambda file: (file.parent / MANIFEST).write_text("[" * 100_000),
    lambda file: (file.parent / MANIFEST).write_text(json.dumps({"format": FORMATS[file.parents[1].name], "files": {"a": 3}})),
    lambda file: (file.parent / MANIFEST).write_text("{}"),
]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", first_of(KINDS, 1))
def test_whatever_is_wrong_with_a_copy_it_is_made_again(kind: str, harm: Callable[[Path], object], home: Home) -> None:
    folder = home.model("llama-gqa", safe=kind == "packed")
    expected = home.tokens(folder, **KINDS[kind])
    harm(max(home.weights(kind), key=lambda file: file.stat().st_size))
    assert home.tokens(folder, **KINDS[kind]) == expected
    assert home.stages.count(Stage.MENDING) == 1


def test_a_damaged_index_of_a_copy_is_noticed(home: Home) -> None:
    folder = home.model()
    expected = home.tokens(folder)
    index = home.copy("converted") / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.0.fc1", "layers.0.fc9"))
    assert home.tokens(folder) == expected and home.stages.count(Stage.MENDING) == 1


@pytest.mark.parametrize("older", ["missing", "of another format"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_older_format_is_made_again_in_its_place(kind: str, older: str, home: Home) -> None:
    folder = home.model(safe=kind == "packed")
    expected = home.tokens(folder, **KINDS[kind])
    manifest = home.copy(kind) / MANIFEST
    if older == "missing":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    assert home.tokens(folder, **KINDS[kind]) == expected
    assert home.stages.count(Stage.RENEWING) == (kind == "packed")
    assert Stage.MENDING not in home.stages and len(home.copies(kind)) == 1


def test_without_a_listener_a_warning_names_the_copy_and_the_tensor(home: Home) -> None:
    folder = home.model()
    home.tokens(folder)
    zero_tail(home.weights("converted")[-1], 5000)
    with pytest.warns(RuntimeWarning, match=r"opt-False-\w+, a copy of weights .* of tensor model.decoder.* made again"):
        home.tokens(folder, on_stage=None)


def test_where_progress_is_shown_the_line_of_a_damaged_copy_stays_and_the_listener_hears_of_it(
    home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, told = home.model(), list[Stage]()
    home.tokens(folder)
    zero_tail(home.weights("converted")[-1], 5000)
    with LLM(str(folder), offload_dir=home.folder / "offload", on_stage=lambda stage, *_: told.append(stage)) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=True)
        assert "was damaged: it is made again from the checkpoint" in capfd.readouterr().err
        assert told.count(Stage.MENDING) == 1 and told[-1] is Stage.GENERATING
        told.clear()
        llm.unload()
        home.stages.clear()
        llm.generate(PROMPTS, PARAMS, on_stage=lambda stage, *_: home.stages.append(stage))
        assert home.stages == [Stage.LOADING, Stage.GENERATING] and told == []
        llm.converse().close()
        assert told == [Stage.GENERATING], "a listener of the call before hears nothing any more"


def test_a_copy_whose_source_is_gone_is_left_and_both_are_named(home: Home) -> None:
    folder = home.model()
    home.tokens(folder)
    copy = home.copy("converted")
    zero_tail(home.weights("converted")[-1], 5000)
    with LLM(str(folder), offload_dir=home.folder / "offload", on_stage=lambda *_: None) as llm:
        gone = next(folder.glob("*.bin"))
        gone.unlink()
        with pytest.raises(ValueError, match=rf"^{copy} is damaged, and {gone}, which it was made from, is gone; get"):
            llm.generate(PROMPTS, PARAMS)
    assert copy.is_dir()


def test_a_copy_that_is_damaged_as_soon_as_it_is_made_ends_the_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home.model()
    monkeypatch.setattr(derived_module.Sums, "are_of", lambda *_: False)
    with pytest.raises(ValueError, match=r"is damaged: .*; it was made again just now: is the disk sound\? Set XDG_CACHE_HOME"):
        home.tokens(folder)
    assert home.stages.count(Stage.MENDING) == 1


def test_what_another_process_has_made_again_stays(home: Home) -> None:
    folder = home.model()
    home.tokens(folder)
    path = home.copy("converted")
    before = Copy.opened(path, ())
    shutil.copytree(path, path.with_name("new"))
    shutil.rmtree(path)
    path.with_name("new").rename(path)
    gone = (home.folder / "gone.bin",)
    assert not before.discard() and not replace(before, sources=gone).discard() and path.is_dir()
    latest = Copy.opened(path, ())
    assert latest.discard() and home.copies("converted") == []
    assert not latest.discard()
    path.parent.rmdir()
    assert not latest.discard()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("percent", first_of([ON_DISK, IN_MEMORY], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_another_process_takes_away_is_made_again(
    kind: str, percent: tuple[float, ...], again: bool, home: Home
) -> None:
    """After the model was opened; also one that this process has just made again itself."""
    folder = home.model()
    expected = home.tokens(folder, percent, **KINDS[kind])
    (path,) = home.copies("converted")
    if again:
        zero_tail(home.weights("converted")[-1], 5000)
    if kind == "packed":
        shutil.rmtree(home.copy("packed"))
    stages, taken = list[Stage](), list[Path]()

    def note(stage: Stage, done: int, total: int) -> None:
        stages.append(stage)
        if stage == Stage.LOADING and not taken and (Stage.MENDING in stages or not again):
            taken.append(path)
            shutil.rmtree(path)

    options: dict[str, Any] = {"percent": percent, "offload_dir": home.folder / "offload", "on_stage": note}
    with LLM(str(folder), dtype="float32", **options, **KINDS[kind]) as llm:
        assert [tuple(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)] == expected
    assert stages.count(Stage.MENDING) == again and taken and path.is_dir()


def test_a_copy_that_goes_while_it_is_opened_is_made_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home.model()
    expected = home.tokens(folder)
    path, work, gone = home.copy("converted"), derived_module._identity, []

    def take_away(place: Path) -> tuple[int, int]:
        if not gone:
            gone.append(place)
            shutil.rmtree(place)
        return work(place)

    monkeypatch.setattr(derived_module, "_identity", take_away)
    assert home.tokens(folder) == expected and gone == [path] and path.is_dir()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("name", ["parse_json", "_head", "header_of"])
def test_what_this_process_lacks_is_no_damage(number: int, name: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home.model()
    home.tokens(folder)
    path = home.copy("converted")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(derived_module, name, refuse)
        told = rf"^{path}, a copy of weights, cannot be read: {os.strerror(number)}; see to that"
        with pytest.raises(ValueError, match=told):
            home.tokens(folder)
    assert Stage.MENDING not in home.stages and path.is_dir()
    Copy.opened(path, ())


def test_a_copy_that_is_opened_by_itself_says_what_to_do(home: Home) -> None:
    """Outside of an LLM nothing is taken away."""
    folder = home.model()
    home.tokens(folder)
    home.weights("converted")[0].unlink()
    with pytest.raises(Damaged, match=r"is missing; remove the folder, and the copy is made again$"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("kind", "percent"), [("converted", IN_MEMORY), ("packed", ON_DISK)])
def test_a_copy_that_a_disk_fails_to_read_is_made_again(
    kind: str, percent: tuple[float, ...], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home.model(safe=kind == "packed")
    expected = home.tokens(folder, percent, **KINDS[kind])
    work, failed, file = os.preadv, [], home.weights(kind)[0].stat().st_ino

    def fail_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not failed and os.fstat(descriptor).st_ino == file:
            failed.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return work(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail_once)
    assert home.tokens(folder, percent, **KINDS[kind]) == expected
    assert failed and home.stages.count(Stage.MENDING) == 1


def test_weights_of_the_user_are_not_checked(home: Home) -> None:
    """What was written to them is not known."""
    checkpoint = open_checkpoint(home.model(safe=True))
    stored: list[StoredTensor] = [*checkpoint._tensors.values()]
    assert stored and all(one.check is None for one in stored)


@pytest.mark.parametrize(("stage", "why"), [(Stage.MENDING, "was damaged"), (Stage.RENEWING, "had an older layout")])
def test_a_person_is_told_in_one_line(stage: Stage, why: str, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, "opening", late=True) as progress:
        OpeningReport(progress).stage(stage, 0, 0)
    cache = home.folder / "cache" / "h2o_flexgen"
    assert capsys.readouterr().err == f"a copy of the weights in {cache} {why}: it is made again from the checkpoint\n"


def test_a_copy_of_a_file_is_named_by_it_and_not_by_what_it_is_a_link_to(tmp_path: Path) -> None:
    (tmp_path / "0123").write_bytes(b"contents")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "0123")
    assert model_name(tmp_path / "model.gguf") == "model"
