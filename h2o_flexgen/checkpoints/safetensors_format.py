"""The safetensors format: where each tensor of a file lies, and writing a file tensor by tensor.

A file is 8 bytes of header length, a JSON header, and the data. Headers are checked here to the last byte, because later the
data are read by offset alone, without a look at the content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeGuard

import torch

from h2o_flexgen.checkpoints.model_files import flush_to_disk, refuse_pointer
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor, Sums
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.files import NotADocument, parse_json
from h2o_flexgen.core.hints import reason
from h2o_flexgen.kernels.raw_memory import bytes_of

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
CODES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """All tensors of a file, in the order of their data; a file that contradicts its header is refused."""
    try:
        return header_of(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def header_of(path: Path) -> tuple[StoredTensor, ...]:
    """Like `read_header`, for callers that know better what an OSError means."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header, data_start = _parse_header(path, file, size)
    header.pop("__metadata__", None)
    tensors = sorted(
        (_stored_tensor(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda tensor: (tensor.offset, tensor.nbytes),
    )
    _check_contiguous(path, tensors, data_start, size)
    return tuple(tensors)


def _parse_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, object], int]:
    start = file.read(64)
    refuse_pointer(path, start)
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if size >= LENGTH_BYTES and length > MAX_HEADER_BYTES:
        raise ValueError(f"{path} is no safetensors file: its header would be {length} bytes long; download it again")
    if size < LENGTH_BYTES + length:
        need = LENGTH_BYTES + length
        raise ValueError(
            f"{path} is truncated: its header alone should take {need} bytes, the file has {size}; download it again"
        )
    file.seek(LENGTH_BYTES)
    try:
        header = parse_json(file.read(length))
    except NotADocument as error:
        raise ValueError(f"{path} has a corrupt header (no valid JSON: {error}); download it again") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a corrupt header (a {type(header).__name__}, no table of tensors); download it again")
    return header, LENGTH_BYTES + length


def _stored_tensor(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    def corrupt(what: str) -> ValueError:
        return ValueError(f"{path} has a corrupt header: tensor {name} {what}; download it again")

    if not isinstance(entry, dict):
        raise corrupt("is not described")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str):
        raise corrupt(f"has the dtype {code!r}")
    if not _is_sizes(shape):
        raise corrupt(f"has the shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(f"lies at {offsets!r}")
    nbytes = offsets[1] - offsets[0]
    if code in BITS and nbytes * 8 != prod(shape) * BITS[code]:
        raise corrupt(f"of shape {shape} and dtype {code} has {nbytes} bytes instead of {prod(shape) * BITS[code] / 8:g}")
    return StoredTensor(name, path, data_start + offsets[0], nbytes, FLOATS.get(code, code), tuple(shape))


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_contiguous(path: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            where = f"starts at byte {tensor.offset} where byte {end} should follow"
            raise ValueError(f"{path} has a corrupt header: tensor {tensor.name} {where}; download it again")
        end += tensor.nbytes
    if size != end:
        state = "is truncated" if size < end else "is too long"
        raise ValueError(f"{path} {state}: by its header it should have {end} bytes, it has {size}; download it again")


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor before its values exist."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Iterable[TensorHeader], value: Callable[[str], torch.Tensor]) -> dict[str, Sums]:
    """Writes a file, asking for the values one by one and keeping none. Wide types come first, so that every tensor is aligned
    to its item size. Returns the checksums of every tensor, computed before it was written."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    sums = {}
    with path.open("wb") as file:
        file.write(_header_bytes(ordered))
        for tensor in ordered:
            data = _checked_bytes(tensor, value(tensor.name))
            sums[tensor.name] = Sums.of(data)
            file.write(data)
            del data
        flush_to_disk(file)
    return sums


def raw_header(path: Path) -> bytes:
    """Everything before the data of a file that was written here."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(0)
        return file.read(LENGTH_BYTES + min(length, MAX_HEADER_BYTES))


def _header_bytes(tensors: list[TensorHeader]) -> bytes:
    """The header, padded with spaces, which the format allows, so that the data start where O_DIRECT can read."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    length = aligned(LENGTH_BYTES + len(text)) - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def _checked_bytes(header: TensorHeader, tensor: torch.Tensor) -> memoryview:
    assert (tensor.dtype, tuple(tensor.shape)) == (header.dtype, header.shape), header
    return tensor_bytes(tensor)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, copied only if it is not contiguous."""
    return bytes_of(tensor.detach().contiguous().flatten())
