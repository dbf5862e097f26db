"""Experts that no row was given to are not brought, where that is known in time: same tokens, fewer bytes, all counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.stores import weights as wanted_module
from h2o_flexgen.engine.stores.weights import Wanted
from h2o_flexgen.models import create_model
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.cost import by_lane, predicted_bytes
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.schedule.ops import Visit
from tests.helpers.contract import Case, Checkpoints, compare, generate_with
from tests.helpers.tiny import tiny_config
from tests.planning.worlds import block_of

ONE_ROW = Case("olmoe", (0, 0, 100, 0, 100, 0), (5,), gen_len=5, gpu_batch_size=1, num_gpu_batches=1)
FEW_ROWS = replace(ONE_ROW, lengths=(5, 3, 2, 4), gpu_batch_size=2, num_gpu_batches=2)


def moved_and_skipped(case: Case, checkpoints: Checkpoints, offload: Path) -> tuple[Counter[str], Counter[str]]:
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))
        assert llm.stats is not None
        moved, skipped = Counter(llm.stats.moved_bytes), Counter(llm.stats.skipped_bytes)
        site = llm.loaded.site
        foreseen = by_lane(predicted_bytes(BlockPlans.of(llm.spec, llm.plan, Workload(case.lengths, case.gen_len), site)))
    assert {lane: nbytes for lane, nbytes in (moved + skipped).items() if nbytes} == foreseen
    return moved, skipped


@pytest.mark.parametrize("schedule", ["zigzag", "row_by_row"])
@pytest.mark.parametrize("case", [ONE_ROW, FEW_ROWS], ids=["one row", "few rows"])
def test_few_rows_read_less(case: Case, schedule: str, checkpoints: Checkpoints, offload: Path) -> None:
    moved, skipped = moved_and_skipped(replace(case, schedule=schedule), checkpoints, offload)
    assert skipped["read"] > (0.2 * moved["read"] if case is ONE_ROW else 0)


@pytest.mark.parametrize("percent", [(0, 0, 100, 0, 100, 0), (0, 60, 100, 0, 100, 0)], ids=["disk", "disk and host"])
def test_what_was_not_read_is_not_loaded(
    percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    _, skipped = moved_and_skipped(replace(ONE_ROW, percent=percent, device="pretended"), checkpoints, offload)
    assert skipped["load"] >= skipped["read"] > 0


def test_nothing_is_skipped_where_many_rows_choose(checkpoints: Checkpoints, offload: Path) -> None:
    many = replace(ONE_ROW, lengths=(2,) * 12, gen_len=3, gpu_batch_size=12)
    assert not moved_and_skipped(many, checkpoints, offload)[1]


def test_a_router_that_says_what_it_chose_is_not_made_from_others(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the experts of the blocks before rest, their routers need not, and do the same else."""
    routers, chose, said = wanted_module._routers, Wanted.chose, set[int]()

    def noted(self: Wanted, visit: Visit, experts: torch.Tensor) -> None:
        said.update([visit.step] if self.waits_for(visit.layer) else [])
        chose(self, visit, experts)

    monkeypatch.setattr(wanted_module, "_routers", lambda *given: dict([*routers(*given).items()][-1:]))
    monkeypatch.setattr(Wanted, "chose", noted)
    case = replace(ONE_ROW, gen_len=9)
    moved_and_skipped(case, checkpoints, offload)
    assert said == {*range(case.gen_len)}


def test_what_is_left_out_is_really_missing(checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests would say nothing."""
    left_out = Wanted.left_out
    monkeypatch.setattr(
        Wanted,
        "left_out",
        lambda self, visit: frozenset(self._layers[visit.layer].expert_of) if left_out(self, visit) else frozenset(),
    )
    with pytest.raises(AssertionError), ONE_ROW.open(checkpoints, offload) as llm:
        compare(ONE_ROW, checkpoints, *generate_with(llm, ONE_ROW))


def test_it_is_known_when_the_last_batch_has_chosen_and_only_for_that_pass() -> None:
    spec = create_model(tiny_config("olmoe"), "float32", True).spec
    plan = Plan(num_gpu_batches=2, gpu_batch_size=1).with_percent((0, 0, 100, 0, 100, 0)).at(Site())
    wanted = Wanted(spec, BlockPlan.of(spec, plan, block_of([[4], [4]]), Site()).schedule)
    router = next(number for number, layer in enumerate(spec.layers) if layer.expert_of)
    names = spec.layers[router + 3].expert_of
    for batch, experts in enumerate([[0, 6, 1], [6, 2, 0]]):
        assert wanted.left_out(Visit(1, router + 3, 0)) == frozenset()
        wanted.chose(Visit(1, router, batch), torch.tensor([[experts]]))
        wanted.computed(Visit(1, router, batch))
    assert wanted.left_out(Visit(1, router + 3, 0)) == {name for name, number in names.items() if number != 6} != set()
    assert "norm" not in str(wanted.left_out(Visit(1, router, 0)))
    for other in (Visit(2, router + 3, 0), Visit(1, router + 10, 0), Visit(0, router + 3, 1)):
        assert wanted.left_out(other) == frozenset()
    many = torch.arange(3).expand(wanted_module.rows_asking(1 / 3), 1, 3)
    for batch in (0, 1):
        wanted.chose(Visit(2, router, batch), many if batch else many[:1])
        wanted.computed(Visit(2, router, batch))
    assert wanted.left_out(Visit(2, router + 3, 0)) == frozenset()
