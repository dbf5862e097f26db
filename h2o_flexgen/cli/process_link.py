"""What processes of one job and the one that looks after them say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock
from typing import TypeVar

from h2o_flexgen.engine.stage import Stage
from h2o_flexgen.engine.tick import Tick
from h2o_flexgen.sampling.completion import Completion

Message = TypeVar("Message")


@dataclass(frozen=True)
class Loaded:
    """The weights in host memory are there: said by the process that reads them, and then to the others."""

    shared_bytes: int


@dataclass(frozen=True)
class Passing:
    """So many bytes of a device's weights lie ready to be taken."""

    nbytes: int


@dataclass(frozen=True)
class BytesTaken:
    """These bytes were taken: said by each process, and then to the one that gives."""


@dataclass(frozen=True)
class AtStage:
    stage: Stage
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Broken:
    """A request that cannot be run to its end."""

    number: int
    reason: str


@dataclass(frozen=True)
class Noted:
    """A line for people."""

    line: str


@dataclass(frozen=True)
class PartFigures:
    """What a process has done, and what it took."""

    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    moved_bytes: Mapping[str, int]  # by lane
    busy_seconds: Mapping[str, float]
    peak_bytes: Mapping[str, int]  # by tier; the host's includes what is shared
    shrunk: tuple[tuple[int, int], ...]  # sizes of blocks that memory ran out in


@dataclass(frozen=True)
class PartDone:
    """A process has done its part."""

    figures: PartFigures


@dataclass(frozen=True)
class Failed:
    """Why a process cannot go on: a line for people, or of a bug where it was."""

    line: str | None
    trace: str


News = AtStage | Completion | Tick | Broken | Noted | PartDone  # what concerns the job


class ProcessLink:
    """One end of what two processes say to each other. Threads take turns in saying things."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._turn = Lock()

    def say(self, message: object) -> None:
        with self._turn:
            self.connection.send(message)

    def hear(self, kind: type[Message]) -> Message:
        message = self.connection.recv()
        assert isinstance(message, kind), message
        return message

    def stage(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        self.say(AtStage(stage, done_bytes, total_bytes))
