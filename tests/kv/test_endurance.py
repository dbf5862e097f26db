"""What a KV budget promises: prompts of any length and texts without end, in memory that does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.tiny import VOCAB, save_tiny

LONG, SLOTS = 12_288, 256
WARM = 7  # thousands of tokens until the timeline is as long as it ever gets
SMALLEST = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def child(code: str, *arguments: object) -> Any:
    """In a process of its own, whose peak of memory is its own. Of large blocks that were freed glibc would keep some (for what
    takes 112 MB, 80 to 180 were measured); with a fixed threshold it gives them all back, and what is left is the engine's."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


PEAK = """
import json, sys, psutil
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.memory.host import peak_resident_bytes
from h2o_flexgen.core.workload import Workload
folder, found, before = sys.argv[1], [], None
for length, rows, generated, options in json.loads(sys.argv[2]):
    with LLM(folder, dtype="float32", gpu_batch_size=rows, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        before = before or psutil.Process().memory_info().rss
        prompts = [[(7 * i + row) % 113 for i in range(length)] for row in range(rows)]
        llm.generate(prompts, SamplingParams(max_tokens=generated))
        needed = llm.check(Workload((length,) * rows, generated)).footprint.total("host")
        found.append({"grown": peak_resident_bytes() - before, "needed": needed})
print(json.dumps(found))
"""


def test_a_long_prompt_takes_memory_in_proportion_to_its_length(tmp_path: Path) -> None:
    """The attention matrix of its one layer would take 1.2 GB."""
    save_tiny("llama-mha", tmp_path, max_position_embeddings=LONG + 8, **SMALLEST)
    kept = {"kv_policy": "h2o", "heavy": 64, "recent": 64}
    half, long = (each["grown"] for each in child(PEAK, tmp_path, json.dumps([(LONG // 2, 1, 4, kept), (LONG, 1, 4, kept)])))
    assert long < 150e6
    assert long < 2.5 * half + 20e6


def test_peak_memory_falls_as_the_budget_predicts(tmp_path: Path) -> None:
    """The smaller budget comes first: the peak of a process does not fall."""
    save_tiny("llama-mha", tmp_path, max_position_embeddings=600, hidden_size=128, num_hidden_layers=4)
    options = {"kv_policy": "h2o", "head_budgets": "equal", "percent": [100, 0, 100, 0, 100, 0]}
    kept = ({**options, "kv_budget": share} for share in (0.2, 1.0))
    less, all_of_it = child(PEAK, tmp_path, json.dumps([(500, 40, 4, each) for each in kept]))
    measured, predicted = (all_of_it[name] - less[name] for name in ("grown", "needed"))
    assert predicted > 50e6
    assert measured == pytest.approx(predicted, rel=0.15)
    assert all(each["grown"] < each["needed"] for each in (less, all_of_it))


def endless(llm: LLM, tokens: int) -> tuple[list[float], list[int], list[int], list[int]]:
    """Seconds of each token, memory at every thousandth, how many functions are called for some early and some late ones, and
    the text."""
    clock, memory, calls = [time.perf_counter()], list[int](), list[int]()
    counted = {1000: True, 1200: False, tokens - 300: True, tokens - 100: False}

    def count(frame: object, event: str, _: object) -> None:
        calls[-1] += event in ("call", "c_call")

    def on_token(row: int, token: int, text: str | None) -> None:
        clock.append(time.perf_counter())
        if len(clock) % 1000 == 0:
            memory.append(psutil.Process().memory_info().rss)
        if len(clock) in counted:
            calls.extend([0] * counted[len(clock)])
            sys.setprofile(count if counted[len(clock)] else None)

    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    [completion] = llm.generate([list(range(1, 33))], params, seed=0, on_token=on_token)
    return [after - before for before, after in pairwise(clock)], memory, calls, list(completion.token_ids)


@pytest.mark.slow
def test_twenty_thousand_tokens_flow_in_constant_memory_and_time(tmp_path: Path) -> None:
    save_tiny("llama-gqa", tmp_path, max_position_embeddings=SLOTS + 64)
    kept: dict[str, Any] = {"kv_policy": "h2o", "heavy": SLOTS - 64, "recent": 64, "positions": "rolling"}
    with LLM(str(tmp_path), dtype="float32", **kept) as llm:
        seconds, memory, calls, tokens = endless(llm, 20_000)
    assert len(tokens) == 20_000 and len(set(tokens[-1000:])) > VOCAB // 4
    assert max(memory) <= 1.02 * memory[WARM]
    assert calls[1] <= 1.1 * calls[0], calls
    assert min(seconds[-1000:]) <= 2 * min(seconds[1000:2000]), "the least of a thousand: no load disturbs all of them"


def test_a_text_goes_on_beyond_the_models_length_with_rolling_positions_alone(checkpoints: Checkpoints, offload: Path) -> None:
    kept: tuple[tuple[str, Any], ...] = (("kv_policy", "h2o"), ("heavy", 20), ("recent", 20))
    case = Case("llama-gqa", lengths=(30, 5), gen_len=300, policy=(*kept, ("positions", "rolling")))
    params = SamplingParams(max_tokens=300, ignore_eos=True, logprobs=0)
    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(case.prompts, params)
    for completion in completions:
        assert len(completion.token_ids) == 300
        assert all(step.chosen.logprob <= 0 for step in completion.logprobs or ())  # NaN would not be
    with case.open(checkpoints, offload, positions="true") as llm, pytest.raises(ValueError, match="128 positions"):
        llm.generate(case.prompts, params)


@pytest.mark.parametrize("lengths", [(129,), (100,)])
def test_rolling_positions_are_not_enough_for_prompts_or_budgets_beyond_the_models_length(
    lengths: Sequence[int], checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", lengths=(*lengths, 3), policy=(("kv_policy", "h2o"), ("heavy", 128), ("positions", "rolling")))
    with case.open(checkpoints, offload) as llm, pytest.raises(ValueError, match=r"but .* has 128 positions; shorten"):
        llm.generate(case.prompts, SamplingParams(max_tokens=100))
