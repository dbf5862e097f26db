"""The work of the run command: opens a model, finds its plan if none is given, and generates texts under it. Its report: texts,
lanes beside their bounds, FlexGen's summary, files, and one JSON document."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path

from h2o_flexgen.cli.output_files import CompletionsFile, writing
from h2o_flexgen.cli.pictures import draw_timelines, two_steps
from h2o_flexgen.cli.report import Entry, document_of, entry, lines_of, noted, told
from h2o_flexgen.cli.report.summary import (
    Timing,
    append_log,
    completion_lines,
    drafts_entry,
    from_first_layers,
    from_first_steps,
    log_name,
    measured,
    peaks_entry,
    say_broken,
    summary,
)
from h2o_flexgen.cli.run_job import RunJob
from h2o_flexgen.cli.run_request import MadeUpPrompts, NamedByPlan, RunRequest
from h2o_flexgen.cli.shared_work import RunApart
from h2o_flexgen.cli.slow import say_slow, unrecorded_reason
from h2o_flexgen.cli.terminal import NARROWEST, page_width, say, say_document, table
from h2o_flexgen.cli.watch import RunWatch, open_llm, say_threads
from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.core.units import format_bytes, format_seconds
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.resources import get_num_threads
from h2o_flexgen.engine.stats import Stats
from h2o_flexgen.memory.host import peak_resident_bytes
from h2o_flexgen.planning.block_plan import BlockPlans
from h2o_flexgen.planning.cost import by_lane, predicted_bytes
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import OFF
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.predict import BlockPrediction
from h2o_flexgen.profiling.measure import Needs, describe_machine, measure, room_to_measure
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import resolve_seed
from h2o_flexgen.schedule.ops import ATTEND_LANE, COMPUTE_LANE, Op, Task
from h2o_flexgen.schedule.trace import Trace


def work(request: RunRequest) -> None:
    with ExitStack() as stack:
        completions = request.files.completions
        output = None if completions is None else stack.enter_context(CompletionsFile(completions))
        llm = stack.enter_context(open_llm(request.model, request.site, request.plan.first_plan, request.shows_trace))
        request.sampling.check_vocabulary(llm.spec.vocab, llm.name)
        if not isinstance(request.prompts, MadeUpPrompts) and not llm.tokenizer.reads_texts:
            llm.tokenizer.encode("")  # reports a missing tokenizer before a machine is measured
        job = RunJob(request, llm, llm.loaded.machines(request.machine), output)
        job.refuse_impossible()
        job.find_plan()
        job.announce()
        if request.dry_run:
            job.say_slow()
            say_document(job.plan_as_json())
        elif job.processes > 1:
            job.say_slow()
            RunApart.of(job).run()
        else:
            is_crowded = say_threads(request.others, request.site.threads, job.plan_report.arithmetic)
            job.say_slow()
            run(job, is_crowded)


def run(job: RunJob, is_crowded: bool) -> None:
    """Runs it in this process. `is_crowded`: it was said that other processes slow it."""
    request, llm, blocks, seed = job.request, job.llm, job.planned_run.blocks, resolve_seed(job.request.seed)
    prepared = llm.prepare(job.prompts, request.sampling.up_to(request.steps), planned=job.planned_run)
    with Progress(blocks.visits, "run", late=True) as progress:
        watch = RunWatch(blocks, progress, is_crowded)
        completions = llm.generate(
            prepared,
            seed=seed,
            on_completion=None if job.output is None else job.output.add,
            on_stage=watch.stage,
            on_visit=_listener(job, watch),
            on_shrink=lambda shrink: watch.shrink(shrink.num_ended, shrink.rest, str(shrink)),
            stop_at=job.stop_at,
        )
        seconds = watch.seconds
    assert llm.stats is not None
    say_slow(unrecorded_reason(llm.stats.unrecorded))
    RunOutcome(job, watch.blocks, llm.stats, completions, watch, seconds, seed).tell()


def _listener(job: RunJob, watch: RunWatch) -> Callable[[Task, int], None]:
    if job.stop_at is None:
        return watch.visit

    def visit_when_done(task: Task, tokens: int) -> None:
        """Waits for the layer: where layers are timed, launching one must not count as its end."""
        job.llm.device.settle()
        watch.visit(task, tokens)

    return visit_when_done


# -- the report ------------------------------------------------------------------------------------------------------------

TIMELINE, BESIDE_LANES = 100, 21  # columns of the timeline, and of what stands beside it
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run."""

    job: RunJob
    blocks: BlockPlans  # those that were run to their end
    stats: Stats
    completions: list[Completion]
    watch: RunWatch
    seconds: float  # seconds of generating, from the first task to the last
    seed: int

    def tell(self) -> None:
        if self.job.output is not None:
            self.job.output.finish(self.completions)
        say(self._texts())
        say(self._pictures())
        if self.job.predicted is not None:
            say(["", *self.job.predicted.beside(self.stats), *self._missed_limit()])
        say(["", *lines_of(self._summary), *lines_of(self._moved), *lines_of(self._drafts)])
        say_broken(self.stats.peaks)
        rates = self._rates_of_machine()
        try:
            self._write_files()
        finally:  # last, to include what measuring the machine has held; and also if a file cannot be written
            say_document(document_of(self._entries(rates)))

    @cached_property
    def _summary(self) -> Sequence[Entry]:
        return summary(self.job.llm.spec, self.job.workload, self.timing, self.stats.peak_bytes["device"])

    def _write_files(self) -> None:
        """Writes each file, also if another one cannot be written."""
        refused = list[ValueError]()
        for flag, file, write in self._files():
            try:
                with writing(file, flag):
                    write(file)
            except ValueError as error:
                refused.append(error)
        if refused:
            raise ValueError("; ".join(map(str, refused))) from refused[0]

    def _files(self) -> Iterator[tuple[str, Path, Callable[[Path], None]]]:
        """The files that were asked for, each with its flag and with what writes it."""
        files = self.job.request.files
        if files.log is not None:
            log = self._log_name() if isinstance(files.log, NamedByPlan) else files.log
            yield "--log-file", log, lambda file: append_log(file, lines_of(self._summary))
        if files.trace is not None:
            yield "--trace", files.trace, lambda file: self.stats.last_block.trace.write_chrome(file, self._layer_names)
        if files.timeline is not None:
            yield "--timeline", files.timeline, self._draw_timeline

    def _missed_limit(self) -> Iterable[str]:
        asked = self.job.request.plan
        limit = asked.latency_limit if isinstance(asked, PlanRequirements) else None
        longest = max(run.prefill_seconds + run.decode_seconds for run in self.stats.blocks)
        if limit is not None and longest > limit:
            slower = "the machine was slower than its profile says"
            yield f"a block took {format_seconds(longest)}, longer than --latency-limit {limit:g}: {slower}"

    def _draw_timeline(self, file: Path) -> None:
        assert self.job.machine is not None
        traces = {"measured": two_steps(self.stats.last_block.trace)}
        if self.job.stop_at is None:
            last = BlockPrediction.of(self.stats.last_block.planned, self.job.machine).trace
            traces = {"predicted": two_steps(last), **traces}
        draw_timelines(traces, file, f"{self.job.request.model.name}: decode steps", self._layer_names)

    @property
    def _layer_names(self) -> Sequence[LayerName]:
        return self.stats.last_block.planned.spec.layer_names

    @cached_property
    def timing(self) -> Timing:
        job, stats, gen_len = self.job, self.stats, self.job.request.gen_len
        if job.stop_at is not None:
            layers = len(job.llm.spec.layers)
            return from_first_layers(stats, self.watch.first_decode_ends, layers, gen_len)
        if job.request.steps < gen_len:
            return from_first_steps(stats, self.completions, gen_len)
        return measured(stats)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _texts(self) -> Iterable[str]:
        if self.job.request.verbose >= 1 and self.job.stop_at is None:
            yield ""
            yield from completion_lines(
                self.completions, everything=self.job.request.verbose >= 2, as_text=self.job.llm.tokenizer.reads_texts
            )
        if self.timing.projected:
            yield ""
            yield f"only a part was run: decode and total are projected to {self.job.request.gen_len} tokens for each prompt"

    def _pictures(self) -> Iterable[str]:
        yield from lines_of(self._breakdown)
        if self.job.request.verbose >= 2:
            drawn = self.stats.last_block.trace.text_timeline(self._timeline_width(), self._layer_names)
            yield from ("", "the last block, lane by lane:", *drawn.split("\n"))

    def _timeline_width(self) -> int:
        """The width of the lanes, between their names and their shares of busy time."""
        width = page_width()
        return TIMELINE if width is None else max(NARROWEST, min(TIMELINE, width - BESIDE_LANES))

    def _log_name(self) -> Path:
        job = self.job
        longest = max(job.workload.prompt_lens)
        return Path(log_name(job.request.model.name, job.llm.loaded.requested, longest, job.request.gen_len))

    # -- entries -------------------------------------------------------------------------------------------------------

    def _entries(self, machine: Machine | None) -> Iterator[Entry]:
        """All that the JSON document says. `machine` was measured after the run."""
        job, steps = self.job, self.stats.step_seconds
        yield from job.plan_report.entries()
        yield from self._summary
        yield noted(
            load_seconds=round(self.watch.load_seconds, 6),
            step_seconds_median=round(statistics.median(steps), 6) if steps else None,
        )
        yield peaks_entry(self.stats.peaks)
        yield noted(process_peak_bytes=peak_resident_bytes(), shrunk=[list(size) for size in self.stats.shrunk])
        yield self._lanes(machine)
        yield from self._moved
        yield from _graphs(self.stats)
        yield from self._drafts
        yield noted(seed=self.seed, threads=get_num_threads())
        yield noted(machine=describe_machine(job.llm.device), rates=_rates(machine))
        yield from self._breakdown
        if job.predicted is not None:
            yield noted(predicted=job.predicted.as_json())

    def _lanes(self, machine: Machine | None) -> Entry:
        predicted = predicted_bytes(self.blocks, self.job.stop_at)
        bounds = {} if machine is None else self._bounds(machine, predicted)
        lanes = lane_reports(self.stats, by_lane(predicted), self.seconds, bounds)
        return noted(lanes={lane: asdict(one) for lane, one in lanes.items()})

    @property
    def _moved(self) -> Iterator[Entry]:
        """What was moved between memories."""
        if moved := self.stats.moved_by_data:
            words = ", ".join(f"{what} {format_bytes(sum(by_lane.values()))}" for what, by_lane in moved.items())
            yield entry("moved", words, moved_by_data=moved)

    @property
    def _drafts(self) -> Iterator[Entry]:
        """What became of guessed tokens, in decode: the first token of each prompt comes from another pass."""
        if self.job.llm.plan.draft != OFF:
            stats = self.stats
            yield drafts_entry(stats.drafted, stats.generated_tokens - len(self.completions), len(stats.step_seconds))

    @property
    def _breakdown(self) -> Iterator[Entry]:
        if self.job.request.breaks_down:
            seconds = breakdown_seconds(self.stats.last_block.trace)
            yield told("", "the last block without overlap:", *breakdown_table(seconds), breakdown_seconds=seconds)

    def _rates_of_machine(self) -> Machine | None:
        """Measures the machine after the run, in memory that was given back. If this fails, the run is reported all the
        same."""
        llm = self.job.llm
        files, usual = llm.loaded.weight_files, llm.spec.usual_matrix
        llm.unload()
        try:
            needs = Needs(
                dtype=llm.spec.dtype,
                weight_shape=(usual.shape[-2], usual.shape[-1]),
                rows=tuple(self.watch.flops),
                format=usual.format,
                product=llm.spec.product,
                read_files=files,
                offload_folder=llm.loaded.offload_folder,
                offload_bytes=self._offloaded_bytes(),
                links=llm.device.accelerator,
                pin_weight=llm.plan.pin_weight,
                memory_bytes=room_to_measure(llm.limits),
            )
            return measure(llm.device, needs)
        except (MemoryError, OSError, RuntimeError) as error:  # torch raises a RuntimeError when memory is short
            print(f"the machine could not be measured, so there are no bounds: {error}", file=sys.stderr)
            return None

    def _bounds(self, machine: Machine, predicted: Mapping[Op, int]) -> dict[str, float]:
        """The least seconds that each lane could take: bytes over bandwidths, flops over rates. What ops share a lane's bytes
        in is known of the prediction. What the host attends was not measured, and has none."""
        bounds, lanes = {COMPUTE_LANE: self._compute_bound(machine)}, by_lane(predicted)
        for lane, moved in self.stats.moved_bytes.items():
            if lane in lanes and lane != ATTEND_LANE:
                seconds = sum(
                    nbytes / machine.bandwidth(lane, self.job.llm.plan.page_locks(op))
                    for op, nbytes in predicted.items()
                    if op.lane == lane
                )
                bounds[lane] = moved / lanes[lane] * seconds
        return bounds

    def _compute_bound(self, machine: Machine) -> float:
        """The seconds that the run's flops take at the rates of its products. These depend on their rows."""
        spec = self.job.llm.spec
        rate = partial(machine.product_rate, spec.product, spec.usual_matrix.format, spec.dtype)
        return sum(done / rate(rows) for rows, done in self.watch.flops.items())

    def _offloaded_bytes(self) -> int:
        """Bytes of KV and activations on disk; that much is free again."""
        written = sum(self.stats.moved_bytes.get(lane, 0) for lane in ("store", "write"))
        return min(written, self.stats.peak_bytes["disk"])


