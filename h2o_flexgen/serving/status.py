"""Status: what a person wants to know of a server at a glance, as JSON: the model and its plan, what it does, what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from h2o_flexgen.serving.counts import Now, ServerCounts


@dataclass(frozen=True)
class Tier:
    """What lies where: one place for data."""

    name: str
    held_bytes: Mapping[str, int]  # by kind of data
    needed_bytes: int  # at most, with the room that is worked in; a checkpoint's own files on disk are only read
    budget_bytes: int | None


@dataclass(frozen=True)
class Facts:
    """What is settled before the server listens."""

    model: str  # by which clients know it
    longest_prompt: int  # tokens
    most_tokens: int  # of a completion
    words: Mapping[str, str]  # what is said of the plan, by what it is about
    tiers: tuple[Tier, ...]


def status(facts: Facts, is_ending: bool, now: Now, counts: ServerCounts) -> dict[str, object]:
    return {
        **asdict(facts),
        "is_ending": is_ending,
        "seconds": counts.seconds(),
        "now": asdict(now),
        "since_it_began": counts.totals(),
    }
