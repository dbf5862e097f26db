"""A process that keeps a model in memory and generates whenever it is asked: of this checkout, or of another one.

The process runs this file; of the checkout that is measured it uses what is public alone.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = json.loads(sys.argv[-1])["checkout"]

from h2o_flexgen import LLM, SamplingParams

HERE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Way:
    """What the process does whenever it is asked. `options`: of LLM."""

    model: str
    prompt_len: int
    gen_len: int
    threads: int
    options: Mapping[str, Any]
    checkout: str = HERE


@dataclass(frozen=True)
class Took:
    """Seconds of a run, of all threads' processor time, of its prompts, and of each of its decode steps."""

    seconds: float
    processor: float
    prefill: float
    steps: tuple[float, ...]
    peak_bytes: int  # most resident memory of the process so far


class EngineProcess:
    """It is started at once, and opens the model when it is first asked."""

    def __init__(self, way: Way) -> None:
        command = [sys.executable, __file__, json.dumps(asdict(way))]
        env = {**os.environ, "PYTHONPATH": way.checkout}
        self._way = way
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def took(self, rows: int) -> Took:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self._way} ended with status {self._process.wait()}")
        return Took(**json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def answer_for(way: Way) -> None:
    """For every number of rows that comes, generates once and says what it took. A model is opened anew for another number."""
    opened, of_rows = None, 0
    for line in sys.stdin:
        rows = int(line)
        if opened is None or rows != of_rows:
            if opened is not None:
                opened.close()
            opened, of_rows = opened_by(way, rows), rows
        print(json.dumps(asdict(generated(opened, way, rows))), flush=True)


def opened_by(way: Way, rows: int) -> LLM:
    opened = LLM(way.model, device="cpu", threads=way.threads, gpu_batch_size=rows, num_gpu_batches=1, **way.options)
    opened.generate([[100] * way.prompt_len] * rows, SamplingParams(max_tokens=2))  # loads
    return opened


def generated(opened: LLM, way: Way, rows: int) -> Took:
    prompts = [[100 + (7 * row + at) % 150 for at in range(way.prompt_len)] for row in range(rows)]
    begun, processor = time.perf_counter(), time.process_time()
    opened.generate(prompts, SamplingParams(max_tokens=way.gen_len, ignore_eos=True))
    seconds, processor = time.perf_counter() - begun, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert opened.stats is not None
    return Took(seconds, processor, opened.stats.prefill_seconds, opened.stats.step_seconds, peak)


if __name__ == "__main__":
    answer_for(Way(**json.loads(sys.argv[-1])))
