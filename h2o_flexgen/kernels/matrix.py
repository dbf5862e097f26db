"""Matrices of layers. PackedMatrix: one in the bytes of its format. It is multiplied as it lies where a kernel can do that;
otherwise it is decoded first, once for all products that follow. SteadyMatrix: a plain one beside matrices with rounded
products.

AdaptedMatrix: one that some of the rows meet with an adapter of their own, which adds B (A x) * factor to their products. The
other rows have the bits that they have without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.formats.byte_layout import Sectioned
from h2o_flexgen.formats.kernel_table import CPU, PRODUCT, STEADY_PRODUCT
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.native import RECORDER
from h2o_flexgen.kernels.operations import (
    counted_products,
    counts_in_memory,
    decode,
    packed_product,
    packed_products,
    plain_product,
    products_of_each,
    steady_product,
)
from h2o_flexgen.kernels.recording import CannotBeRecorded

AT_ONCE = 3  # matrices


@dataclass(eq=False)
class DecodeBuffer:
    """Memory for the decoded values of one matrix at a time."""

    values: Tensor  # (outputs, inputs) of the largest matrix
    holder: PackedMatrix | None = None  # the matrix that has its values there


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    data: Tensor  # (units of rows, bytes of a unit)
    format: str
    outputs: int
    room: DecodeBuffer | None  # None where all products read the bytes
    product: str = PRODUCT  # the op by which it is multiplied

    def values(self) -> Tensor:
        """The decoded values (outputs, inputs). They are valid until another matrix takes the buffer."""
        assert self.room is not None
        values = self.room.values[: self.outputs]
        if self.room.holder is not self:
            decode(self.format, self.data, values)
            self.room.holder = self
        return values

    def part(self, rows: slice, room: DecodeBuffer | None) -> PackedMatrix:
        """Some of its rows: whole units of its format."""
        together = FORMATS[self.format].rows_together
        assert rows.start % together == 0 and (rows.stop % together == 0 or rows.stop == self.outputs), rows
        units = self.data[rows.start // together : -(-rows.stop // together)]
        return replace(self, data=units, outputs=rows.stop - rows.start, room=room)

    def renew(self) -> None:
        """Forgets decoded values, after the bytes have changed or the buffer was used for something else."""
        if self.room is not None:
            self.room.holder = None

    def linear(self, x: Factor, bias: Tensor | None) -> Tensor:
        """The linear layer of torch, with the decoded values as weights."""
        out = packed_product(self.product, self.format, x, self.data, self.outputs, bias)
        return plain_product(x, self.values(), bias) if out is None else out


def linears_of_same(x: Factor, matrices: Sequence[tuple[object, Tensor | None]]) -> Sequence[Tensor] | None:
    """The linear layers of the same rows with two or three matrices, each with its bias, in one go; None where there is no
    kernel for that."""
    given, kinds = [], set()
    for matrix, bias in matrices:
        if not isinstance(matrix, PackedMatrix):
            return None
        given.append((matrix.data, matrix.outputs, bias))
        kinds.add((matrix.product, matrix.format, bias is None))
    if len(kinds) > 1 or not 1 < len(given) <= AT_ONCE:
        return None
    ((product, format, _),) = kinds
    return packed_products(product, format, x, given)


@dataclass(frozen=True, eq=False)
class SteadyMatrix:
    """A plain matrix. What becomes of a row does not depend on the rows beside it, as in products of whole numbers."""

    values: Tensor  # (outputs, inputs)

    def part(self, rows: slice) -> SteadyMatrix:
        return SteadyMatrix(self.values[rows])

    def linear(self, x: Factor, bias: Tensor | None) -> Tensor:
        return steady_product(x, self.values, bias)


Matrix = PackedMatrix | SteadyMatrix | Tensor


def linear_of_each(x: Factor, meetings: Sequence[tuple[int, int, Matrix, Tensor | None]]) -> Tensor:
    """The linear layers of rows (rows, inputs) that have matrices of their own: the first row, how many there are, their matrix
    and its bias -> (rows, outputs). The matrices have as many outputs, and all rows have one."""
    outputs = _outputs(meetings[0][2])
    out = x.values.new_empty(len(x.values), outputs)
    packed = {first: matrix for first, _, matrix, _ in meetings if isinstance(matrix, PackedMatrix)}
    by_kind = defaultdict[tuple[str, str], list[Meeting]](list)
    for first, rows, matrix, bias in meetings:
        assert _outputs(matrix) == outputs
        by_kind[_multiplied_as(matrix)].append(Meeting(first, rows, _data(matrix), bias))
    for kind, its in by_kind.items():
        for meeting in products_of_each(*kind, x, its, out):
            first, rows, _, bias = meeting
            out[first : first + rows] = plain_product(x.part(first, rows), packed[first].values(), bias)
    return out


def linear_of_parts(x: Tensor, matrix: Matrix) -> Tensor:
    """The linear layers of rows (parts, rows, inputs) with as many equal parts of a matrix: (parts, rows, its outputs)."""
    (parts, rows, inputs), values = x.shape, _plain_values(matrix)
    if x.device.type != CPU and values is not None:  # a launch for all
        return torch.bmm(x, values.view(parts, -1, inputs).transpose(1, 2))
    meetings = [(number * rows, rows, part, None) for number, part in enumerate(_in_parts(matrix, parts))]
    return linear_of_each(Factor(x.reshape(-1, inputs)), meetings).view(parts, rows, -1)


def _plain_values(matrix: Matrix) -> Tensor | None:
    """Its values, if it is plain; on a GPU packed ones are decoded, where there is room for that. Products that round their
    factor are never made of values: whether there is room must not change what is computed."""
    if isinstance(matrix, PackedMatrix):
        is_decoded = matrix.product == PRODUCT and matrix.room is not None and matrix.data.device.type != CPU
        return matrix.values() if is_decoded else None
    return matrix if isinstance(matrix, Tensor) else None


def _in_parts(matrix: Matrix, count: int) -> list[Matrix]:
    each = _outputs(matrix) // count
    parts = [slice(number * each, (number + 1) * each) for number in range(count)]
    if isinstance(matrix, PackedMatrix):
        _refuse_cut_units(matrix.format, count, each)
        return [matrix.part(rows, _room_for(matrix, rows)) for rows in parts]
    if isinstance(matrix, SteadyMatrix):
        return [matrix.part(rows) for rows in parts]
    return [matrix[rows] for rows in parts]


def _refuse_cut_units(format: str, parts: int, rows: int) -> None:
    """Refuses parts with so many rows each, if they do not begin where units of the format do."""
    together = FORMATS[format].rows_together
    if parts > 1 and rows % together:
        raise ValueError(
            f"a matrix of {parts} heads with {rows} rows each is packed as {format}, in units of {together} rows, and cannot "
            "be taken apart; do not pack the weights of this model"
        )


def _room_for(matrix: PackedMatrix, rows: slice) -> DecodeBuffer | None:
    return None if matrix.room is None else DecodeBuffer(matrix.room.values[rows])


def counted_linear_of_each(x: Factor, matrices: Sequence[tuple[Matrix, Tensor | None]]) -> Tensor:
    """The same where memory alone says which rows meet which matrix and its bias."""
    out = x.values.new_empty(len(x.values), _outputs(matrices[0][0]))
    (op, format), *others = {_multiplied_as(matrix): None for matrix, _ in matrices}
    if others or any(_is_ordered(matrix) for matrix, _ in matrices):
        raise CannotBeRecorded("experts have matrices of several formats, or in an order of their own")
    counted_products(op, format, x, [Meeting(0, 0, _data(matrix), bias) for matrix, bias in matrices], out)
    return out


def can_be_counted(x: Tensor, each: int, matrices: Sequence[object]) -> bool:
    """Whether rows that only memory counts may meet these matrices, `each` as many on average, and nothing waits for it. They
    have one format then."""
    counted = [one for one in matrices if isinstance(one, (Tensor, PackedMatrix)) and _lies_as_counted(one, x.dtype)]
    kinds = {_multiplied_as(one) for one in counted}
    return len(counted) == len(matrices) and len(kinds) == 1 and all(counts_in_memory(*kind, x, each) for kind in kinds)


def _lies_as_counted(matrix: Tensor | PackedMatrix, dtype: torch.dtype) -> bool:
    if isinstance(matrix, PackedMatrix):
        return not _is_ordered(matrix)
    return matrix.dtype == dtype and matrix.is_contiguous()  # one in other memory would be copied to ever new places


def _is_ordered(matrix: Matrix) -> bool:
    format = FORMATS[matrix.format] if isinstance(matrix, PackedMatrix) else None
    return isinstance(format, Sectioned) and format.layout.is_ordered


def _outputs(matrix: Matrix) -> int:
    return matrix.outputs if isinstance(matrix, PackedMatrix) else len(_data(matrix))


def _multiplied_as(matrix: Matrix) -> tuple[str, str]:
    """The op by which it is multiplied, and its format."""
    if isinstance(matrix, PackedMatrix):
        return matrix.product, matrix.format
    return STEADY_PRODUCT if isinstance(matrix, SteadyMatrix) else PRODUCT, PLAIN


def _data(matrix: Matrix) -> Tensor:
    return memory_of(matrix) if isinstance(matrix, PackedMatrix) else memory_of(matrix).contiguous()


def memory_of(matrix: Matrix) -> Tensor:
    """The tensor with its values as they are stored."""
    if isinstance(matrix, PackedMatrix):
        return matrix.data
    return matrix.values if isinstance(matrix, SteadyMatrix) else matrix


# -- adapters of rows ------------------------------------------------------------------------------------------------------

ADAPTED_AT_ONCE = 256  # rows of an adapter: what they add is held beside what they are added to


@dataclass(frozen=True, eq=False)
class LowRankMatrices:
    """The thin matrices of an adapter for one matrix, in fp32."""

    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)
    factor: float


@dataclass(frozen=True, eq=False)
class AdaptedRows:
    """The adapter of each row, by its number; 0: none. A row may have several tokens."""

    numbers: tuple[int, ...]
    device: torch.device
    _known: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)

    def make_ready(self) -> None:
        """Makes the places of rows of one token, which no recording can make."""
        for number in {*self.numbers} - {0}:
            self.places(number, 1)

    def places(self, number: int, tokens: int) -> Sequence[Tensor]:
        """The places of the tokens that have an adapter among those of all rows, some at a time. `tokens`: of each row."""
        key = number, tokens
        if key not in self._known:
            rows = torch.tensor([row for row, own in enumerate(self.numbers) if own == number])
            every = (rows[:, None] * tokens + torch.arange(tokens)).flatten().to(self.device)
            self._known[key] = every.split(ADAPTED_AT_ONCE)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class AdaptedMatrix:
    matrix: Any  # of the model
    rows: AdaptedRows
    by_number: Mapping[int, LowRankMatrices]  # of the adapters that rows have and that change it

    def added(self, x: Factor, out: Tensor) -> Tensor:
        """The products `out` of the matrix with rows x, and what the adapters of rows add to them."""
        given, made = x.values.reshape(x.rows, -1), out.flatten(0, -2)
        assert x.rows % len(self.rows.numbers) == 0, "each row has as many tokens"
        recorder = RECORDER.get()
        for number, own in self.by_number.items():
            for places in self.rows.places(number, x.rows // len(self.rows.numbers)):
                if recorder is None:
                    _add(own.factor, made, given, places, own.a, own.b)
                else:
                    recorder.by_torch(partial(_add, own.factor), (given, places, own.a, own.b), made)
        return made.view(out.shape)


def _add(factor: float, made: Tensor, given: Tensor, places: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds to the products of the rows that have an adapter what it adds."""
    made[places] = (made[places].float() + low_rank_product(given[places], a, b, factor)).to(made.dtype)


def low_rank_product(x: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """What an adapter adds to the products of rows (rows, inputs): (rows, outputs), in fp32. With kernels in C it does not
    depend on the rows beside a row."""
    between = steady_product(Factor(x.float()), a, None)
    return steady_product(Factor(between), b, None).mul_(factor)


def bare(matrix: Any) -> Any:
    """The matrix of the model itself."""
    return matrix.matrix if isinstance(matrix, AdaptedMatrix) else matrix
