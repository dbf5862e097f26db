"""A plan that is found for what is to be generated: searched, or known without a search. The commands and LLM both ask here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.core.model_spec import DTYPE_BYTES, ModelSpec
from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.demo import demo_folder
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.budgets import Budgets, DoesNotFit, Request
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.positions import check_positions, check_rolling
from h2o_flexgen.planning.search import MOST_ROWS, THROUGHPUT, Found, Problem, refuse_what_never_fits, search

if TYPE_CHECKING:
    from h2o_flexgen.llm import LLM
    from h2o_flexgen.memory.device import Device

AUTO = "auto"
FASTEST = Shares(1.0, 0.0)


@dataclass(frozen=True)
class Asked:
    """What is asked of a plan, whatever the model, the prompts and the machine."""

    plan: Plan  # has all that is not searched: schedule, KV policy and its budget, slots, codecs
    batch_sizes: tuple[int, ...] = ()  # only these, where somebody has chosen
    batches: tuple[int, ...] = ()
    codecs: tuple[tuple[str, str], ...] = ()  # of weights and KV that may be taken instead of the plan's
    attend_on: tuple[str, ...] = (DEVICE,)
    latency_limit: float | None = None
    prefer: str = THROUGHPUT

    @property
    def is_only_speed(self) -> bool:
        return not self.codecs and self.latency_limit is None and self.prefer == THROUGHPUT

    def problem(
        self,
        machine: Machine,
        model: Callable[[Plan], ModelSpec],
        workload: Workload | None,
        prompt_len: int,
        gen_len: int,
        budgets: Budgets,
        writes_weights: bool,
    ) -> Problem:
        """What can be seen to be wrong without a search is refused here."""
        from h2o_flexgen.kernels.native import kernel_threads  # imports torch

        accelerator = machine.has_accelerator
        plan = self.plan if accelerator else self.plan.folded()
        spec = model(plan)
        machine.flop_rate(spec.dtype, 1)  # a type that was not measured there is refused
        check_rolling(spec, plan)
        for length, row in ({prompt_len: 0} if workload is None else workload.first_of_length).items():
            check_positions(spec, plan, row, length, gen_len)
        return Problem(
            model=model,
            workload=workload,
            prompt_len=prompt_len,
            gen_len=gen_len,
            plan=plan,
            machine=machine,
            budgets=budgets,
            kernel_threads=0 if accelerator else kernel_threads(),
            writes_weights=writes_weights,
            codecs=self.codecs,
            attend_on=self.attend_on,
            batch_sizes=self.batch_sizes,
            batches=self.batches,
            latency_limit=self.latency_limit,
            prefer=self.prefer,
        )


@dataclass(frozen=True)
class FoundPlan:
    machine: Machine
    found: Found
    seconds: float  # of searching

    @property
    def plan(self) -> Plan:
        return self.found.best.plan

    def lines(self) -> Iterator[str]:
        best = self.found.best
        yield f"machine   {self.machine.name}; its busiest part will be {best.prediction.busiest_lane}"
        yield f"found     in {self.seconds:.1f} s among {self.found.cases} sizes of batch and block"


@dataclass(frozen=True)
class Wish:
    """What is to be generated, by a model that is open, under a plan that is to be found."""

    asked: Asked
    llm: LLM
    workload: Workload | None  # of prompts that are given; without one as many will be made as the block takes
    prompt_len: int
    gen_len: int
    held_back: int = 0  # bytes of the fastest memory that the plan may not use

    def refuse_impossible(self) -> None:
        """What no machine could do is refused before this one is measured."""
        refuse_what_never_fits(self._problem(machine_before_profile(self.llm.device, self.llm.offload_folder)))

    def find(self, machine: Machine) -> FoundPlan:
        """The plan is the model's when this returns. A search leaves something in memory: where that is what the plan has no
        room for, it is searched once more, with what is left."""
        begun = time.perf_counter()
        for is_last in (False, True):
            found = search(self._problem(machine))
            self.llm.adopt(found.best.plan)
            if is_last or self.is_granted_by(found.best.plan):
                break
        return FoundPlan(machine, found, time.perf_counter() - begun)

    def is_granted_by(self, plan: Plan) -> bool:
        """Whether the plan fits it."""
        return self._request(plan).fits(self._budgets)

    @property
    def _budgets(self) -> Budgets:
        tier = DEVICE if self.llm.device.accelerator else HOST
        held = self.llm.budgets.of(tier)
        return self.llm.budgets if held is None else replace(self.llm.budgets, **{tier: held - self.held_back})

    def _problem(self, machine: Machine) -> Problem:
        llm = self.llm
        return self.asked.problem(
            machine,
            model=llm.spec_under,
            workload=self.workload,
            prompt_len=self.prompt_len,
            gen_len=self.gen_len,
            budgets=self._budgets,
            writes_weights=llm.dummy_weights,
        )

    def _request(self, plan: Plan) -> Request:
        workload = self.workload or Workload.uniform(plan.block_size, self.prompt_len, self.gen_len)
        return self.llm.request(workload, plan)

    # -- without a search ------------------------------------------------------------------------------------------------

    def plan_with_room(self) -> Plan | None:
        """All prompts in one block and everything in the fastest memory, where no more than half of it is needed for that: no
        search finds a better plan, so the machine need not be measured. None where it is not so, or where more is asked of a
        plan than to be fast."""
        asked = self.asked
        if not asked.is_only_speed:
            return None
        fastest = replace(asked.plan, weights=FASTEST, kv=FASTEST, hidden=FASTEST)
        if self.workload is not None:
            fastest = _in_one_block(fastest, self.workload.num_prompts, asked.batch_sizes, asked.batches)
        elif demo_folder(self.llm.name) is None:
            return None  # how many prompts make a good block is what is asked
        return fastest if self._request(fastest).fits(self._budgets.with_half_free()) else None


def _in_one_block(plan: Plan, rows: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Plan:
    """The plan with all rows in one block, in as few batches as there can be where nobody says otherwise."""
    number = batches[0] if batches else -(-rows // (sizes[0] if sizes else MOST_ROWS))
    size = sizes[0] if sizes else min(MOST_ROWS, -(-rows // number))
    return replace(plan, gpu_batch_size=size, num_gpu_batches=number)


# -- the machine -----------------------------------------------------------------------------------------------------------


def this_machine(device: Device, offload_folder: Path, dtype: str, progress: Progress) -> Machine:
    """This machine as its profile was kept, or as it is measured now, which is shown. `dtype` is as it was asked for."""
    from h2o_flexgen.profiling.kept import profiled  # imports torch

    progress.stage("profiling this machine, once")
    return profiled(
        device,
        offload_folder,
        None if dtype == AUTO else dtype,
        on_note=progress.note,
        on_subject=lambda title, done, total: progress.stage(title, f"{done}/{total}" if total else ""),
    )


def machine_before_profile(device: Device, offload_folder: Path) -> Machine:
    """This machine as far as it is known without measuring it: its memory. It stands in until a problem is known to make
    sense."""
    import shutil

    from h2o_flexgen.llm import existing_folder  # imports torch
    from h2o_flexgen.memory.host import available_bytes

    folder = existing_folder(offload_folder)
    return Machine(
        name="this machine",
        device=device.kind,
        device_bytes=device.free_bytes() or 0,
        host_bytes=available_bytes(),
        disk_bytes=0 if folder is None else shutil.disk_usage(folder).free,
        disk_read_per_s=inf,
        disk_write_per_s=inf,
        host_copy_per_s=inf,
        host_to_device_per_s=inf,
        device_to_host_per_s=inf,
        flops_per_s=dict.fromkeys(DTYPE_BYTES, ((1, inf),)),
        attention_bytes_per_s={},
        task_seconds=0.0,
    )


# -- for Python ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What a plan has to have room for."""

    workload: Workload
    held_back: int  # bytes of the fastest memory that the plan may not use

    def is_outgrown_by(self, other: Need, plan: Plan) -> bool:
        """Longer texts need more room; and more of them a larger block, where the block was as large as the workload."""
        new, known = other.workload, self.workload
        is_longer = max(new.prompt_lens) > max(known.prompt_lens) or new.gen_len > known.gen_len
        has_more_rows = new.num_prompts > known.num_prompts and plan.block_size >= known.num_prompts
        return is_longer or has_more_rows or other.held_back > self.held_back

    def together_with(self, other: Need) -> Need:
        """The larger of each."""
        lengths = (sorted(one.workload.prompt_lens, reverse=True) for one in (self, other))
        longest = tuple(max(pair) for pair in zip_longest(*lengths, fillvalue=0))
        gen_len = max(self.workload.gen_len, other.workload.gen_len)
        return Need(Workload(longest, gen_len), max(self.held_back, other.held_back))


