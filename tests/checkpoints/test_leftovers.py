"""Leftovers of runs that were killed: removed by any later run, and nothing that a living process uses."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen import LLM
from h2o_flexgen.checkpoints import stale_files
from h2o_flexgen.checkpoints.derived import MANIFEST, DerivedFolder
from h2o_flexgen.checkpoints.stale_files import (
    RAY_PREFIX,
    Leftovers,
    held_folder,
    is_on_disk_of_one_host,
    remove_leftovers,
    writer,
)
from h2o_flexgen.core.environment import cache_folder


@contextmanager
def locked(place: Path) -> Iterator[None]:
    descriptor = os.open(place, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


@pytest.fixture(autouse=True)
def disk_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests run on."""
    monkeypatch.setattr(stale_files, "is_on_disk_of_one_host", lambda folder: True)


def weights_of(folder: Path, who: str, nbytes: int = 100) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"h2o_flexgen-weights-{who}-x1.bin"
    file.write_bytes(bytes(nbytes))
    return file


def partial_of(cache: Path, who: str) -> Path:
    folder = cache / f"opt-0123.partial-{who}"
    folder.mkdir(parents=True)
    (folder / "packed-00000.safetensors").write_bytes(bytes(1000))
    return folder


def test_what_is_not_held_is_removed_and_told_in_a_line(tmp_path: Path) -> None:
    offload, cache, mine = tmp_path / "offload", tmp_path / "packed", tmp_path / "offload" / "weights.bin"
    dead = [weights_of(offload, writer()), weights_of(offload, "older"), partial_of(cache, writer()), partial_of(cache, "17")]
    mine.write_bytes(b"somebody's")
    (cache / "opt-0123").mkdir()
    removed = remove_leftovers(offload, [cache, tmp_path / "not there"])
    assert removed is not None and sorted(removed.places) == sorted(dead) and removed.nbytes == 2200
    assert not any(place.exists() for place in dead) and mine.exists() and (cache / "opt-0123").exists()
    assert str(removed) == f"removed 2.20 kB from {offload} and {cache}, left there by runs that were killed"
    assert remove_leftovers(offload, [cache]) is None


def test_what_a_living_process_holds_stays(tmp_path: Path) -> None:
    """Random weights are locked one by one, the cache as a whole; and so is the offload folder while a file is made there."""
    offload, cache = tmp_path / "offload", tmp_path / "packed"
    file, other, folder = weights_of(offload, "a"), weights_of(offload, "b"), partial_of(cache, "c@3")
    with locked(file), locked(cache):
        removed = remove_leftovers(offload, [cache])
    assert removed is not None and removed.places == [other] and file.exists() and folder.exists()
    with locked(offload):
        assert remove_leftovers(offload, []) is None
    assert remove_leftovers(offload, [cache]) == Leftovers([file, folder], 1100)


def test_a_temporary_folder_stays_while_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, nowhere = tmp_path / f"{RAY_PREFIX}dead", tmp_path / "nowhere"
    (dead / "session").mkdir(parents=True)
    (dead / "session" / "log").write_bytes(bytes(70))
    (dead / "latest").symlink_to(dead / "gone")
    (tmp_path / "another").mkdir()
    with held_folder(RAY_PREFIX, tmp_path) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(RAY_PREFIX)
        removed = remove_leftovers(nowhere, [], tmp_path)
        assert removed is not None and removed.places == [dead] and removed.nbytes >= 70
        assert folder.is_dir() and not dead.exists() and (tmp_path / "another").is_dir()
        (folder / "socket").touch()
    assert not folder.exists()
    dead.mkdir()
    monkeypatch.setattr(stale_files, "is_on_disk_of_one_host", lambda folder: False)
    assert remove_leftovers(nowhere, [], tmp_path) is None and dead.is_dir(), "its lock may be on another host"


def test_a_temporary_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the new folder for a leftover."""
    made: list[Path] = []

    def removed_at_first(prefix: str, dir: Path) -> str:
        folder = dir / f"{prefix}{len(made)}"
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            remove_leftovers(tmp_path / "nowhere", [], tmp_path)
        return str(folder)

    monkeypatch.setattr("tempfile.mkdtemp", removed_at_first)
    with held_folder(RAY_PREFIX, tmp_path) as folder:
        assert folder == made[1] and folder.is_dir() and not made[0].exists()


def test_where_other_hosts_write_too_only_what_this_one_wrote_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_files, "is_on_disk_of_one_host", lambda folder: False)
    offload, cache = tmp_path / "offload", tmp_path / "packed"
    own = [weights_of(offload, writer()), partial_of(cache, writer())]
    others = [
        weights_of(offload, "other@1"),
        weights_of(offload, "older"),
        partial_of(cache, "other@1"),
        partial_of(cache, "17"),
    ]
    removed = remove_leftovers(offload, [cache])
    assert removed is not None and list(removed.places) == own and all(place.exists() for place in others)


def test_which_file_systems_are_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount that is nearest to a folder decides, and of two at the same place the later."""
    mounts = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path / "local"), "nfs4"), (str(tmp_path / "local"), "xfs")]
    listed = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: listed)
    asked = (tmp_path.parent, tmp_path, tmp_path / "other", tmp_path / "local" / "below")
    assert [is_on_disk_of_one_host(place) for place in asked] == [True, False, False, True]


@pytest.mark.parametrize("model", ["m.partial-merge", "m.partial-a@1", "m.partial"])
def test_finished_copies_stay_whatever_their_model_is_called(model: str, tmp_path: Path) -> None:
    copies = [tmp_path / f"{model}-{digest}" for digest in ("0123456789abcdef", "0123456789012345")]
    for copy in copies:
        copy.mkdir()
    dead = tmp_path / f"{copies[0].name}.partial-{writer()}"
    dead.mkdir()
    removed = remove_leftovers(tmp_path, [tmp_path])
    assert removed is not None and removed.places == [dead] and all(copy.is_dir() for copy in copies)


def test_a_folder_that_is_made_is_known_by_its_writer(tmp_path: Path) -> None:
    """And one that a dead process of our number left is no hindrance; others are for the beginning of a run."""
    other, seen = partial_of(tmp_path, writer()), list[str]()
    (tmp_path / f"opt.partial-{writer()}").mkdir()
    (tmp_path / f"opt.partial-{writer()}" / "half").touch()
    DerivedFolder(tmp_path / "opt", 1, "make it", ()).made(lambda folder: seen.append(folder.name) or {})
    assert seen == [f"opt.partial-{writer()}"] and other.exists()
    assert [file.name for file in (tmp_path / "opt").iterdir()] == [MANIFEST]


@pytest.mark.parametrize("kind", ["converted", "packed"])
def test_any_run_removes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sockets = tmp_path / "sockets"
    monkeypatch.setattr("h2o_flexgen.session.loaded_model.folder_of_sockets", lambda: sockets)
    dead = [weights_of(tmp_path / "offload", "a"), partial_of(cache_folder(kind), "b@2"), sockets / f"{RAY_PREFIX}c"]
    dead[-1].mkdir(parents=True)
    with LLM("demo", offload_dir=tmp_path / "offload") as llm:
        assert llm.loaded.leftovers is not None and llm.loaded.leftovers.places == dead
