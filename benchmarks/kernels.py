"""The kernels beside their twins in torch, and beside what the machine's memory gives in the same run.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --seconds 0.2 --output kernels.json

Reading is measured with a sum over 1 GiB, copying with a copy of as much, both before and behind the kernels: the better one
counts, because machines drift. Every kernel and its twin take turns; of all turns the best counts, as of the limits. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from h2o_flexgen.kernels.decode_attention import decode_attention, decode_attention_twin
from h2o_flexgen.kernels.group_decode import group_decode, group_decode_twin
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.files import write_text
from h2o_flexgen.quant.codec import PLAIN
from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.runtime.measure import describe_machine

GIB = 1 << 30
READ, COPY = "read", "copy"


@dataclass(frozen=True)
class Subject:
    """Something to measure: the bytes that count, and the limit that they are held against."""

    name: str
    nbytes: int
    limit: str
    aim: float
    kernel: Callable[[], object]
    twin: Callable[[], object]


def main() -> int:
    args = parse(sys.argv[1:])
    limits = measured_limits(args.seconds)
    lines = [measured(subject, args.seconds) for subject in subjects(args.scale)]
    after = measured_limits(args.seconds)
    limits = {name: max(limits[name], after[name]) for name in limits}
    for line in lines:
        line["ceiling"] = limits[str(line["limit"])]
        line["share"] = line["measured"] / line["ceiling"]  # type: ignore[operator]
    result = {
        "benchmark": "kernels",
        "title": f"Kernels for the CPU ({in_use()}), GB/s",
        "command": " ".join(["python benchmarks/kernels.py", *sys.argv[1:]]),
        "machine": describe_machine(open_device("cpu")),
        "unit": "GB/s",
        "higher_is_better": True,
        "ceiling": "a sum over 1 GiB (attention), a copy of 1 GiB (decoding weights), in the same run",
        "limits": limits,
        "rows": lines,
        "notes": "In torch instead: " + "; ".join(f"{line['name']} {line['twin']:.1f}" for line in lines) + ".",
    }
    print_table(result)
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: below 1 for a quick look")
    parser.add_argument("--output", help="also write the JSON document here")
    return parser.parse_args(argv)


# -- what is measured --------------------------------------------------------------------------------------------------------


def subjects(scale: float) -> list[Subject]:
    rows = max(1, round(32 * scale))
    return [
        attention("OPT-6.7B heads, bf16", rows, 32, 1, 128, 512, torch.bfloat16),
        attention("OPT-1.3B heads, bf16", rows, 32, 1, 64, 512, torch.bfloat16),
        attention("LLaMA-3-8B heads, bf16", 2 * rows, 8, 4, 128, 512, torch.bfloat16),
        attention("OPT-1.3B heads, fp32", rows, 32, 1, 64, 512, torch.float32),
        attention("OPT-6.7B heads, 4 bits", 2 * rows, 32, 1, 128, 512, torch.bfloat16, "group4"),
        attention("LLaMA-3-8B heads, 4 bits", 4 * rows, 8, 4, 128, 512, torch.bfloat16, "group4"),
        decoding(4, torch.bfloat16, scale),
        decoding(8, torch.bfloat16, scale),
    ]


def attention(
    name: str, rows: int, kv_heads: int, group: int, dim: int, slots: int, dtype: torch.dtype, codec: str = PLAIN
) -> Subject:
    coding = Coding(codec, dtype, dim)
    drawn = (coding.encode(torch.randn(rows, kv_heads, slots, dim).to(dtype)) for _ in range(2))
    keys, values = map(coding.attendable, drawn)
    q, held = torch.randn(rows, kv_heads, group, dim).to(dtype), torch.full((rows,), slots)
    mask = torch.zeros(rows, 1, 1, slots)
    return Subject(
        f"decode attention, {name}, {rows} rows of {slots}",
        keys.data.nbytes + values.data.nbytes,
        READ,
        0.6,
        lambda: decode_attention(q, keys, values, held, mask),
        lambda: decode_attention_twin(q, keys.values(dim, dtype), values.values(dim, dtype), mask),
    )


def decoding(bits: int, dtype: torch.dtype, scale: float) -> Subject:
    shape = (max(1, round(4096 * scale)), 11008)
    data = torch.empty(Grouped(bits).nbytes(shape, 2), dtype=torch.uint8)
    Grouped(bits).encode(torch.randn(shape), data)
    out, rows = torch.empty(shape, dtype=dtype), data.view(shape[0], -1)
    return Subject(
        f"{bits}-bit weights to bf16, bytes that come out",
        out.nbytes,
        COPY,
        0.5,
        lambda: group_decode(rows, out, bits),
        lambda: group_decode_twin(rows, out, bits),
    )


# -- how ---------------------------------------------------------------------------------------------------------------------


def measured_limits(seconds: float) -> dict[str, float]:
    source, target = torch.ones(GIB // 4), torch.ones(GIB // 4)
    return {
        READ: GIB / best_seconds([source.sum], seconds)[0] / 1e9,
        COPY: GIB / best_seconds([lambda: target.copy_(source)], seconds)[0] / 1e9,
    }


def measured(subject: Subject, seconds: float) -> dict[str, object]:
    kernel, twin = best_seconds([subject.kernel, subject.twin], 2 * seconds)
    rates = {"measured": subject.nbytes / kernel / 1e9, "twin": subject.nbytes / twin / 1e9}
    return {"name": subject.name, "limit": subject.limit, "aim": subject.aim, **rates}


def best_seconds(actions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Of each, in turns, for so long."""
    best, end = [float("inf")] * len(actions), time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best:
        for place, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[place] = min(best[place], time.perf_counter() - start)
    return best


def print_table(result: dict[str, object]) -> None:
    print(f"machine: {result['machine']}\nkernels: {in_use()}\nlimits: {result['ceiling']}: {result['limits']}\n")
    print(f"{'':62} {'GB/s':>6} {'torch':>6} {'limit':>6} {'share':>6} {'aim':>5}")
    for line in result["rows"]:  # type: ignore[attr-defined]
        rates = f"{line['measured']:6.1f} {line['twin']:6.1f} {line['ceiling']:6.1f} {line['share']:6.2f} {line['aim']:5.2f}"
        print(f"{line['name']:62} {rates}")


if __name__ == "__main__":
    sys.exit(main())
