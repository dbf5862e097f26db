"""Plans: what cannot be meant is refused in one line that names the value and what is known."""

from __future__ import annotations

import numpy
import pytest

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.schedule import SCHEDULES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzagg"}, r"schedule 'zigzagg' is unknown; known: zigzag, .*row_by_row; did you mean zigzag\?$"),
        ({"schedule": "abacus"}, r"schedule 'abacus' is unknown; known: zigzag, [^;]*$"),
        ({"kv_policy": "ful"}, r"kv_policy 'ful' is unknown; known: full.*; did you mean full\?$"),
        ({"kv_policy": "h20"}, r"kv_policy 'h20' is unknown; known: full.*; did you mean h2o\?$"),
        ({"kv_policy": "hi0"}, r"kv_policy 'hi0' is unknown; known: full.*, knorm$"),
        ({"gpu_batch_size": 0}, "gpu_batch_size is 0; allowed is a whole number from 1 to 1000000"),
        ({"slots": 0}, "buffers is 0"),
        ({"bufers": 3}, r"unknown plan option 'bufers'; did you mean buffers\?"),
        ({"abacus": 3}, "unknown plan option 'abacus'$"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.create(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "full", "heavy": 3}, "kv_policy 'full' does not take heavy; it takes kv_recall, kv_recall_together"),
        (
            {"kv_policy": "h2o", "kv_recall": 0.1, "kv_recall_reuse": True},
            "kv_recall_reuse is for policies that keep all, and kv_policy 'h2o' evicts",
        ),
        (
            {"kv_recall_reuse": True},
            "kv_recall_reuse keeps what kv_recall has read; give kv_recall, or leave",
        ),
        ({"kv_policy": "local", "heavy": 3}, "kv_policy 'local' does not take heavy; it takes recent, hh_ratio, kv_budget"),
        ({"kv_policy": "tova", "score_decay": 0.5}, "kv_policy 'tova' does not take score_decay"),
        ({"kv_policy": "h2o", "heavy": -1}, "heavy is -1; allowed is a whole number from 0 to 10000000"),
        ({"kv_policy": "h2o", "hh_ratio": 0.0}, "hh_ratio is 0.0; allowed is a number above 0 and at most 1"),
        ({"kv_policy": "h2o", "kv_budget": 1.5}, "kv_budget is 1.5; allowed is a number above 0 and at most 1"),
        ({"kv_policy": "h2o", "score_decay": -0.5}, "score_decay is -0.5"),
        ({"kv_policy": "h2o", "hh_ratio": 0.1, "kv_budget": 0.2}, "both hh_ratio=0.1 and kv_budget=0.2 are given"),
        ({"kv_policy": "h2o", "hh_ratio": 0.1, "recent": 2}, "both hh_ratio 0.1 and slots are given"),
        ({"kv_policy": "h2o", "kv_budget": 0.1, "heavy": 2}, "both kv_budget=0.1 and heavy=2 are given"),
        (
            {"kv_policy": "h2o", "kv_recall": 0.1, "positions": "rolling"},
            r"kv_recall 0\.1 compares keys as they stand in the text",
        ),
        ({"kv_recall": 1.5}, "kv_recall is 1.5; allowed is a number above 0 and at most 1"),
        (
            {"kv_policy": "h2o", "kv_recall": 0.1, "kv_recall_together": True},
            "kv_recall_together is for policies that keep all, and kv_policy 'h2o' evicts; leave kv_recall_",
        ),
        ({"kv_recall_together": True}, "kv_recall_together says how kv_recall chooses; give kv_recall, or leave"),
        ({"kv_recall": 0.0}, "kv_recall is 0.0; allowed is a number above 0 and at most 1"),
        ({"kv_recall": 0.1, "pipeline": 2}, "kv_recall 0.1 cannot be had with a pipeline of 2 devices; give pipeline=1"),
        ({"kv_recall": 0.1, "prefix_policy": "judged"}, "kv_recall 0.1 cannot be had with prefix_policy 'judged'"),
        ({"kv_policy": "h2o", "positions": "relative"}, "positions 'relative' is unknown; known: true, rolling"),
    ],
)
def test_what_cannot_be_asked_of_a_policy_is_refused_with_the_plan(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Plan.create(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "h2o", "heavy": 0, "recent": 0}, "has a budget of 0 slots for a prompt of 20 and 10 to generate"),
        ({"kv_policy": "h2o", "hh_ratio": 0.01}, "has a budget of 0 slots"),
        (
            {"kv_policy": "h2o", "kv_budget": 0.2, "recent": 7},
            r"recent is 7, but the budget for a prompt of 20 and 10 to generate is 6 slots",
        ),
        ({"kv_policy": "h2o", "heavy": 2, "recent": 2, "sinks": 3}, r"protects 5 tokens \(sinks 3\), but has 4 slots"),
        ({"kv_policy": "h2o", "heavy": 2, "recent": 2, "grace": 5}, "protects 5 tokens"),
        ({"kv_policy": "h2o-flexgen", "heavy": 0, "recent": 5}, "has 0 heavy and 5 recent slots"),
        ({"kv_policy": "snapkv", "heavy": 5}, "has no recent slots"),
        ({"kv_policy": "streaming", "kv_budget": 0.1}, "has a budget of 3 slots .* of which 4 are sinks"),
    ],
)
def test_budgets_that_leave_no_slot_are_refused_with_the_workload(options: dict[str, object], message: str) -> None:
    plan = Plan.create(**options)
    with pytest.raises(ValueError, match=message) as caught:
        plan.policy.occupancy(Batch((0,), (20,)), 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"kv_policy": "h2o"}, (6, 4)),  # 20 % of prompt and generation
        ({"kv_policy": "h2o", "hh_ratio": 0.25}, (10, 4)),  # of each row's own prompt
        ({"kv_policy": "h2o", "heavy": 5, "recent": 2}, (7, 7)),
        ({"kv_policy": "h2o", "kv_budget": 0.5, "recent": 2}, (15, 10)),
        ({"kv_policy": "h2o-flexgen", "heavy": 5, "recent": 2}, (6, 6)),
        ({"kv_policy": "local", "hh_ratio": 0.25}, (10, 4)),
        ({"kv_policy": "streaming", "recent": 3}, (7, 7)),
        ({"kv_policy": "streaming", "kv_budget": 0.5, "sinks": 1}, (15, 10)),
        ({"kv_policy": "full"}, (30, 20)),
    ],
)
def test_budgets_in_slots(options: dict[str, object], slots: tuple[int, int]) -> None:
    budgets = Plan.create(**options).policy.occupancy(Batch((0, 1), (20, 10)), 10).budgets
    assert tuple(budget.slots for budget in budgets) == slots


