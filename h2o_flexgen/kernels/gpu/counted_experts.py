"""Experts of which only memory counts the rows: what a router has chosen is gathered, multiplied and summed up without a wait.

A program of a product looks where the rows of its expert begin and end, and does nothing where there are none: so only experts
that a row was given to are read. A row comes out with the bits that it has alone. Packed experts have those of the product of
few rows, too; plain ones are multiplied by torch elsewhere, with other last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from math import gcd
from operator import or_

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import Tiled, groups_of
from h2o_flexgen.formats.table import PlainFormat, Stored
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.gpu.codes import as_float32
from h2o_flexgen.kernels.gpu.launching import ALIGNED, Launch, Seen, kept_by_shape, launcher, seen
from h2o_flexgen.kernels.gpu.stored_product import Sizes, multiply_rows
from h2o_flexgen.kernels.gpu.stored_values import parts_of
from h2o_flexgen.kernels.gpu.tile_product import ROWS_AT_ONCE, WORDS_OF_WARP, multiply_tile, tiles_of, warps_of
from h2o_flexgen.kernels.raw_memory import addresses_of
from h2o_flexgen.kernels.routing import Chosen, GatheredRows

COLUMNS = 1024  # of a sum, that a program adds up
PLAIN_WARPS, SUMS_OF_THREAD = 4, 64  # of a product of plain matrices

# -- gather counted --------------------------------------------------------------------------------------------------------


def gather_counted(chosen: Chosen, rows: Tensor, experts: range) -> GatheredRows:
    """The rows (tokens, width) that these experts were given, expert by expert, each expert's in the order of their tokens, and
    behind them what others were given. `begins` (experts + 1,)"""
    count = chosen.numbers.numel()
    to, begins = (rows.new_empty(size, dtype=torch.int64) for size in (count, len(experts) + 1))
    weights = rows.new_empty(count, dtype=torch.float32)
    gathering_of(seen(chosen.numbers), seen(chosen.shares), experts)(chosen.numbers, chosen.shares, to, weights, begins)
    return GatheredRows(rows.index_select(0, to), to, weights, begins)


@kept_by_shape
def gathering_of(numbers: Seen, shares: Seen, experts: range) -> Launch:
    (tokens, each), (row, step), _ = numbers
    assert step == shares[1][1] == 1 and shares[0] == numbers[0]
    choices = triton.next_power_of_2(tokens * each)
    told = tokens * each, each, experts.start, len(experts), row, shares[1][0]
    return launcher(gather_kernel, (1,), told, CHOICES=choices, RUNS=triton.next_power_of_2(len(experts) + 1))


@triton.jit(do_not_specialize=["first"])
def gather_kernel(
    numbers, shares, to, weights, begins, count, each, first, experts, numbers_row, shares_row,
    CHOICES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    choice = tl.arange(0, CHOICES)
    there, token = choice < count, choice // each
    expert = tl.load(numbers + token * numbers_row + choice % each, mask=there, other=0) - first
    run = tl.where(there & (expert >= 0) & (expert < experts), expert, RUNS)
    order = run * CHOICES + choice
    place = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    tl.store(to + place, token.to(tl.int64), mask=there)
    share = tl.load(shares + token * shares_row + choice % each, mask=there, other=0.0)
    tl.store(weights + place, share, mask=there)
    of = tl.arange(0, RUNS)
    before = tl.sum((run[None, :] < of[:, None]).to(tl.int32), 1)
    tl.store(begins + of, before.to(tl.int64), mask=of <= experts)


# -- counted products ------------------------------------------------------------------------------------------------------


def counted_tile_products(format: Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """x (rows, inputs), the matrices of runs of its rows, in tiles, and their biases -> out (rows, outputs)"""
    starts = _starts(meetings)
    launch_of = partial(counted_of, format.bits, reduce(or_, starts) % ALIGNED, seen(meetings[0].data))
    _multiply(launch_of, x, starts, meetings, out)


def counted_stored_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of matrices in a checkpoint's own form. Their sections begin equally far behind their own beginnings."""
    starts, data = _starts(meetings), meetings[0].data
    codes, scales, zeros, _ = parts_of(format, data, out.shape[1], x.values.shape[1])
    places = [place - starts[0] for place in addresses_of((codes, scales, zeros))]
    begin = reduce(or_, [start + places[0] for start in starts]) % ALIGNED
    sections = [start + place for place in places for start in starts]
    _multiply(
        partial(counted_stored_of, format.name, begin, scales.dtype, zeros.dtype), x, sections, meetings, out, (scales, zeros)
    )


