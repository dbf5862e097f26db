"""How long a decode step's attention takes in a layer where it reads a share of the tokens, beside all of them.

    python benchmarks/attended_share.py --rows 4 --slots 4096 16384 --shares 0.2 0.1 0.05

Heads are those of Qwen3-8B (8 KV heads of 128 values, 4 queries each). KV is random and lies in memory, in so many layers that
no cache of the processor holds them: each is read once in a turn. The index is there; each step adds its own token. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.table import BY_BITS, PLAIN
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.key_index import KeyIndex
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.policies.recall import ALL
from h2o_flexgen.profiling.measure import describe_machine

KV_HEADS, GROUP, DIM = 8, 4, 128
FRESH_BYTES = 1 << 29  # of KV that is read before any of it is read again


class Layers:
    """Caches of layers, full to the last slot but one, under one share."""

    def __init__(self, images: Sequence[Tensor], coding: Coding, share: float) -> None:
        shape, self.share = images[0].shape[1:4], share
        policy = Full(KVOptions(kv_recall=share))
        rows, _, slots = shape
        width = Coding(BY_BITS[4], coding.dtype, DIM).width
        self._caches = []
        for image in images:
            region = torch.empty(prod(shape) * width, dtype=torch.uint8) if coding.is_plain else None
            index = None if share == ALL else KeyIndex.over(region, policy, coding, tuple(shape))
            if index is not None:
                index.note(image[0], 0, slots - 1)
            self._caches.append(KVCache(image, None, coding, index=index))
        occupancy = policy.occupancy(Batch(tuple(range(rows)), (slots - 1,) * rows), 2)
        self._now = KVStep.of(occupancy.at(1), slots, torch.device("cpu"))
        heads = (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)
        self._tokens = NewTokens(*(torch.randn(rows, 1, count, DIM).to(coding.dtype) for count in heads))

    def seconds(self) -> float:
        """Of a layer, on average over a turn through all."""
        begun = time.perf_counter()
        for cache in self._caches:
            cache.attend(self._now, self._tokens)
        return (time.perf_counter() - begun) / len(self._caches)


def measured(rows: int, slots: int, shares: Sequence[float], codec: str, turns: int) -> Iterator[dict[str, Any]]:
    coding = Coding(codec, torch.bfloat16, DIM)
    plain = torch.randn(2, rows, KV_HEADS, slots, DIM, dtype=torch.bfloat16)
    first = coding.encode(plain)
    images = [first, *(first.clone() for _ in range(max(1, FRESH_BYTES // first.nbytes)))]
    each = [Layers(images, coding, share) for share in (ALL, *shares)]
    times: list[list[float]] = [[] for _ in each]
    for turn in range(turns + 1):
        for own, layers in zip(times, each):
            seconds = layers.seconds()
            if turn:  # the first one warms up
                own.append(seconds)
    full = statistics.median(times[0])
    for own, layers in zip(times, each):
        seconds = statistics.median(own)
        spread = (max(own) - min(own)) / seconds
        line = {"rows": rows, "slots": slots, "kv": codec, "share": layers.share, "ms": 1e3 * seconds, "spread": spread}
        yield line | {"as_fast": full / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.1, 0.05])
    parser.add_argument("--codecs", nargs="+", choices=(PLAIN, BY_BITS[4]), default=[PLAIN, BY_BITS[4]])
    parser.add_argument("--turns", type=int, default=7)
    asked, found = parser.parse_args(), []
    print(f"kernels {in_use()}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for codec in asked.codecs:
            for slots in asked.slots:
                for line in measured(asked.rows, slots, asked.shares, codec, asked.turns):
                    found.append(line)
                    print(
                        f"{codec:8} {line['rows']} rows of {slots}: share {line['share']:<5g} {line['ms']:8.3f} ms a layer, "
                        f"x {line['as_fast']:.2f}, spread {line['spread']:.2f}",
                        flush=True,
                    )
    print(json.dumps({"machine": describe_machine(open_device("cpu")), "arguments": vars(asked), "found": found}))


if __name__ == "__main__":
    main()
