"""One of several processes that do a job together: it opens the model on a device of its own, over weights in host memory that
all of them share, and does its part. One of them reads the weights; the others open the model when these are there, and so find
copies that were mended."""

from __future__ import annotations

import mmap
import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from h2o_flexgen.cli.errors import FAILED, INTERRUPTED
from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.cli.process_link import BytesTaken, Failed, Loaded, Noted, PartDone, Passing, ProcessLink
from h2o_flexgen.engine.restarted_run import RestartedRun, Shrink
from h2o_flexgen.jobs.file_job import LineReading, SentJob
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.host import SharedWeights
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import ModelRequest, OpenRequest, SiteRequest
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.prompts import Prompt

PASSING_BYTES = 16 << 20  # of a device's weights that are handed round at once


class ProcessPart(Protocol):
    """What a process does of a job."""

    def run(self, llm: LLM, link: ProcessLink) -> None: ...


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process: its device, and what it shares with the others."""

    number: int
    model: ModelRequest
    site: SiteRequest
    plan: Plan
    weights: int  # descriptor of the file of the weights in host memory
    passing: int  # of the file by which those on devices are handed round

    @property
    def reads(self) -> bool:
        return self.number == 0


@dataclass(frozen=True)
class PromptsPart:
    """Prompts of a run, with their numbers in it."""

    prompts: Sequence[Prompt | list[int]]
    numbers: Sequence[int]
    sampling: SamplingParams
    seed: int

    def run(self, llm: LLM, link: ProcessLink) -> None:
        prepared = llm.prepare(list(self.prompts), self.sampling, numbers=self.numbers)
        note = partial(_note, link)
        llm.generate(prepared, seed=self.seed, on_completion=link.say, on_stage=link.stage, on_shrink=note)
        _say_done(link, llm)


@dataclass(frozen=True)
class RequestsPart:
    """Requests of a file, which are read again here."""

    requests: SentJob
    style: str  # how chats are written down
    seed: int

    def run(self, llm: LLM, link: ProcessLink) -> None:
        maker, style = llm.row_maker, choose_style(self.style, llm.tokenizer)
        reading = LineReading(llm.tokenizer, style, maker.size, longest=maker.longest_prompt)
        left = self.requests.read_with(reading)
        heard: dict[str, Any] = {"on_stage": link.stage, "on_shrink": partial(_note, link)}
        for outcome in RestartedRun(partial(llm.generate_stream, seed=self.seed, **heard), left, link.say).outcomes():
            link.say(outcome)
        left.index.close()
        _say_done(link, llm)


def _note(link: ProcessLink, shrink: Shrink) -> None:
    link.say(Noted(str(shrink)))


def _say_done(link: ProcessLink, llm: LLM) -> None:
    link.say(PartDone(None if llm.stats is None else replace(llm.stats, blocks=())))


def compute(link: ProcessLink, place: ProcessPlace, part: ProcessPart) -> int:
    """The life of a process, and its exit status."""
    try:
        _compute(link, place, part)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent has gone, or this process was told to end
        return INTERRUPTED
    except Exception as error:
        with suppress(OSError):  # the other end has gone
            link.say(Failed(one_line(error), traceback.format_exc()))
        return FAILED
    return 0


def _compute(link: ProcessLink, place: ProcessPlace, part: ProcessPart) -> None:
    handed = HandedRound(link, place.passing)
    if not place.reads:
        link.hear(Loaded)
    with LLM.of(OpenRequest(place.model, place.site, place.plan), link.stage) as llm:
        shared = SharedWeights(place.weights, None if place.reads else handed.take)
        engine = llm.loaded.load_shared(shared, link.stage)
        if place.reads:
            link.say(Loaded(os.fstat(place.weights).st_size))
            engine.hand_round(handed.give)
        part.run(llm, link)


class HandedRound:
    """Memory by which one process gives bytes to all others, as many at a time as it holds."""

    def __init__(self, link: ProcessLink, descriptor: int) -> None:
        self._link = link
        os.ftruncate(descriptor, PASSING_BYTES)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, PASSING_BYTES, flags=mmap.MAP_SHARED), dtype=torch.uint8)

    def give(self, given: Tensor) -> None:
        for part in given.split(PASSING_BYTES):
            self._memory[: part.nbytes].copy_(part)
            self._link.say(Passing(part.nbytes))
            self._link.hear(BytesTaken)

    def take(self, out: Tensor) -> None:
        for part in out.split(PASSING_BYTES):
            assert self._link.hear(Passing).nbytes == part.nbytes, "processes have one plan"
            part.copy_(self._memory[: part.nbytes])
            self._link.say(BytesTaken())
