"""Requests to a system and its answers: what compare.py and the process of a system exchange."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

Ready = Callable[[], None]  # called once, when everything is loaded: until then a system may be given more memory


@dataclass(frozen=True)
class Request:
    """Rows of `prompt_len` tokens each are to be continued greedily by `gen_len` tokens."""

    system: str
    checkpoint: str  # a folder with config.json and safetensors, as the Hugging Face hub has them, or shapes.json alone
    dtype: str
    device: str  # "cpu" or "cuda"
    rows: int
    prompt_len: int
    gen_len: int
    steps: int | None  # decode steps that are timed, at the KV length of the middle of the text; None: all, from the first on
    host_bytes: int | None  # what the process may hold, page cache included; None: what the machine has
    device_bytes: int | None  # of a GPU
    scratch: str  # a folder on the disk that is offloaded to; emptied afterwards
    options: Mapping[str, Any] = field(default_factory=dict)  # of the system's own

    @property
    def middle(self) -> int:
        """Tokens of a row half way through its generation."""
        return self.prompt_len + self.gen_len // 2

    @property
    def last(self) -> int:
        """Tokens of a row with KV that is held when the last token is made."""
        return self.prompt_len + self.gen_len - 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Answer:
    """The result of a run. Seconds are wall time; `prefill_seconds` end with the first token of every row."""

    versions: Mapping[str, str]  # of the packages that did the work
    placement: str  # where weights and KV were, for people
    load_seconds: float
    prefill_seconds: float
    step_seconds: tuple[float, ...]  # of decode steps
    peak_host_bytes: int  # most resident memory of the process, files that are mapped included
    read_bytes_per_step: float  # from the disk in decode, as the system counts them for the process
    notes: str = ""
    disk_busy: float | None = None  # the share of these steps in which the disk had anything to do, as the system counts it
    peak_device_bytes: int = 0  # that torch has taken of a GPU for the process
    link_bytes_per_step: float = 0.0  # that have to reach the accelerator in a decode step, where the system knows
    written_bytes_per_step: float = 0.0  # to the disk in decode, where the system knows
    wall_seconds: float = 0.0  # of the whole process

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        fields = json.loads(text)
        return cls(**{**fields, "step_seconds": tuple(fields["step_seconds"])})


class System(Protocol):
    """A system to compare."""

    loads_within_cap: bool  # else it is loaded without a cap, which comes down when it is ready: that is in its favour

    def missing(self, request: Request) -> str | None:
        """The reason, in a line, why it cannot run this here, or None. Nothing large is imported to find out."""

    def run(self, request: Request, ready: Ready) -> Answer: ...


@runtime_checkable
class Plans(Protocol):
    """A system that knows without trying how many rows fit."""

    def most_rows(self, request: Request) -> int: ...


@runtime_checkable
class Estimates(Protocol):
    """A system of which it can be said, without importing anything large, with how many rows it is likely to be best."""

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        """Numbers of rows that are expected to fit; 0: not even one."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A system that needs more than a checkpoint: what is compiled or converted once, and kept."""

    def prepare(self, request: Request) -> None:
        """Makes what is not there yet. It may take all memory and many minutes, and says on standard error what it does."""
