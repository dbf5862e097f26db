"""The kernels that a GPU's decode steps consist of, beside what its memory gives in the same run.

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --device cpu --scale 0.01 --seconds 0.001      # a quick look without a GPU

The ceiling is a copy within the GPU's memory, all bytes read and written, measured before and behind the kernels: the better
one counts. Every kernel reads other bytes in each call than in the last ones, as a step does, so that no cache helps it. Calls
are replayed as a graph, so that the GPU never waits; what the processor takes to give one call to the GPU stands beside.
Each kernel has a share of the ceiling that it is expected to reach; --strict ends with status 1 if one does not. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from h2o_flexgen.core.files import write_text
from h2o_flexgen.engine.stores.kv import image_over
from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.formats.kernel_table import PRODUCT, TILE_DOTS, kernels
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.functions import function_of
from h2o_flexgen.kernels.native import in_use, processor
from h2o_flexgen.kernels.operations import decode, decode_attention, encode, packed_product
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.schedule.ops import COMPUTE_LANE

COPIED_BYTES, USED_IN_TURN = 1 << 30, 256 << 20  # more than caches hold
WIDTH, FFN, HEADS, HEAD_DIM = 7168, 28672, 56, 128  # of OPT-30B
ROWS, SLOTS = 8, 544
CALLS = 10  # given to the device before it is awaited
# shares of the ceiling that are expected: aims, set before anything was measured
ATTENTION_SHARES = {PLAIN: 0.6, "group8": 0.4, "group4": 0.3}
PRODUCT_SHARES = {(4, 1): 0.4, (4, 8): 0.3, (4, 32): 0.25, (8, 1): 0.5}  # by bits and rows
DECODING_SHARE = 0.6
# products of so many rows with 4 bits, by tensor cores that read the bytes and of decoded values: by rows, for each way
SOME_ROWS = 8, 16, 32, 64
TENSOR_SHARE, DECODED_SHARE = 0.25, 0.07


Product: TypeAlias = "Callable[..., Tensor | None]"  # as in a row of the table of kernels; None: it does not read the bytes


@dataclass(frozen=True)
class Line:
    name: str
    measured: float  # bytes per second that have to be read and written
    ceiling: float
    expected_share: float  # of the ceiling
    launch_seconds: float  # of the processor, for one call

    @property
    def share(self) -> float:
        return self.measured / self.ceiling

    @property
    def reaches(self) -> bool:
        return self.share >= self.expected_share


@dataclass(frozen=True)
class Subject:
    name: str
    nbytes: int
    expected_share: float
    call: Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    device = open_device(args.device)
    found = lines(device, args.seconds, args.scale)
    for line in found:
        told = "" if line.reaches else f"  below the {line.expected_share:.0%} that are expected"
        launch = f"{line.launch_seconds * 1e6:9.0f} us to launch"
        print(f"{line.name:52}{line.measured / 1e9:9.1f} GB/s{line.share:7.0%}{launch}{told}")
    result = as_json(device, found)
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if args.strict and not all(line.reaches for line in found) else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: below 1 for a quick look")
    parser.add_argument("--strict", action="store_true", help="status 1 if a kernel does not reach its share")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def as_json(device: Device, found: Sequence[Line]) -> dict[str, object]:
    return {
        "benchmark": "gpu_kernels",
        "title": f"Kernels of decode steps at the sizes of OPT-30B ({in_use(device.kind)}), bytes per second",
        "machine": describe_machine(device),
        "ceiling": "a copy within the device's memory, read and written, in the same run",
        "rows": [{**asdict(line), "share": line.share, "reaches": line.reaches} for line in found],
    }


@torch.inference_mode()
def lines(device: Device, seconds: float, scale: float) -> list[Line]:
    before = copied_per_s(device, seconds, scale)
    found = [(subject, taken_by(device, subject.call, seconds)) for subject in subjects(device, scale)]
    ceiling = max(before, copied_per_s(device, seconds, scale))
    return [
        Line(subject.name, subject.nbytes / taken.seconds, ceiling, subject.expected_share, taken.launch_seconds)
        for subject, taken in found
    ]


def copied_per_s(device: Device, seconds: float, scale: float) -> float:
    source = torch.zeros(round(COPIED_BYTES * scale), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / taken_by(device, lambda: target.copy_(source), seconds, replays=False).seconds


@dataclass(frozen=True)
class Taken:
    seconds: float  # of the device for one call, the best of groups
    launch_seconds: float  # of the processor, to give it to the device: all of it where that is the processor itself


def taken_by(device: Device, call: Callable[[], object], seconds: float, replays: bool = True) -> Taken:
    """`replays`: calls are so short that the device would wait for the next one. A long copy is slower in a graph."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    with device.stream(COMPUTE_LANE):
        calls()
        device.settle()
        begun = time.perf_counter()
        calls()
        launched = time.perf_counter() - begun
        device.settle()
        again = device.capture(calls) if replays else calls
        best, ends = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < ends or best == float("inf"):
            begun = time.perf_counter()
            again()
            device.settle()
            best = min(best, time.perf_counter() - begun)
    return Taken(best / CALLS, launched / CALLS)


