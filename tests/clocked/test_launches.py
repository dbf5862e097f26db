"""A decode step on a device: what is launched for each kind of layer, and how often the host waits.

Nothing waits inside a layer, so that the caller's thread may launch a whole step ahead; the head waits once, for its tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.sampling.params import SamplingParams
from tests.clocked.checker import Checker
from tests.clocked.tensor import NAME
from tests.helpers.contract import POLICIES, WEIGHTS, Case, Checkpoints
from tests.helpers.samples import first_of

WAITS_OF_A_HEAD = 1
WAITS_OF_SINGLE_SLOTS = 1  # before the processor brings changed slots home
H2O, STREAMING = POLICIES[1], POLICIES[6]
OFFLOADED = Case("opt", (0, 100, 0, 100, 0, 100), (3, 2, 4, 2), 4, buffers=3, device=NAME)
LAST = 7  # the head: two layers for each of three blocks stand between it and the embedding

# launches of functions of torch, without kernels: of attention, of its first layer, which makes what all share, and of the MLP
LAUNCHES: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[int, int, int]] = {
    ("opt", ()): (15, 21, 6),
    ("opt", H2O): (46, 52, 6),
    ("llama-gqa", ()): (34, 44, 13),
    ("llama-gqa", H2O): (65, 75, 13),
}


def generate(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len, ignore_eos=True))


def by_task(counted: Counter[Any], beginning: str) -> Counter[str]:
    """What was counted for tasks whose names begin so."""
    found: Counter[str] = Counter()
    for (task, *_), times in counted.items():
        if task.startswith(beginning):
            found[task] += times
    return found


@pytest.mark.parametrize(("kind", "policy"), LAUNCHES)
def test_launches_of_each_kind_of_layer(
    kind: str, policy: tuple[tuple[str, Any], ...], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    generate(replace(OFFLOADED, kind=kind, policy=policy), by_twins, offload)
    launched = by_task(checker.launched, "COMPUTE 2.")
    attention, first, mlp = LAUNCHES[kind, policy]
    for batch in (0, 1):
        assert launched[f"COMPUTE 2.1.{batch}"] <= first
        assert launched[f"COMPUTE 2.2.{batch}"] <= mlp
        assert launched[f"COMPUTE 2.3.{batch}"] <= attention


@pytest.mark.parametrize("policy", [(), H2O, STREAMING])
@pytest.mark.parametrize(("weight_codec", "compute", "kv_codec"), [(*WEIGHTS[0], PLAIN), (*WEIGHTS[1], "group4")])
@pytest.mark.parametrize("schedule", first_of(["zigzag", "flexgen_barrier"], 1))
def test_the_host_waits_once_at_each_head_and_never_inside_a_layer(
    weight_codec: str,
    compute: str,
    kv_codec: str,
    schedule: str,
    policy: Any,
    by_twins: Checkpoints,
    offload: Path,
    checker: Checker,
) -> None:
    how = {"weight_codec": weight_codec, "compute": compute, "kv_codec": kv_codec, "schedule": schedule}
    generate(replace(OFFLOADED, policy=policy, **how), by_twins, offload)
    for step in (1, 2, 3):
        waits = by_task(checker.waited, f"COMPUTE {step}.")
        assert waits == {f"COMPUTE {step}.{LAST}.{batch}": WAITS_OF_A_HEAD for batch in (0, 1)}
    assert not by_task(checker.waited, "LOAD")
    stored = by_task(checker.waited, "STORE")
    assert set(stored.values()) <= {WAITS_OF_SINGLE_SLOTS} and bool(stored) == bool(policy)
    assert {task.split()[0] for task in stored} <= {"STORE_KV"}
