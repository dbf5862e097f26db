"""Products of matrices by the number of rows: every stored form, as a run multiplies it, beside torch and the machine's limit.

    python benchmarks/products.py
    python benchmarks/products.py --rows 1 32 --shape 11008x4096 --output benchmarks/results
    H2O_FLEXGEN_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/products.py    # emulated

Each product has another matrix than the one before, of so many that no cache holds them, and rows that it has not seen: what a
run makes of rows once for several matrices is made anew here, and what is decoded first is decoded anew. All forms take turns
at each number of rows, and the best time counts. The limit of a product is the longer of two times: its bytes at the rate at
which memory is read, and its operations at the peak of the processor's arithmetic (peaks.c). Both are measured before and
behind each number of rows. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import argument_of, commit
from benchmarks.instructions import instructions, processor_slug
from benchmarks.limits import Limits
from h2o_flexgen.core.files import write_text
from h2o_flexgen.formats.kernel_table import INT8, PRODUCTS, rounds
from h2o_flexgen.formats.table import FORMATS, TILED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kernels.operations import encode, plain_product
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.profiling.measure import describe_machine

ROWS = (1, 8, 32, 128, 512)
SHAPE = (5632, 2048)  # outputs and inputs of TinyLlama's widest matrix
BEYOND_CACHES = 192 << 20  # bytes of all matrices of one form
STORED_FORMS = ("q4_0", "q4_1", "q4_K", "q5_K", "q6_K", "q8_0", "mxfp4", "fp8-128x128-float32", "int4-128-float16-zeros")
SOUND_BYTES = 60  # random bytes below it are small, finite numbers in every form and every type of its scales
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ARITHMETIC = {torch.float32: "fp32", torch.bfloat16: "exact"}  # the property of Peaks that bounds exact products of a type
Product = Callable[[Tensor], object]


@dataclass(frozen=True)
class Form:
    """A way in which matrices are stored and multiplied."""

    name: str
    dtype: torch.dtype  # of the rows
    nbytes: int  # of one matrix
    arithmetic: str  # the property of Peaks that bounds it
    products: Sequence[Product]  # with one matrix each


def main() -> int:
    args = parse(sys.argv[1:])
    result = benchmark(args)
    print_table(result)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_text(Path(args.output) / f"products-{processor_slug()}.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=ROWS)
    add("--shape", type=argument_of(shape_of), default=SHAPE, metavar="OxI", help="outputs and inputs of a matrix")
    add("--seconds", type=float, default=1.0, help="for each form and number of rows")
    add("--matrix-bytes", type=int, default=BEYOND_CACHES, help="of all matrices of a form: more than the caches hold")
    add("--output", metavar="FOLDER", help="also write products-<processor>.json there")
    return parser.parse_args(argv)


def shape_of(text: str) -> tuple[int, int]:
    outputs, cross, inputs = text.partition("x")
    if not (cross and outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
        raise ValueError(f"shape {text!r} is not understood; write it like 5632x2048: outputs and inputs")
    return int(outputs), int(inputs)


@torch.inference_mode()
def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    limits, forms, best = Limits.measured(), list(forms_of(args.shape, args.matrix_bytes)), {}
    for rows in args.rows:
        best[rows] = best_seconds(forms, rows, args.shape[1], args.seconds)
        limits = limits.at_best(Limits.measured())
    lines = [line(form, rows, best[rows][form.name], args.shape, limits) for form in forms for rows in args.rows]
    return {
        "benchmark": "products",
        "title": f"Products of {args.shape[0]} x {args.shape[1]} matrices by rows, GFLOP/s and share of the limit "
        f"({instructions()})",
        "command": " ".join(["python benchmarks/products.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": describe_machine(open_device("cpu")),
        "instructions": instructions(),
        "threads": torch.get_num_threads(),
        "unit": "GFLOP/s",
        "higher_is_better": True,
        "ceiling": "bytes of the matrix over the rate of reading, or operations over the peak of arithmetic in registers",
        "limits": {"read_per_s": limits.read_per_s, **asdict(limits.peaks)},
        "columns": ["", *(f"{rows} row{'s' * (rows > 1)}" for rows in args.rows)],
        "cells": [[form.name, *map(cell, (one for one in lines if one["form"] == form.name))] for form in forms],
        "rows": lines,
        "notes": f"Limits: {limits}. Shares of int8 products are those of the first integer peak.",
    }


def line(form: Form, rows: int, seconds: float, shape: tuple[int, int], limits: Limits) -> dict[str, Any]:
    operations = 2 * rows * shape[0] * shape[1]
    least = limits.seconds(form.nbytes, operations, form.arithmetic)
    rates = {"measured": operations / seconds / 1e9, "ceiling": operations / least / 1e9, "share": least / seconds}
    return {"name": f"{form.name}, {rows} rows", "form": form.name, "rows": rows, "seconds": seconds, **rates}


def cell(one: dict[str, Any]) -> str:
    return f"{one['measured']:,.0f} ({one['share']:.0%})"


# -- what is measured --------------------------------------------------------------------------------------------------------


def forms_of(shape: tuple[int, int], nbytes: int) -> Iterator[Form]:
    """What a run multiplies, and torch's own products last."""
    fp32, bf16 = torch.float32, torch.bfloat16
    plain = {dtype: plain_matrices(shape, dtype, nbytes) for dtype in (fp32, bf16)}
    for dtype, matrices in plain.items():
        yield Form(WORDS[dtype], dtype, matrices[0].nbytes, ARITHMETIC[dtype], [partial(plainly, one) for one in matrices])
    for codec in TILED:
        packed = packed_matrices(codec.name, shape, bf16, nbytes)
        for compute, op in PRODUCTS.items():
            arithmetic = "integer" if compute == INT8 else ARITHMETIC[bf16]
            products = [partial(as_it_lies, replace(one, product=op)) for one in packed]
            yield Form(f"{codec.bits} bits, {compute}", bf16, packed[0].data.nbytes, arithmetic, products)
    for form in STORED_FORMS:
        stored = stored_matrices(form, shape, bf16, nbytes)
        for compute, op in PRODUCTS.items():
            if compute != INT8 or rounds(form):
                arithmetic = "integer" if compute == INT8 else ARITHMETIC[bf16]
                products = [partial(as_it_lies, replace(one, product=op)) for one in stored]
                yield Form(f"{form}, {compute}", bf16, stored[0].data.nbytes, arithmetic, products)
    for dtype, matrices in plain.items():
        products = [partial(functional.linear, weight=one) for one in matrices]
        yield Form(f"torch, {WORDS[dtype]}", dtype, matrices[0].nbytes, ARITHMETIC[dtype], products)


