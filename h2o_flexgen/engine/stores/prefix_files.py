"""PrefixFiles: a folder in which prefixes outlive the process that computed them. The next one finds them there.

A prefix is a file, named by a hash of all that its bytes depend on: what they are of (`kind`: model, codec, policy, ...) and
its tokens. It is written behind the work, by a thread of its own, beside its place, and renamed when it is whole. Readers take
no lock. Several processes may use the folder at once; each sees what the others have added.

StoredPrefix is such a file: its tokens, and its parts as they lie in memory, such as keys and values. First comes a head with a
checksum of its own. It says how long each part is, and has the checksums of its bytes. The parts follow one behind the other,
each from a page on. The head is written last: a file that was cut off or changed is never taken for a prefix.

All files together take no more than a limit: the longest unused go first. What is damaged is removed, and computed again. What
cannot be written is not kept, and nothing else happens.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from io import BufferedReader, FileIO
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.derived import is_lost
from h2o_flexgen.checkpoints.stale_files import remove_partial_files, written_beside
from h2o_flexgen.checkpoints.stored_tensors import DIGEST_BYTES, STRETCH_BYTES, Sums
from h2o_flexgen.core.buffer_layout import CHUNK_BYTES, aligned
from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.hints import reason
from h2o_flexgen.core.prefix_groups import TOKEN, adapter_of, text_under
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.kernels.raw_memory import bytes_of
from h2o_flexgen.memory.threads import started_pool

# -- a prefix in a file ----------------------------------------------------------------------------------------------------

MAGIC = b"h2o_flexgen prefix 1\n".ljust(32, b"\0")
FIXED = Struct("<32sII16s")  # what every file begins with; bytes of what is said of parts, and of the tokens; their checksum
LARGEST_HEAD = 1 << 28  # bytes

OpenFile = FileIO | BufferedReader
Scratch = Callable[[int], memoryview]  # memory of the calling thread to read into
ReadPart = Callable[[int, Tensor], None]  # copies bytes of a part, from this one on, to memory of the host


class BrokenPrefix(ValueError):
    """An error: a file has something else than what was written."""


class PartInMemory(NamedTuple):
    """A part that is to be written."""

    name: str
    nbytes: int
    read: ReadPart


class StoredPart(NamedTuple):
    """The place of a part in its file."""

    start: int
    nbytes: int
    sums: Sums

    def read(self, file: OpenFile, out: Tensor, scratch: Scratch | None) -> None:
        """Fills `out`, bytes, and compares them with what was written. `scratch`: for memory that no file is read into."""
        if out.nbytes != self.nbytes:
            raise BrokenPrefix(f"a part has {self.nbytes} bytes instead of {out.nbytes}")
        file.seek(self.start)
        for first in range(0, self.nbytes, CHUNK_BYTES):
            piece = out[first : first + CHUNK_BYTES]
            data = bytes_of(piece, writes=True) if scratch is None else scratch(len(piece))
            _read_fully(file, data)
            if not self.sums.are_of(data, first, self.nbytes):
                raise BrokenPrefix(f"bytes from {self.start + first} on are not those that were written")
            if scratch is not None:
                piece.copy_(torch.frombuffer(data, dtype=torch.uint8))


@dataclass(frozen=True)
class StoredPrefix:
    file: Path
    text: bytes  # its tokens, as they are compared
    parts: Mapping[str, StoredPart]

    @property
    def tokens(self) -> int:
        return len(self.text) // TOKEN

    @property
    def ids(self) -> Sequence[int]:
        return memoryview(self.text).cast("i").tolist()


def read_head(file: OpenFile, place: Path) -> StoredPrefix:
    """What a file says of its prefix."""
    magic, said_bytes, text_bytes, digest = FIXED.unpack(_exactly(file, FIXED.size))
    if magic != MAGIC or max(said_bytes, text_bytes) > LARGEST_HEAD:
        raise BrokenPrefix("it has no head of a prefix")
    head = _exactly(file, said_bytes + text_bytes)
    if _digest(head) != digest:
        raise BrokenPrefix("its head is not what was written")
    start, parts = aligned(FIXED.size + len(head)), dict[str, StoredPart]()
    for name, nbytes, sums in parse_json(head[:said_bytes]):
        parts[name] = StoredPart(start, nbytes, Sums(sums))
        start += aligned(nbytes)
    return StoredPrefix(place, head[said_bytes:], parts)


def stored_bytes(text: bytes, parts: Sequence[PartInMemory]) -> int:
    """Bytes of the file of a prefix."""
    return _head_bytes(text, parts) + sum(aligned(part.nbytes) for part in parts)


def write_prefix(descriptor: int, text: bytes, parts: Sequence[PartInMemory], room: Tensor) -> None:
    """Writes a prefix to an empty file. `room`: memory of the host through which its bytes go, whole stretches of a sum."""
    assert room.nbytes % STRETCH_BYTES == 0
    start, said = _head_bytes(text, parts), []
    for part in parts:
        sums = []
        for first in range(0, part.nbytes, room.nbytes):
            piece = room[: min(room.nbytes, part.nbytes - first)]
            part.read(first, piece)
            data = bytes_of(piece)
            sums.append(Sums.of(data).text)
            _write_fully(descriptor, start + first, data)
        said.append((part.name, part.nbytes, "".join(sums)))
        start += aligned(part.nbytes)
    os.ftruncate(descriptor, start)
    written = json.dumps(said).encode()
    head = written + text
    _write_fully(descriptor, 0, memoryview(FIXED.pack(MAGIC, len(written), len(text), _digest(head)) + head))


def _head_bytes(text: bytes, parts: Sequence[PartInMemory]) -> int:
    """Bytes before the first part: how long sums are is known before they are."""
    stretches = [-(-part.nbytes // STRETCH_BYTES) for part in parts]
    said = [(part.name, part.nbytes, "0" * (2 * DIGEST_BYTES * count)) for part, count in zip(parts, stretches)]
    return aligned(FIXED.size + len(json.dumps(said)) + len(text))


def _digest(head: bytes) -> bytes:
    return blake2b(head, digest_size=16).digest()


def _exactly(file: OpenFile, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise BrokenPrefix("it ends too early")
    return data


def _read_fully(file: OpenFile, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = file.readinto(out[done:])
        if not count:
            raise BrokenPrefix("it ends too early")
        done += count


def _write_fully(descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


# -- a folder of prefixes --------------------------------------------------------------------------------------------------

SUFFIX = ".prefix"
NAME_BYTES = 12  # of the hash in a name
KNOWN_BYTES = 8 << 20  # of what is known of files: millions of tokens
FILE_BYTES = 2000  # of what is known of a file beside its tokens


class Gone(Exception):
    """Raised where a prefix that is written has lost its place in memory."""


@dataclass(frozen=True)
class PrefixFileCounts:
    """What a process has read from the folder of prefixes, and written to it."""

    found: int = 0  # prefixes
    found_tokens: int = 0
    read_bytes: int = 0
    written: int = 0  # prefixes
    written_bytes: int = 0
    damaged: int = 0  # files that were not what was written
    trouble: str | None = None  # why one was not written, last


class PrefixFiles:
    def __init__(self, folder: Path, limit: int, kind: str, adapters: Callable[[], Sequence[str]] = tuple) -> None:
        """`limit`: bytes of all files. `kind`: a hash of all that the bytes of a prefix depend on beside its tokens and its
        adapter. `adapters`: what identifies each adapter that rows may have, by number less one."""
        self._folder, self._limit, self._kind, self._adapters = folder, limit, kind, adapters
        self._kinds: Sequence[str] = ()  # with each adapter, by its number
        self._known: dict[str, StoredPrefix] = {}  # of this kind, by the names of their files
        self._there: dict[str, int] = {}  # which file had a name: another with the same name may have more parts
        self._looked_at: tuple[int, int] | None = None  # when the folder had last changed, and how many kinds there were
        self._counting = Lock()
        self.counts = PrefixFileCounts()
        remove_partial_files(folder)
        self._pool = started_pool(1, "prefixes")
        self._unwritten: deque[Future[None]] = deque()
        self._look()  # now, and not where the first row waits for it

    def close(self) -> None:
        """Ends the thread, when it has written what is left."""
        self._pool.shutdown(wait=True)

    # -- finding -----------------------------------------------------------------------------------------------------------

    def like(self, text: bytes, least: int) -> Iterator[StoredPrefix]:
        """The prefixes that begin with the same tokens as a text, so many at least."""
        self._look()
        beginning = text[: least * TOKEN]
        return (one for one in self._known.values() if one.text.startswith(beginning))

    def of(self, text: bytes) -> StoredPrefix | None:
        """The prefix of just these tokens."""
        self._look()
        return self._known.get(self._place(text).name)

    def _place(self, text: bytes) -> Path:
        kind, plain = self._all_kinds()[adapter_of(text)], text_under(0, text)
        return self._folder / f"{kind}-{blake2b(plain, digest_size=NAME_BYTES).hexdigest()}{SUFFIX}"

    def _all_kinds(self) -> Sequence[str]:
        """The kinds of prefixes without an adapter, and with each of them. Numbers of adapters are those of this process."""
        known, kinds = self._adapters(), self._kinds
        if len(kinds) <= len(known):  # a new list takes the place of the old one, as two threads may be here at once
            self._kinds = kinds = [self._kind, *map(self._kind_under, known)]
        return kinds

    def _kind_under(self, identity: str) -> str:
        return blake2b(f"{self._kind} {identity}".encode(), digest_size=len(self._kind) // 2 or 1).hexdigest()

    def _look(self) -> None:
        """Reads the heads of files that have come, and forgets those that have gone."""
        with suppress(OSError):
            kinds = tuple(f"{kind}-" for kind in self._all_kinds())
            changed = self._folder.stat().st_mtime_ns, len(kinds)
            if changed == self._looked_at:
                return
            with os.scandir(self._folder) as files:
                numbers = {one.name: one.inode() for one in files}
            there = {name: one for name, one in numbers.items() if name.startswith(kinds) and name.endswith(SUFFIX)}
            come = {name for name, number in there.items() if self._there.get(name) != number}
            stays = there.keys() - come
            self._known = {name: one for name, one in self._known.items() if name in stays}
            self._there = there
            self._take_note(sorted(come, key=self._used_at))
            self._looked_at = changed

    def _used_at(self, name: str) -> int:
        with suppress(OSError):
            return (self._folder / name).stat().st_mtime_ns
        return 0

    def _take_note(self, names: Iterable[str]) -> None:
        """Reads the heads of files. What is known of all has room: the longest known are forgotten for others."""
        held = sum(map(_known_bytes, self._known.values()))
        for name in names:
            if (found := self._head(self._folder / name)) is not None:
                self._known[name] = found
                held += _known_bytes(found)
            while held > KNOWN_BYTES:
                held -= _known_bytes(self._known.pop(next(iter(self._known))))

    def _head(self, file: Path) -> StoredPrefix | None:
        try:
            with file.open("rb") as opened:
                found = self._under_its_adapter(read_head(opened, file))
            if self._place(found.text) != file:
                raise BrokenPrefix("it has another name than its tokens")
        except FileNotFoundError:
            self._there.pop(file.name, None)
            return None
        except (OSError, ValueError, TypeError) as error:
            self._discard(file, error)
            return None
        return found

    def _under_its_adapter(self, read: StoredPrefix) -> StoredPrefix:
        """A prefix with its tokens as they are compared: files have them as the model has them."""
        kind, _, _ = read.file.name.partition("-")
        kinds = self._all_kinds()
        return replace(read, text=text_under(kinds.index(kind), read.text)) if kind in kinds else read

    def _discard(self, file: Path, error: Exception) -> None:
        """Removes a damaged file. What says nothing about its bytes, as too few descriptors, leaves it there."""
        self._there.pop(file.name, None)  # so that it, or another in its place, is looked at again
        if isinstance(error, OSError) and not is_lost(error):
            return
        self._count(damaged=1)
        self._known.pop(file.name, None)
        with suppress(OSError):
            file.unlink(missing_ok=True)

    # -- reading -----------------------------------------------------------------------------------------------------------

    def read(self, stored: StoredPrefix, wanted: Mapping[str, Tensor], scratch: Scratch | None) -> bool:
        """Fills parts of a prefix, as bytes. False if the file has gone, or lacks one, or is damaged: then what they hold means
        nothing. `scratch`: for memory that no file is read into."""
        try:
            with stored.file.open("rb", buffering=0) as opened:
                now = self._under_its_adapter(read_head(opened, stored.file))  # others may have written it again
                if now.text != stored.text:
                    raise BrokenPrefix("it has other tokens")
                if not wanted.keys() <= now.parts.keys():
                    return False
                for name, out in wanted.items():
                    now.parts[name].read(opened, out, scratch)
            with suppress(OSError):
                os.utime(stored.file)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError) as error:
            self._discard(stored.file, error)
            return False
        nbytes = sum(out.nbytes for out in wanted.values())
        self._count(found=1, found_tokens=stored.tokens, read_bytes=nbytes)
        return True

    # -- writing -----------------------------------------------------------------------------------------------------------

    def write_behind(self, text: bytes, parts: Sequence[PartInMemory]) -> None:
        """Lets the thread write a prefix in time. Its parts are read then: one that has lost its place raises Gone."""
        while self._unwritten and self._unwritten[0].done():
            self._unwritten.popleft()
        self._unwritten.append(self._pool.submit(self._write, text, parts))

    def settle(self) -> None:
        """Waits until all that is to be written has been."""
        while self._unwritten:
            self._unwritten.popleft().result()

    def _write(self, text: bytes, parts: Sequence[PartInMemory]) -> None:
        file, text = self._place(text), text_under(0, text)
        nbytes = stored_bytes(text, parts)
        try:
            if self._is_there(file, parts):
                os.utime(file)
                return
            if nbytes > self._limit:
                self._trouble(f"one takes {format_bytes(nbytes)}, and all may take {format_bytes(self._limit)}")
                return
            self._make_room(nbytes)
            with written_beside(file) as descriptor:
                write_prefix(descriptor, text, parts, self._room)
            self._there.pop(file.name, None)  # a new file may have the number of one that has gone,
            self._looked_at = None  # and the folder's time may be that of the last look
            self._make_room(0)  # others have written meanwhile
        except Gone:
            return
        except OSError as error:
            self._trouble(reason(error))
            return
        except Exception as error:  # whatever a device raises that is read from: rows have their answers without the file
            said, _, _ = str(error).partition("\n")
            self._trouble(f"{type(error).__name__}: {said}")
            return
        self._count(written=1, written_bytes=nbytes)

    @cached_property
    def _room(self) -> Tensor:
        """Memory of the thread that writes."""
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    @staticmethod
    def _is_there(file: Path, parts: Sequence[PartInMemory]) -> bool:
        try:
            with file.open("rb") as opened:
                found = read_head(opened, file).parts
        except (OSError, ValueError, TypeError):
            return False
        return {part.name for part in parts} <= found.keys()

    def _make_room(self, nbytes: int) -> None:
        """Removes the longest unused files until so many bytes fit."""
        files = []
        for place in self._folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                status = place.stat()
                files.append((status.st_mtime_ns, status.st_size, place))
        held = sum(size for _, size, _ in files)
        for _, size, place in sorted(files):
            if held + nbytes <= self._limit:
                return
            place.unlink(missing_ok=True)
            held -= size

    # -- counting ----------------------------------------------------------------------------------------------------------

    def _count(self, **more: int) -> None:
        with self._counting:
            self.counts = replace(self.counts, **{name: getattr(self.counts, name) + count for name, count in more.items()})

    def _trouble(self, why: str) -> None:
        with self._counting:
            self.counts = replace(self.counts, trouble=why)


def _known_bytes(known: StoredPrefix) -> int:
    return len(known.text) + FILE_BYTES
