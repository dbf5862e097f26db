"""The work of the serve command: finds a plan for the seats, loads the weights, listens, and computes until it ends."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from socket import socket

from starlette.types import ASGIApp

from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.cli.interrupts import Interrupts
from h2o_flexgen.cli.report.plan_report import PLACED_DATA, PlanReport, placed_bytes
from h2o_flexgen.cli.report.summary import peaks_entry, say_broken
from h2o_flexgen.cli.serve_request import DATA_DIR, GEN_LEN, KEYS, PROMPT_LEN, ServeRequest
from h2o_flexgen.cli.slow import plan_reasons, say_slow
from h2o_flexgen.cli.terminal import say, say_document
from h2o_flexgen.cli.watch import Crowd, OpeningReport, open_llm, say_threads
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import TIER_NAMES
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.arrivals import Arrivals
from h2o_flexgen.engine.job import without_number
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.restarted_run import Shrink
from h2o_flexgen.evaluation.answer_settings import model_settings, plan_settings
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.jobs.file_job import LineReading
from h2o_flexgen.jobs.line_fields import Options
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.jobs.output import Settings
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed
from h2o_flexgen.planning.positions import check_positions
from h2o_flexgen.planning.workload_plan import first_that_fits, prefix_rooms, room_of_states, rooms_to_search
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server.app import Facts, Hosts, Keys, Tier, make_app
from h2o_flexgen.server.batch_routes import BatchRoutes
from h2o_flexgen.server.batch_threads import BatchWork
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desk import Desk, Terms
from h2o_flexgen.server.listening import Limits, ServerAddress, bound, is_loopback, listening, place_of
from h2o_flexgen.server.service import Service
from h2o_flexgen.server.stored_batches import DataFolder, data_folder
from h2o_flexgen.session.plan_finder import PlanFinder
from h2o_flexgen.text.dialogue import choose_style

TEMPERATURE, MAX_TOKENS = 1.0, 16  # of OpenAI, where a request does not say
ENDING = "shutting down: finishing admitted requests; another signal ends at once"


def work(request: ServeRequest) -> None:
    with ExitStack() as stack:
        keys = Keys() if request.listen.key_file is None else Keys.read(request.listen.key_file, KEYS)
        opened = stack.enter_context(bound(ServerAddress(request.listen.host, request.listen.port)))
        folder = None if request.keep is None else stack.enter_context(data_folder(request.keep.folder, DATA_DIR))
        llm = stack.enter_context(open_llm(request.model, request.site, request.plan.first_plan))
        server = Preparing(request, llm).server()
        readers = stack.enter_context(ThreadPoolExecutor(1, "reading"))
        service, hosts = server.service(readers), Hosts(request.listen.host if is_loopback(place_of(opened)) else None)
        batches = None if folder is None else server.batches(folder, service)
        server.run(make_app(service, server.counts, keys, hosts, server.facts, batches), opened, batches)


@dataclass(frozen=True)
class Preparing:
    """A request with its model open."""

    request: ServeRequest
    llm: LLM

    def server(self) -> Server:
        """Plans the seats, and loads the weights; refuses what does not fit."""
        room = self._room()
        self._refuse_useless_folder(room.prompt_len)
        self._find_plan(room)
        with _named_as_flags():
            arrivals = self.llm.arrivals(room.prompt_len, room.gen_len, prefix_room=self.request.prefix_room)
        report = PlanReport.of(self.llm.loaded, arrivals.planned, arriving=True)
        is_crowded = self._announce(report, arrivals)
        with Progress(0, f"loading {self.llm.name}", late=True) as progress:
            self.llm.load(OpeningReport(progress).stage)
        counts = ServerCounts(lambda: self.llm.loaded.prefix_counts)
        return Server(self.request, self.llm, arrivals, counts, facts_of(self.request.name, report), is_crowded)

    def _room(self) -> SeatNeed:
        """The longest prompt and completion."""
        asked, spec = self.request, self.llm.spec
        most = spec.max_positions + 1
        gen_len = asked.gen_len or max(1, min(GEN_LEN, most // 4, most - (asked.prompt_len or 1)))
        room = SeatNeed(asked.prompt_len or max(1, min(PROMPT_LEN, most - gen_len)), gen_len)
        try:
            check_positions(spec, self.llm.plan, 0, room.prompt_len, room.gen_len)
        except ValueError as error:
            raise ValueError(f"--prompt-len and --gen-len: {without_number(str(error), 0)}") from error
        return room

    def _find_plan(self, room: SeatNeed) -> None:
        """Finds a plan if none was given."""
        request, asked = self.request, self.request.plan
        if isinstance(asked, Plan):
            return
        with _named_as_flags():
            rooms = rooms_to_search(self.llm.plan, room.prompt_len, request.prefix_room, self._room_of_states)
        finder = PlanFinder(self.llm.loaded.with_heads(asked), self.llm.loaded, self.llm.loaded.machines(request.machine))

        def find(tokens: int) -> None:
            self._tell(finder.find(PlanNeed(Workload.arriving(room, request.rows, tokens, self._room_of_states))).lines())

        first_that_fits(rooms, find)

    @property
    def _room_of_states(self) -> int:
        """The room that the states of a prefix take, in tokens."""
        return room_of_states(self.llm.spec, self.llm.plan)

    def _refuse_useless_folder(self, prompt_len: int) -> None:
        """Refuses a folder of prefixes where requests share none, however much memory there is: nothing would be in it."""
        request, plan = self.request, self.llm.plan
        with _named_as_flags():
            rooms = prefix_rooms(plan, prompt_len, request.prefix_room, self._room_of_states)
        is_useful = request.site.prefix_dir is None or any(rooms)
        if is_useful:
            return
        if request.prefix_room is not None:
            why, instead = "--prefix-room is 0", "give it tokens"
        elif plan.answers_depend_on_prefixes:
            why, instead = "answers would depend on it", "say --prefix-room TOKENS"
        else:
            why, instead = f"prompts of {prompt_len} tokens are too short", "give a longer --prompt-len"
        folder = shown(str(request.site.prefix_dir))
        raise ValueError(f"--prefix-dir is {folder}, but requests share nothing ({why}); {instead}, or leave --prefix-dir out")

    def _announce(self, report: PlanReport, arrivals: Arrivals) -> bool:
        """Says what is planned, and what makes it slow. Returns whether a crowd of other processes is among that."""
        self._tell([*report.lines(), *self._unshared(arrivals)])
        say_slow(plan_reasons(report.planned, report.arithmetic))
        return say_threads(self.request.others, self.request.site.threads, report.arithmetic)

    def _unshared(self, arrivals: Arrivals) -> Iterator[str]:
        """Why requests share nothing, if the user has not asked for that."""
        plan = self.llm.plan
        can_share = plan.shares_prefixes and arrivals.longest_prompt > plan.least_prefix
        if arrivals.planned.workload.prefix_room or self.request.prefix_room is not None or not can_share:
            return
        if not plan.answers_depend_on_prefixes:
            yield "prefixes  nothing is shared: there is no room beside the seats"
        elif plan.kv_codec == PLAIN and not plan.policy.echoes:
            yield "prefixes  nothing is shared, as answers would depend on it; not so with --prefix-policy judged"
        else:
            yield "prefixes  nothing is shared, as answers would depend on it; --prefix-room says to share all the same"

    def _tell(self, lines: Iterable[str]) -> None:
        if self.request.verbose:
            say(lines)


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """A context in which errors name flags."""
    try:
        yield
    except ValueError as error:
        raise type(error)(str(error).replace("prefix_room", "--prefix-room")) from error


class Server:
    """A model that is loaded, and the desk that serves it."""

    def __init__(
        self, request: ServeRequest, llm: LLM, arrivals: Arrivals, counts: ServerCounts, facts: Facts, is_crowded: bool
    ) -> None:
        self._request, self._llm, self._arrivals, self.counts, self.facts = request, llm, arrivals, counts, facts
        self._limits = replace(Limits(), body_bytes=request.listen.most_body_bytes)
        terms = Terms(request.gather_seconds, request.most_waiting, request.seed)
        crowd = Crowd(lambda line: print(line, file=sys.stderr, flush=True), is_told=is_crowded)
        self.desk = Desk(llm, arrivals, terms, counts, self._broken, _shrunk, crowd.computing, crowd.look)

    def service(self, readers: Executor) -> Service:
        llm, request = self._llm, self._request
        size_of, style = llm.row_maker.size, choose_style(request.style, llm.tokenizer)
        reading = LineReading(llm.tokenizer, style, size_of, longest=self._arrivals.longest_prompt)
        answers = Answers(request.name, style, llm.spec.labels, llm.loaded.adapters.names)
        of_prompts, of_chats = usual_options(self._arrivals.most_tokens)
        return Service(self.desk, reading, answers, of_prompts, of_chats, self._limits, readers, int(time.time()))

    def batches(self, folder: DataFolder, service: Service) -> BatchRoutes:
        request = self._request
        assert request.keep is not None
        work = BatchWork(folder, service, self._settings, note)
        return BatchRoutes(work, self._limits, request.keep.most_file_bytes, request.seed, lambda: self.desk.is_closed)

    def _settings(self) -> tuple[Settings, Settings]:
        """What answers of batches depend on, and what only their last bits depend on."""
        of_model, noted = model_settings(self._llm)
        room = {"prompt_len": self._arrivals.longest_prompt, "gen_len": self._arrivals.most_tokens}
        return {**of_model, **plan_settings(self._llm.plan), **room, "style": self._request.style}, noted

    def run(self, app: ASGIApp, opened: socket, batches: BatchRoutes | None = None) -> None:
        """Serves until a signal comes and every admitted request has an answer. Batches stay as far as they are."""
        interrupts = Interrupts(self._end)
        working = nullcontext() if batches is None else batches.work.running()
        with interrupts.heard(), listening(app, opened, self._limits, self.desk.close), working:
            interrupts.listen()
            say(self._welcome(place_of(opened)))
            try:
                self.desk.run()
            finally:
                self.desk.hand_back()  # no request is left, unless it was ended at once
        peaks = self._llm.peaks()
        say_broken(peaks)
        say_document({**self.counts.totals(), **peaks_entry(peaks).values})

    def _welcome(self, place: ServerAddress) -> Iterator[str]:
        seats, arrivals = self._arrivals.load.seats, self._arrivals
        room = f"prompts of up to {arrivals.longest_prompt} tokens, completions of up to {arrivals.most_tokens}"
        if not is_loopback(place):
            guarded = "" if self._request.listen.key_file else f"; {KEYS} would make clients show a key"
            note(f"{place.host} is not this machine alone: any client that reaches port {place.port} may ask{guarded}")
        yield f"serving   {self._request.name} at {place.url}/v1: {seats} seats, {room}"

    def _end(self) -> None:
        self.desk.close()
        note(ENDING)

    def _broken(self, error: Exception) -> str:
        if self._request.verbose >= TRACEBACK:
            traceback.print_exception(error)
        line = one_line(error) or f"{type(error).__name__}: {error}"
        note(f"block failed; affected clients were notified: {line}")
        return f"the computation has failed: {line}"


def facts_of(name: str, report: PlanReport) -> Facts:
    """What the page of a server shows of its plan, as it was announced."""
    held, limits, workload = placed_bytes(report.first), report.limits, report.planned.workload
    tiers = [
        Tier(
            name=TIER_NAMES[tier],
            held_bytes={kind: held[kind][tier] for kind in PLACED_DATA},
            needed_bytes=limits.needs(report.planned.footprint, tier),
            budget_bytes=limits.of(tier),
        )
        for tier in report.tiers
    ]
    return Facts(name, max(workload.prompt_lens), workload.gen_len, report.words, tuple(tiers))


def usual_options(most_tokens: int) -> tuple[Options, Options]:
    """What completions and chats leave open, as OpenAI has it, as far as there is room."""
    of_prompts = SamplingParams(temperature=TEMPERATURE, max_tokens=min(MAX_TOKENS, most_tokens))
    return Options(of_prompts), Options(replace(of_prompts, max_tokens=most_tokens))


def _shrunk(shrink: Shrink) -> None:
    note(str(shrink))


def note(line: str) -> None:
    print(f"note: {line}\n", end="", file=sys.stderr, flush=True)  # at once: a signal may come between two writes
