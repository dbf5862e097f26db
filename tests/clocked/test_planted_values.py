"""Faults that make values wrong, and no access early: graphs that repeat what they should not, and experts that were not
fetched. The contract finds them on a device whose graphs do what they were captured with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from h2o_flexgen.engine import graphs
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.graphs import GraphPlace
from h2o_flexgen.engine.stores.weights import Wanted, WeightStore
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Visit
from tests.clocked.context import checked
from tests.clocked.tensor import NAME
from tests.helpers.contract import POLICIES, Case, Checkpoints, compare, compare_each_alone, generate_with
from tests.helpers.samples import every_nth
from tests.kernels.variants import used

Fault = Callable[[], AbstractContextManager[object]]


# -- graphs ----------------------------------------------------------------------------------------------------------------


def numbers_do_not_follow() -> AbstractContextManager[object]:
    """A graph works with the slots and positions of the step that it was captured in."""
    return patch.object(KVStep, "follow", lambda own, other: None)


def rotations_do_not_follow() -> AbstractContextManager[object]:
    def follow(own: KVStep, other: KVStep) -> None:
        for name, known in vars(own).items():
            if isinstance(known, Tensor):
                known.copy_(getattr(other, name))

    return patch.object(KVStep, "follow", follow)


def tokens_do_not_follow() -> AbstractContextManager[object]:
    follow = graphs._Batch.follow

    def without_tokens(batch: graphs._Batch, part: Any) -> None:
        follow(batch, replace(part, tokens=batch.part.tokens) if part is not batch.source else part)
        batch.source = part

    return patch.object(graphs._Batch, "follow", without_tokens)


def what_was_decoded_is_not_forgotten() -> AbstractContextManager[object]:
    return patch.object(WeightStore, "forget_decoded", lambda store: None)


def graphs_know_no_buffers() -> AbstractContextManager[object]:
    """A graph reads the weights where they came first, whichever buffer they come through now."""
    compute = graphs.StepGraphs.compute

    def anywhere(own: graphs.StepGraphs, place: GraphPlace, *given: Any) -> Tensor:
        return compute(own, GraphPlace(place.layer), *given)

    return patch.object(graphs.StepGraphs, "compute", anywhere)


def graphs_last_when_eviction_begins() -> AbstractContextManager[object]:
    of = graphs.Kind.of

    def alike(rows: Any, where: Any) -> graphs.Kind:
        return of(rows, where)._replace(evicts=(), stores_singly=())

    return patch.object(graphs.Kind, "of", alike)


# -- experts ---------------------------------------------------------------------------------------------------------------


def experts_are_known_from_the_first_batch_on() -> AbstractContextManager[object]:
    """What the rows of the other batches choose is left out."""
    make = Wanted.__init__

    def made(wanted: Wanted, *given: Any) -> None:
        make(wanted, *given)
        wanted._batches.update({batch: 1 - count for batch, count in wanted._batches.items()})

    return patch.object(Wanted, "__init__", made)


def experts_are_those_of_the_block_before() -> AbstractContextManager[object]:
    return patch.object(Wanted, "_pass", lambda wanted, step, layer, batch: (0, 0, wanted._weight_batch(batch)))


def one_expert_too_many_is_left_out() -> AbstractContextManager[object]:
    chose = Wanted.chose

    def without_one(wanted: Wanted, visit: Visit, experts: Tensor) -> None:
        chose(wanted, visit, experts[..., 1:])

    return patch.object(Wanted, "chose", without_one)


@dataclass(frozen=True)
class Planted:
    what: str
    fault: Fault
    case: Case
    limits: tuple[int, ...] = ()  # the tokens of each row, where not all have as many

    def __str__(self) -> str:
        return self.what


RESIDENT = Case("llama-gqa", (100, 0, 100, 0, 100, 0), (5, 9, 2, 7), 7, device=NAME, policy=POLICIES[1])
GROWING = replace(RESIDENT, lengths=(2, 3), gen_len=12, policy=(("kv_policy", "h2o"), ("heavy", 4), ("recent", 4)))
PACKED = replace(RESIDENT, kind="opt", lengths=(6, 6, 6, 6), weight_codec="group4", policy=())
STREAMED = replace(RESIDENT, kind="opt", percent=(0, 60, 100, 0, 100, 0), policy=(), sep_layer=False)  # an odd number of layers
MIXTURE = Case("olmoe", (0, 60, 100, 0, 100, 0), (5, 3, 2, 4), 5, gpu_batch_size=2, num_gpu_batches=2, device=NAME)
FEW = replace(MIXTURE, lengths=(5,), gpu_batch_size=1, num_gpu_batches=1)
FAULTS = [
    Planted("numbers do not follow", numbers_do_not_follow, RESIDENT),
    Planted("rotations do not follow", rotations_do_not_follow, RESIDENT),
    Planted("tokens do not follow", tokens_do_not_follow, RESIDENT),
    Planted("what was decoded is not forgotten", what_was_decoded_is_not_forgotten, PACKED, (5, 5, 10, 10)),
    Planted("graphs know no buffers", graphs_know_no_buffers, STREAMED),
    Planted("graphs last when eviction begins", graphs_last_when_eviction_begins, GROWING),
    Planted("experts are known from the first batch on", experts_are_known_from_the_first_batch_on, MIXTURE),
    Planted("experts are those of the block before", experts_are_those_of_the_block_before, FEW),
    Planted("one expert too many is left out", one_expert_too_many_is_left_out, FEW),
]


def run(planted: Planted, checkpoints: Checkpoints, offload: Path) -> list[str]:
    """What is found in a run with a fault: races, broken promises, and what a graph cannot repeat."""
    case, limits = planted.case, planted.limits
    checkpoints.folder(case.kind)
    with used(TORCH), checked() as checker, case.open(checkpoints, offload) as llm, planted.fault():
        try:
            if limits:
                done = llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in limits])
                compare_each_alone(case, limits, checkpoints, done)
            else:
                compare(case, checkpoints, *generate_with(llm, case))
        except TaskFailed as error:
            return [*checker.faults, *([str(error)] * isinstance(error.cause, AssertionError))]
        except AssertionError as broken:
            return [*checker.faults, str(broken)]
    return checker.faults


@pytest.mark.parametrize("planted", every_nth(FAULTS, 2), ids=str)
def test_a_planted_fault_is_found(planted: Planted, by_twins: Checkpoints, offload: Path) -> None:
    assert run(planted, by_twins, offload)


SOUND = dict.fromkeys(replace(planted, what="nothing", fault=nullcontext) for planted in FAULTS)


@pytest.mark.parametrize("planted", every_nth(SOUND, 2), ids=lambda one: str(one.case))
def test_nothing_is_found_where_nothing_is_planted(planted: Planted, by_twins: Checkpoints, offload: Path) -> None:
    assert run(planted, by_twins, offload) == []
