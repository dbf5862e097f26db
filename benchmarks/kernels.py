"""The kernels beside their twins in torch, and beside what the machine gives in the same run; and two things that are made of
more than a kernel: a part of a prompt in one layer, and the engine's reading from disk.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --seconds 0.2 --output kernels.json --folder /a/folder/on/the/disk

Reading is measured with a sum over 1 GiB, reading and writing with a product of as much in place, copying with a copy of it,
multiplying with a square product, all before and behind the kernels: the better one counts, because machines drift. Every
kernel and its twin take turns; of all turns the best counts, as of the limits. Disks drift most: their limit is the plain
reading that takes turns with the engine's. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.peaks import Peaks
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.formats.kernel_table import PRODUCT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.decode_attention import KVSlots, decode_attention_twin
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.group_codes import tile_decode_twin
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.kernels.operations import decode, decode_attention, encode, gated_delta, packed_product, selective_scan
from h2o_flexgen.kernels.raw_memory import bytes_of
from h2o_flexgen.kernels.states import gated_delta_twin, selective_scan_twin
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.memory.disk import DiskFiles, FilePiece, read_fully
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.models.base import Given, computed
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine

GIB = 1 << 30
READ, IN_PLACE, COPY, PRODUCTS, PLAIN_READING = "read", "in place", "copy", "products", "plain reading"
PEAK_16, PEAK_32 = "peak of bf16", "peak of fp32"  # of the processor's instructions, if nothing had to be read
SIDE = 4096  # side of the square product, smaller if sizes are scaled
FILE_BYTES, READ_BYTES, PLAIN_BYTES = 2_000_000_000, 256 << 20, 16 << 20  # on disk; at once; at once in plain reading


@dataclass(frozen=True)
class Subject:
    """Something to measure: the bytes or flops that count, and the limit to compare them with."""

    name: str
    work: int
    limit: str
    aim: float
    kernel: Callable[[], object]
    twin: Callable[[], object] | None


def main() -> int:
    args = parse(sys.argv[1:])
    print_table(result := benchmark(args))
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def benchmark(args: argparse.Namespace) -> dict[str, object]:
    limits = measured_limits(args.seconds, args.scale)
    lines = [measured(subject, args.seconds) for subject in subjects(args.scale)]
    with file_on_disk(args.folder, round(FILE_BYTES * args.scale)) as file, DiskFiles() as files:
        disk = measured(reading(files, file), args.seconds)
    after = measured_limits(args.seconds, args.scale)
    limits = {name: max(limits[name], after[name]) for name in limits} | peaks(limits[PRODUCTS], args.seconds)
    limits[PLAIN_READING], disk["twin"] = disk["twin"], None  # type: ignore[assignment]
    lines.append(disk)
    for line in lines:
        line["ceiling"] = limits[str(line["limit"])]
        line["share"] = line["measured"] / line["ceiling"]  # type: ignore[operator]
    return {
        "benchmark": "kernels",
        "title": f"Kernels for the CPU ({in_use()}), GB/s, and GFLOP/s for prompts",
        "command": " ".join(["python benchmarks/kernels.py", *sys.argv[1:]]),
        "machine": describe_machine(open_device("cpu")),
        "unit": "GB/s or GFLOP/s",
        "higher_is_better": True,
        "ceiling": "a sum over 1 GiB (decode attention), a product of 1 GiB in place, which is read and written (states), "
        "a copy of 1 GiB (decoding weights), a square product in bf16 (prompts), direct reading of the same file with one "
        "thread (disk), in the same run; what the processor could compute in a type if nothing had to be read (many heads)",
        "limits": limits,
        "rows": lines,
        "notes": "In torch instead: " + "; ".join(f"{line['name']} {line['twin']:.1f}" for line in lines if line["twin"]) + ".",
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes: below 1 for a quick look")
    parser.add_argument("--folder", help="where a file of 2 GB is written, read and removed (default: the system's for such)")
    parser.add_argument("--output", help="also write the JSON document here")
    return parser.parse_args(argv)


# -- what is measured --------------------------------------------------------------------------------------------------------


def subjects(scale: float) -> list[Subject]:
    rows = max(1, round(32 * scale))
    return [
        attention("OPT-6.7B heads, bf16", rows, 32, 1, 128, 512, torch.bfloat16),
        attention("OPT-1.3B heads, bf16", rows, 32, 1, 64, 512, torch.bfloat16),
        attention("LLaMA-3-8B heads, bf16", 2 * rows, 8, 4, 128, 512, torch.bfloat16),
        attention("LLaMA-3-8B heads, fp16", 2 * rows, 8, 4, 128, 512, torch.float16),
        attention("Qwen2.5-7B heads, bf16", 4 * rows, 4, 7, 128, 512, torch.bfloat16),
        attention("OPT-1.3B heads, fp32", rows, 32, 1, 64, 512, torch.float32),
        attention("OPT-6.7B heads, 4 bits", 2 * rows, 32, 1, 128, 512, torch.bfloat16, "group4"),
        attention("LLaMA-3-8B heads, 4 bits", 4 * rows, 8, 4, 128, 512, torch.bfloat16, "group4"),
        attention("LLaMA-3-8B heads, 8 bits", 2 * rows, 8, 4, 128, 512, torch.bfloat16, "group8"),
        attention("Qwen2.5-7B heads, 4 bits", 8 * rows, 4, 7, 128, 512, torch.bfloat16, "group4"),
        latents("DeepSeek-V3 heads, bf16", max(1, rows // 4), 128),
        latents("DeepSeek-V3 heads, bf16", 1, 128, slots=max(1, round(4096 * scale))),
        latents("Kimi-K2 heads, bf16", max(1, rows // 4), 64),
        latents("GLM-4.7-Flash heads, bf16", rows, 20),
        latents("DeepSeek-V3 heads, fp32", max(1, rows // 4), 128, dtype=torch.float32),
        deltas("Qwen3.6-35B-A3B", 16 * rows, 16, 32),
        scans("Granite 4 H small", 8 * rows, 128),
        decoding(4, torch.bfloat16, scale),
        decoding(8, torch.bfloat16, scale),
        product(4, 1, scale),
        product(4, 4, scale),
        product(4, 16, scale),
        prompts("facebook/opt-1.3b", max(1, round(16 * scale)), 64),
        prompts("facebook/opt-1.3b", max(1, round(2 * scale)), 512),
    ]


def attention(
    name: str, rows: int, kv_heads: int, group: int, dim: int, slots: int, dtype: torch.dtype, codec: str = PLAIN
) -> Subject:
    coding = Coding(codec, dtype, dim)
    keys, values = (KVSlots(coding.encode(torch.randn(rows, kv_heads, slots, dim).to(dtype)), codec) for _ in range(2))
    q, held = torch.randn(rows, kv_heads, group, dim).to(dtype), torch.full((rows,), slots)
    mask = torch.zeros(rows, 1, 1, slots)
    return Subject(
        f"decode attention, {name}, {rows} rows of {slots}",
        keys.data.nbytes + values.data.nbytes,
        READ,
        0.6,
        lambda: decode_attention(q, keys, values, held, mask),
        lambda: decode_attention_twin(q, *(KVSlots(coding.decode(kept.data)) for kept in (keys, values)), held, mask),
    )


def latents(name: str, rows: int, group: int, dim: int = 576, slots: int = 512, dtype: torch.dtype = torch.bfloat16) -> Subject:
    """Attention of many heads over one KV head with the values in its keys: a product."""
    keys, q = KVSlots(torch.randn(rows, 1, slots, dim).to(dtype)), torch.randn(rows, 1, group, dim).to(dtype)
    held, mask = torch.full((rows,), slots), torch.zeros(rows, 1, 1, slots)
    return Subject(
        f"decode attention, {name}, {rows} rows of {slots}, GFLOP/s",
        4 * rows * group * slots * dim,
        PEAK_32 if dtype == torch.float32 else PEAK_16,
        0.5,
        lambda: decode_attention(q, keys, keys, held, mask, gathers=None),
        lambda: decode_attention_twin(q, keys, keys, held, mask, gathers=None),
    )


def deltas(name: str, rows: int, key_heads: int, heads: int, width: int = 128) -> Subject:
    """A step of the delta rule in one layer, which reads and writes the states of its rows."""
    state = torch.randn(rows, heads, width, width).mul_(0.1)
    q, k, v = (torch.randn(rows, 1, each, width).bfloat16() for each in (key_heads, key_heads, heads))
    decay, beta = -torch.rand(rows, 1, heads), torch.rand(rows, 1, heads)
    return Subject(
        f"step of the gated delta rule, {name}, {rows} rows",
        2 * state.nbytes,
        IN_PLACE,
        0.7,
        lambda: gated_delta(q, k, v, decay, beta, state),
        lambda: gated_delta_twin(q, k, v, decay, beta, state),
    )


def scans(name: str, rows: int, heads: int, width: int = 64, state_width: int = 128) -> Subject:
    """The same of Mamba-2."""
    state = torch.randn(rows, heads, state_width, width).mul_(0.1)
    x, b, c = (torch.randn(rows, 1, *each).bfloat16() for each in ((heads, width), (1, state_width), (1, state_width)))
    steps, rates, skip = torch.rand(rows, 1, heads), -torch.rand(heads), torch.rand(heads)
    return Subject(
        f"step of Mamba-2's scan, {name}, {rows} rows",
        2 * state.nbytes,
        IN_PLACE,
        0.7,
        lambda: selective_scan(x, steps, rates, b, c, skip, state),
        lambda: selective_scan_twin(x, steps, rates, b, c, skip, state),
    )


def decoding(bits: int, dtype: torch.dtype, scale: float) -> Subject:
    shape, codec = (max(1, round(4096 * scale)), 11008), Tiled(bits)
    data = torch.empty(codec.nbytes(shape, 2), dtype=torch.uint8)
    encode(codec.name, torch.randn(shape), data)
    out, tiles = torch.empty(shape, dtype=dtype), data.view(-(-shape[0] // TILE), -1)
    return Subject(
        f"{bits}-bit weights to bf16, bytes that come out",
        out.nbytes,
        COPY,
        0.5,
        lambda: decode(codec.name, tiles, out),
        lambda: tile_decode_twin(codec, tiles, out),
    )


def prompts(model_name: str, rows: int, tokens: int) -> Subject:
    """A part of a batch's prompts in one layer: products, norms, attention, and what h2o keeps of them."""
    config = known_config(model_name)
    assert config is not None
    model = create_model(config, "bfloat16", sep_layer=False)
    spec, layer = model.spec, next(layer for layer in model.spec.layers if layer.has_kv)
    weights = {name: torch.randn(tensor.shape).mul_(0.02).bfloat16() for name, tensor in layer.tensors}
    policy, batch = Plan.create(kv_policy="h2o", kv_budget=0.2).policy, Batch(tuple(range(rows)), (tokens,) * rows)
    occupancy = policy.occupancy(batch, tokens)
    shape = (rows, spec.kv_heads, occupancy.capacity)
    scores = SlotScores.over(torch.zeros(rows * spec.kv_heads * occupancy.capacity * 8, dtype=torch.uint8), policy, shape)
    cache = KVCache(torch.zeros(2, *shape, spec.head_dim, dtype=torch.bfloat16), scores)
    hidden = torch.randn(rows, tokens, spec.width).bfloat16()
    now = KVStep.of(occupancy.at(0), occupancy.capacity, torch.device("cpu"))
    given = Given(now.positions, partial(cache.attend, now))
    attention = 4 * rows * spec.heads * spec.head_dim * tokens * (tokens + 1) // 2
    return Subject(
        f"one layer of OPT-1.3B over {rows} prompts of {tokens}, h2o, bf16, GFLOP/s",
        2 * rows * tokens * layer.matmul_values + attention,
        PRODUCTS,
        0.75,
        torch.inference_mode()(lambda: computed(model, layer, hidden, weights, given)),
        None,
    )


