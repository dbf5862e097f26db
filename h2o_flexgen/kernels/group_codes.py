"""Values in groups of 4 or 8 bits, encoded and decoded: row by row, and in tiles. In C and in torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP, TILE, Grouped, Tiled, groups_of
from h2o_flexgen.formats.kernel_sizes import TWIN_VALUES, twin_values
from h2o_flexgen.kernels.native import KINDS, pointer, run

# -- group decode ----------------------------------------------------------------------------------------------------------
# Values of a group format, decoded. C and torch give the same bits.


def group_decode(format: Grouped, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns)."""
    given = _Coding(pointer(data), pointer(out, writes=True), *out.shape, format.bits, KINDS[out.dtype])
    run("group_decode", given, torch.get_num_threads())


def group_decode_twin(format: Grouped, data: Tensor, out: Tensor) -> None:
    rows, columns = out.shape
    codes, scales, minima = group_parts(format, data, columns)
    step = max(1, twin_values(out.device.type) // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        values = _unpacked(codes[part]).float()
        values.mul_(scales[part].float().unsqueeze(-1)).add_(minima[part].float().unsqueeze(-1))
        out[part] = values.flatten(1)[:, :columns]


def group_parts(format: Grouped, data: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of each row (rows, groups, bytes of a group), its scales and its minima (rows, groups), as bfloat16."""
    groups = groups_of(columns)
    codes, scales, minima = data.split((groups * format.code_bytes, 2 * groups, 2 * groups), dim=1)
    return codes.unflatten(1, (groups, format.code_bytes)), scales.view(torch.bfloat16), minima.view(torch.bfloat16)


def _unpacked(codes: Tensor) -> Tensor:
    """Unpacks codes to (rows, groups, 64): byte j of a four-bit group holds the codes of values j (low) and j + 32 (high)."""
    return codes if codes.shape[-1] == GROUP else torch.cat((codes & 15, codes >> 4), dim=-1)


# -- group encode ----------------------------------------------------------------------------------------------------------
# Values encoded with a group format. C and torch give the same bits.


def group_encode(format: Grouped, values: Tensor, out: Tensor) -> None:
    """Encodes values (rows, columns) into out (rows, bytes of a row)."""
    values = values.contiguous()  # kept alive until C is done
    given = _Coding(pointer(values), pointer(out, writes=True), *values.shape, format.bits, KINDS[values.dtype])
    run("group_encode", given, torch.get_num_threads())


def group_encode_twin(format: Grouped, values: Tensor, out: Tensor) -> None:
    codes, scales, minima = group_parts(format, out, values.shape[1])
    most, step = 2**format.bits - 1, max(1, twin_values(values.device.type) // (codes.shape[1] * GROUP))
    for row in range(0, len(values), step):
        part = slice(row, row + step)
        here = _in_groups(values[part].float(), codes.shape[1])
        minimum = _rounded(here.amin(-1).add_(0.0), -torch.inf)  # adding 0.0 makes -0 positive
        here.sub_(minimum.float().unsqueeze(-1))
        largest = here.amax(-1).add_(0.0)
        scale = _rounded(largest / torch.full_like(largest, most), torch.inf)  # a GPU multiplies with the inverse of a number
        lost = ~(scale.isfinite() & minimum.isfinite())  # a group with a NaN or an infinity becomes NaN altogether
        scale, minimum = scale.masked_fill(lost, 0.0), minimum.masked_fill(lost, torch.nan)
        here.masked_fill_(lost.unsqueeze(-1), 0.0)
        here.div_(torch.where(scale > 0, scale, 1).float().unsqueeze(-1))  # a constant group has codes of 0
        code = here.round_().clamp_(0, most).byte()
        codes[part] = code if format.bits == 8 else code[..., : GROUP // 2] | code[..., GROUP // 2 :] << 4
        scales[part], minima[part] = scale, minimum


def _in_groups(rows: Tensor, groups: int) -> Tensor:
    """A copy as (rows, groups, 64); the last group is filled with the row's last value, which changes neither extreme."""
    lacking = groups * GROUP - rows.shape[-1]
    padded = torch.cat((rows, rows[:, -1:].expand(-1, lacking)), dim=-1) if lacking else rows.clone()
    return padded.view(len(rows), groups, GROUP)


def _rounded(values: Tensor, towards: float) -> Tensor:
    """The nearest bfloat16 that is not beyond the value on the side of `towards`."""
    near = values.bfloat16()
    beyond = near.float() > values if towards < 0 else near.float() < values
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)


class _Coding(ctypes.Structure):
    """Rows that are decoded or encoded."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "out")),
        *((name, ctypes.c_long) for name in ("rows", "columns")),
        *((name, ctypes.c_int) for name in ("bits", "kind")),
    )


# -- tile rows -------------------------------------------------------------------------------------------------------------
# Rows of the group format put into tiles and taken out of them, bit for bit the same in C and in torch.


def tile_encode(format: Tiled, values: Tensor, out: Tensor) -> None:
    """Encodes values (outputs, columns) into out (tiles, bytes of a tile)."""
    rows = _room_for_rows(format.as_rows, values)
    group_encode(format.as_rows, values, rows)
    given = _Reordering(pointer(rows), pointer(out, writes=True), None, *values.shape, TILE * len(out), format.bits)
    run("rows_to_tiles", given, torch.get_num_threads())


def tile_encode_twin(format: Tiled, values: Tensor, out: Tensor) -> None:
    rows = _room_for_rows(format.as_rows, values)
    group_encode_twin(format.as_rows, values, rows)
    filled = torch.nn.functional.pad(rows, (0, 0, 0, len(out) * TILE - len(rows)))
    out.copy_(_rows_to_tiles(format, filled, groups_of(values.shape[1])))


def tile_decode_rows(format: Tiled, data: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Decodes the outputs with these numbers (count,) of data (tiles, bytes of a tile) into out (count, columns). A number that
    no output has gives NaN."""
    rows, numbers = _room_for_rows(format.as_rows, out), numbers.contiguous()
    assert numbers.dtype == torch.int64 and len(numbers) == len(out)
    given = _Reordering(pointer(data), pointer(rows), pointer(numbers), *out.shape, TILE * len(data), format.bits)
    run("tiles_to_rows", given, torch.get_num_threads())
    group_decode(format.as_rows, rows, out)


def tile_decode_rows_twin(format: Tiled, data: Tensor, numbers: Tensor, out: Tensor) -> None:
    step = max(1, twin_values(out.device.type) // (TILE * max(1, out.shape[1])))
    for start in range(0, len(out), step):
        part = numbers[start : start + step]
        rows = _tiles_to_rows(format, data[part // TILE], groups_of(out.shape[1]))
        own = rows.view(len(part), TILE, -1)[torch.arange(len(part), device=part.device), part % TILE]
        group_decode_twin(format.as_rows, own, out[start : start + step])


def tile_decode(format: Tiled, data: Tensor, out: Tensor) -> None:
    """Decodes all outputs, some tiles at a time: their rows are still in the cache when they are decoded."""
    step = max(1, TWIN_VALUES // (TILE * max(1, out.shape[1]))) * TILE
    numbers = torch.arange(len(out))
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        tile_decode_rows(format, data, numbers[part], out[part])


def tile_decode_twin(format: Tiled, data: Tensor, out: Tensor) -> None:
    step = max(1, twin_values(out.device.type) // (TILE * max(1, out.shape[1])))
    for start in range(0, len(data), step):
        values = out[start * TILE : (start + step) * TILE]
        rows = _tiles_to_rows(format, data[start : start + step], groups_of(out.shape[1]))
        group_decode_twin(format.as_rows, rows[: len(values)], values)


def _room_for_rows(format: Grouped, like: Tensor) -> Tensor:
    rows, columns = like.shape
    return torch.empty(rows, format.nbytes((columns,), like.itemsize), dtype=torch.uint8, device=like.device)


def _rows_to_tiles(format: Tiled, rows: Tensor, groups: int) -> Tensor:
    """rows (tiles * 16, bytes of a row) -> (tiles, bytes of a tile)"""
    codes, shared = rows.tensor_split([groups * format.as_rows.code_bytes], dim=1)
    codes = codes.view(len(rows), groups, -1)
    if format.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1).view(len(rows), groups, GROUP // 8, 2, 4)
        codes = codes[..., 0, :] | codes[..., 1, :] << 4
    words = codes.reshape(-1, TILE, groups, format.as_rows.code_bytes // 4, 4).permute(0, 2, 3, 1, 4)
    pairs = shared.view(-1, TILE, 2, groups, 2).permute(0, 3, 2, 1, 4)  # (tiles, groups, scales or minima, outputs, bytes)
    return torch.cat((words.flatten(2), pairs.flatten(2)), dim=-1).flatten(1)


def _tiles_to_rows(format: Tiled, tiles: Tensor, groups: int) -> Tensor:
    """tiles (tiles, bytes of a tile) -> (tiles * 16, bytes of a row)"""
    blocks = tiles.view(len(tiles), groups, format.block_bytes)
    words, pairs = blocks.tensor_split([TILE * format.as_rows.code_bytes], dim=-1)
    codes = words.view(len(tiles), groups, -1, TILE, 4).permute(0, 3, 1, 2, 4)  # (tiles, outputs, groups, words, bytes)
    if format.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-2).flatten(3)
        codes = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    shared = pairs.reshape(len(tiles), groups, 2, TILE, 2).permute(0, 3, 2, 1, 4)
    return torch.cat((codes.reshape(len(tiles) * TILE, -1), shared.reshape(len(tiles) * TILE, -1)), dim=1)


class _Reordering(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "out", "numbers")),
        *((name, ctypes.c_long) for name in ("rows", "columns", "outputs")),
        ("bits", ctypes.c_int),
    )