def plainly(matrix: Tensor, x: Tensor) -> Tensor:
    return plain_product(Factor(x), matrix, None)


def as_it_lies(matrix: PackedMatrix, x: Tensor) -> Tensor:
    return matrix.linear(Factor(x), None)


def plain_matrices(shape: tuple[int, int], dtype: torch.dtype, nbytes: int) -> list[Tensor]:
    count = -(-nbytes // (shape[0] * shape[1] * dtype.itemsize))
    return [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(max(2, count))]


def packed_matrices(codec: str, shape: tuple[int, int], dtype: torch.dtype, nbytes: int) -> list[PackedMatrix]:
    """They share the room in which those are decoded that no kernel multiplies as they lie."""
    form, room = FORMATS[codec], DecodeBuffer(torch.empty(shape, dtype=dtype))
    matrix_bytes, units = form.nbytes(shape, dtype.itemsize), -(-shape[0] // form.rows_together)
    matrices = []
    for _ in range(max(2, -(-nbytes // matrix_bytes))):
        data = torch.empty(units, matrix_bytes // units, dtype=torch.uint8)
        encode(codec, torch.randn(shape).mul_(0.02), data)
        matrices.append(PackedMatrix(data, codec, shape[0], room))
    return matrices


def stored_matrices(codec: str, shape: tuple[int, int], dtype: torch.dtype, nbytes: int) -> list[PackedMatrix]:
    """Matrices in a checkpoint's own form, which nothing here encodes."""
    form, room = FORMATS[codec], DecodeBuffer(torch.empty(shape, dtype=dtype))
    matrix_bytes, units = form.nbytes(shape, dtype.itemsize), max(1, shape[0] // form.rows_together)
    count = max(2, -(-nbytes // matrix_bytes))
    data = torch.randint(SOUND_BYTES, (count, units, matrix_bytes // units), dtype=torch.uint8)
    return [PackedMatrix(one, codec, shape[0], room) for one in data]


# -- how ---------------------------------------------------------------------------------------------------------------------


def best_seconds(forms: Sequence[Form], rows: int, inputs: int, seconds: float) -> dict[str, float]:
    """The best time of each form, which take turns for so many seconds each."""
    values = torch.randn(rows, inputs)
    products = {form.name: cycle(form.products) for form in forms}
    x = {form.name: values.to(form.dtype) for form in forms}
    best, spent = dict.fromkeys(products, inf), dict.fromkeys(products, 0.0)
    while under_way := [name for name in products if spent[name] < seconds or best[name] == inf]:
        for name in under_way:
            start = time.perf_counter()
            next(products[name])(x[name])
            best[name] = min(best[name], took := time.perf_counter() - start)
            spent[name] += took
    return best


def print_table(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{result['title']}\nmachine: {machine['cpu']}, {result['threads']} threads, torch {machine['torch']}")
    print(f"{result['notes']}\n")
    table = [result["columns"], *result["cells"]]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for first, *rest in table:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))


if __name__ == "__main__":
    sys.exit(main())
