"""RunJob: one call of the run command: what it generates, under which plan, and what is said before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.cli.output_files import CompletionsFile
from h2o_flexgen.cli.report import Entry, document_of, lines_of
from h2o_flexgen.cli.report.plan_report import PlanReport, Predicted, together
from h2o_flexgen.cli.report.summary import after_first_layers
from h2o_flexgen.cli.run_request import MadeUpPrompts, RunRequest
from h2o_flexgen.cli.slow import buffers_reason, compute_reason, plan_reasons, say_slow
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.core.workload import Workload, longest_part
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed
from h2o_flexgen.planning.predict import predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Task
from h2o_flexgen.session.machine_source import MachineSource
from h2o_flexgen.session.plan_finder import FoundPlan, PlanFinder
from h2o_flexgen.text.given_texts import check_room, made_up_prompts
from h2o_flexgen.text.prompts import Prompt


@dataclass(frozen=True)
class RunJob:
    """One call of the command: what it generates, and what it reports."""

    request: RunRequest
    llm: LLM
    machines: MachineSource
    output: CompletionsFile | None  # where texts go, beside those that are shown

    # -- what is to be done --------------------------------------------------------------------------------------------

    def refuse_impossible(self) -> None:
        """Refuses what no plan and no machine can run, before a machine is measured to find a plan."""
        asked = self.request.prompts
        if isinstance(asked, MadeUpPrompts):
            one = made_up_prompts(1, asked.length, self.llm.tokenizer, self.llm.spec.vocab)  # all of them are as long
            self.llm.read(one, self.request.sampling)
            if self._is_counted:
                self._check_room(asked)
        else:
            _ = self._read

    @property
    def _is_counted(self) -> bool:
        """Whether the number of prompts is known before a plan is found."""
        request = self.request
        return (
            isinstance(request.plan, Plan)
            or not isinstance(request.prompts, MadeUpPrompts)
            or request.prompts.number is not None
        )

    def find_plan(self) -> None:
        """Finds a plan if none was given."""
        if (found := self._found) is not None:
            say(found.lines())

    @cached_property
    def _found(self) -> FoundPlan | None:
        """The plan that was found, if none was given. Without a number, made-up prompts are as many as a block takes."""
        request = self.request
        if isinstance(request.plan, Plan):
            return None
        finder = PlanFinder(self.llm.loaded.with_heads(request.plan), self.llm.loaded, self.machines)
        if self._is_counted:
            return finder.find(PlanNeed(self.workload_of_each))
        assert isinstance(request.prompts, MadeUpPrompts)
        return finder.find(PlanNeed(Workload.uniform(1, request.prompts.length, request.gen_len), is_sample=True))

    @cached_property
    def machine(self) -> Machine | None:
        """The machine that the run is predicted for; None, and not measured, if no prediction is asked for."""
        is_searched = self._found is not None and self._found.search is not None
        if not is_searched and self.request.machine is None and self.request.files.timeline is None:
            return None
        with Progress(0, "this machine", late=True) as progress:
            return self.machines.measured(progress)

    def _num_made_up(self, asked: MadeUpPrompts) -> int:
        return self.llm.plan.block_size * self.request.site.gpus if asked.number is None else asked.number

    @cached_property
    def _read(self) -> list[Prompt]:
        """The texts with their tokens; none if prompts are made up."""
        asked = self.request.prompts
        return [] if isinstance(asked, MadeUpPrompts) else self.llm.read(asked, self.request.sampling)

    @cached_property
    def prompts(self) -> list[Prompt] | list[list[int]]:
        asked = self.request.prompts
        if not isinstance(asked, MadeUpPrompts):
            return self._read
        self._check_room(asked)
        return made_up_prompts(self._num_made_up(asked), asked.length, self.llm.tokenizer, self.llm.spec.vocab)

    def _check_room(self, asked: MadeUpPrompts) -> None:
        check_room(self._num_made_up(asked), asked.length, self.llm.limits.host)

    @cached_property
    def workload(self) -> Workload:
        """The whole workload, even if only a part is run."""
        asked, gen_len = self.request.prompts, self.request.gen_len
        if isinstance(asked, MadeUpPrompts):  # they can be counted without being made
            return Workload.uniform(self._num_made_up(asked), asked.length, gen_len)
        return Workload(tuple(len(prompt.ids) for prompt in self._read), gen_len)

    @property
    def processes(self) -> int:
        """The processes that do the work: no more than there are prompts."""
        return min(self.request.site.gpus, self.workload.num_prompts)

    @property
    def workload_of_each(self) -> Workload:
        """The workload of the process that has most to do."""
        return longest_part(self.workload, self.processes)

    @property
    def stop_at(self) -> Callable[[Task], bool] | None:
        return after_first_layers if self.request.stops_after_layers else None

    @cached_property
    def planned(self) -> WorkloadPlan:
        return self.llm.check(self.workload_of_each)

    @cached_property
    def planned_run(self) -> WorkloadPlan:
        """The part of the workload that is run."""
        steps = self.request.steps
        is_whole = steps == self.workload.gen_len
        return self.planned if is_whole else self.llm.planned(replace(self.workload, gen_len=steps))

    # -- before --------------------------------------------------------------------------------------------------------

    @cached_property
    def plan_report(self) -> PlanReport:
        return PlanReport.of(self.llm.loaded, self.planned)

    def plan_as_json(self) -> dict[str, object]:
        """The plan, with the prompts of all processes."""
        return document_of([*self.plan_report.entries(), self._together])

    @property
    def _together(self) -> Entry:
        return together(self.processes, self.workload.num_prompts, self.llm.device.accelerator)

    @cached_property
    def predicted(self) -> Predicted | None:
        """The prediction for the steps that are run; None for a run that ends inside a step."""
        if self.machine is None or self.stop_at is not None:
            return None
        return Predicted(predict(self.planned_run, self.machine), self.machine.name, self.llm.limits)

    def announce(self) -> None:
        say(self.plan_report.lines())
        say(self.request.notes)
        say(self._together.lines)
        if self.predicted is not None:
            say(["", *lines_of(self.predicted.entries())])

    def say_slow(self) -> None:
        """Says what makes the run slow and could be mended."""
        say_slow(plan_reasons(self.planned, self.plan_report.arithmetic))
        if self._known_machine is not None:
            say_slow(compute_reason(self.planned.blocks.first, self._known_machine))
        if self._known_machine is not None and isinstance(self.request.plan, Plan):
            say_slow(buffers_reason(self.planned, self._known_machine, self.llm.limits))

    @cached_property
    def _known_machine(self) -> Machine | None:
        return self.machine or self.machines.at_hand(self.llm.spec.dtype)