def _graphs(stats: Stats) -> Iterator[Entry]:
    """What became of graphs, if anything did."""
    given_up = next((run.graphs_given_up for run in stats.blocks if run.graphs_given_up), None)
    if stats.replayed or given_up is not None or stats.unrecorded:
        unrecorded = {"unrecorded": dict(stats.unrecorded)} if stats.unrecorded else {}
        yield noted(graphs={"replayed_visits": stats.replayed, "given_up": given_up, **unrecorded})


def _rates(machine: Machine | None) -> dict[str, object]:
    """The rates that were measured."""
    if machine is None:
        return {}
    rates = {
        name: value
        for name, value in asdict(machine).items()
        if name.endswith("_per_s") and isinstance(value, float) and isfinite(value)
    }
    curves = {"flops_per_s": machine.flops_per_s, "packed_flops_per_s": machine.packed_flops_per_s}
    return {**rates, **{name: {of: list(curve) for of, curve in each.items()} for name, each in curves.items() if each}}


# -- lanes and operations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneReport:
    moved_bytes: int
    predicted_bytes: int  # of a run in which no row finishes early
    skipped_bytes: (
        int  # experts that no token chose, tokens that were there or chosen twice: with these, as much as is predicted
    )
    busy_share: float  # share of the seconds from the first task to the last
    bound_seconds: float | None  # bytes over measured bandwidths, flops over measured rates; None where not measured


