"""The main command: generates text under a plan, and measures.

    python -m h2o_flexgen.run --model facebook/opt-30b --percent 20 80 0 100 0 100 --gpu-batch-size 48 --num-gpu-batches 3

The plan comes first, then the texts, then FlexGen's summary; the last line of stdout is one JSON document. Progress and errors
go to stderr: an error that can be mended from outside is one line and exit status 2.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.cli import projection, report
from h2o_flexgen.cli.arguments import AUTO_LOG, BREAKDOWN, FEWER_BATCH, parse
from h2o_flexgen.cli.asked_problem import asked_of, check_device, machine_of, named_machine
from h2o_flexgen.cli.breakdown import breakdown_lines, breakdown_seconds
from h2o_flexgen.cli.choose_model import ChosenModel, choose_model
from h2o_flexgen.cli.completions_file import CompletionsFile
from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.flags import AUTO, sampling_of
from h2o_flexgen.cli.lanes import lane_reports
from h2o_flexgen.cli.made_up import DEFAULT_TOKENS, check_room, made_up_prompts
from h2o_flexgen.cli.open_llm import open_llm
from h2o_flexgen.cli.page import NARROWEST, page_width
from h2o_flexgen.cli.pictures import check_picture
from h2o_flexgen.cli.plan_report import PlanReport
from h2o_flexgen.cli.predicted import Predicted
from h2o_flexgen.cli.projection import Timing
from h2o_flexgen.cli.report import say
from h2o_flexgen.cli.say_threads import say_threads
from h2o_flexgen.cli.timeline_picture import draw_timelines, two_steps
from h2o_flexgen.cli.watch import Watch
from h2o_flexgen.core.tiers import HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.finding import Wish
from h2o_flexgen.planning.block_plan import BlockPlans
from h2o_flexgen.planning.cost import predicted_bytes
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import BlockPrediction, predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling.others import Others
from h2o_flexgen.schedule.task import Task
from h2o_flexgen.text.prompt_file import given_prompts
from h2o_flexgen.text.prompts import Prompt

if TYPE_CHECKING:
    from h2o_flexgen.engine.stats import Stats
    from h2o_flexgen.llm import LLM
    from h2o_flexgen.sampling.output import Completion
    from h2o_flexgen.sampling.params import SamplingParams


WITH_ROOM = "everything in the fastest memory, which has room to spare: nothing is searched, and no machine measured"
TIMELINE, BESIDE_LANES = 100, 21  # columns of the timeline, and what stands beside it


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: parse(argv), _run)


def _run(args: Namespace) -> None:
    sampling = sampling_of(args)
    others = Others()
    texts = given_prompts(args.prompt, args.prompt_file, args.num_prompts)
    report.check_writable(args.trace, "--trace")
    check_picture(args.timeline, "--timeline")
    if args.log_file != AUTO_LOG:
        report.check_writable(args.log_file, "--log-file")
    named_machine(args)  # one that is not there is told of before a model is fetched
    chosen = choose_model(args.model, args.path, args.dummy_weights)
    if args.dry_run:
        chosen = chosen.without_weights()
    with ExitStack() as stack:
        output = None if args.output is None else stack.enter_context(CompletionsFile(args.output))
        llm = stack.enter_context(open_llm(args, chosen))
        sampling.check_vocabulary(llm.spec.vocab, llm.name)
        if texts and not llm.tokenizer.reads_texts:
            llm.tokenizer.encode("")  # says what is missing, before a machine is measured
        job = Job(args, chosen, llm, texts, output)
        job.refuse_impossible()
        job.find_plan()
        job.announce()
        if args.dry_run:
            print(json.dumps(job.plan_report.as_json()))
        else:
            say_threads(others, args.threads)
            job.run()


@dataclass(frozen=True)
class Job:
    """One call of the command: what it is to generate, and what it tells of that."""

    args: Namespace
    chosen: ChosenModel
    llm: LLM
    texts: list[str]
    output: CompletionsFile | None  # where texts go, beside those that are shown

    # -- what is to be done --------------------------------------------------------------------------------------------

    def refuse_impossible(self) -> None:
        """What no plan can run, and no machine: before a plan is found, and a machine measured for it."""
        if (named := named_machine(self.args)) is not None:
            check_device(named, self.llm.device.kind)
        one = made_up_prompts(1, self._made_up_length, self.llm.tokenizer, self.llm.spec.vocab)  # all are as long
        _ = self._read if self.texts else self.llm.read(one, self.params)
        if not self.texts and (self._wish is None or self.args.num_prompts is not None):  # it is known how many are made up
            self._check_room()
        if self._wish is not None:
            self._wish.refuse_impossible()

    @cached_property
    def _wish(self) -> Wish | None:
        """None where a plan is given. Prompts that are made up are as many as a block takes, unless a number is asked for."""
        if self.args.percent != AUTO:
            return None
        workload = self.workload if self.texts or self.args.num_prompts is not None else None
        return Wish(asked_of(self.args), self.llm, workload, self._made_up_length, self.args.gen_len)

    def find_plan(self) -> None:
        """Where none was given."""
        if self._wish is None:
            return
        if self._plan_with_room is not None:
            say([f"plan      {WITH_ROOM}"])
            self.llm.adopt(self._plan_with_room)
            return
        assert self.machine is not None
        say(self._wish.find(self.machine).lines())

    @cached_property
    def _plan_with_room(self) -> Plan | None:
        return None if self._wish is None or self.args.machine is not None else self._wish.plan_with_room()

    @cached_property
    def machine(self) -> Machine | None:
        """The machine that the run is predicted for. It is None where nobody asks, so that none is measured."""
        args = self.args
        is_searched = self._wish is not None and self._plan_with_room is None
        if not is_searched and args.machine is None and args.timeline is None:
            return None
        with Progress(0, "this machine", late=True) as progress:
            machine = machine_of(args, progress)
        check_device(machine, self.llm.device.kind)
        return machine

    @property
    def _made_up_length(self) -> int:
        return DEFAULT_TOKENS if self.args.prompt_len is None else int(self.args.prompt_len)

    @property
    def _num_made_up(self) -> int:
        return self.llm.plan.block_size if self.args.num_prompts is None else int(self.args.num_prompts)

    @cached_property
    def _read(self) -> list[Prompt]:
        """The texts with their tokens."""
        return self.llm.read(self.texts, self.params)

    @cached_property
    def prompts(self) -> list[Prompt] | list[list[int]]:
        if self.texts:
            return self._read
        self._check_room()
        return made_up_prompts(self._num_made_up, self._made_up_length, self.llm.tokenizer, self.llm.spec.vocab)

    def _check_room(self) -> None:
        check_room(self._num_made_up, self._made_up_length, self.llm.budgets.host)

    @cached_property
    def params(self) -> SamplingParams:
        return replace(sampling_of(self.args), logprobs=self.args.logprobs)

    @cached_property
    def workload(self) -> Workload:
        """All of it, also where only a part is run."""
        if not self.texts:  # they need not be made to be counted
            return Workload.uniform(self._num_made_up, self._made_up_length, self.args.gen_len)
        return Workload(tuple(len(prompt.ids) for prompt in self._read), self.args.gen_len)

    @cached_property
    def steps(self) -> int:
        """That are run."""
        cut = self.args.cut_gen_len
        return self.workload.gen_len if cut is None else min(cut, self.workload.gen_len)

    @property
    def stop_at(self) -> Callable[[Task], bool] | None:
        return projection.after_first_layers if self.args.debug_mode == FEWER_BATCH else None

    @cached_property
    def planned(self) -> WorkloadPlan:
        return self.llm.check(self.workload)

    @cached_property
    def planned_run(self) -> WorkloadPlan:
        """What is run of it."""
        is_whole = self.steps == self.workload.gen_len
        return self.planned if is_whole else self.llm.planned(replace(self.workload, gen_len=self.steps))

    # -- before --------------------------------------------------------------------------------------------------------

    @cached_property
    def plan_report(self) -> PlanReport:
        from h2o_flexgen.kernels.native import in_use  # imports torch, which is there by now

        llm = self.llm
        return PlanReport(
            model=self.chosen.name,
            dummy_weights=self.chosen.dummy_weights,
            requested=llm.requested,
            planned=self.planned,
            budgets=llm.budgets,
            kernels=in_use(),
            packing=llm.packing,
            tokenizer_note=llm.tokenizer.note,
        )

    @cached_property
    def predicted(self) -> Predicted | None:
        """Of the steps that are run; of what ends inside of a step nothing can be said."""
        if self.machine is None or self.stop_at is not None:
            return None
        return Predicted(predict(self.planned_run, self.machine), self.machine.name, self.llm.budgets)

    def announce(self) -> None:
        say(self.plan_report.lines())
        if self.texts and self.args.prompt_len is not None and not self.args.demo:
            say([f"--prompt-len {self.args.prompt_len} is not used: the prompts are given"])
        if self.predicted is not None:
            say(["", self.predicted.line()])

    # -- the run -------------------------------------------------------------------------------------------------------

    def _listener(self, watch: Watch) -> Callable[[Task, int], None]:
        if self.stop_at is None:
            return watch.visit

        def visit_when_done(task: Task, tokens: int) -> None:
            """Where the time of single layers is what is asked for, launching a layer must not count as its end."""
            self.llm.device.settle()
            watch.visit(task, tokens)

        return visit_when_done

    def run(self) -> None:
        from h2o_flexgen.sampling.sampler import resolve_seed

        blocks, seed = self.planned_run.blocks, resolve_seed(self.args.seed)
        prepared = self.llm.prepare(self.prompts, self.params.up_to(self.steps), planned=self.planned_run)
        with Progress(blocks.visits, "run", late=True) as progress:
            watch = Watch(blocks, progress)
            completions = self.llm.generate(
                prepared,
                seed=seed,
                on_completion=None if self.output is None else self.output.add,
                on_stage=watch.stage,
                on_visit=self._listener(watch),
                on_shrink=lambda shrink: watch.shrink(shrink.num_ended, shrink.rest, str(shrink)),
                stop_at=self.stop_at,
            )
            seconds = watch.seconds
        stats = self.llm.stats
        assert stats is not None
        Outcome(self, watch.blocks, stats, completions, watch, seconds, seed).tell()


@dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    job: Job
    blocks: BlockPlans  # that were run to their end
    stats: Stats
    completions: list[Completion]
    watch: Watch
    seconds: float  # of generating, from the first task to the last
    seed: int

    def tell(self) -> None:
        if self.job.output is not None:
            self.job.output.finish(self.completions)
        summary = self._summary()
        say(self._texts())
        say(self._pictures())
        if self.job.predicted is not None:
            say(["", *self.job.predicted.lines(self.stats), *self._missed_limit()])
        say(["", *summary])
        rates = self._rates_of_machine()
        try:
            self._write_files(summary)
        finally:  # last, as it tells of the most memory that the process has held; and also where a file cannot be written
            print(json.dumps(self._json(rates)), flush=True)

    def _write_files(self, summary: Sequence[str]) -> None:
        args = self.job.args
        if args.log_file is not None and not args.no_log:
            report.append_log(self._log_file(), summary)
        if args.trace is not None:
            self.stats.last_block.trace.write_chrome(Path(args.trace).expanduser())
        if args.timeline is not None:
            self._draw_timeline(Path(args.timeline).expanduser())

    def _missed_limit(self) -> Iterable[str]:
        limit = self.job.args.latency_limit
        longest = max(run.prefill_seconds + run.decode_seconds for run in self.stats.blocks)
        if limit is not None and longest > limit:
            slower = "the machine was slower than its profile says"
            yield f"a block took {longest:.3g} s, longer than --latency-limit {limit:g}: {slower}"

    def _draw_timeline(self, file: Path) -> None:
        assert self.job.machine is not None
        traces = {"measured": two_steps(self.stats.last_block.trace)}
        if self.job.stop_at is None:
            last = BlockPrediction.of(self.stats.last_block.planned, self.job.machine).trace
            traces = {"predicted": two_steps(last), **traces}
        draw_timelines(traces, file, f"{self.job.chosen.name}: decode steps")

    @cached_property
    def timing(self) -> Timing:
        job, stats, gen_len = self.job, self.stats, self.job.workload.gen_len
        if job.stop_at is not None:
            layers = len(job.llm.spec.layers)
            return projection.from_first_layers(stats, self.watch.first_decode_ends, layers, gen_len)
        if job.steps < gen_len:
            return projection.from_first_steps(stats, self.completions, gen_len)
        return projection.measured(stats)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _texts(self) -> Iterable[str]:
        if self.job.args.verbose >= 1 and self.job.stop_at is None:
            yield ""
            yield from report.completion_lines(
                self.completions, everything=self.job.args.verbose >= 2, as_text=self.job.llm.tokenizer.reads_texts
            )
        if self.timing.projected:
            yield ""
            yield f"only a part was run: decode and total are projected to {self.job.workload.gen_len} tokens for each prompt"

    def _pictures(self) -> Iterable[str]:
        trace = self.stats.last_block.trace
        if self.job.args.debug_mode == BREAKDOWN:
            yield from ("", "the last block without overlap:", *breakdown_lines(trace))
        if self.job.args.verbose >= 2:
            yield from ("", "the last block, lane by lane:", *trace.text_timeline(self._timeline_width()).split("\n"))

    def _timeline_width(self) -> int:
        """The width of the lanes, between their names and how busy they are."""
        width = page_width()
        return TIMELINE if width is None else max(NARROWEST, min(TIMELINE, width - BESIDE_LANES))

    def _summary(self) -> list[str]:
        return report.summary_lines(self.job.llm.spec, self.job.workload, self.timing, self.stats.peak_bytes["device"])

    def _log_file(self) -> Path:
        job = self.job
        if job.args.log_file != AUTO_LOG:
            return Path(job.args.log_file).expanduser()
        longest = max(job.workload.prompt_lens)
        return Path(report.log_name(job.chosen.name, job.llm.requested, longest, job.workload.gen_len))

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def _json(self, machine: Machine | None) -> dict[str, object]:
        """`machine`: as it was measured behind the run."""
        from h2o_flexgen.engine.threads import get_num_threads
        from h2o_flexgen.memory.host import peak_resident_bytes  # imports torch, which is there by now
        from h2o_flexgen.profiling.measure import describe_machine

        job, stats = self.job, self.stats
        predicted = predicted_bytes(self.blocks, job.stop_at)
        lanes = lane_reports(stats, predicted, self.watch.flops, self.seconds, machine, job.llm.spec.dtype)
        steps = stats.step_seconds
        return {
            **job.plan_report.as_json(),
            **report.timing_json(self.timing),
            "load_seconds": round(self.watch.load_seconds, 6),
            "step_seconds_median": round(statistics.median(steps), 6) if steps else None,
            "peak_bytes": {**stats.peak_bytes, HOST: peak_resident_bytes()},
            "shrunk": [list(size) for size in stats.shrunk],
            "lanes": {lane: asdict(one) for lane, one in lanes.items()},
            "seed": self.seed,
            "threads": get_num_threads(),
            "machine": describe_machine(job.llm.device),
            "rates": _rates(machine),
            **self._breakdown(),
            **self._predicted(),
        }

    def _predicted(self) -> dict[str, object]:
        return {} if self.job.predicted is None else {"predicted": self.job.predicted.as_json()}

    def _breakdown(self) -> dict[str, object]:
        if self.job.args.debug_mode != BREAKDOWN:
            return {}
        return {"breakdown_seconds": breakdown_seconds(self.stats.last_block.trace)}

    def _rates_of_machine(self) -> Machine | None:
        """Measured behind the run, in memory that the run has given back. A run that is done is told of even if this fails."""
        from h2o_flexgen.profiling.measure import Needs, measure, room_to_measure

        llm = self.job.llm
        files = llm.weight_files
        llm.unload()
        try:
            needs = Needs(
                dtype=llm.spec.dtype,
                weight_shape=(llm.spec.ffn, llm.spec.width),
                rows=tuple(self.watch.flops),
                read_files=files,
                offload_folder=llm.offload_folder,
                offload_bytes=self._offloaded_bytes(),
                links=llm.device.accelerator,
                pinned=llm.plan.pin_weight,
                memory_bytes=room_to_measure(llm.budgets),
            )
            return measure(llm.device, needs)
        except (MemoryError, OSError, RuntimeError) as error:  # torch's want of memory is a RuntimeError
            print(f"the machine could not be measured, so there are no bounds: {error}", file=sys.stderr)
            return None

    def _offloaded_bytes(self) -> int:
        """What KV and activations took on disk: so much can be had again."""
        written = sum(self.stats.moved_bytes.get(lane, 0) for lane in ("store", "write"))
        return min(written, self.stats.peak_bytes["disk"])


def _rates(machine: Machine | None) -> dict[str, object]:
    """Those that were measured."""
    if machine is None:
        return {}
    rates = {
        name: value
        for name, value in asdict(machine).items()
        if name.endswith("_per_s") and isinstance(value, float) and isfinite(value)
    }
    return {**rates, "flops_per_s": {dtype: list(curve) for dtype, curve in machine.flops_per_s.items()}}


if __name__ == "__main__":
    sys.exit(main())
