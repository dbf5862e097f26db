"""StoredPrefix: a prefix in a file of its own: its tokens, and its parts as they lie in memory, such as keys and values.

First comes a head with a checksum of its own. It says how long each part is, and has the checksums of its bytes. The parts
follow one behind the other, each from a page on. The head is written last: a file that was cut off or changed is never taken
for a prefix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader, FileIO
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_tensors import DIGEST_BYTES, STRETCH_BYTES, Sums
from h2o_flexgen.core.buffer_layout import CHUNK_BYTES, aligned
from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.prefix_groups import TOKEN
from h2o_flexgen.kernels.raw_memory import bytes_of

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