# -- what is measured ----------------------------------------------------------------------------------------------------


def subjects(device: Device, scale: float) -> Iterator[Subject]:
    for codec, expected in ATTENTION_SHARES.items():
        yield attention(device, codec, scale, expected)
    for (bits, rows), expected in PRODUCT_SHARES.items():
        yield product(device, bits, rows, scale, expected)
    if (dots := on_tensor_cores(device)) is not None:
        for rows in SOME_ROWS:
            yield product(device, 4, rows, scale, TENSOR_SHARE, dots, ", on tensor cores")
            yield product(device, 4, rows, scale, DECODED_SHARE, decoded_first, ", decoded first")
    for bits in (4, 8):
        yield decoding(device, bits, scale)


def on_tensor_cores(device: Device) -> Product | None:
    """The product of some rows that the device makes on tensor cores, chosen or not: that depends on what is measured here."""
    kernel = next(each for each in kernels() if each.function == TILE_DOTS)
    return function_of(kernel) if processor(device.kind).runs(kernel) else None


def decoded_first(*given: object) -> None:
    """Multiplies nothing with packed weights."""


def by_table(codec: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor | None:
    return packed_product(PRODUCT, codec.name, x, data, outputs, bias)


def attention(device: Device, codec: str, scale: float, expected: float) -> Subject:
    """One layer's attention in a step, over images as they lie on a device."""
    coding, shape = Coding(codec, torch.float16, HEAD_DIM), (ROWS, max(1, round(HEADS * scale)), SLOTS)
    rows, heads, slots = shape
    region = torch.zeros(2 * rows * heads * slots * coding.width * coding.kept_dtype.itemsize, dtype=torch.uint8)
    values = torch.randn(2, rows, heads, slots, HEAD_DIM).half()
    image_over(region, shape, coding, True).copy_(coding.encode(values))
    regions = in_turn(region.to(device.torch_device), scale)
    q = torch.randn(rows, heads, 1, HEAD_DIM).half().to(device.torch_device)
    held = torch.full((rows,), slots, device=device.torch_device)
    mask = torch.zeros(rows, 1, 1, slots, device=device.torch_device)

    def call() -> object:
        keys, of_values = image_over(next(regions), shape, coding, True)
        return decode_attention(q, KVSlots(keys, codec), KVSlots(of_values, codec), held, mask, gathers=None)

    return Subject(f"decode attention, {codec} KV, {rows} rows of {slots}", region.nbytes, expected, call)


def product(
    device: Device, bits: int, rows: int, scale: float, expected: float, by: Product = by_table, told: str = ""
) -> Subject:
    """A product of few rows with packed weights; of decoded ones where nothing here reads the bytes."""
    inputs, outputs = WIDTH, max(TILE, round(FFN * scale))
    codec, data = packed(bits, outputs, inputs)
    tiles, x = in_turn(data.to(device.torch_device), scale), torch.randn(rows, inputs).half().to(device.torch_device)
    decoded = torch.empty(outputs, inputs, dtype=torch.float16, device=device.torch_device)

    def call() -> object:
        chosen = next(tiles).view(-(-outputs // TILE), -1)
        out = by(codec, Factor(x), chosen, outputs, None)
        if out is None:
            decode(codec.name, chosen, decoded)
            out = x @ decoded.T
        return out

    return Subject(f"product of {rows} rows with {bits}-bit weights{told}", data.nbytes, expected, call)


def decoding(device: Device, bits: int, scale: float) -> Subject:
    outputs = max(TILE, round(FFN * scale))
    codec, data = packed(bits, outputs, WIDTH)
    tiles = in_turn(data.to(device.torch_device), scale)
    out = torch.empty(outputs, WIDTH, dtype=torch.float16, device=device.torch_device)
    call = lambda: decode(codec.name, next(tiles).view(-(-outputs // TILE), -1), out)  # noqa: E731
    return Subject(f"{bits}-bit weights to fp16", data.nbytes + out.nbytes, DECODING_SHARE, call)


def packed(bits: int, outputs: int, inputs: int) -> tuple[Tiled, Tensor]:
    codec = Tiled(bits)
    data = torch.empty(codec.nbytes((outputs, inputs), 2), dtype=torch.uint8)
    encode(codec.name, torch.randn(outputs, inputs).mul_(0.02), data)
    return codec, data


def in_turn(data: Tensor, scale: float) -> Iterator[Tensor]:
    """An endless series of copies, together more than caches hold."""
    copies = max(2, -(-round(USED_IN_TURN * scale) // data.nbytes))
    return itertools.cycle([data.clone() for _ in range(copies)])


if __name__ == "__main__":
    sys.exit(main())
