"""One of several processes that do a job together: it opens the model on a device of its own, over weights in host memory that
all of them share, and does its part. One of them reads the weights; the others open the model when these are there, and so find
copies that were mended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from h2o_flexgen.cli.common_requests import ModelRequest, SiteRequest
from h2o_flexgen.cli.errors import FAILED, INTERRUPTED
from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.cli.open_llm import make_llm
from h2o_flexgen.cli.process_link import Broken, Failed, Loaded, Noted, PartDone, PartFigures, ProcessLink
from h2o_flexgen.cli.weight_broadcast import HandedRound
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.engine.shrink import Shrink
from h2o_flexgen.engine.stats import Stats
from h2o_flexgen.jobs.file_job import Apart, FileJob, LineReading
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.shared import SharedWeights
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import NoTokenLeft
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.prompts import Prompt


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
        link.say(PartDone(_figures(llm.stats)))


@dataclass(frozen=True)
class RequestsPart:
    """Requests of a file, which are read again here."""

    requests: Apart
    style: str | None  # how chats are written down; None: there are none
    seed: int
    _ended: set[int] = field(default_factory=set, compare=False)  # numbers of requests

    def run(self, llm: LLM, link: ProcessLink) -> None:
        style = None if self.style is None else choose_style(self.style, llm.tokenizer)
        reading = LineReading(llm.tokenizer, style, RowMaker(llm.spec, llm.plan, llm.tokenizer).size)
        left = self.requests.read_with(reading)
        index = left.index
        while len(left.sizes):
            broken = self._broken_in(left, llm, link)
            if broken is None:
                break
            self._ended.add(broken.number)
            link.say(Broken(broken.number, str(broken)))
            left = left.only(lambda place: index.request_number(place) not in self._ended)
        index.close()
        link.say(PartDone(_figures(llm.stats)))

    def _broken_in(self, left: FileJob, llm: LLM, link: ProcessLink) -> NoTokenLeft | None:
        """Runs requests until all are done, or until one breaks."""
        heard: dict[str, Any] = {"on_stage": link.stage, "on_tick": link.say, "on_shrink": partial(_note, link)}
        try:
            for done in llm.generate_stream(left, seed=self.seed, **heard):
                self._ended.add(done.index)
                link.say(done)
        except TaskFailed as failed:
            if isinstance(failed.cause, NoTokenLeft):
                return failed.cause
            raise
        return None


def _note(link: ProcessLink, shrink: Shrink) -> None:
    link.say(Noted(str(shrink)))


def _figures(stats: Stats | None) -> PartFigures:
    if stats is None:
        return PartFigures(0, 0, 0, 0.0, 0.0, {}, {}, {}, ())
    counts = stats.num_prompts, stats.prompt_tokens, stats.generated_tokens
    seconds = stats.prefill_seconds, stats.decode_seconds
    shrunk = tuple((size.batch_size, size.num_batches) for size in stats.shrunk)
    return PartFigures(*counts, *seconds, stats.moved_bytes, stats.busy_seconds, dict(stats.peak_bytes), shrunk)


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
    with make_llm(place.model, place.site, place.plan, link.stage) as llm:
        shared = SharedWeights(place.weights, None if place.reads else handed.take)
        engine = llm.load_shared(shared, link.stage)
        if place.reads:
            link.say(Loaded(os.fstat(place.weights).st_size))
            engine.hand_round(handed.give)
        part.run(llm, link)
