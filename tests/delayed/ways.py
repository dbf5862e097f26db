"""The ways in which plans are tried, and what each says in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

OK, BAD, ALARM, ERROR, TIMEOUT, CRASH = "ok", "bad", "alarm", "error", "timeout", "crash"
TOLD, UNTOLD = "told", "untold"  # of what queries find
WORDS = 200  # characters of a reason


@dataclass(frozen=True)
class Way:
    """`late`: lanes that are late; None: all of them, and an empty string: none."""

    name: str
    late: str | None = ""
    spoils: bool = False  # freed buffers
    sanitizer: str = ""
    graphs: bool = True  # where the plan has them
    environment: Mapping[str, str] = field(default_factory=dict)


A = Way("A")
B = Way("B", late=None, spoils=True)
C = Way("C", late=None, spoils=True, sanitizer=TOLD)
D = Way("D", late=None, spoils=True, sanitizer=UNTOLD)
ALL = (A, B, C, D)

BY_TORCH = {"H2O_FLEXGEN_KERNELS": "torch"}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
AGAIN = Way("A again")
A_BY_TORCH, B_BY_TORCH = Way("A by torch", environment=BY_TORCH), Way("B by torch", None, True, environment=BY_TORCH)
A_STEP_BY_STEP = Way("A without graphs", graphs=False)
B_STEP_BY_STEP = Way("B without graphs", None, True, graphs=False)
A_BLOCKING, B_BLOCKING = Way("A blocking", environment=BLOCKING), Way("B blocking", None, True, environment=BLOCKING)


def late(lane: str) -> Way:
    return Way(f"B {lane}", late=lane, spoils=True)


@dataclass(frozen=True)
class Result:
    """What became of a plan in a way."""

    plan: int
    way: str
    verdict: str
    seconds: float = 0.0
    error: str = ""  # its type
    words: str = ""
    step: int | None = None  # where logits, or tokens, first differ
    row: int | None = None
    difference: float | None = None  # the largest of any logit
    tokens_equal: bool | None = None
    pairs: tuple[str, ...] = ()  # of accesses that the sanitizer takes for a race
    bits: str = ""  # a digest of all logits

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", ())}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Result:
        known = {one.name for one in fields(cls)}
        given = {name: tuple(value) if name == "pairs" else value for name, value in document.items() if name in known}
        return cls(**given)
