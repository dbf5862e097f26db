"""Requests of many threads at desks: each of them gets what the model says of it alone, and errors are its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.engine.arrivals import Arrivals, Closed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desks import THREAD, Desks, Lengths, Turns
from h2o_flexgen.text.prompts import Prompt
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.tiny import POSITIONS

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


class OnTick(ServerCounts):
    """Counts that let a test act in the thread that computes."""

    def __init__(self, hear: Callable[[Tick], object]) -> None:
        super().__init__()
        self._hear = hear

    def tick(self, tick: Tick) -> None:
        super().tick(tick)
        self._hear(tick)


def asked(desks: Desks, prompt: Sequence[int], tokens: int = 4, **params: Any) -> Future[Completion]:
    return desks.ask(Request(Prompt(None, tuple(prompt)), SamplingParams(max_tokens=tokens, **params)))


def generated(*futures: Future[Completion]) -> list[int]:
    return [len(future.result(PATIENCE_SECONDS).token_ids) for future in futures]


def test_threads_get_what_the_model_says_alone_and_share_passes(llm: LLM) -> None:
    wanted = [llm.generate([prompt], SamplingParams(max_tokens=6))[0].token_ids for prompt in CASE.prompts]
    ticks = list[Tick]()
    with Desks(llm, seconds=60, counts=OnTick(ticks.append)) as desks, ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(lambda prompt: asked(desks, prompt, 6), CASE.prompts))
    assert [future.result().token_ids for future in futures] == wanted
    assert ticks[0].alive == 4 and len(ticks) < 8 * 6, "they were computed one by one"


def test_nothing_is_computed_before_a_request_comes(llm: LLM) -> None:
    with Desks(llm) as desks:
        assert desks._thread is None and llm.loaded.weight_files == () and llm.loaded._engine is None


def test_a_request_that_needs_more_waits_for_the_desk_and_those_behind_it_wait_too(llm: LLM) -> None:
    """Seats are planned for the first, while it runs a longer one comes, and a short one behind it."""
    order, futures = list[str](), dict[str, Future[Completion]]()

    def come(tick: Tick) -> None:
        if not futures:
            for name, prompt, tokens in (("long", range(1, 60), 9), ("short", (1, 2), 1)):
                futures[name] = asked(desks, prompt, tokens)
                futures[name].add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]

    with Desks(llm, seconds=0, counts=OnTick(come)) as desks:
        first = asked(desks, [1, 2, 3])
        first.add_done_callback(lambda _: order.append("first"))
        assert generated(first) == [4]
        assert generated(futures["long"], futures["short"]) == [9, 1]
    assert order[0] == "first" and set(order) == {"first", "long", "short"}


@pytest.mark.parametrize(
    ("lengths", "rounded"),
    [((9, 1), (10, 1)), ((65, 33), (80, 40)), ((100, 28), (100, 28)), ((100, 20), (108, 20)), ((1, 1), (1, 1))],
)
def test_seats_are_planned_for_round_lengths_that_have_positions(lengths: tuple[int, int], rounded: tuple[int, int]) -> None:
    assert Lengths(*lengths).rounded(POSITIONS) == rounded


def test_what_the_model_cannot_do_is_refused_at_once(llm: LLM) -> None:
    with Desks(llm) as desks:
        with pytest.raises(ValueError, match=r"^prompt 0 has 99 tokens"):
            asked(desks, range(1, 100), 90)
        assert generated(asked(desks, (1, 2))) == [4]


def failing_arrivals(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Has no seats planned for prompts of more than 50 tokens."""
    planned = llm.arrivals

    def arrivals(prompt_len: int, gen_len: int, **options: Any) -> Any:
        if prompt_len > 50:
            raise error(f"{prompt_len} tokens do not fit")
        return planned(prompt_len, gen_len, **options)

    monkeypatch.setattr(llm, "arrivals", arrivals)


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_that_does_not_fit_is_told_so_and_others_are_served(
    order: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_arrivals(llm, monkeypatch, ValueError)
    with Desks(llm, seconds=0) as desks:
        with desks._changed:  # both are there before seats are planned
            too_long, short = [asked(desks, prompt) for prompt in (range(1, 60), (1, 2))[::order]][::order]
        with pytest.raises(ValueError, match="59 tokens do not fit"):
            too_long.result(PATIENCE_SECONDS)
        assert generated(short) == [4]


def test_where_planning_fails_all_that_wait_are_told_and_the_next_are_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_arrivals(llm, monkeypatch, OSError)
    with Desks(llm, seconds=0) as desks:
        with desks._changed:
            futures = [asked(desks, prompt) for prompt in (range(1, 60), (1, 2))]
        for future in futures:
            with pytest.raises(OSError, match="tokens do not fit"):
                future.result(PATIENCE_SECONDS)
        assert generated(asked(desks, (1, 2))) == [4]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_the_engine_reaches_those_with_a_seat_and_the_next_are_served(
    llm: LLM, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a seat are served by the same desk, unless the error is none that a desk survives. For the next
    requests seats are planned anew."""

    def fail(tick: Tick) -> None:
        if not hits:
            hits.append(tick)
            raise kind("the disk is gone")

    def arrivals(*lengths: int, **options: Any) -> Arrivals:
        planned.append(lengths)
        return plan_seats(*lengths, **options)

    hits, planned, plan_seats = list[Tick](), list[tuple[int, ...]](), llm.arrivals
    monkeypatch.setattr(llm, "arrivals", arrivals)
    with Desks(llm, seconds=0, counts=OnTick(fail)) as desks:
        with desks._changed:  # all of them are there before the first is computed
            futures = [asked(desks, (1, 2, 3)) for _ in range(6)]
        lost = 4 if issubclass(kind, Exception) else 6
        for future in futures[:lost]:
            with pytest.raises(kind, match="the disk is gone"):
                future.result(PATIENCE_SECONDS)
        assert generated(*futures[lost:], asked(desks, (1,), 1)) == [4] * (6 - lost) + [1]
    assert len(planned) == 2


def test_a_new_desk_does_not_wait_for_others_a_second_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, waited = Arrivals.gather, list[float]()

    def told_how_long(arrivals: Arrivals, seconds: float) -> bool:
        waited.append(seconds)
        return gather(arrivals, 0.0)

    monkeypatch.setattr(Arrivals, "gather", told_how_long)
    with Desks(llm, seconds=60) as desks:
        futures = [asked(desks, (1, 2)) for _ in range(4)]
    assert generated(*futures) == [4] * 4 and waited == [0.0, 60.0]


def test_closing_lets_all_finish_and_admits_no_more(llm: LLM) -> None:
    desks = Desks(llm, seconds=60)
    futures = [asked(desks, prompt) for prompt in CASE.prompts[:3]]
    assert not futures[0].cancel()
    desks.close()
    assert [future.done() for future in futures] == [True] * 3
    with pytest.raises(Closed, match="no more requests are taken"):
        asked(desks, (1, 2))
    desks.close()


def test_models_take_turns_and_the_other_gives_its_memory_back(checkpoints: Checkpoints, offload: Path) -> None:
    turns = Turns()
    opened = CASE.open(checkpoints, offload), CASE.open(checkpoints, offload.with_name("other"))
    with opened[0] as one, opened[1] as other, Desks(one, turns=turns) as first, Desks(other, turns=turns) as second:
        texts = []
        for desks, held, given_back in ((first, one, other), (second, other, one), (first, one, other)):
            texts.append(asked(desks, (1, 2, 3)).result(PATIENCE_SECONDS).token_ids)
            assert held.loaded._engine is not None and given_back.loaded._engine is None
    assert texts[0] == texts[1] == texts[2]


def test_a_request_with_a_place_in_the_queue_is_served_before_seats_are_planned_anew(
    checkpoints: Checkpoints, offload: Path
) -> None:
    """So many come while a block runs that they would fill its empty batch: it ends with them in the queue, and a longer one
    waits behind them."""
    later = list[Future[Completion]]()

    def come(tick: Tick) -> None:
        if not later:
            later.extend(asked(desks, prompt) for prompt in [(1, 2)] * 5 + [tuple(range(1, 60))])

    case = Case("llama-gqa", gpu_batch_size=2, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm, Desks(llm, seconds=0, counts=OnTick(come)) as desks:
        assert generated(asked(desks, [1, 2, 3])) == [4]
        assert generated(*later) == [4] * 6
