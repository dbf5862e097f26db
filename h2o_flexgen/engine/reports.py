"""What is reported while an engine works: the stage that it is in, and after each pass over the weights how far a job is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.drafts import NONE_DRAFTED, Drafted


class Stage(str, Enum):
    CONVERTING = "converting weights"  # .bin files, once
    PACKING = "packing weights"  # into fewer bits, once
    WRITING = "writing random weights"  # those that are to be read from disk
    MENDING = "making a damaged copy of weights again"  # reported once, before it is converted or packed again
    RENEWING = "making a copy of weights of an older layout again"  # reported once, before they are packed again
    CALIBRATING = "measuring what each KV head needs"  # once for a model, if a plan evicts and nothing is known
    LOADING = "loading weights"
    GENERATING = "generating"

    def __str__(self) -> str:
        return self.value


OnStage = Callable[[Stage, int, int], None]  # bytes done and bytes in all: both 0 where they are not counted


class Stages:
    """Reports the stages to the listener of the present call, or else to the permanent listener."""

    def __init__(self, always: OnStage | None) -> None:
        self.always = self._now = always

    @property
    def is_heard(self) -> bool:
        return self._now is not None

    @contextmanager
    def heard_by(self, on_stage: OnStage | None) -> Iterator[None]:
        self._now = on_stage or self.always
        try:
            yield
        finally:
            self._now = self.always

    def __call__(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        if self._now is not None:
            self._now(stage, done_bytes, total_bytes)

    def of(self, stage: Stage, behind_it: Stage | None = None) -> Callable[[int, int], None]:
        """A function that reports how far a stage is, and the stage that follows when it is over."""

        def tell(done_bytes: int, total_bytes: int) -> None:
            self(stage, done_bytes, total_bytes)
            if behind_it is not None and done_bytes == total_bytes:
                self(behind_it)

        return tell


def how_far(done_bytes: int, total_bytes: int) -> str:
    return f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}" if total_bytes else ""


MADE_AGAIN = {Stage.MENDING: "was damaged", Stage.RENEWING: "had an older layout"}  # why copies are made again


def made_again(stage: Stage, place: Path) -> str:
    """A line for people that should stay on the screen, since other stages soon follow."""
    return f"a copy of the weights in {place} {MADE_AGAIN[stage]}: it is made again from the checkpoint"


class Pass(NamedTuple):
    """One pass of a block over the weights."""

    seats: int
    alive: int  # rows that are left
    prompt_tokens: int  # tokens of prompts that were read
    generated_tokens: int
    computed_tokens: int  # with pads
    seconds: float
    busy_seconds: Mapping[str, float]  # by lane, since the block began
    spared_tokens: int = 0  # of prompts, not computed as they were already computed for other rows
    drafted: Drafted = NONE_DRAFTED


OnPass = Callable[[Pass], None]


@dataclass(frozen=True)
class Tick:
    """How far a job is after one pass over the weights. All counts are from its beginning."""

    number: int
    requests_done: int
    alive: int  # rows that have a seat now
    seats: int
    prompt_tokens: int  # of prompts that were read, without pads
    generated_tokens: int
    computed_tokens: int  # with pads
    prompt_seconds: float  # of passes that read prompts
    decode_seconds: float  # of all others
    busy_seconds: Mapping[str, float]  # by lane
    spared_tokens: int = 0  # of prompts, not computed as they had been computed for other rows
    proposed_tokens: int = 0  # that were guessed
    accepted_tokens: int = 0  # those of them that were right

    def behind(self, before: Tick) -> Tick:
        """Counts from the beginning of an earlier run, of which `before` was the last, and seats as they are now."""
        return replace(summed([before, self]), alive=self.alive, seats=self.seats)


OnTick = Callable[[Tick], None]
NO_TICK = Tick(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, {})
SUMMED = (
    "number", "requests_done", "alive", "prompt_tokens", "spared_tokens", "generated_tokens", "computed_tokens",
    "prompt_seconds", "decode_seconds", "proposed_tokens", "accepted_tokens",
)  # fmt: skip


def summed(ticks: Collection[Tick]) -> Tick:
    """How far all parts of a job are together. A part that is done has no seats."""
    counts = {name: sum(getattr(tick, name) for tick in ticks) for name in SUMMED}
    busy = Counter[str]()
    for tick in ticks:
        busy.update(tick.busy_seconds)
    return Tick(**counts, seats=sum(tick.seats for tick in ticks if tick.alive), busy_seconds=busy)


@dataclass
class Ticker:
    """Counts the passes of a job, through all its blocks."""

    on_tick: OnTick | None
    requests_done: int = 0
    passes: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: Counter[bool] = field(default_factory=Counter)  # of passes that read prompts, and of the others
    busy_before: Counter[str] = field(default_factory=Counter)  # in blocks that have ended
    busy: Mapping[str, float] = field(default_factory=dict)  # in the block that runs

    def begin_block(self) -> None:
        self.busy_before.update(self.busy)
        self.busy = {}

    def __call__(self, one: Pass) -> None:
        self.passes += 1
        self.tokens.update(
            prompt=one.prompt_tokens,
            spared=one.spared_tokens,
            generated=one.generated_tokens,
            computed=one.computed_tokens,
            proposed=one.drafted.proposed,
            accepted=one.drafted.accepted,
        )
        self.seconds[one.prompt_tokens > 0] += one.seconds  # type: ignore[assignment]
        self.busy = one.busy_seconds
        if self.on_tick is not None:
            self.on_tick(self._tick(one))

    def _tick(self, one: Pass) -> Tick:
        return Tick(
            number=self.passes,
            requests_done=self.requests_done,
            alive=one.alive,
            seats=one.seats,
            prompt_tokens=self.tokens["prompt"],
            spared_tokens=self.tokens["spared"],
            generated_tokens=self.tokens["generated"],
            computed_tokens=self.tokens["computed"],
            prompt_seconds=self.seconds[True],
            decode_seconds=self.seconds[False],
            proposed_tokens=self.tokens["proposed"],
            accepted_tokens=self.tokens["accepted"],
            busy_seconds=dict(self.busy_before + Counter(self.busy)),
        )
