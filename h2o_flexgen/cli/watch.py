"""Observers of a command's work, which feed the progress line: OpeningReport while a model is opened, RunWatch while a run
computes, Crowd for other processes, EvaluationWatch while cells are measured. The LLM of a request is opened under the
first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from h2o_flexgen.checkpoints.derived import CONVERTED, PACKED
from h2o_flexgen.cli.common_requests import GPUS
from h2o_flexgen.cli.report.arithmetic import Arithmetic
from h2o_flexgen.cli.slow import SLOW, say_slow
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.environment import cache_folder, cores
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import MADE_AGAIN, Stage, how_far, made_again
from h2o_flexgen.engine.resources import crowding, get_num_threads, make_room_for_others
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.block_plan import BlockPlans
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.schedule.ops import Task
from h2o_flexgen.session.open_request import ModelRequest, OpenRequest, SiteRequest

COPIES = {  # how copies are made, and where in the cache they are kept
    Stage.CONVERTING: ("the checkpoint's .bin files are converted to safetensors", CONVERTED),
    Stage.PACKING: ("the checkpoint's matrices are packed", PACKED),
}
LOOK_SECONDS = 1.0  # between two looks at other processes: the system counts busy time in hundredths


# -- while a model is opened -------------------------------------------------------------------------------------------


def show_stage(progress: Progress, stage: Stage, done_bytes: int, total_bytes: int) -> None:
    if stage in MADE_AGAIN:
        progress.note(made_again(stage, cache_folder("")))
    progress.stage(str(stage), how_far(done_bytes, total_bytes))


class OpeningReport:
    """Reports once when a copy of the weights is made and kept, and why one is made again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._noted: set[Stage] = set()

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        if stage in COPIES and stage not in self._noted:
            self._noted.add(stage)
            self._progress.note(_copy(stage, total_bytes))
        show_stage(self._progress, stage, done_bytes, total_bytes)


def _copy(stage: Stage, total_bytes: int) -> str:
    what, kind = COPIES[stage]
    return f"{what}, once: a copy of {format_bytes(total_bytes)}, which is kept in {cache_folder(kind)}"


def say_threads(others: Others, asked: int | None, arithmetic: Arithmetic) -> bool:
    """Uses fewer threads if other processes are busy and threads would wait for each other, or tells of the crowd, in a line.
    `others` have been watched, at no cost, since the command began. Plans and profiles come before this: they are for the
    undisturbed machine. Returns whether the crowd was told of."""
    busy = others.cores()
    line = make_room_for_others(0.0 if arithmetic.shares_work else busy, asked)
    if line is not None:
        say([f"threads   {line}"])
    elif crowded := crowding(busy, get_num_threads(), cores()):
        say_slow([crowded])
        return True
    return False


# -- while a run computes ----------------------------------------------------------------------------------------------


@dataclass
class VisitTimes:
    """How long visits of one kind take."""

    visits: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.visits += 1
        self.seconds += seconds

    def expected(self, visits: int) -> float:
        """The seconds of so many more."""
        return visits * self.seconds / max(self.visits, 1)