def counted_plain_products(format: PlainFormat, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of plain matrices, which have the type of the rows."""
    starts, (shape, steps, dtype) = _starts(meetings), seen(meetings[0].data)
    assert shape == (out.shape[1], x.values.shape[1]) and steps == (shape[1], 1) and dtype == x.values.dtype
    _multiply(partial(counted_plain_of, reduce(or_, starts) % ALIGNED), x, starts, meetings, out)


def _starts(meetings: Sequence[Meeting]) -> list[int]:
    """The addresses of matrices, which lie alike."""
    alike = seen(meetings[0].data)
    assert all(seen(meeting.data) == alike for meeting in meetings)
    return addresses_of(meeting.data for meeting in meetings)


def _multiply(
    launch_of: Callable[..., Launch],
    x: Factor,
    places: Sequence[int],
    meetings: Sequence[Meeting],
    out: Tensor,
    more: Sequence[Tensor] = (),
) -> None:
    """`places`: the addresses of all parts of matrices. `more`: what a kernel asks for the types of these."""
    rows, counted = x.values.contiguous(), x.counted
    assert counted is not None and out.is_contiguous() and len(meetings) == counted.runs
    biases = [meeting.bias for meeting in meetings if meeting.bias is not None]
    assert out.dtype == rows.dtype and len(biases) in (0, len(meetings)) and all(bias.dtype == out.dtype for bias in biases)
    table = table_of((*places, *addresses_of(biases)), rows.device)
    launch = launch_of(rows.shape, rows.dtype, out.shape[1], bool(biases), counted.runs, counted.most)
    launch(table, *more, rows, counted.begins, out)


@cache
def table_of(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Some for each slice of a model. To make one waits for its copy to the GPU, and graphs read it while they last."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@kept_by_shape
def counted_of(
    bits: int,
    begin: int,
    data: Seen,
    shape: torch.Size,
    dtype: torch.dtype,
    outputs: int,
    has_bias: bool,
    runs: int,
    most: int,
) -> Launch:
    """`begin`: where matrices begin behind a multiple of what is loaded at once."""
    tiles, format = tiles_of(bits, data, outputs, shape[1]), Tiled(bits)
    warps = warps_of(tiles, groups_of(shape[1]) * format.as_rows.code_bytes // 4)
    at_once = min(ROWS_AT_ONCE, triton.next_power_of_2(most))
    return launcher(
        counted_tiles_kernel,
        (runs * tiles, triton.cdiv(most, at_once)),
        (runs, tiles, outputs, shape[1]),
        HAS_BIAS=has_bias,
        BITS=bits,
        ALIGNED=gcd(begin, ALIGNED),
        ROWS=at_once,
        WORDS=warps * WORDS_OF_WARP,
        num_warps=warps,
    )


@triton.jit
def counted_tiles_kernel(
    table, x, begins, out, runs, tiles, outputs, inputs,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One tile of one expert, times one, two or four of its rows."""
    run, tile = tl.program_id(0) // tiles, (tl.program_id(0) % tiles).to(tl.int64)
    row, end = tl.load(begins + run) + tl.program_id(1) * ROWS, tl.load(begins + run + 1)
    if row < end:
        data = tl.multiple_of(tl.load(table + run).to(tl.pointer_type(tl.uint8)), ALIGNED)
        if HAS_BIAS:
            bias = tl.load(table + runs + run).to(tl.pointer_type(out.dtype.element_ty))
        else:
            bias = out
        multiply_tile(data, x, bias, out, tile, row, end, outputs, inputs, HAS_BIAS, BITS, ROWS, WORDS)


@kept_by_shape
def counted_stored_of(
    format: str,
    begins: int,
    scales: torch.dtype,
    zeros: torch.dtype,
    shape: torch.Size,
    dtype: torch.dtype,
    outputs: int,
    has_bias: bool,
    runs: int,
    most: int,
) -> Launch:
    sizes = Sizes.of(format, begins, most, outputs, shape[1])
    grid = runs * sizes.blocks, triton.cdiv(most, sizes.rows)
    numbers = runs, sizes.blocks, outputs, shape[1], sizes.row_bytes
    return launcher(counted_product_kernel, grid, numbers, HAS_BIAS=has_bias, **sizes.constants)


@triton.jit
def counted_product_kernel(
    table, scales, zeros, x, begins, out, runs, blocks, outputs, inputs, row_bytes,
    HAS_BIAS: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Some outputs of one expert, times some of its rows."""
    run, output = tl.program_id(0) // blocks, tl.program_id(0) % blocks * OUTPUTS
    row, end = tl.load(begins + run) + tl.program_id(1) * ROWS, tl.load(begins + run + 1)
    if row < end:
        own = tl.load(table + run).to(tl.pointer_type(tl.uint8))
        own_scales, own_zeros = tl.load(table + runs + run).to(scales.dtype), tl.load(table + 2 * runs + run).to(zeros.dtype)
        if HAS_BIAS:
            bias = tl.load(table + 3 * runs + run).to(tl.pointer_type(out.dtype.element_ty))
        else:
            bias = out
        multiply_rows(
            own, own_scales, own_zeros, x, bias, out, output, row, end, outputs, inputs, row_bytes,
            HAS_BIAS, LAYOUT, AT_ONCE, ROWS, OUTPUTS, LANES,
        )  # fmt: skip


@kept_by_shape
def counted_plain_of(
    begin: int, shape: torch.Size, dtype: torch.dtype, outputs: int, has_bias: bool, runs: int, most: int
) -> Launch:
    """A thread loads 16 bytes at once of each output, whatever the number of rows. So sums have one order."""
    values, at_once = ALIGNED // dtype.itemsize, min(ROWS_AT_ONCE, triton.next_power_of_2(most))
    warps = max(1, min(PLAIN_WARPS, triton.next_power_of_2(shape[1]) // (32 * values)))
    outputs_at_once = SUMS_OF_THREAD // (values * at_once)
    blocks, groups = triton.cdiv(outputs, outputs_at_once), triton.cdiv(most, at_once)
    return launcher(
        counted_plain_kernel,
        (runs * blocks * groups,),
        (runs, blocks, groups, outputs, shape[1]),
        HAS_BIAS=has_bias,
        ALIGNED=gcd(begin, ALIGNED),
        ROWS=at_once,
        OUTPUTS=outputs_at_once,
        INPUTS=warps * 32 * values,
        num_warps=warps,
        enable_fp_fusion=False,
    )


@triton.jit
def counted_plain_kernel(
    table, x, begins, out, runs, blocks, groups, outputs, inputs,
    HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one plain expert, times one, two or four of its rows. Programs for its other rows stand beside this one,
    so that they find in the cache what it reads."""
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    run, output = block // blocks, block % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    row, end = tl.load(begins + run) + group * ROWS, tl.load(begins + run + 1)
    if row < end:
        own = tl.multiple_of(tl.load(table + run).to(tl.pointer_type(x.dtype.element_ty)), ALIGNED)
        places = own + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
        x_0, x_1 = _row(x, row, end, inputs), _row(x, row + 1, end, inputs)
        x_2, x_3 = _row(x, row + 2, end, inputs), _row(x, row + 3, end, inputs)
        sums_0 = tl.zeros([OUTPUTS, INPUTS], tl.float32)
        sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
        for first in range(0, inputs, INPUTS):
            at = first + tl.arange(0, INPUTS)[None, :]
            values = as_float32(places + at, at < inputs)
            sums_0 = tl.fma(values, as_float32(x_0 + at, at < inputs), sums_0)
            if ROWS >= 2:
                sums_1 = tl.fma(values, as_float32(x_1 + at, at < inputs), sums_1)
            if ROWS >= 4:
                sums_2 = tl.fma(values, as_float32(x_2 + at, at < inputs), sums_2)
                sums_3 = tl.fma(values, as_float32(x_3 + at, at < inputs), sums_3)
        if HAS_BIAS:
            bias = tl.load(table + runs + run).to(tl.pointer_type(out.dtype.element_ty))
        else:
            bias = out
        _finish(out, bias, sums_0, row, end, output, outputs, HAS_BIAS)
        if ROWS >= 2:
            _finish(out, bias, sums_1, row + 1, end, output, outputs, HAS_BIAS)
        if ROWS >= 4:
            _finish(out, bias, sums_2, row + 2, end, output, outputs, HAS_BIAS)
            _finish(out, bias, sums_3, row + 3, end, output, outputs, HAS_BIAS)


@triton.jit
def _row(x, row, end, inputs):
    """The beginning of a row. Behind the last row that one is repeated, and nothing of it is stored."""
    return x + tl.minimum(row, end - 1) * inputs


@triton.jit
def _finish(out, bias, sums, row, end, output, outputs, HAS_BIAS: tl.constexpr):
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += as_float32(bias + output, output < outputs)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=output < tl.where(row < end, outputs, 0))


# -- add counted -----------------------------------------------------------------------------------------------------------


def add_counted(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counted: CountedRows) -> None:
    """Adds rows (count, width), each times its weight, to the sums (tokens, width) that `to` names, in their order."""
    assert rows.is_contiguous()
    adding_of(seen(sums), rows.shape[1], rows.dtype, counted.runs)(sums, rows, weights, to, counted.begins)


@kept_by_shape
def adding_of(sums: Seen, width: int, dtype: torch.dtype, runs: int) -> Launch:
    """`dtype`: of what is added."""
    (tokens, _), (row, step), of_sums = sums
    assert step == 1 and of_sums == torch.float32 and sums[0][1] == width
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = tokens, triton.cdiv(width, columns)
    return launcher(add_kernel, grid, (width, row, runs), COLUMNS=columns, enable_fp_fusion=False)


@triton.jit
def add_kernel(sums, rows, weights, to, begins, width, row_stride, runs, COLUMNS: tl.constexpr):
    token, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, own = column < width, sums + token.to(tl.int64) * row_stride + column
    total = tl.load(own, mask=there, other=0.0)
    for row in range(tl.load(begins + runs).to(tl.int32)):
        if tl.load(to + row) == token:
            made = tl.load(rows + row * width + column, mask=there, other=0.0)
            total += made.to(tl.float32) * tl.load(weights + row)
    tl.store(own, total, mask=there)
