"""What graphs take of a GPU's memory, and whether that grows while rows leave and others take their places.

    python benchmarks/gpu_graphs.py --seconds 25 --strict
    python benchmarks/gpu_graphs.py --model FOLDER --device cpu --seconds 1      # a quick look without a GPU

Rounds of requests of many lengths run until the time is over, on random weights that stay on the GPU. Rows that leave take new
graphs. A graph takes what the driver's free memory has lost by the captures of a round, for each of them: of the round, and up
to the capture, by which it is most. For later ones take what graphs before them have left. After some rounds the
memory that is held must not grow any more; --strict ends with status 1 if it does. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling.params import SamplingParams

MODEL = "facebook/opt-1.3b"
WARM_ROUNDS = 3  # in which allocators take what they keep
ALLOWED_GROWTH = 16 << 20  # bytes, from then on to the end
ROWS, BATCHES, PROMPT, MOST_TOKENS = 8, 2, 16, 24


@dataclass(frozen=True)
class Found:
    rounds: int
    captures: int
    graph_bytes: int  # of one, as the driver's free memory says
    growth_bytes: int  # from the last warm round to the end
    measured: bool  # a device without memory of its own has nothing to measure

    @property
    def holds(self) -> bool:
        return self.captures > 0 and (not self.measured or self.growth_bytes <= ALLOWED_GROWTH)

    @property
    def verdict(self) -> str:
        grown = f"what is held grew by {self.growth_bytes / 1e6:.1f} MB over {self.rounds} rounds"
        taken = f"a graph takes {self.graph_bytes / 1024:.0f} KiB" if self.measured else "nothing was measured"
        return f"{self.captures} captures; {taken} ({GRAPH_BYTES / 1024:.0f} are assumed); {grown}"


class Counted:
    """Captures of a device, and the free memory that they took."""

    def __init__(self, device: Device) -> None:
        self.captures, self._taken = 0, list[int]()  # up to each capture of a round
        self._device, self._capture = device, device.capture
        device.capture = self.capture  # type: ignore[method-assign]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        before = self._device.free_bytes() or 0
        replay = self._capture(work)
        self.captures += 1
        lost = before - (self._device.free_bytes() or 0)
        self._taken.append(lost + (self._taken[-1] if self._taken else 0))
        return replay

    def of_a_graph(self) -> int:
        """What one took in a round, which ends here."""
        taken, self._taken = self._taken, []
        first = len(taken) // 2  # a driver takes some megabytes at once, which say nothing of a few graphs
        return max((lost // (first + place) for place, lost in enumerate(taken[first:], 1)), default=0)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    own: dict[str, Any] = {"dummy_weights": True} if args.model == MODEL else {"tokenizer": "bytes"}
    shape = {"gpu_batch_size": ROWS, "num_gpu_batches": BATCHES, "graphs": "on", "percent": (100, 0, 100, 0, 100, 0)}
    with LLM(args.model, device=args.device, **own, **shape) as llm:
        found = rounds_of(llm, args.seconds)
        machine = describe_machine(llm.loaded.device)
    print(found.verdict)
    document = {"benchmark": "gpu_graphs", "machine": machine, "model": args.model, **asdict(found), "holds": found.holds}
    print(json.dumps({**document, "verdict": found.verdict}))
    return 1 if args.strict and not found.holds else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a folder, or the shapes of %(default)s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--strict", action="store_true", help="status 1 if memory grows")
    return parser.parse_args(argv)


def rounds_of(llm: LLM, seconds: float) -> Found:
    random, held, taken, began = Random(0), list[int](), 0, time.monotonic()
    device = llm.loaded.device
    counted = Counted(device)
    while len(held) < WARM_ROUNDS + 2 or time.monotonic() - began < seconds:
        one_round(llm, random)
        taken = max(taken, counted.of_a_graph())
        device.settle()
        device.give_back_freed()
        held.append(-(device.free_bytes() or 0))
    grown = max(0, held[-1] - max(held[:WARM_ROUNDS]))
    return Found(len(held), counted.captures, taken, grown, device.free_bytes() is not None)


def one_round(llm: LLM, random: Random) -> None:
    rows = range(ROWS * BATCHES)
    prompts = [[random.randrange(4, 64) for _ in range(random.randint(1, PROMPT))] for _ in rows]
    llm.generate(prompts, [SamplingParams(max_tokens=random.randint(4, MOST_TOKENS), ignore_eos=True) for _ in rows])


if __name__ == "__main__":
    sys.exit(main())
