"""The common parts of exact products with kernels that work panel by panel: rows arranged for them, and their arguments. A call
is for one product or for several, each of other rows with another matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP, groups_of
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting, Runs
from h2o_flexgen.kernels.native import KINDS, pointer, run
from h2o_flexgen.kernels.raw_memory import address_of

PLAIN_BITS = 0  # of a matrix without codes
MOST_BETWEEN = 1.5  # times the rows of some runs: what they and the rows of others between them may be, without a copy


class Run(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("first", "rows"))


class JoinedRuns(NamedTuple):
    """The rows of some runs. A kernel may get few of all rows: many others need no room, but where memory says which they
    are."""

    rows: Tensor  # (rows, inputs)
    runs: ctypes.Array[Run]  # of these
    places: Mapping[int, int]  # where each run begins among all rows -> among these

    @classmethod
    def of(cls, values: Tensor, runs: Runs) -> JoinedRuns:
        """Rows (..., inputs), copied only where many others stand between them: few of them cost less room than a copy."""
        if isinstance(runs, CountedRows):
            return cls.counted(values, runs)
        rows, firsts = values.reshape(-1, values.shape[-1]), [first for first, _ in runs]
        *begins, count = accumulate((count for _, count in runs), initial=0)
        first, behind = min(firsts, default=0), max((first + count for first, count in runs), default=0)
        if behind - first <= MOST_BETWEEN * count:
            rows, begins = rows[first:behind], [own - first for own in firsts]
        else:
            rows = torch.cat([rows[first : first + count] for first, count in runs])
        own = (Run * len(runs))(*(Run(begin, count) for begin, (_, count) in zip(begins, runs)))
        return cls(rows.contiguous(), own, dict(zip(firsts, begins)))

    @classmethod
    def counted(cls, values: Tensor, runs: CountedRows) -> JoinedRuns:
        """All rows, and which of them are runs. A product is told of its first row later."""
        own = (Run * runs.runs)()
        runs.place_each(own, Run.rows.offset, {Run.first.offset: (0, 1)})
        return cls(values, own, {0: 0})


class Arranged(NamedTuple):
    values: Tensor  # (rows, columns and what else there is of a row)
    columns: int  # of a row: inputs, or pairs of them, filled up
    places: Mapping[int, int]  # where each run begins among all rows -> here
    kept: object = None  # what else must stay until products with these rows are done


Arrange = Callable[[Tensor, Runs], Arranged]


def panel_products(function: str, x: Factor, arrange: Arrange, meetings: Sequence[Meeting], out: Tensor, told: int) -> None:
    """Rows of x (..., inputs) times transposed matrices, by a function of the library, into out (..., outputs). `told`: what
    that one wants to know of the matrices: the bits of their codes, or the kind of plain values."""
    asked, arranged = products(x, arrange, meetings, out)
    for product, meeting in zip(asked, meetings):
        product.data = pointer(meeting.data)
    given = (Product * len(asked))(*asked)
    place(given, x, arranged, out)
    call(function, given, told)


def place(asked: ctypes.Array[Any], x: Factor, arranged: Arranged, out: Tensor) -> None:
    """Lets memory tell the products, each of which begins with a `Product`, where it says which rows meet which matrix."""
    if x.counted is not None:
        rows = address_of(arranged.values), arranged.values.stride(0) * arranged.values.itemsize
        outcome = address_of(out), out.shape[-1] * out.itemsize
        x.counted.place_each(asked, Product.rows.offset, {Product.x.offset: rows, Product.out.offset: outcome})


def call(function: str, products: ctypes.Array[Any], told: int) -> None:
    """Computes some products by a function of the library, which knows their type. `told`: what they have in common."""
    if len(products):
        run(function, _AskedProducts(products, told), torch.get_num_threads())


def products(x: Factor, arrange: Arrange, meetings: Sequence[Meeting], out: Tensor) -> tuple[list[Product], Arranged]:
    """What C is told of products but for their matrices, and the rows of all of them."""
    assert out.is_contiguous()
    inputs, outputs = x.values.shape[-1], out.shape[-1]
    arranged = x.arranged(arrange, x.runs(meetings))
    biases = [None if meeting.bias is None else meeting.bias.float().contiguous() for meeting in meetings]
    assert all(bias is None or bias.shape == (outputs,) for bias in biases)
    of_row, of_outcome = arranged.values.stride(0) * arranged.values.itemsize, outputs * out.itemsize
    from_rows, to, kind = address_of(arranged.values), address_of(out), KINDS[out.dtype]
    asked = [
        Product(
            None,
            from_rows + arranged.places[meeting.first] * of_row,
            None if bias is None else pointer(bias),
            to + meeting.first * of_outcome,
            *(meeting.rows, outputs, inputs, arranged.columns, kind),
        )
        for meeting, bias in zip(meetings, biases)
    ]
    return asked, arranged._replace(kept=biases)


def _arranged(values: Tensor, runs: Runs, bits: int) -> Arranged:
    """Rows (..., inputs) as float32, block by block, and for codes the sums of their groups behind them: panels.c says how."""
    joined, columns = JoinedRuns.of(values, runs), groups_of(values.shape[-1]) * GROUP
    out = torch.empty(len(joined.rows), columns + (columns // GROUP if bits else 0))
    run("arrange_rows", RowsInRuns.of(joined, out, columns, bits), torch.get_num_threads())
    return Arranged(out, columns, joined.places)


ARRANGED: Mapping[int, Arrange] = {bits: partial(_arranged, bits=bits) for bits in (PLAIN_BITS, 4, 8)}


class RowsInRuns(ctypes.Structure):
    """Rows that are to be arranged."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        ("runs", ctypes.POINTER(Run)),
        *((name, ctypes.c_long) for name in ("count", "inputs", "columns")),
        *((name, ctypes.c_int) for name in ("kind", "bits")),
    )
    kept: object  # what it points to

    @classmethod
    def of(cls, joined: JoinedRuns, out: Tensor, columns: int, bits: int) -> RowsInRuns:
        rows, runs = joined.rows, joined.runs
        made = cls(pointer(rows), pointer(out), runs, len(runs), rows.shape[1], columns, KINDS[rows.dtype], bits)
        made.kept = runs
        return made


class _AskedProducts(ctypes.Structure):
    _fields_ = (("products", ctypes.c_void_p), ("count", ctypes.c_long), ("told", ctypes.c_int))

    def __init__(self, products: ctypes.Array[Any], told: int) -> None:
        super().__init__(ctypes.addressof(products), len(products), told)
        self.kept = products


class Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "x", "bias", "out")),
        *((name, ctypes.c_long) for name in ("rows", "outputs", "inputs", "columns")),
        ("kind", ctypes.c_int),
    )