class RunWatch:
    """Adds up the work that was done, and keeps the times that a shortened run is projected from. `blocks` are those of the
    run, as planned; after memory ran out, those that took their place. `is_crowded`: a crowd was told of before."""

    def __init__(self, blocks: BlockPlans, progress: Progress, is_crowded: bool = False) -> None:
        self.flops: Counter[int] = Counter()  # rows of a matrix product -> flops done with as many
        self.first_decode_ends: list[dict[int, float]] = [{} for _ in blocks]  # layer of the first decode step -> when it ended
        self.load_seconds = 0.0
        self.blocks = blocks
        self._block = blocks[0]
        self._progress = progress
        self._crowd = Crowd(progress.note, is_told=is_crowded)
        self._index = -1  # index of the running block
        self._visits_ended = 0  # visits of the running block when it is over, and of all before it
        self._visits_before = self._tokens_before = self._tokens = 0
        self._visits = self._visits_lost = 0  # visits of the running block so far, and of blocks that memory ran out in
        self._prompt_visits = 0  # of the running block so far
        self._reading, self._decoding = VisitTimes(), VisitTimes()  # one that reads prompts may take as long as a hundred
        self._stage_began = time.perf_counter()
        self._generation_began = self._last_ended = self._stage_began

    @property
    def total(self) -> int:
        """Visits of all blocks, including those made twice."""
        return self._visits_lost + self.blocks.visits

    @property
    def seconds(self) -> float:
        """Seconds since the weights were loaded."""
        return time.perf_counter() - self._generation_began

    def stage(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        now = time.perf_counter()
        if stage is Stage.GENERATING:
            self.load_seconds = now - self._stage_began
            self._generation_began = self._last_ended = now
        show_stage(self._progress, stage, done_bytes, total_bytes)

    def visit(self, task: Task, tokens: int) -> None:
        """Counts a finished COMPUTE; `tokens` were generated in its block so far."""
        if self._block.schedule.number(*task.visit) == 0:
            self._next_block()
        self._tokens = tokens
        self._visits = max(self._visits, self._block.schedule.number(*task.visit) + 1)  # several devices take turns
        self._count_work(task)
        self._time(task)
        self._progress.update(self._text(), self._done, self._details(task))
        self._crowd.look()

    def shrink(self, num_ended: int, rest: BlockPlans, note: str) -> None:
        """Memory ran out in a block. The smaller blocks take the place of all that were to come, and the visits of the broken
        one count as done: progress never goes backwards."""
        if self._index == num_ended:  # otherwise memory ran out before its first visit
            self._visits_lost += self._visits
            self._visits_ended = self._visits_before
            self._tokens = 0
            self._index -= 1
        self.blocks = self.blocks.followed_by(rest, num_ended)
        self._block = self.blocks[max(self._index, 0)]
        self.first_decode_ends[num_ended:] = [{} for _ in rest]
        self._progress.expect(self.total)
        self._progress.note(note)

    def _next_block(self) -> None:
        self._index += 1
        self._visits = self._prompt_visits = 0
        self._block = self.blocks[self._index]
        self._cost = Cost(self._block)
        self._visits_before = self._visits_ended
        self._visits_ended += self._block.schedule.traffic.visits
        self._tokens_before += self._tokens

    def _count_work(self, task: Task) -> None:
        self.flops[self._cost.product_rows(task)] += self._cost.flops(task)  # type: ignore[assignment]
        if task.step == 1:
            self.first_decode_ends[self._index][task.layer] = time.perf_counter()

    def _time(self, task: Task) -> None:
        now = time.perf_counter()
        (self._decoding if task.step else self._reading).add(now - self._last_ended)
        self._prompt_visits += task.step == 0
        self._last_ended = now

    @property
    def _done(self) -> int:
        return self._visits_lost + self._visits_before + self._visits

    def _details(self, task: Task) -> list[str]:
        traffic = self._block.schedule.traffic
        block = [f"block {self._index + 1}/{len(self.blocks)}"] if len(self.blocks) > 1 else []
        places = (
            ("step", task.step, traffic.steps),
            ("layer", task.layer, traffic.layers),
            ("batch", task.batch, traffic.batches),
        )
        layer = self._block.spec.layer_names[task.layer]
        named = {"layer": f" ({layer.title})"} if layer.is_of_experts else {}  # of other layers the number is enough
        return [*block, *(f"{name} {place + 1}/{total}{named.get(name, '')}" for name, place, total in places)]

    def _text(self) -> str:
        """The rate and the time left, once that can be told: while the first prompts are read, it cannot."""
        traffic, later = self._block.schedule.traffic, self.total - self._visits_lost - self._visits_ended
        prompts = traffic.layers * traffic.batches - self._prompt_visits + later // traffic.steps
        decode = self.total - self._done - prompts
        if decode and not self._decoding.visits:
            return "reading prompts"
        rate = (self._tokens_before + self._tokens) / max(self.seconds, 1e-9)
        return f"{rate:.2f} tokens/s, ETA {clock(self._reading.expected(prompts) + self._decoding.expected(decode))}"


def clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


# -- other processes ---------------------------------------------------------------------------------------------------


class Watched(Protocol):
    """The processes that have kept cores busy since a moment."""

    @property
    def seconds(self) -> float:
        """Since that moment."""

    def cores(self) -> float:
        """Those that other processes have kept busy, on average."""

    def own_cores(self) -> float:
        """Those that this process has had."""


class Crowd:
    """Looks for a crowd of other processes that comes while a run computes, and makes it slow: said once, with what it costs
    and what helps. It is asked at the end of each step, and looks now and then."""

    def __init__(self, note: Callable[[str], None], begin: Callable[[], Watched] = Others, is_told: bool = False) -> None:
        """`is_told`: it was said before that there is one."""
        self._note, self._begin, self._is_told = note, begin, is_told
        self._watched = begin()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which is computed, for what may be idle before and behind it: that time is not looked at."""
        self._watched = self._begin()
        yield

    def look(self) -> None:
        if self._is_told or self._watched.seconds < LOOK_SECONDS:
            return
        watched, self._watched = self._watched, self._begin()
        line = crowding(watched.cores(), get_num_threads(), cores(), watched.own_cores())
        if line is not None:
            self._is_told = True
            self._note(f"{SLOW}: {line}")


# -- while cells are measured ------------------------------------------------------------------------------------------


class EvaluationWatch:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._opening = OpeningReport(progress)
        self._doing, self._done = "", 0

    def begin(self, doing: str) -> None:
        self._doing = doing
        self._progress.stage(doing)
        self.advance(0)

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._progress.update("tokens", self._done)

    def stage(self, stage: Stage, done_bytes: int, total_bytes: int) -> None:
        """Shows the stages of opening a model that take long, which are those with bytes; during all others, the progress of
        the evaluation. A copy that is made again leaves a line."""
        if total_bytes or stage in MADE_AGAIN:
            self._opening.stage(stage, done_bytes, total_bytes)
        else:
            self.begin(self._doing)


def open_llm(model: ModelRequest, site: SiteRequest, plan: Plan, trace: bool = False) -> LLM:
    """The LLM that plans for as many processes as are asked for: with the threads of each, and room for all of them."""
    with Progress(0, f"opening {model.name}", late=True) as progress:
        llm = LLM.of(OpenRequest(model, site.of_each, plan, trace), OpeningReport(progress).stage, progress.note)
        if llm.loaded.leftovers is not None:
            progress.note(str(llm.loaded.leftovers))
    try:
        _refuse_missing_devices(llm, site)
    except BaseException:
        llm.close()
        raise
    return llm


def _refuse_missing_devices(llm: LLM, site: SiteRequest) -> None:
    if site.gpus > 1 and site.device == AUTO and not llm.device.accelerator:
        raise ValueError(f"{GPUS} {site.gpus} is for GPUs, and there is none; with --device cpu so many processes use the CPU")
    llm.device.names_of(site.gpus)
