"""Prefixes that rows share have the states at their ends: each row says what it says where nothing is shared, and a snapshot of
another token, or of another prefix, is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.site import HOST
from h2o_flexgen.engine import engine
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.engine.stores.states_of_visits import States
from h2o_flexgen.formats.kernel_table import FLOAT32
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.plan import BFLOAT16, JUDGED, PINNED
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import POLICIES, Checkpoints
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.refusals import one_line
from tests.whole.test_arriving_prefixes import ArrivingCase, Counted, drawn
from tests.whole.test_arriving_prefixes import hold_contract as hold_arriving
from tests.whole.test_lasting_prefixes import KeptCase, counts_of
from tests.whole.test_shared_prefixes import LITTLE_GROWTH, OWN, SharedCase
from tests.whole.test_shared_prefixes import hold_contract as hold_job
from tests.whole.test_stream import MIXES, nothing_runs_on, same, streamed

__all__ = ["nothing_runs_on"]

KINDS = ("qwen3-5", "lfm2", "bamba", "kimi-linear")
CHOICES = {
    ("kind", "state_dtype"): (("qwen3-5", FLOAT32), ("lfm2", FLOAT32), ("bamba", BFLOAT16), ("kimi-linear", FLOAT32)),
    "percent": (MIXES[3], MIXES[0], MIXES[2]),
    ("gpu_batch_size", "num_gpu_batches"): ((2, 3), (5, 1), (1, 2)),
    "schedule": ("zigzag", "flexgen_barrier"),
    ("policy", "prefix_policy", "kv_codec"): (
        (POLICIES[0], PINNED, PLAIN),
        (POLICIES[1], PINNED, PLAIN),
        (POLICIES[2], JUDGED, PLAIN),
        (POLICIES[0], PINNED, "group4"),
    ),
    "prefill_tokens": (1024, 12),
}


@pytest.mark.parametrize("values", on_devices(CHOICES, share=ELSEWHERE))
def test_each_row_of_a_job_says_what_it_says_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_job(SharedCase(own=OWN[:7], growth=LITTLE_GROWTH, **values), checkpoints, offload)


ARRIVING = CHOICES | {
    ("policy", "prefix_policy"): ((POLICIES[0], PINNED), (POLICIES[2], JUDGED), (POLICIES[1], PINNED)),
    "room": (600, 1200),
    ("at_once", "every"): ((1, 5), (4, 2)),
}
del ARRIVING["policy", "prefix_policy", "kv_codec"]


@pytest.mark.parametrize("values", on_devices(ARRIVING, share=ELSEWHERE))
def test_each_row_that_arrives_says_what_it_says_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    values = dict(values)
    how = {name: values.pop(name) for name in ("room", "at_once", "every")}
    hold_arriving(ArrivingCase(**values), checkpoints, offload, **how)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_an_earlier_process_has_kept_has_its_states(
    kind: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    kept = KeptCase.of(ArrivingCase(kind, gpu_batch_size=3, num_gpu_batches=2), tmp_path)
    for _ in range(2):
        guests = hold_arriving(kept, checkpoints, offload, room=1200, at_once=2)
    counts = counts_of(kept.opened[-1])
    assert counts.found >= 2 and counts.damaged == 0
    assert next(iter(guests.shared.values())) > 0, "the first of all is spared something"


def test_prefixes_are_shared_as_a_whole(checkpoints: Checkpoints, offload: Path) -> None:
    """States are known behind their last tokens alone. Longer prefixes begin with a copy of them."""
    case, head, other = ArrivingCase("qwen3-5", gpu_batch_size=4), drawn(40, 1), drawn(20, 2)
    with case.open(checkpoints, offload) as llm:
        counted = Counted(llm, llm.arrivals(80, 4, prefix_room=1200))
        assert counted.spared([*head, 1, 2]) == counted.spared([*head, 3, 4]) == 0
        assert counted.spared([*head, 5, 6]) == 40
        assert counted.spared([*head[:22], 9, 9, 9]) == 0, "nothing ends there"
        assert counted.spared([*head, *other, 1]) == counted.spared([*head, *other, 2]) == 40
        assert counted.spared([*head, *other, 3]) == 60


def test_log_probabilities_of_prompts_are_those_of_prompts_that_share_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    case = SharedCase("qwen3-5", MIXES[3], gpu_batch_size=3, num_gpu_batches=3)
    requests = [
        Request(prompt, SamplingParams(max_tokens=2, n=2, temperature=1.2, prompt_logprobs=1)) for prompt in case.prompts
    ]
    with case.open(checkpoints, offload, shared_prefixes=False) as llm:
        wanted = streamed(llm, requests, seed=7)
    with case.open(checkpoints, offload) as llm:
        found = streamed(llm, requests, seed=7)
    assert same(found, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        of_both = [
            [own.chosen.logprob for own in made[1:] if own is not None] for made in (one.prompt_logprobs, other.prompt_logprobs)
        ]
        assert of_both[0] == pytest.approx(of_both[1], abs=1e-4)


# -- faults ----------------------------------------------------------------------------------------------------------------


def not_begun_behind() -> AbstractContextManager[object]:
    """Rows begin with zeros, as if nothing were before."""
    return patch.object(engine, "begin_behind", lambda states, prefixes, at_the_end_of: None)


def of_another_layer() -> AbstractContextManager[object]:
    """The states of the last layer stand for those of all."""
    usual = PrefixStore.states

    def of_last(store: PrefixStore, layer: int, group: int) -> States:
        return usual(store, store._spec.state_layers[-1], group)

    return patch.object(PrefixStore, "states", of_last)


def of_another_prefix() -> AbstractContextManager[object]:
    """Where several prefixes are kept, rows begin with the states of the next one."""
    usual = engine.begin_behind

    def turned(states: States, prefixes: Any, at_the_end_of: Callable[[int], States]) -> None:
        store: PrefixStore = at_the_end_of.func.__self__  # type: ignore[attr-defined]
        groups = sorted(store._kept)
        usual(states, prefixes, lambda group: at_the_end_of(groups[(groups.index(group) + 1) % len(groups)]))

    return patch.object(engine, "begin_behind", turned)


def one_token_late() -> AbstractContextManager[object]:
    """The last token of a prefix has passed its states twice."""
    usual = engine.base.computed

    def twice(model: Any, layer: Any, x: torch.Tensor, weights: Any, given: Any) -> torch.Tensor:
        made = usual(model, layer, x, weights, given)
        if given.states.by_name and given.in_heads and x.ndim == 3 and x.shape[:1] == (1,) and x.shape[1] in (12, 19):
            usual(model, layer, x[:, -1:].clone(), weights, replace(given, positions=given.positions[:, -1:]))
        return made

    return patch.object(engine.base, "computed", twice)


SPOILT = [SharedCase(kind, own=OWN[:8], growth=LITTLE_GROWTH, gpu_batch_size=3, num_gpu_batches=2) for kind in KINDS[:2]]


@pytest.mark.parametrize("case", SPOILT, ids=KINDS[:2])
def test_nothing_is_found_where_nothing_is_planted(case: SharedCase, checkpoints: Checkpoints, offload: Path) -> None:
    hold_job(case, checkpoints, offload)


@pytest.mark.parametrize("fault", [not_begun_behind, of_another_layer, of_another_prefix, one_token_late])
@pytest.mark.parametrize("case", SPOILT, ids=KINDS[:2])
def test_a_snapshot_that_is_not_that_of_the_end_is_found(
    case: SharedCase, fault: Callable[[], AbstractContextManager[object]], checkpoints: Checkpoints, offload: Path
) -> None:
    with fault(), pytest.raises(AssertionError, match="row"):
        hold_job(case, checkpoints, offload)


# -- plans -----------------------------------------------------------------------------------------------------------------


def test_states_are_a_part_of_the_room_that_is_promised(checkpoints: Checkpoints, offload: Path) -> None:
    """A prefix takes so many tokens more, whatever its length; a room without place for one is refused."""
    with ArrivingCase("qwen3-5", gpu_batch_size=2).open(checkpoints, offload) as llm:
        one = PrefixLayout.of(llm.spec, 1, 0)
        least = llm.plan.least_prefix + one.beside
        assert one.beside * one.token_bytes >= one.state_bytes > (one.beside - 16) * one.token_bytes
        said = one_line(lambda: llm.arrivals(60, 4, prefix_room=least - 1))
        takes = f"prefix_room is {least - 1}, and a prefix takes {least} tokens at least, as its states take room"
        assert said == f"{takes}; give more, or 0"
        planned = llm.arrivals(60, 4).planned
        assert planned.workload.prefix_room == 64 + one.beside and planned.blocks.first.block.batches[0].longest_prefix == 59
        assert planned.footprint.parts[HOST]["shared prefixes"] >= planned.workload.prefix_room * one.token_bytes