def reading(files: DiskFiles, file: Path) -> Subject:
    """Reads neighbouring pieces of a file, as a layer's weights are, with the engine's readers, and plainly with one thread."""
    size, places = file.stat().st_size, HostTier().alloc(READ_BYTES)
    nbytes = min(READ_BYTES, size)
    starts = range(0, size - nbytes + 1, nbytes)
    descriptor, turns = files.descriptor(file), {"engine": 0, "plain": 0}

    def next_start(reader: str) -> int:
        turns[reader] += 1
        return starts[turns[reader] % len(starts)]

    def plainly() -> None:
        start, memory = next_start("plain"), bytes_of(places[:nbytes])
        for at in range(0, nbytes, PLAIN_BYTES):
            end = min(at + PLAIN_BYTES, nbytes)
            read_fully(descriptor, start + at, memory[at:end], end - at, file)

    return Subject(
        "disk, by the engine's readers",
        nbytes,
        PLAIN_READING,
        0.9,
        lambda: files.read([FilePiece(file, next_start("engine"), places[:nbytes], torch.uint8)]),
        plainly,
    )


@contextmanager
def file_on_disk(folder: str | None, nbytes: int) -> Iterator[Path]:
    """A context with a file of whole pages of data that is really on the disk."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / "read.bin"
        page = torch.randint(256, (1 << 20,), dtype=torch.uint8)
        with file.open("wb") as out:
            for _ in range(max(1, nbytes >> 20)):
                out.write(bytes_of(page))
            out.flush()
            os.fsync(out.fileno())
        yield file


def product(bits: int, rows: int, scale: float) -> Subject:
    """Products with so many matrices that no cache holds them. The twin in torch decodes by the kernel, then multiplies."""
    shape, codec = (max(1, round(4096 * scale)), 4096), Tiled(bits)
    matrices = []
    for _ in range(8):
        data = torch.empty(-(-shape[0] // TILE), codec.tile_bytes(shape[1]), dtype=torch.uint8)
        encode(codec.name, torch.randn(shape), data)
        matrices.append(data)
    x, values = torch.randn(rows, shape[1]).bfloat16(), torch.empty(shape, dtype=torch.bfloat16)

    def decoded_first() -> None:
        for data in matrices:
            decode(codec.name, data, values)
            functional.linear(x, values)

    return Subject(
        f"{rows} row{'s' * (rows > 1)} times {bits}-bit weights, packed bytes",
        sum(data.nbytes for data in matrices),
        READ,
        0.5,
        lambda: [packed_product(PRODUCT, codec.name, Factor(x), data, shape[0], None) for data in matrices],
        decoded_first,
    )


# -- how ---------------------------------------------------------------------------------------------------------------------


def measured_limits(seconds: float, scale: float) -> dict[str, float]:
    values, side = max(1, round(GIB // 4 * scale)), max(64, round(SIDE * min(1.0, scale)))
    source, target = torch.ones(values), torch.ones(values)
    one, other = (torch.randn(side, side).bfloat16() for _ in range(2))
    return {
        READ: source.nbytes / best_seconds([source.sum], seconds)[0] / 1e9,
        IN_PLACE: 2 * source.nbytes / best_seconds([lambda: source.mul_(1.0)], seconds)[0] / 1e9,
        COPY: source.nbytes / best_seconds([lambda: target.copy_(source)], seconds)[0] / 1e9,
        PRODUCTS: 2 * side**3 / best_seconds([lambda: torch.nn.functional.linear(one, other)], seconds)[0] / 1e9,
    }


def peaks(of_torch: float, seconds: float) -> dict[str, float]:
    """What the processor could compute; without a compiler for C, what torch does."""
    found = Peaks.measured(seconds=seconds)
    if found is None:
        return dict.fromkeys((PEAK_16, PEAK_32), of_torch)
    return {PEAK_16: found.exact / 1e9, PEAK_32: found.fp32 / 1e9}


def measured(subject: Subject, seconds: float) -> dict[str, object]:
    actions = [subject.kernel] if subject.twin is None else [subject.kernel, subject.twin]
    kernel, *twin = (subject.work / best / 1e9 for best in best_seconds(actions, len(actions) * seconds))
    rates = {"measured": kernel, "twin": twin[0] if twin else None}
    return {"name": subject.name, "limit": subject.limit, "aim": subject.aim, **rates}


def best_seconds(actions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The best time of each function; they take turns for this many seconds."""
    best, end = [float("inf")] * len(actions), time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best:
        for place, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[place] = min(best[place], time.perf_counter() - start)
    return best


def print_table(result: dict[str, object]) -> None:
    print(f"machine: {result['machine']}\nkernels: {in_use()}\nlimits: {result['ceiling']}: {result['limits']}\n")
    print(f"{'':62} {'rate':>6} {'torch':>6} {'limit':>6} {'share':>6} {'aim':>5}")
    for line in result["rows"]:  # type: ignore[attr-defined]
        twin = "" if line["twin"] is None else f"{line['twin']:.1f}"
        rates = f"{line['measured']:6.1f} {twin:>6} {line['ceiling']:6.1f} {line['share']:6.2f} {line['aim']:5.2f}"
        print(f"{line['name']:62} {rates}")


if __name__ == "__main__":
    sys.exit(main())
