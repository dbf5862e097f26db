"""Requests of many threads in blocks: every one of them gets what the model says of it alone, and errors are their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.engine.arrivals import Closed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.tick import Tick
from h2o_flexgen.gathering import THREAD, Gathering, Lengths, Turns
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.output import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt
from tests.contract import Case, Checkpoints
from tests.patience import PATIENCE_SECONDS
from tests.tiny import POSITIONS

LENGTHS = (9, 1, 5, 3, 12, 2, 7, 4)
CASE = Case("llama-gqa", lengths=LENGTHS, gpu_batch_size=4, num_gpu_batches=1)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert THREAD not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def llm(checkpoints: Checkpoints, offload: Path) -> Iterator[LLM]:
    with CASE.open(checkpoints, offload) as opened:
        yield opened


def asked(gathering: Gathering, prompt: Any, tokens: int = 4, **params: Any) -> Future[Completion]:
    return gathering.ask(gathering.read(list(prompt), SamplingParams(max_tokens=tokens, **params)))


def test_threads_get_what_the_model_says_alone_and_share_passes(llm: LLM) -> None:
    wanted = [llm.generate([prompt], SamplingParams(max_tokens=6))[0].token_ids for prompt in CASE.prompts]
    ticks = list[Tick]()
    with Gathering(llm, seconds=60, on_tick=ticks.append) as gathering, ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(lambda prompt: asked(gathering, prompt, 6), CASE.prompts))
    assert [future.result().token_ids for future in futures] == wanted
    assert ticks[0].alive == 4 and len(ticks) < 8 * 6, "they were computed one by one"


def test_nothing_is_computed_before_somebody_asks(llm: LLM) -> None:
    with Gathering(llm) as gathering:
        assert gathering.load == (0, 0, 4) and llm.weight_files == () and llm._engine is None


def test_who_needs_more_waits_for_the_running_block_and_those_behind_wait_with_him(llm: LLM) -> None:
    """Seats are planned for the first, while it runs longer ones come, and a short one behind them."""
    order = list[str]()
    futures = dict[str, Future[Completion]]()

    def hear(row: RowState, token: int, text: str | None) -> None:
        if row.num_generated == 1:
            for name, prompt, tokens in (("long", range(1, 60), 9), ("short", (1, 2), 1)):
                futures[name] = asked(gathering, prompt, tokens)
                futures[name].add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]

    with Gathering(llm, seconds=0) as gathering:
        first = gathering.ask(gathering.read([1, 2, 3], SamplingParams(max_tokens=4)), hear)
        first.add_done_callback(lambda _: order.append("first"))
        assert len(first.result().token_ids) == 4
        assert len(futures["long"].result().token_ids) == 9 and len(futures["short"].result().token_ids) == 1
    assert order[0] == "first" and set(order) == {"first", "long", "short"}


@pytest.mark.parametrize(
    ("lengths", "rounded"),
    [((9, 1), (10, 1)), ((65, 33), (80, 40)), ((100, 28), (100, 28)), ((100, 20), (108, 20)), ((1, 1), (1, 1))],
)
def test_seats_are_planned_for_round_lengths_that_have_positions(lengths: tuple[int, int], rounded: tuple[int, int]) -> None:
    assert Lengths(*lengths).rounded(POSITIONS) == rounded


def test_what_the_model_cannot_do_is_refused_at_once(llm: LLM) -> None:
    with Gathering(llm) as gathering:
        for prompt, tokens, said in (
            ((), 1, "^the prompt is empty"),
            (range(1, 100), 90, "^the prompt has 99 tokens"),
            ((999,), 1, "999"),
        ):
            with pytest.raises(ValueError, match=said):
                asked(gathering, prompt, tokens)
        unread = Request(Prompt(None, tuple(range(1, 100))), SamplingParams(max_tokens=90))
        with pytest.raises(ValueError, match=r"^the prompt has 99 tokens"):
            gathering.ask(unread)
        assert len(asked(gathering, (1, 2)).result().token_ids) == 4


def test_who_does_not_fit_hears_so_and_others_are_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = llm.arrivals

    def arrivals(prompt_len: int, gen_len: int, **options: Any) -> Any:
        if prompt_len > 50:
            raise ValueError(f"{prompt_len} tokens do not fit")
        return planned(prompt_len, gen_len, **options)

    monkeypatch.setattr(llm, "arrivals", arrivals)
    with Gathering(llm, seconds=0.01) as gathering:
        too_long, short = asked(gathering, range(1, 60)), asked(gathering, (1, 2))
        with pytest.raises(ValueError, match="59 tokens do not fit"):
            too_long.result()
        assert len(short.result().token_ids) == 4


def test_an_error_of_the_engine_reaches_all_who_wait_and_the_next_are_served(llm: LLM) -> None:
    class Broken(Exception):
        pass

    def fail(tick: Tick) -> None:
        if not hits:
            hits.append(tick)
            raise Broken("the disk is gone")

    hits = list[Tick]()
    with Gathering(llm, seconds=0, on_tick=fail) as gathering:
        with gathering._changed:  # all of them are there before the first is computed
            futures = [asked(gathering, (1, 2, 3)) for _ in range(6)]
        for future in futures:
            with pytest.raises(Broken, match="the disk is gone"):
                future.result()
        assert len(asked(gathering, (1, 2, 3)).result().token_ids) == 4


def test_an_error_of_a_listener_is_its_own(llm: LLM) -> None:
    def fail(row: RowState, token: int, text: str | None) -> None:
        raise RuntimeError("nobody listens")

    with Gathering(llm, seconds=0.01) as gathering:
        bad = gathering.ask(gathering.read([1, 2], SamplingParams(max_tokens=5)), fail)
        good = asked(gathering, (1, 2), 5)
        with pytest.raises(RuntimeError, match="nobody listens"):
            bad.result()
        assert len(good.result().token_ids) == 5
    assert gathering.load == (0, 0, 4)


def test_who_cancels_frees_his_seat_and_his_place_in_the_queue(llm: LLM) -> None:
    def cancel(row: RowState, token: int, text: str | None) -> None:
        for future in (running, *queued):
            future.cancel()

    with Gathering(llm, seconds=60) as gathering:
        read = gathering.read([1, 2], SamplingParams(max_tokens=40))
        with gathering._changed:  # all of them are there before the first is computed
            running = gathering.ask(read, cancel)
            queued = [gathering.ask(read) for _ in range(6)]
        for future in (running, *queued):
            with pytest.raises(CancelledError):
                future.result()
        last = [asked(gathering, (1, 2), 3) for _ in range(4)]
        assert all(len(one.result().token_ids) == 3 for one in last) and not gathering._guests


def test_closing_lets_all_finish_and_admits_nobody(llm: LLM) -> None:
    gathering = Gathering(llm, seconds=60)
    futures = [asked(gathering, prompt) for prompt in CASE.prompts[:3]]
    gathering.close()
    assert [future.done() for future in futures] == [True] * 3
    with pytest.raises(Closed, match="no more requests are taken"):
        asked(gathering, (1, 2))
    gathering.close()


def test_models_take_turns_and_the_other_gives_its_memory_back(checkpoints: Checkpoints, offload: Path) -> None:
    turns = Turns()
    opened = CASE.open(checkpoints, offload / "one"), CASE.open(checkpoints, offload / "other")
    with opened[0] as one, opened[1] as other, Gathering(one, turns=turns) as first, Gathering(other, turns=turns) as second:
        texts = []
        for gathering, held, given_back in ((first, one, other), (second, other, one), (first, one, other)):
            texts.append(asked(gathering, (1, 2, 3)).result().token_ids)
            assert held._engine is not None and given_back._engine is None
    assert texts[0] == texts[1] == texts[2]


def test_where_the_only_one_who_asked_cancels_the_next_is_served(llm: LLM) -> None:
    with Gathering(llm, seconds=0.01) as gathering:
        for _ in range(3):
            asked(gathering, (1, 2)).cancel()
        assert len(asked(gathering, (1, 2, 3)).result(PATIENCE_SECONDS).token_ids) == 4


def test_who_has_a_place_in_the_queue_is_served_before_seats_are_planned_anew(checkpoints: Checkpoints, offload: Path) -> None:
    """So many come while a block runs that they would fill its empty batch: it ends with them in the queue, and a longer one
    waits behind them."""
    later = list[Future[Completion]]()

    def hear(row: RowState, token: int, text: str | None) -> None:
        if row.num_generated == 1:
            later.extend(asked(gathering, prompt, 4) for prompt in [(1, 2)] * 5 + [tuple(range(1, 60))])

    case = Case("llama-gqa", gpu_batch_size=2, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm, Gathering(llm, seconds=0) as gathering:
        first = gathering.ask(gathering.read([1, 2, 3], SamplingParams(max_tokens=4)), hear)
        assert len(first.result(PATIENCE_SECONDS).token_ids) == 4
        assert [len(future.result(PATIENCE_SECONDS).token_ids) for future in later] == [4] * 6
