"""Steps that choose what they attend, on the clocked device: where the host attends beside it, where KV lies on it, and where
it brings what they choose from the host, or from a disk through the host. Tokens and logits are those of the resident loop with
the same choice, and nothing races with anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PromptPlaces
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.engine.stores import kv_rows
from h2o_flexgen.engine.stores.kv import SlotNotes
from h2o_flexgen.engine.stores.kv_pages import Brought, KVPages
from h2o_flexgen.engine.stores.kv_rows import KVRows, PlacesOnDevice, RowPlaces
from h2o_flexgen.formats.kernel_table import EXACT, INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.chosen_slots import best_of, choose_slots_twin
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.evict import Missing, RowsOfBoth
from h2o_flexgen.kernels.operations import bring_slots
from h2o_flexgen.kv.key_index import ALWAYS, ChosenSlots, KeyIndex
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.policies.recall import INDEX
from h2o_flexgen.schedule.ops import Op
from tests.clocked.checker import Checker, current
from tests.clocked.context import checked
from tests.clocked.tensor import NAME
from tests.clocked.test_planted_faults import never_finished, without_needs
from tests.helpers.contract import Case, Checkpoints, compare, generate_with, hold_contract
from tests.helpers.held_by_hand import HELD
from tests.helpers.pairwise import ELSEWHERE, most_of
from tests.helpers.samples import first_of, slow, spread
from tests.kernels.test_chosen_slots import drawn, index_of
from tests.kernels.variants import used
from tests.planning.test_cost import assert_moved_as_predicted
from tests.whole import test_conversation as talks
from tests.whole import test_shared_prefixes as prefixes
from tests.whole import test_stream as stream
from tests.whole.test_recall import (
    ALIKE,
    HALF,
    HEADS_APART,
    KEEPING_SOME,
    LongBehind,
    index_one_token_behind,
    newest_tokens_are_not_written,
)

WHERE = (  # shares of the tiers, and what attends KV in host memory
    ((100, 0, 0, 100, 100, 0), HOST),
    ((0, 0, 100, 0, 0, 50), DEVICE),
    ((30, 30, 50, 50, 40, 30), HOST),
    ((0, 100, 100, 0, 100, 0), DEVICE),
    ((100, 0, 0, 100, 100, 0), DEVICE),
    ((0, 50, 40, 60, 40, 60), DEVICE),
    ((100, 0, 0, 0, 100, 0), DEVICE),
    ((0, 50, 30, 30, 40, 30), DEVICE),
)
FROM_HOST, FROM_DISK = WHERE[4:6], WHERE[6:]
EACH = *WHERE[:2], WHERE[4], WHERE[6]
PLANS = {
    "kind": ("llama-gqa", "opt", "gpt-oss-far", "deepseek-v2"),
    ("percent", "attend_on"): WHERE,
    "gpu_batch_size": (2, 1),
    "num_gpu_batches": (2, 1),
    "buffers": (2, 1),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": (HALF, KEEPING_SOME, ALIKE),
    "prefill_tokens": (1024, 24),
    ("weight_codec", "compute"): ((PLAIN, EXACT), ("group8", INT8)),
    "kv_codec": (PLAIN, "group4", "group8"),
    "streams_are_quick": (False, True),  # tasks are over when they are asked, and are forgotten then
}
LENGTHS = (45, 26, 38)
USUAL = Case("llama-gqa", WHERE[0][0], LENGTHS, 3, device=NAME, policy=HALF, attend_on=HOST)
BY_PART = replace(USUAL, lengths=(30, 24, 45, 38, 27), gpu_batch_size=4, prefill_tokens=40)  # of the prompts
LAUNCHES_OF_RANKS, LAUNCHES_OF_A_ROW, LAUNCHES_OF_WHAT_IS_BROUGHT = 15, 32, 8
COMING = replace(USUAL, lengths=(45, 26, 33, 38, 29))
GROWTH = (3, 1, 4, 2, 3)


@pytest.mark.parametrize("values", most_of(PLANS, share=ELSEWHERE))
def test_plans_equal_the_resident_loop_with_the_same_choice(
    values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    values = dict(values)
    checker.streams_are_quick = values.pop("streams_are_quick")
    with spoilt():
        hold_contract(Case(lengths=LENGTHS, gen_len=3, device=NAME, **values), by_twins, offload)


@contextmanager
def spoilt() -> Iterator[None]:
    """What chosen slots come to has nothing else to be read: all is NaN, as plain values and as scales of packed ones."""
    bring, read = KVRows.bring, KVPages.bring

    def into_spoilt(rows: KVRows, buffer: Tensor, choice: ChosenSlots) -> int:
        buffer.fill_(255)
        return bring(rows, buffer, choice)

    def read_into_spoilt(pages: KVPages, image: numpy.ndarray, choice: ChosenSlots, policy: KVPolicy) -> Brought:
        image[...] = ~image.dtype.type(0)
        return read(pages, image, choice, policy)

    with patch.object(KVRows, "bring", into_spoilt), patch.object(KVPages, "bring", read_into_spoilt):
        yield


@pytest.mark.parametrize("policy", [HALF, HEADS_APART])
def test_the_index_of_prompts_goes_home_part_by_part(
    policy: tuple[tuple[str, Any], ...], by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    hold_contract(replace(BY_PART, policy=policy), by_twins, offload)
    assert any(task.startswith("ATTEND") for task in checker.tasks)


@pytest.mark.parametrize(("percent", "attend_on"), WHERE[:2])
def test_it_matters_what_is_chosen(
    percent: tuple[int, ...], attend_on: str, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    case = replace(USUAL, percent=percent, attend_on=attend_on)
    hold_contract(case, by_twins, offload)
    beside = case.beside(by_twins.spec(case))[0]
    chosen, whole = (by_twins.resident_logits(each, (0, 1), beside) for each in (case, replace(case, policy=())))
    assert torch.equal(chosen[0], whole[0]), "prompts are attended whole"
    assert not torch.equal(chosen[1], whole[1])


RUNNING = {
    "kind": ("llama-gqa", "opt"),
    ("percent", "attend_on"): (*WHERE[:3], *FROM_HOST, *FROM_DISK),
    "num_gpu_batches": (2, 1),
    "buffers": (2, 1),
    "policy": (HALF, KEEPING_SOME),
    "kv_codec": (PLAIN, "group4"),
    "held": ((), HELD),
}


@pytest.mark.parametrize("values", most_of(RUNNING, share=ELSEWHERE))
def test_rows_that_come_and_go(values: dict[str, Any], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    stream.hold_contract(Case(lengths=COMING.lengths, device=NAME, **values), GROWTH, by_twins, offload)


KEPT = (), (("kv_policy", "h2o"), ("heavy", 10), ("recent", 12))
TALKS = [(KEPT[(place + turn) % 2], *where) for turn in (0, 1) for place, where in enumerate(EACH)]


@pytest.mark.parametrize(("kept", "percent", "attend_on"), first_of(spread(TALKS), len(EACH)))
def test_turns_of_a_conversation(
    kept: tuple[tuple[str, object], ...],
    percent: tuple[int, ...],
    attend_on: str,
    by_twins: Checkpoints,
    offload: Path,
    checker: Checker,
) -> None:
    policy = (*kept, ("kv_recall", 0.7))
    case = Case("llama-gqa", percent, policy=policy, prefill_tokens=4, device=NAME, attend_on=attend_on)
    with patch.object(talks, "TURNS", [[*turn, *turn[::-1]] for turn in talks.TURNS]):
        talks.hold_contract(case, by_twins, offload)


@pytest.mark.parametrize(("percent", "attend_on"), EACH)
def test_rows_attend_what_they_share_whole(
    percent: tuple[int, ...], attend_on: str, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    growth = (2, 1, 3, 1, 4, 2, 1)
    case = LongBehind(
        "llama-gqa", own=prefixes.OWN[:7], growth=growth, policy=HALF, percent=percent, attend_on=attend_on, device=NAME
    )
    prefixes.hold_contract(case, by_twins, offload)


@pytest.mark.parametrize("case", [USUAL, BY_PART, replace(COMING, policy=KEEPING_SOME), replace(USUAL, kv_codec="group4")])
def test_what_is_moved_is_predicted(case: Case, by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    """The index of prompts, too, where keys are not their own and the host attends."""
    moved = assert_moved_as_predicted(case, by_twins, offload)
    whole = assert_moved_as_predicted(replace(case, policy=case.policy[:-1]), by_twins, offload)
    assert (moved["store"] > whole["store"]) == (case.kv_codec == PLAIN)


CROSSING = (
    (replace(USUAL, policy=ALIKE), *FROM_HOST[0]),
    (replace(COMING, policy=KEEPING_SOME, kv_codec="group4"), *FROM_DISK[0]),
    (replace(COMING, policy=KEEPING_SOME, kv_codec="group4"), *FROM_HOST[0]),
    (replace(USUAL, policy=ALIKE), *FROM_DISK[0]),
    *((replace(USUAL, policy=HEADS_APART, kind="gpt-oss-far"), *where) for where in (FROM_HOST[0], FROM_DISK[0])),
)


@pytest.mark.parametrize(("case", "percent", "attend_on"), first_of(spread(CROSSING), 2), ids=str)
def test_only_chosen_slots_cross_the_link(
    case: Case, percent: tuple[int, ...], attend_on: str, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    """And back to the host just what changed. Of a disk they alone are read, with the values of all heads."""
    case = replace(case, percent=percent, attend_on=attend_on)
    moved = assert_moved_as_predicted(case, by_twins, offload)
    of_all = tuple(one for one in case.policy if not one[0].startswith("kv_recall"))
    whole = assert_moved_as_predicted(replace(case, policy=of_all), by_twins, offload)
    assert 0 < moved["load"] < whole["load"] and 0 < moved["store"] <= whole["store"]
    if percent == FROM_DISK[0][0]:
        assert 0 < moved["read"] < whole["read"]


@pytest.mark.parametrize(("percent", "attend_on"), (WHERE[1], FROM_HOST[0], FROM_DISK[0]))
def test_the_host_waits_at_the_heads_alone(
    percent: tuple[int, ...], attend_on: str, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    """Not to rank slots, so that steps may be launched ahead. Of a disk the lane that reads waits for their numbers."""
    case = replace(USUAL, percent=percent, attend_on=attend_on)
    with case.open(by_twins, offload) as llm:
        generate_with(llm, case)
        head = len(llm.spec.layers) - 1
    works_with_kv = "COMPUTE", "CHOOSE", "LOAD_KV", "STORE_KV"
    waited = {
        task
        for (task, *_) in checker.waited
        if task.startswith(tuple(f"{op} {step}." for op in works_with_kv for step in (1, 2)))
    }
    assert waited == {f"COMPUTE {step}.{head}.{batch}" for step in (1, 2) for batch in (0, 1)}


@pytest.mark.parametrize(
    "case",
    [
        replace(USUAL, policy=KEEPING_SOME),
        replace(USUAL, kind="opt", percent=(0, 50, 100, 0, 100, 0), kv_codec="group4"),
        slow(replace(USUAL, kind="gpt-oss-far", policy=HEADS_APART)),
    ],
    ids=str,
)
def test_steps_that_choose_are_replayed_where_all_stays_on_the_device(
    case: Case, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    """Without Python, as a GPU does it: another choice in each step."""
    percent = (100, 0, 100, 0, 100, 0) if case.percent == USUAL.percent else case.percent
    case = replace(case, percent=percent, attend_on=DEVICE, gen_len=7)
    with case.open(by_twins, offload) as llm:
        compare(case, by_twins, *generate_with(llm, case))
        assert llm.stats is not None and llm.stats.last_block.replayed > 0


def launches(work: Callable[[], object]) -> int:
    before = sum(current().launched.values())
    work()
    return sum(current().launched.values()) - before


def test_launches_of_a_choice(checker: Checker) -> None:
    """Ranks are made for all rows at once, beside kernels in Triton; without these a row takes many."""
    q, keys, *numbers = drawn((3, 2, 2, 90, 64), torch.float32)
    q, held, counts, codes, worth = (one.to(NAME) for one in (q, *numbers, index_of(keys).data, torch.rand(3, 2, 90)))

    def of_rows(rows: int) -> int:
        index = KVSlots(codes[:rows], INDEX)
        return launches(lambda: choose_slots_twin(q[:rows], index, held[:rows], counts[:rows], 40, ALWAYS))

    assert launches(lambda: best_of(worth, held, counts, 40, ALWAYS, together=False)) == LAUNCHES_OF_RANKS
    assert of_rows(3) - of_rows(2) == LAUNCHES_OF_A_ROW


def test_launches_of_what_is_brought_without_a_kernel(checker: Checker) -> None:
    home, image = (torch.zeros(2, 3, 2, 90, 64).to(NAME) for _ in range(2))
    chosen, counts, newest = torch.arange(40).expand(3, 2, 40).to(NAME), *torch.tensor([[30] * 3, [20] * 3]).to(NAME)

    def of_rows(rows: int) -> int:
        missing = Missing(counts[:rows], newest[:rows])
        return launches(lambda: bring_slots(home, image, chosen[:rows], RowsOfBoth(), missing))

    assert of_rows(3) - of_rows(2) == LAUNCHES_OF_WHAT_IS_BROUGHT


# -- faults that these tests find ------------------------------------------------------------------------------------------


@contextmanager
def an_index_stays_on_the_device() -> Iterator[None]:
    with patch.object(SlotNotes, "tensors", property(lambda notes: () if notes.scores is None else notes.scores.tensors)):
        yield


@contextmanager
def notes_of_parts_lie_in_one_place() -> Iterator[None]:
    with patch.object(PromptPlaces, "start_of_notes", lambda *_: 0):
        yield


@contextmanager
def rows_leave_their_index_behind() -> Iterator[None]:
    with patch.object(KeyIndex, "copy_row", lambda *_: None):
        yield


@contextmanager
def rows_are_looked_for_where_they_are_now() -> Iterator[None]:
    with patch.object(PlacesOnDevice, "of", lambda *_: None):
        yield


@contextmanager
def a_chosen_slot_stays_behind() -> Iterator[None]:
    """The first is not brought, and what an earlier visit had there is read."""
    brought = kv_rows.bring_slots

    def all_but_one(source: Tensor, target: Tensor, slots: Tensor, rows: RowsOfBoth, missing: Missing | None = None) -> None:
        brought(source, target, slots if missing is None else slots[..., 1:], rows, missing)

    with patch.object(kv_rows, "bring_slots", all_but_one):
        yield


@contextmanager
def what_changed_stays_on_the_device() -> Iterator[None]:
    brought = kv_rows.bring_slots

    def not_home(source: Tensor, target: Tensor, slots: Tensor, rows: RowsOfBoth, missing: Missing | None = None) -> None:
        if missing is not None:
            brought(source, target, slots, rows, missing)

    with patch.object(kv_rows, "bring_slots", not_home):
        yield


@contextmanager
def rows_lose_their_places() -> Iterator[None]:
    with patch.object(RowPlaces, "keep_rows", lambda *_: None):
        yield


GROWN = replace(USUAL, gen_len=24)  # until new tokens are no more among the newest
OFF_DISK = replace(USUAL, percent=FROM_DISK[0][0], attend_on=DEVICE)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (an_index_stays_on_the_device, USUAL),
        (index_one_token_behind, GROWN),
        slow(index_one_token_behind, replace(GROWN, percent=WHERE[1][0])),
        (notes_of_parts_lie_in_one_place, BY_PART),
        (a_chosen_slot_stays_behind, replace(USUAL, percent=FROM_HOST[0][0], attend_on=DEVICE)),
        (what_changed_stays_on_the_device, replace(USUAL, percent=FROM_HOST[0][0], attend_on=DEVICE)),
        (without_needs(Op.LOAD_KV, Op.CHOOSE), replace(USUAL, percent=FROM_HOST[0][0], attend_on=DEVICE)),
        (without_needs(Op.COMPUTE, Op.LOAD_KV), replace(USUAL, percent=FROM_HOST[0][0], attend_on=DEVICE)),
        (without_needs(Op.CHOOSE, Op.STORE_KV), replace(USUAL, percent=FROM_HOST[0][0], attend_on=DEVICE)),
        (a_chosen_slot_stays_behind, OFF_DISK),
        (what_changed_stays_on_the_device, OFF_DISK),
        (newest_tokens_are_not_written, OFF_DISK),
        slow(index_one_token_behind, replace(OFF_DISK, gen_len=24)),
        (without_needs(Op.READ_KV, Op.CHOOSE), OFF_DISK),
        (never_finished(Op.READ_KV), OFF_DISK),
        (without_needs(Op.LOAD_KV, Op.READ_KV), OFF_DISK),
        (without_needs(Op.COMPUTE, Op.LOAD_KV), OFF_DISK),
        (without_needs(Op.WRITE_KV, Op.STORE_KV), OFF_DISK),
        (never_finished(Op.WRITE_KV), replace(OFF_DISK, policy=KEEPING_SOME)),
    ],
)
def test_what_goes_wrong_is_found(fault: Callable[[], Any], case: Case, by_twins: Checkpoints, offload: Path) -> None:
    """By the tokens, or because it races."""
    spec = by_twins.spec(case)
    with used(TORCH):
        for rows, beside in zip(case.batches(), case.beside(spec), strict=True):
            by_twins.resident_logits(case, rows, beside)  # before the fault is there
    with used(TORCH), checked() as checker:
        with case.open(by_twins, offload) as llm, fault():
            made = generate_with(llm, case)
        try:
            compare(case, by_twins, *made)
        except AssertionError:
            return
    assert checker.faults


@pytest.mark.parametrize(
    ("fault", "percent", "attend_on"),
    [
        *first_of(spread((rows_leave_their_index_behind, *where) for where in WHERE[:2]), 1),
        (rows_are_looked_for_where_they_are_now, *FROM_HOST[0]),
        (rows_lose_their_places, *FROM_DISK[0]),
    ],
)
def test_rows_that_leave_something_behind_are_found(
    fault: Callable[[], Any], percent: tuple[int, ...], attend_on: str, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    case = replace(COMING, percent=percent, attend_on=attend_on, lengths=(45, 30, 62, 25, 38, 51, 28, 33))
    growth = (4, 1, 6, 3, 5, 2, 3, 1)
    for row, grown in enumerate(growth):  # before the fault is there
        by_twins.resident_logits(replace(case, gen_len=grown), (row,))
    with case.open(by_twins, offload) as llm, fault():
        completions = stream.streamed(llm, stream.requests_of(case, growth))
    with pytest.raises(AssertionError):
        stream.compare_each_alone(case, growth, by_twins, completions)


def test_the_host_chooses_nothing_before_it_attends(by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    """Only what is elsewhere needs to be known before."""
    with USUAL.open(by_twins, offload) as llm:
        generate_with(llm, USUAL)
        assert llm.stats is not None
        ops = {span.key.op for span in llm.stats.last_block.trace.spans}
    assert Op.ATTEND in ops and not {Op.CHOOSE, Op.LOAD_KV, Op.READ_KV} & ops
