"""A decode step on a device: what is launched for each kind of layer, and how often the host waits.

Nothing waits inside a layer, so that the caller's thread may launch a whole step ahead; the head waits once, for its tokens.
Where the experts of a slice are there, it does not wait for a router's choice, if kernels count the rows. Functions of torch
stand for these kernels here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import ADD_COUNTED, COUNTED_PRODUCTS, GATHER_COUNTED
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.routing import Chosen, GatheredRows
from h2o_flexgen.sampling.params import SamplingParams
from tests.clocked.checker import Checker
from tests.clocked.tensor import NAME, ClockedTensor
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


# -- experts ---------------------------------------------------------------------------------------------------------------


def gathered(chosen: Chosen, rows: Tensor, experts: range) -> GatheredRows:
    run = chosen.numbers.flatten() - experts.start
    run = torch.where((run >= 0) & (run < len(experts)), run, len(experts))
    order = run.argsort(stable=True)
    begins = (run < torch.arange(len(experts) + 1, device=rows.device)[:, None]).sum(1)
    to = order.div(chosen.numbers.shape[1], rounding_mode="floor")
    return GatheredRows(rows.index_select(0, to), to, chosen.shares.flatten().index_select(0, order), begins)


@cache
def table_of(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A copy that waits, once for each set of matrices."""
    return torch.tensor(addresses).to(device)


def address(data: Tensor) -> int:
    return (data.inner if isinstance(data, ClockedTensor) else data).data_ptr()


def multiplied(format: object, x: Factor, meetings: list[Meeting], out: Tensor) -> None:
    assert x.counted is not None
    table_of(tuple(address(meeting.data) for meeting in meetings), out.device)
    row, begins = torch.arange(len(out), device=out.device)[:, None], x.counted.begins
    for number, meeting in enumerate(meetings):
        is_own = (row >= begins[number]) & (row < begins[number + 1])
        out.copy_(torch.where(is_own, x.values @ meeting.data.T, out))


def added(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counted: CountedRows) -> None:
    is_own = torch.arange(len(rows), device=rows.device) < counted.begins[counted.runs]
    sums.index_add_(0, to, torch.where(is_own[:, None], rows * weights[:, None], 0.0))


STANDING_IN = {GATHER_COUNTED: gathered, COUNTED_PRODUCTS: multiplied, ADD_COUNTED: added}
HEADS = {"olmoe": 19, "nemotron-h": 10, "gemma4": 22}  # layers: gates with silu; a square of relu without one; with gelu
STAYING = Case("olmoe", (100, 0, 0, 100, 0, 100), (3, 2, 4, 2), 4, device=NAME)


@pytest.mark.parametrize(("kind", "counts"), [("olmoe", False), *((kind, True) for kind in HEADS)])
def test_where_its_experts_are_there_no_slice_waits_for_the_choice(
    kind: str, counts: bool, by_twins: Checkpoints, offload: Path, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = operations.chosen
    if counts:
        monkeypatch.setattr(operations, "chosen", lambda op, *of, **more: STANDING_IN.get(op) or chosen(op, *of, **more))
    generate(replace(STAYING, kind=kind), by_twins, offload)
    waits = by_task(checker.waited, "COMPUTE 2.")
    heads = {f"COMPUTE 2.{HEADS[kind]}.{batch}": WAITS_OF_A_HEAD for batch in (0, 1)}
    assert (waits == heads) == counts and waits.items() >= heads.items()
