"""Conversations: whatever the plan, turn after turn they say what the plain resident loop says; and they end cleanly."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.conversation import ContextFull, Extent
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.formats.kernel_table import EXACT, INT8
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.llama import Llama
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import UNLIKE, Case, Checkpoints, distinct_prompts, recorded_logits
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.resident import resident_talk
from tests.helpers.samples import every_nth, spread
from tests.whole.test_contract import MIXES, has_code_elsewhere

STEPS, CONTEXT = 3, 100
TURNS = distinct_prompts((7, 4, 1, 11))  # more than a piece of prompts has, just as many, a single one
GREEDY = SamplingParams(max_tokens=STEPS, ignore_eos=True)
ROLLING = (("kv_policy", "h2o"), ("heavy", 5), ("recent", 3), ("positions", "rolling"))
LIVING = [policy for policy in UNLIKE if ("hh_prompt_only", True) not in policy]
CHOICES = {
    "kind": ("opt", "llama-gqa", "gpt-oss", "olmoe", "deepseek-v3"),
    "percent": MIXES,
    "buffers": (1, 2, 3),
    "sep_layer": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": LIVING,
    "prefill_tokens": (1024, 4),
    ("weight_codec", "compute"): ((PLAIN, EXACT), ("group4", EXACT), ("group4", INT8)),
    "kv_codec": (PLAIN, "group4"),
}


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"} <= before  # that one is of transformers


def hold_contract(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    """Tokens and logits of every turn, bit for bit."""
    device = "cuda" if case.device == "cuda" else "cpu"
    forms = case.weight_codec, case.compute, case.state_dtype
    model, weights = checkpoints.model(case.kind, case.stored, case.dtype, device, *forms)
    by_token = case.device != "cpu"
    how = (case.prefill_tokens, by_token, case.levels(model.spec), case.kv_codec)
    expected = resident_talk(model, weights, TURNS, STEPS, CONTEXT, *how)
    with case.open(checkpoints, offload) as llm, llm.converse(CONTEXT) as talk:
        for number, (turn, wanted) in enumerate(zip(TURNS, expected)):
            with recorded_logits() as logits:
                reply = talk.reply(turn, GREEDY)
            assert list(reply.completion.token_ids) == [int(step.argmax()) for step in wanted], f"turn {number}: {case}"
            for step in range(STEPS):
                assert torch.equal(logits[step, number].cpu(), wanted[step][0].cpu()), f"turn {number}, step {step}: {case}"


@pytest.mark.parametrize("values", on_devices(CHOICES, has_code_elsewhere, ELSEWHERE))
def test_turns_equal_the_resident_loop_for_every_pair_of_choices(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(**values), checkpoints, offload)


@pytest.mark.parametrize("values", on_devices({"kind": ("llama-gqa", "neox-parallel"), "percent": MIXES[:3]}))
def test_rolling_turns_too(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold_contract(Case(policy=ROLLING, prefill_tokens=6, **values), checkpoints, offload)


CHUNKS = [("opt", 1), ("opt", 512), ("llama-gqa", 3), ("llama-gqa", 1), ("neox-parallel", 512), ("qwen3", 3)]


@pytest.mark.parametrize(("kind", "chunk"), every_nth(spread(CHUNKS), 2))
def test_with_the_full_cache_a_turn_says_what_the_whole_text_says(
    kind: str, chunk: int, checkpoints: Checkpoints, offload: Path
) -> None:
    """The words of transformers, which is handed the text from its beginning."""
    text, case = list[int](), Case(kind, MIXES[3], prefill_tokens=chunk)
    with case.open(checkpoints, offload) as llm, llm.converse() as talk:
        for turn in TURNS:
            text += turn
            tokens, _ = checkpoints.continued(kind, text, STEPS)
            assert list(talk.reply(turn, GREEDY).completion.token_ids) == tokens
            text += tokens
            assert (talk.seen, talk.held) == (len(text) - 1, len(text) - 1)


def test_a_turn_may_be_read_in_pieces_or_at_once(checkpoints: Checkpoints, offload: Path) -> None:
    said = []
    for chunk in (1, 2, 100):
        with Case("llama-gqa", prefill_tokens=chunk).open(checkpoints, offload) as llm, llm.converse() as talk:
            said.append([talk.reply(turn, GREEDY).completion.token_ids for turn in TURNS])
    assert said[0] == said[1] == said[2]


def test_texts_are_said_and_come_in_pieces(checkpoints: Checkpoints, offload: Path) -> None:
    pieces: list[str] = []
    with Case("llama-gqa").open(checkpoints, offload) as llm, llm.converse() as talk:
        replies = [talk.reply(text, GREEDY, pieces.append) for text in ("ab", "c")]
        assert talk.seen == 2 + STEPS + 1 + STEPS - 1 and talk.turns == 2
    assert "".join(pieces) == "".join(reply.completion.text for reply in replies) and len(pieces) > 2
    assert replies[1].completion.index == 1 and replies[1].tokens_read == 2


def test_a_seed_repeats_a_conversation_and_turns_draw_differently(checkpoints: Checkpoints, offload: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=3.0, ignore_eos=True)
    said = []
    for _ in range(2):
        with Case("llama-gqa").open(checkpoints, offload) as llm, llm.converse(seed=7) as talk:
            first = talk.reply([5], params).completion.token_ids
            talk.reset()
            said += [first, talk.reply([5], params).completion.token_ids]
    assert said[0] == said[2] and said[1] == said[3] and said[0] != said[1]


@pytest.mark.parametrize("percent", [MIXES[0], MIXES[2]])
def test_a_reset_conversation_begins_anew(percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", percent, policy=ROLLING, prefill_tokens=4)
    with case.open(checkpoints, offload) as llm, llm.converse() as talk:
        first = [talk.reply(turn, GREEDY).completion.token_ids for turn in TURNS]
        talk.reset()
        assert (talk.seen, talk.held, talk.kv_bytes) == (0, 0, 0)
        assert [talk.reply(turn, GREEDY).completion.token_ids for turn in TURNS] == first


# -- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", on_devices({"policy": ((), ROLLING), "percent": (MIXES[0], MIXES[2], MIXES[3])}, share=ELSEWHERE)
)
def test_a_reply_that_is_stopped_leaves_a_text_that_goes_on(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """As if two tokens were all that had been asked for: what was under way is stored, what was ahead is not."""
    said, case = [], Case("llama-gqa", prefill_tokens=4, **values)
    for limit in (2, 30):
        with case.open(checkpoints, offload) as llm, llm.converse(60) as talk:
            heard: list[str] = []
            params = replace(GREEDY, max_tokens=limit)
            stopped = talk.reply(TURNS[0], params, heard.append, (lambda heard=heard: len(heard) >= 1) if limit == 30 else None)
            assert stopped.completion.finish_reason == ("interrupted" if limit == 30 else "length")
            said.append([stopped.completion.token_ids, *(talk.reply(turn, GREEDY).completion.token_ids for turn in TURNS[1:])])
    assert len(said[0][0]) == 2 and said[0] == said[1]


def test_a_stop_token_ends_a_reply_and_the_text_goes_on_behind_it(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("llama-gqa").open(checkpoints, offload) as llm:
        with llm.converse() as talk:
            tokens = talk.reply(TURNS[0], GREEDY).completion.token_ids
        with llm.converse() as talk:
            params = replace(GREEDY, stop_token_ids=(tokens[2],))
            reply = talk.reply(TURNS[0], params).completion
            assert reply.finish_reason == "stop" and reply.token_ids == tokens[: tokens.index(tokens[2]) + 1]
            text = [*TURNS[0], *reply.token_ids, *TURNS[1]]
            after = talk.reply(TURNS[1], GREEDY).completion.token_ids
        assert after == llm.generate([text], GREEDY)[0].token_ids


def test_a_full_conversation_says_so_and_can_be_reset(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("llama-gqa").open(checkpoints, offload) as llm, llm.converse(context=20) as talk:
        talk.reply(list(range(12)), GREEDY)  # 14 of 20
        reply = talk.reply([1, 2], replace(GREEDY, max_tokens=100))  # 1 + 2 more are read, and four generated behind them
        assert reply.fills_context and len(reply.completion.token_ids) == 4
        assert talk.seen == 20
        with pytest.raises(
            ContextFull,
            match=r"it has 20 tokens and 2 are new, but the limit is 20 tokens, the context .*; reset it, or keep less",
        ):
            talk.reply([3], GREEDY)
        talk.reset()
        assert not talk.reply([3], GREEDY).fills_context


def test_true_positions_end_where_the_models_do_also_when_little_is_kept(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", policy=(("kv_policy", "h2o"), ("heavy", 4), ("recent", 4)))
    with case.open(checkpoints, offload) as llm, llm.converse() as talk:
        talk.reply(list(range(100)), replace(GREEDY, max_tokens=1000))
        assert (talk.seen, talk.held) == (128, 8)
        with pytest.raises(ContextFull, match=r"the limit is the model\'s 128 positions; reset it$"):
            talk.reply([3], GREEDY)


def test_a_rolling_conversation_goes_on_beyond_the_models_length_in_the_same_memory(
    checkpoints: Checkpoints, offload: Path
) -> None:
    case, memory = Case("llama-gqa", policy=ROLLING), []
    with case.open(checkpoints, offload) as llm, llm.converse() as talk:
        for turn in range(30):
            reply = talk.reply([turn, *TURNS[turn % len(TURNS)]], replace(GREEDY, max_tokens=20, logprobs=0))
            assert all(step.chosen.logprob <= 0 for step in reply.completion.logprobs or ())  # NaN would not be
            memory.append(psutil.Process().memory_info().rss)
        assert talk.seen > 5 * llm.spec.max_positions and talk.held == 8
        assert len(talk._tail) <= llm.spec.max_positions
    assert max(memory[10:]) <= 1.02 * memory[10]


# -- what goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({"kv_policy": "h2o", "hh_prompt_only": True}, {}, "hh_prompt_only keeps all that is generated"),
        ({}, {"context": 129}, r"context is 129, but .* has 128 positions; give 1 to 128"),
        ({}, {"context": 0}, "context is 0"),
        ({"kv_policy": "h2o", "heavy": 128, "positions": "rolling"}, {}, "budget of 128 slots leaves no position"),
        ({"kv_policy": "h2o", "kv_budget": 0.1}, {"context": 9}, "has a budget of 0 slots for a text of 9 tokens"),
        ({"cpu_mem": "200MB"}, {}, r"plan needs .* the limit is"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused_before_anything_is_loaded(
    options: dict[str, Any], asked: dict[str, Any], message: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with Case("llama-gqa").open(checkpoints, offload, **options) as llm:
        with pytest.raises(ValueError, match=message):
            llm.converse(**asked)
        assert llm.loaded._engine is None


@pytest.mark.parametrize(
    ("turn", "message"), [([], "turn 0 is empty"), ("", "turn 0 is empty"), ([113], r"token id 113; .* knows 0 to 112")]
)
def test_a_turn_that_cannot_be_said_leaves_the_conversation_as_it_was(
    turn: Any, message: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with Case("llama-gqa").open(checkpoints, offload) as llm, llm.converse() as talk:
        with pytest.raises(ValueError, match=message):
            talk.reply(turn)
        assert talk.seen == 0
        talk.reply([1], GREEDY)


def test_one_thing_at_a_time(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("llama-gqa").open(checkpoints, offload) as llm:
        before = llm.generate([[1, 2]], GREEDY)
        with llm.converse() as talk:
            for other in (lambda: llm.generate([[1, 2]], GREEDY), llm.converse):
                with pytest.raises(ValueError, match=r"a conversation of .* is open; close it first"):
                    other()
        with pytest.raises(ValueError, match="this conversation is closed"):
            talk.reply([1])
        assert llm.generate([[1, 2]], GREEDY) == before
        llm.converse()  # closing the model closes it


def test_a_reply_that_broke_has_to_be_reset(checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Case("llama-gqa", MIXES[2]).open(checkpoints, offload) as llm, llm.converse() as talk:
        first = talk.reply(TURNS[0], GREEDY).completion.token_ids
        with monkeypatch.context() as patched:
            patched.setattr(Llama, "mlp", broken)
            with pytest.raises(TaskFailed, match="the layer is broken"):
                talk.reply(TURNS[1], GREEDY)
        with pytest.raises(ValueError, match="reset the conversation"):
            talk.reply(TURNS[1], GREEDY)
        talk.reset()
        assert talk.reply(TURNS[0], GREEDY).completion.token_ids == first


def broken(*_: object) -> None:
    raise ValueError("the layer is broken")


@pytest.mark.parametrize("policy", [(), ROLLING])
def test_what_lies_on_the_tiers_is_what_was_promised_and_goes_back(
    policy: tuple[tuple[str, Any], ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with Case("llama-gqa", MIXES[3], device=any_device, policy=policy, prefill_tokens=6).open(checkpoints, offload) as llm:
        promised = WorkloadPlan(llm.spec, llm.plan, Workload((6,), 1, CONTEXT), llm.loaded.site).footprint
        with llm.converse(CONTEXT) as talk:
            held = [on_tiers(llm) for _ in range(5) if talk.reply(TURNS[0], GREEDY)]
        assert len(set(held)) == 1
        for tier, peak in zip(("host", "disk"), held[0][:2]):
            arenas = [nbytes for name, nbytes in promised.parts[tier].items() if name not in ("working space", "disk buffers")]
            assert 0 < peak <= sum(arenas), promised.parts[tier]
        with llm.converse(CONTEXT) as talk:  # what the first one held can be had again
            talk.reply(TURNS[0], GREEDY)
            assert on_tiers(llm) == held[0]


def on_tiers(llm: LLM) -> tuple[int, int, int]:
    assert llm.loaded._memories is not None
    disk, arenas = llm.loaded._memories.disk, (llm.loaded._memories.host, llm.loaded._memories.weights)
    return sum(tier.meter.peak_bytes for tier in arenas), disk.meter.peak_bytes, os.fstat(disk._descriptor or 0).st_size


def test_what_a_closed_conversation_held_is_let_go_of_before_the_next_workload(checkpoints: Checkpoints, offload: Path) -> None:
    """Though the model stays, and the conversation as well."""
    with Case("llama-gqa", MIXES[3], policy=ROLLING).open(checkpoints, offload) as llm:
        with llm.converse(CONTEXT) as talk:
            talk.reply(TURNS[0], GREEDY)
            (store,) = talk._stores.kv._stores
            held = [weakref.ref(tensor) for tensor in store._in_memory.values()]
            held += [weakref.ref(unit.cache) for unit in store._units.values() if unit.cache is not None]
            assert held and all(one() is not None for one in held)
        llm.generate([[1, 2, 3]], GREEDY)
        gc.collect()
        assert all(one() is None for one in held)


def test_a_conversation_is_promised_the_room_to_read_a_long_turn_behind_a_short_one(
    checkpoints: Checkpoints, offload: Path
) -> None:
    """Which is more than the first turn needs, also where all of the context may be read at once."""
    with Case("llama-gqa", MIXES[0]).open(checkpoints, offload) as llm:
        extent = Extent.of(llm.spec, llm.plan, CONTEXT)
        workloads = extent.workload, Workload((CONTEXT,), 1)
        long_behind_short, first = (workload.blocks(1, 1)[0].batches[0] for workload in workloads)
        assert extent.piece_tokens == CONTEXT
        assert (long_behind_short.before, long_behind_short.lengths) == ((1,), (CONTEXT - 1,))
        assert (first.before, first.lengths) == ((0,), (CONTEXT,))
        needs = [WorkloadPlan(llm.spec, llm.plan, workload, Site()).footprint.parts["host"] for workload in workloads]
        assert needs[0]["working space"] > needs[1]["working space"]
