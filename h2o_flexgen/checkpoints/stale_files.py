"""Leftovers: files on disk of processes that were killed. Every later run removes them, whatever else it does.

A writer holds a lock until it has ended, however it ends: on its own random weights, on its own temporary folder, on a file
that it writes beside its place, or on the cache in which it fills a folder. Files without a lock are leftovers. On file
systems that other hosts see too, locks may belong to one host alone, so only files that this host wrote are removed there;
their names say which host wrote them, except those of temporary folders, which stay there.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from h2o_flexgen.core.units import format_bytes

WEIGHTS_PREFIX, WEIGHTS_SUFFIX = "h2o_flexgen-weights-", ".bin"
RAY_PREFIX = "h2o-ray-"  # of temporary folders; their names stay short, since names of sockets begin with them
PARTIAL = ".partial-"
BEFORE_PID = "@"  # between host and process
LONGEST_PID = 10  # digits; a finished copy's name ends in 16, which may all be decimal ones
OF_A_WRITER = re.compile(rf"{re.escape(PARTIAL)}([A-Za-z0-9-]+{BEFORE_PID})?\d{{1,{LONGEST_PID}}}$")  # the end of a name
OF_ONE_HOST = frozenset({"apfs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "overlay", "tmpfs", "ufs", "xfs", "zfs"})


@dataclass(frozen=True)
class Leftovers:
    """The places that were removed."""

    places: Sequence[Path]
    nbytes: int

    def __str__(self) -> str:
        folders = " and ".join(map(str, dict.fromkeys(place.parent for place in self.places)))
        return f"removed {format_bytes(self.nbytes)} from {folders}, left there by runs that were killed"


def remove_leftovers(offload_folder: Path, caches: Sequence[Path], temporary: Path | None = None) -> Leftovers | None:
    """Removes leftovers and reports them; None if there are none. A run goes on without what cannot be removed."""
    found = [*_weights_in(offload_folder), *(one for cache in caches for one in _partial_folders_in(cache))]
    found += () if temporary is None else _held_folders_in(temporary)
    return Leftovers([place for place, _ in found], sum(nbytes for _, nbytes in found)) if found else None


@contextmanager
def held_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """A temporary folder that is locked, and removed at the end. One that was taken for a leftover before its lock was there is
    made again."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            with _lock(folder) as is_ours:
                if is_ours and folder.exists():
                    yield folder
                    return
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def written_beside(place: Path) -> Iterator[int]:
    """The descriptor of a new file, which takes this place when the context ends well. Until then it lies beside it, locked."""
    descriptor, name = tempfile.mkstemp(f"{PARTIAL}{writer()}", f"{place.name}-", place.parent)
    beside = Path(name)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
        os.replace(beside, place)
    finally:
        beside.unlink(missing_ok=True)
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Removes the files of a folder that processes which were killed have left beside their places."""
    for place in _glob(folder, f"*{PARTIAL}*"):
        if place.is_file() and may_be_removed(place):
            with _lock(place) as is_left, suppress(OSError):
                if is_left:
                    place.unlink()


def nbytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def writer() -> str:
    """The mark of this process and its host in names of files."""
    return f"{_host()}{BEFORE_PID}{os.getpid()}"


def may_be_removed(place: Path) -> bool:
    """True if, judging by its name, a lock of its writer would be seen from here."""
    name = place.name.removeprefix(WEIGHTS_PREFIX).rpartition(PARTIAL)[2]
    host, _, rest = name.rpartition(BEFORE_PID)
    return (rest != "" and host == _host()) or is_on_disk_of_one_host(place.parent)


def is_on_disk_of_one_host(folder: Path) -> bool:
    place = folder.resolve()
    with suppress(OSError):
        mounts = [one for one in psutil.disk_partitions(all=True) if place.is_relative_to(one.mountpoint)]
        return bool(mounts) and max(reversed(mounts), key=lambda one: len(one.mountpoint)).fstype in OF_ONE_HOST
    return False


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", platform.node()) or "host"


def _weights_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yields removed files. No process makes such a file meanwhile: it is locked before its folder's lock is released."""
    places = [place for place in _glob(folder, f"{WEIGHTS_PREFIX}*{WEIGHTS_SUFFIX}") if may_be_removed(place)]
    if not places:
        return
    with _lock(folder) as is_ours:
        for place in places if is_ours else ():
            with _lock(place) as is_left, suppress(OSError):
                if is_left:
                    nbytes = place.stat().st_size
                    place.unlink()
                    yield place, nbytes


def _partial_folders_in(cache: Path) -> Iterator[tuple[Path, int]]:
    partial = [place for place in _glob(cache, f"*{PARTIAL}*") if OF_A_WRITER.search(place.name)]
    places = [place for place in partial if may_be_removed(place)]
    if not places:
        return
    with _lock(cache) as is_ours:  # otherwise another process is filling one of them
        for place in places if is_ours else ():
            with suppress(OSError):
                nbytes = nbytes_in(place)
                shutil.rmtree(place)
                yield place, nbytes


def _held_folders_in(parent: Path) -> Iterator[tuple[Path, int]]:
    places = _glob(parent, f"{RAY_PREFIX}*")
    for place in places if places and is_on_disk_of_one_host(parent) else ():
        with _lock(place) as is_left:
            if is_left:
                nbytes = _nbytes_of_what_is_there(place)
                shutil.rmtree(place, ignore_errors=True)
                if not place.exists():
                    yield place, nbytes


def _nbytes_of_what_is_there(folder: Path) -> int:
    """Files may go meanwhile, and links may lead nowhere."""
    nbytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                nbytes += os.lstat(os.path.join(place, name)).st_size
    return nbytes


def _glob(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return list(folder.glob(pattern))
    return []


@contextmanager
def _lock(place: Path) -> Iterator[bool]:
    """Yields whether the lock could be taken at once."""
    try:
        descriptor = os.open(place, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)
