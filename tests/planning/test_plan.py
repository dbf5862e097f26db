"""Plans: what cannot be meant is refused in one line that names the value and what is known."""

from __future__ import annotations

import pytest

from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.schedule import SCHEDULES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzagg"}, r"schedule 'zigzagg' is unknown; known: zigzag, .*row_by_row; did you mean zigzag\?$"),
        ({"schedule": "abacus"}, r"schedule 'abacus' is unknown; known: zigzag, [^;]*$"),
        ({"kv_policy": "ful"}, r"kv_policy 'ful' is unknown; known: full.*; did you mean full\?$"),
        ({"gpu_batch_size": 0}, "gpu_batch_size is 0; it must be 1 or more"),
        ({"slots": 0}, "slots is 0"),
        ({"slotz": 3}, r"unknown plan option 'slotz'; did you mean slots\?"),
        ({"abacus": 3}, "unknown plan option 'abacus'$"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.create(**options)


def test_the_policy_that_the_project_is_named_for_is_known_to_be_missing() -> None:
    with pytest.raises(ValueError, match="kv_policy 'h2o' is not there yet; known: full"):
        Plan(kv_policy="h2o")


def test_percents_are_refused_by_kind_without_a_word_of_flags() -> None:
    with pytest.raises(ValueError, match=r"^percent takes six numbers, got 2"):
        Plan().with_percent((1, 2))
    with pytest.raises(ValueError, match=r"^percent for KV is 60 \(GPU\) and 50 \(CPU\)"):
        Plan().with_percent((0, 0, 60, 50, 0, 0))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_without_overlap_there_is_one_slot_or_a_refusal(schedule: str) -> None:
    plan = Plan(schedule=schedule, slots=3)
    if schedule != "flexgen_barrier":
        assert plan.without_overlap() == Plan(schedule=schedule, slots=1)
        return
    with pytest.raises(ValueError, match="flexgen_barrier cannot do without overlap"):
        plan.without_overlap()
