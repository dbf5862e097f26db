"""Ticks: how far a job is after each pass over the weights, for code that monitors it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


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

    def behind(self, before: Tick) -> Tick:
        """Counts from the beginning of an earlier run, of which `before` was the last, and seats as they are now."""
        return replace(summed([before, self]), alive=self.alive, seats=self.seats)


OnTick = Callable[[Tick], None]
NO_TICK = Tick(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, {})
SUMMED = (
    "number", "requests_done", "alive", "prompt_tokens", "spared_tokens", "generated_tokens", "computed_tokens",
    "prompt_seconds", "decode_seconds",
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
            busy_seconds=dict(self.busy_before + Counter(self.busy)),
        )