def test_products_of_8_bits_are_no_matter_of_the_plan_alone() -> None:
    """A checkpoint's own weights may be packed; the model says so."""
    assert Plan.create(compute="int8", weight_codec="group8").compute == Plan(compute="int8").compute == "int8"
    with pytest.raises(ValueError, match="compute 'int4' is unknown; known: exact, int8; did you mean int8"):
        Plan(compute="int4", weight_codec="group4")


def test_percents_are_refused_by_kind_without_a_word_of_flags() -> None:
    with pytest.raises(ValueError, match=r"^percent takes six numbers, got 2"):
        Plan().with_percent((1, 2))
    with pytest.raises(ValueError, match=r"^percent for KV is 60 \(GPU\) and 50 \(CPU\)"):
        Plan().with_percent((0, 0, 60, 50, 0, 0))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_without_overlap_there_is_one_buffer_or_a_refusal(schedule: str) -> None:
    plan = Plan(schedule=schedule, buffers=3)
    if schedule != "flexgen_barrier":
        assert plan.without_overlap() == Plan(schedule=schedule, buffers=1)
        return
    with pytest.raises(ValueError, match=r"^schedule='flexgen_barrier' cannot do without overlap"):
        plan.without_overlap()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_batch_size": "3"}, "gpu_batch_size is '3'; allowed is a whole number"),
        ({"gpu_batch_size": 2.5}, "gpu_batch_size is 2.5"),
        ({"buffers": True}, "buffers is True"),
        ({"kv_policy": "h2o", "heavy": "3"}, "heavy is '3'"),
        ({"kv_policy": "h2o", "kv_budget": float("nan")}, "kv_budget is nan"),
    ],
)
def test_an_option_of_another_type_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.create(**options)


@pytest.mark.parametrize("share", ["0", float("nan"), True, -1])
def test_per_cent_are_numbers(share: object) -> None:
    with pytest.raises(ValueError, match=r"percent for weights is .*; allowed is a number from 0 to 100"):
        Plan().with_percent((share, 0, 0, 0, 0, 0))  # type: ignore[arg-type]


def test_buffers_are_also_called_slots_but_not_both_at_once() -> None:
    assert Plan.create(slots=3) == Plan.create(buffers=3) == Plan(buffers=3)
    assert Plan(buffers=3).as_json()["slots"] == 3 and "buffers" not in Plan().as_json()
    with pytest.raises(ValueError, match="buffers is also called slots, and both are given"):
        Plan.create(slots=3, buffers=3)


def test_numbers_of_numpy_become_pythons() -> None:
    plan = Plan.create(gpu_batch_size=numpy.int8(100), num_gpu_batches=numpy.int8(100), kv_policy="h2o", heavy=numpy.int64(3))
    assert plan.block_size == 10_000 and type(plan.kv_options.heavy) is int