def lane_reports(
    stats: Stats, predicted: Mapping[str, int], seconds: float, bounds: Mapping[str, float]
) -> dict[str, LaneReport]:
    """A report for each lane."""
    reports = {}
    for lane in dict.fromkeys((*predicted, *stats.moved_bytes)):
        moved = stats.moved_bytes.get(lane, 0)
        bound = bounds.get(lane)
        busy = min(1.0, stats.busy_seconds.get(lane, 0.0) / seconds) if seconds else 0.0
        skipped, seconds_at_least = stats.skipped_bytes.get(lane, 0), None if bound is None else round(bound, 6)
        reports[lane] = LaneReport(moved, predicted.get(lane, 0), skipped, round(busy, 4), seconds_at_least)
    return reports


def breakdown_seconds(trace: Trace) -> dict[str, dict[str, float]]:
    """Seconds by operation and phase."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for span in trace.spans:
        seconds[str(span.key.op)][PHASES[span.key.step > 0]] += span.end - span.start
    return {str(op): seconds[str(op)] for op in Op if str(op) in seconds}


def breakdown_table(seconds: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    rows = [["operation", *(f"{phase} s" for phase in PHASES)]]
    for op, phases in seconds.items():
        rows.append([op, *(f"{phases[phase]:.3f}" for phase in PHASES)])
    return table(rows, page_width())
