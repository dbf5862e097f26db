"""Products of rows that are rounded to 8 bits, and tiles of 4 or 8 bits. In C and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.grouped import GROUP, TILE, Tiled, groups_of
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.native import KINDS, pointer, run
from h2o_flexgen.kernels.panels import call
from h2o_flexgen.kernels.raw_memory import address_of

# -- int8 rows -------------------------------------------------------------------------------------------------------------
# Rows of x as int8: 64 values along a row share a scale, which is their largest magnitude over 127. C and torch give the
# same bits. A group with NaN or infinity has NaN as its scale, so that no outcome of it is a number.

LARGEST_CODE = 127
NOTHING = 1e-30  # groups of smaller values become zeros: scales have to have inverses


class Int8Rows(NamedTuple):
    codes: Tensor  # (rows, groups * 64), int8
    scales: Tensor  # (rows, groups), float32
    sums: Tensor  # (rows, groups), float32: of the codes, times the scale


class Int8Parts(NamedTuple):
    """The same with the sums of smaller groups, for matrices with scales and minima for fewer inputs."""

    rows: Int8Rows
    wholes: Tensor  # (rows, parts), int32: the sum of the codes of each part


class Factors(ctypes.Structure):
    """What every product with rows of int8 is told in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "bias", "out")),
        *((name, ctypes.c_long) for name in ("rows", "groups", "outputs")),
        ("kind", ctypes.c_int),
    )


class FactorRows:
    """Says of any rows what C is told of them, as long as it is kept. Addresses are asked for once: experts have few rows."""

    def __init__(self, x: Int8Rows, sums: Tensor, out: Tensor) -> None:
        """sums (rows, ...), which the kernel wants beside codes and scales; out (..., outputs) of all rows"""
        self._codes, self._scales, self._sums = (_in_rows(values) for values in (x.codes, x.scales, sums))
        self._outcome = _in_rows(out.view(len(x.codes), out.shape[-1]))
        self._sizes = x.scales.shape[1], out.shape[-1], KINDS[out.dtype]
        self._kept: list[object] = [x, sums]

    def factors(self, first: int, rows: int, bias: Tensor | None) -> Factors:
        """What is told of some rows and a bias (outputs,)."""
        added = None
        if bias is not None:
            assert bias.shape == self._sizes[1:2]
            self._kept.append(wide := bias.float().contiguous())
            added = pointer(wide)
        codes, scales, out = (at + first * stride for at, stride in (self._codes, self._scales, self._outcome))
        return Factors(codes, scales, added, out, rows, *self._sizes)

    def place(self, asked: ctypes.Array[Any], x: Factor, sums_at: int) -> None:
        """Lets memory tell the products, each of which begins with `Factors`, where it says which rows meet which matrix."""
        if x.counted is not None:
            fields = Factors.codes, Factors.scales, Factors.out
            addresses = zip((field.offset for field in fields), (self._codes, self._scales, self._outcome))
            x.counted.place_each(asked, Factors.rows.offset, {**dict(addresses), sums_at: self._sums})

    def sums(self, first: int) -> int:
        """The address of those of a row and the ones behind it."""
        at, stride = self._sums
        return at + first * stride


def _in_rows(values: Tensor) -> tuple[int, int]:
    """The address of values (rows, ...), and the bytes of a row."""
    assert values.is_contiguous()
    return address_of(values), values.stride(0) * values.itemsize


def int8_rows(values: Tensor, counted: CountedRows | None = None) -> Int8Rows:
    """values (..., columns); `counted`: how many of the rows there are, where memory says it"""
    x = values.reshape(-1, values.shape[-1]).contiguous()
    _round(x, made := _room(x), None, GROUP, counted)
    return made


@cache
def int8_parts(part: int) -> Callable[..., Int8Parts]:
    """Rounds rows to int8, with sums of so many codes each: 16, 32 or 64."""
    return partial(_parts, part)