@dataclass
class AutoPlan:
    """The plan of an LLM that was given none: found for its first workload, and anew for one that has outgrown it. A new plan
    has room for what came before, too: two kinds of calls in turn would load the weights anew each time."""

    asked: Asked
    dtype: str  # as it was asked for
    found_for: tuple[Need, ...] = ()  # each alone has room under the plan
    _machine: Machine | None = None

    def has_outgrown(self, workload: Workload, held_back: int, plan: Plan) -> bool:
        need = Need(workload, held_back)
        return all(known.is_outgrown_by(need, plan) for known in self.found_for)

    def find(self, llm: LLM, workload: Workload, held_back: int) -> None:
        """The plan is the model's when this returns."""
        need, known = Need(workload, held_back), self.found_for
        together = reduce(Need.together_with, known, need)
        if together != need and self._has_plan_for_both(llm, together):
            self.found_for = (together,)
            return
        wish = self._wish(llm, need)
        wish.refuse_impossible()
        self._adopt_best(wish)
        others = (one for one in known if self._wish(llm, one).is_granted_by(llm.plan)) if together != need else ()
        self.found_for = (need, *others)

    def _has_plan_for_both(self, llm: LLM, together: Need) -> bool:
        """Long prompts and long answers may each fit, but not both at once."""
        wish = self._wish(llm, together)
        try:
            wish.refuse_impossible()
        except ValueError:
            return False
        try:
            self._adopt_best(wish)
        except DoesNotFit:
            return False
        return wish.is_granted_by(llm.plan)

    def _wish(self, llm: LLM, need: Need) -> Wish:
        workload = need.workload
        return Wish(self.asked, llm, workload, max(workload.prompt_lens), workload.gen_len, need.held_back)

    def _adopt_best(self, wish: Wish) -> None:
        llm = wish.llm
        if (known := wish.plan_with_room()) is not None:
            llm.adopt(known)
            return
        if self._machine is None:
            with Progress(0, "this machine", late=True) as progress:
                self._machine = this_machine(llm.device, llm.offload_folder, self.dtype, progress)
        with Progress(0, f"planning for {llm.name}", late=True):
            wish.find(self._machine)