def _parts(part: int, values: Tensor, counted: CountedRows | None = None) -> Int8Parts:
    x = values.reshape(-1, values.shape[-1]).contiguous()
    rows = _room(x)
    _round(x, rows, wholes := torch.empty(len(x), rows.codes.shape[1] // part, dtype=torch.int32), part, counted)
    return Int8Parts(rows, wholes)


def _round(x: Tensor, made: Int8Rows, wholes: Tensor | None, part: int, counted: CountedRows | None) -> None:
    places = (*map(pointer, (x, *made)), None if wholes is None else pointer(wholes))
    given = _Rounding(*places, *x.shape, part, KINDS[x.dtype])
    if counted is not None:
        counted.place_all(given, _Rounding.rows.offset)
    run("int8_rows", given, torch.get_num_threads())


def int8_rows_twin(values: Tensor) -> Int8Rows:
    x = values.reshape(-1, values.shape[-1])
    made, step = _room(x), max(1, twin_values(x.device.type) // max(1, x.shape[1]))
    for row in range(0, len(x), step):
        part = slice(row, row + step)
        made.codes[part], made.scales[part], made.sums[part] = _encoded(x[part].float())
    return made


@cache
def int8_parts_twin(part: int) -> Callable[[Tensor], Int8Parts]:
    return partial(_parts_twin, part)


def _parts_twin(part: int, values: Tensor) -> Int8Parts:
    rows = int8_rows_twin(values)
    return Int8Parts(rows, rows.codes.unflatten(1, (-1, part)).sum(-1, dtype=torch.int32))


def _encoded(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most = x.abs().amax(-1)
    limit = torch.full_like(most, LARGEST_CODE)  # a number is no divisor: torch would multiply with its inverse
    some = (most >= NOTHING) & (most < inf)
    scales = torch.where(some, most / limit, 0.0).masked_fill_(~(most < inf), nan)
    inverses = torch.where(some, limit / most, 0.0).unsqueeze(-1)
    codes = torch.where(some.unsqueeze(-1), x * inverses, 0.0).round_()
    return codes.flatten(1), scales, scales * codes.sum(-1)


def _room(x: Tensor) -> Int8Rows:
    rows, groups, device = len(x), groups_of(x.shape[1]), x.device
    scales, sums = (torch.empty(rows, groups, device=device) for _ in range(2))
    return Int8Rows(torch.empty(rows, groups * GROUP, dtype=torch.int8, device=device), scales, sums)


class _Rounding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "sums", "wholes")),
        *((name, ctypes.c_long) for name in ("rows", "columns", "part")),
        ("kind", ctypes.c_int),
    )


# -- int8 product ----------------------------------------------------------------------------------------------------------
# The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits. C and torch give the same bits, and what
# becomes of a row depends on nothing but the row and the matrix: int8_product.c says how.


def int8_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., columns), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    int8_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def int8_products(format: Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    made, shape = x.arranged(int8_rows, x.counted), (-(-out.shape[-1] // TILE), format.tile_bytes(x.values.shape[-1]))
    given, asked = FactorRows(made, made.sums, out), list[_Int8Product]()
    for first, rows, data, bias in meetings:
        assert data.shape == shape
        asked.append(_Int8Product(given.factors(first, rows, bias), pointer(data), given.sums(first)))
    told = (_Int8Product * len(asked))(*asked)
    given.place(told, x, _Int8Product.sums.offset)
    call("int8_product", told, format.bits)


def int8_product_twin(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    rows = x.made(int8_rows_twin)
    step = max(1, twin_values(data.device.type) // max(TILE * rows.codes.shape[1], TILE * len(rows.codes)))
    parts = [_product_of_tiles(format, rows, data[start : start + step]) for start in range(0, len(data), step)]
    out = torch.cat(parts, dim=1)[:, :outputs]
    added = out if bias is None else out + bias.float()
    return added.to(x.values.dtype).reshape(*x.values.shape[:-1], outputs)


def _product_of_tiles(format: Tiled, x: Int8Rows, tiles: Tensor) -> Tensor:
    """The sums of some tiles (rows, tiles * 16), group behind group. Dot products are whole numbers below 2 ** 24, which
    float32 holds, in any order of their sums."""
    sums = torch.zeros(len(x.codes), len(tiles) * TILE, device=tiles.device)
    for group in range(groups_of(x.codes.shape[1])):
        codes, scales, minima = _block(format, tiles, group)
        dots = functional.linear(x.codes[:, group * GROUP : (group + 1) * GROUP].float(), codes)
        own = slice(group, group + 1)
        sums += dots * x.scales[:, own] * scales + x.sums[:, own] * minima
    return sums


def _block(format: Tiled, tiles: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes (tiles * 16, 64), scales and minima (tiles * 16,) of a group, as float32."""
    blocks = tiles[:, group * format.block_bytes : (group + 1) * format.block_bytes]
    words, scales, minima = blocks.split((TILE * format.as_rows.code_bytes, 2 * TILE, 2 * TILE), dim=1)
    codes = words.reshape(len(tiles), -1, TILE, 4)
    if format.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2)
    shared = (part.contiguous().view(torch.bfloat16).float().flatten() for part in (scales, minima))
    return codes.transpose(1, 2).reshape(len(tiles) * TILE, GROUP).float(), *shared


class _Int8Product(ctypes.Structure):
    _fields_ = (("of", Factors), ("data", ctypes.c_void_p), ("sums", ctypes.c_void_p))
