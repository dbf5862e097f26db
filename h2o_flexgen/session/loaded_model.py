"""LoadedModel: an open model under a plan, its memory limits, and its engine, once its weights are loaded."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from h2o_flexgen.calibration.text_reading import ReadModel
from h2o_flexgen.checkpoints.checkpoint import HandedSource, WeightSource
from h2o_flexgen.checkpoints.derived import CALIBRATE, COPIES, Damaged
from h2o_flexgen.checkpoints.gguf_format import read_gguf
from h2o_flexgen.checkpoints.packed import PackedCheckpoint
from h2o_flexgen.checkpoints.stale_files import remove_leftovers
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.environment import cache_folder, folder_of_sockets
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.conversation import Conversation
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.reports import OnStage, Stage, Stages
from h2o_flexgen.engine.resources import (
    Packing,
    keep_few_compiled_products,
    on_disk,
    open_limits,
    set_threads,
    weighed_anew,
)
from h2o_flexgen.engine.row_adapters import RowAdapters
from h2o_flexgen.engine.stats import Peaks
from h2o_flexgen.engine.stores.prefix_files import PrefixFileCounts, PrefixFiles
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.host import FREED_BYTES, SharedWeights, give_back_freed, keep_little_freed, peak_resident_bytes
from h2o_flexgen.memory.memories import Memories, own_site
from h2o_flexgen.memory.threads import do_without_lost_threads, refuse_forked, start_computing_threads
from h2o_flexgen.models import tensor_names
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements, PlanSubject
from h2o_flexgen.planning.positions import check_positions, check_rolling
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling.gpu_checks import kept_graph_bytes
from h2o_flexgen.session.machine_source import MachineSource
from h2o_flexgen.session.measured_heads import HeadMeasuring
from h2o_flexgen.session.open_request import OpenRequest
from h2o_flexgen.session.opened_model import Mending, OpenedModel
from h2o_flexgen.session.prefix_folder import PrefixFolder

Say = Callable[[str], None]


def told_by_stages(line: str) -> None:
    """Says nothing: there are those that hear stages alone."""


def told_by_warnings(line: str) -> None:
    """Tells a program that hears no stages why its model takes so long to open."""
    warnings.warn(" ".join(line.split()), UserWarning, stacklevel=2)


class LoadedModel:
    """An open model under a plan. Nothing large is loaded before an engine is asked for; `close`, or a `with`, frees it."""

    def __init__(self, request: OpenRequest, on_stage: OnStage | None = None, say: Say = told_by_stages) -> None:
        """`say` is told in lines what is measured of the model before its first use."""
        site = request.site
        set_threads(site.threads)
        keep_few_compiled_products()
        do_without_lost_threads()
        self.request = request
        self.stages = Stages(on_stage)
        self.conversation: Conversation | None = None
        self._mending = Mending(self.stages)
        self._process = os.getpid()
        self._held_before = peak_resident_bytes()
        self._closed = False
        self._memories: Memories | None = None
        self._shared: SharedWeights | None = None
        self._engine: Engine | None = None
        self._prefix_files: PrefixFiles | None = None
        self.adapters = RowAdapters()  # that rows may ask for
        self.device = open_device(site.device)
        if self.device.accelerator and self.device.graph_bytes is None:
            self.device.graph_bytes = kept_graph_bytes(self.device.torch_device)
        site.refuse_memory_of_no_gpu(self.device.accelerator, "this model computes on the CPU")
        self._take(request.plan)
        site.refuse_unusable_folder()
        self.offload_folder, self.folder_to_make = site.offload_folder, site.folder_to_make
        caches = [cache_folder(kind) for kind in COPIES]
        self.leftovers = remove_leftovers(self.offload_folder, caches, folder_of_sockets())
        self._open()
        for name, folder in request.model.adapters_by_name.items():
            self.take_adapter(name, folder)
        self._prefix_folder = PrefixFolder.of(site, self.opened)
        limits = open_limits([self.device, *self.others], site.gpu_mem, site.cpu_mem)
        self.limits = self._on_disk(replace(limits, processes=site.gpus))
        self._measure_heads(say)

    @property
    def name(self) -> str:
        return self.request.model.source

    # -- the plan --------------------------------------------------------------------------------------------------------

    def _take(self, plan: Plan) -> None:
        folded = plan.at(self.site)
        folded.refuse_graphs(self.site)
        self.others = self._open_others(folded.pipeline)
        self.requested, self.plan = plan, folded

    def _open_others(self, devices: int) -> list[Device]:
        """The devices of a pipeline after the first."""
        if devices == 1:
            return []
        asked = f"a pipeline of {devices} devices was asked for"
        if not self.device.accelerator:
            raise ValueError(f"{asked}, and there is no GPU; leave it out, and the model computes on the CPU")
        if ":" in self.request.site.device:
            raise ValueError(f"{asked}, and device={self.request.site.device!r} is one; leave one of them out")
        return [open_device(name) for name in self.device.names_of(devices)[1:]]

    def adopt(self, plan: Plan) -> None:
        """Replaces the plan, e.g. by one that was found for this model."""
        self._refuse_closed()
        if self._engine is not None:
            raise ValueError(f"weights of {self.name} are already loaded under another plan; make a new LLM for this one")
        self._take(plan)
        self.source.close()
        self._put_under_plan()
        self.limits = self._on_disk(self.limits)
        self.weigh()

    def _on_disk(self, limits: MemoryLimits) -> MemoryLimits:
        return on_disk(limits, self.offload_folder, self.packing, self.request.site.disk_mem)

    @contextmanager
    def replanned(self, on_stage: OnStage | None) -> Iterator[None]:
        """A context in which another plan may be adopted after weights were loaded. An error restores the earlier plan."""
        self._refuse_closed()
        self._refuse_in_conversation()
        before = self.requested
        self._unload()
        with self.stages.heard_by(on_stage):
            try:
                yield
            except BaseException:
                self.adopt(before)
                raise

    def weigh(self) -> None:
        """Measures again the bytes that the process holds besides those that the plan counts."""
        if self._memories is None:
            self.limits = weighed_anew(self.limits)

    # -- what its heads need ---------------------------------------------------------------------------------------------

    @property
    def reading(self) -> ReadModel:
        """What texts are read with, under the plan."""
        return ReadModel(
            self.name, self.model, self.source, self.device, self.limits, self.offload_folder, self.plan.pin_weight
        )

    def _measure_heads(self, say: Say) -> None:
        """Measures what heads need where the plan goes by it and nothing is known: of the model as it is under no plan."""
        asked, plan = self.request.model, Plan()
        if not self._wants_heads(self.plan) or asked.tokenizer != AUTO:  # with other tokens, texts would be noise
            return
        source = self.opened.source(plan, self.offload_folder, self.stages)
        try:
            if self._copies_for(source):
                copied = f"weights are copied: {CALIBRATE} --model {asked.source}"
                say(f"heads     equal budgets: to measure what each needs, {copied}")
                return
            model = replace(self.reading, model=self.opened.model(plan), source=source)
            found = HeadMeasuring(asked.source, self.tokenizer, self.stages, say).budgets(model)
        finally:
            source.close()
        self._held_before = peak_resident_bytes()
        if found is None:
            self.weigh()
        else:
            self.adopt(replace(self.requested, head_budgets=found))

    def _wants_heads(self, plan: Plan) -> bool:
        """Whether the plan is to go by what heads need, and nothing is known of it."""
        asked = self.request.model
        return plan.head_budgets is None and asked.measures_heads and not asked.is_looked_at and plan.suits_any_head_budgets

    def _copies_for(self, source: WeightSource) -> bool:
        """Whether the source would copy weights that the plan's own source does not need."""
        if not isinstance(source, PackedCheckpoint) or not source.bytes_to_write:
            return False
        return not isinstance(self.source, PackedCheckpoint) or self.source.folder != source.folder

    def with_heads(self, asked: PlanRequirements) -> PlanRequirements:
        """What is asked of a plan, with the head budgets that were measured for it."""
        own = self.requested.head_budgets
        return replace(asked, plan=replace(asked.plan, head_budgets=own)) if self._wants_heads(asked.plan) else asked

    @property
    def site(self) -> Site:
        device, request = self.device, self.request
        own = own_site(device.kind, device.accelerator, request.model.dummy_weights, device.graph_bytes)
        own = replace(own, adapters=self.adapters.room)
        return own if request.site.prefix_dir is None else replace(own, writes_prefixes=True)

    def planned(self, workload: Workload, plan: Plan | None = None, scored_at_once: int = 0) -> WorkloadPlan:
        """Plans the workload under this model's plan, or under another one."""
        site = self.site
        plan = self.plan if plan is None else plan.at(site)
        spec = self.spec if plan == self.plan else self.spec_under(plan)
        return WorkloadPlan(spec, plan, workload, site, scored_at_once)

    def check(self, workload: Workload) -> WorkloadPlan:
        """Refuses a workload that the plan does not fit, before anything is loaded; otherwise returns how it is planned."""
        for length, row in workload.first_of_length.items():
            check_positions(self.spec, self.plan, row, length, workload.gen_len)
        return self.fitting(workload)

    def fitting(self, workload: Workload, scored_at_once: int = 0) -> WorkloadPlan:
        planned = self.planned(workload, None, scored_at_once)
        self.hold_to_limits(planned)
        return planned

    def hold_to_limits(self, planned: WorkloadPlan) -> None:
        """Refuses what does not fit. Of what fits closely the process keeps little of what was freed, which no plan counts."""
        planned.refuse_what_does_not_fit(self.limits)
        if self.limits.room(planned.footprint, HOST) < FREED_BYTES:
            keep_little_freed()

    def spec_under(self, plan: Plan) -> ModelSpec:
        return self.opened.spec(plan)

    def machines(self, named: Machine | None = None) -> MachineSource:
        """The machine that plans are found for: the named one, or this one."""
        return MachineSource(named, self.device, self.offload_folder, self.request.model.dtype, self.limits.processes)

    def subject_on(self, machine: Machine) -> PlanSubject:
        """What a plan is found for; the machine has the memory that was free when the model was opened."""
        return PlanSubject(self.spec_under, self.limits, self.site)

    # -- the model -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Opens the model; damaged copies of its weights are made again."""
        asked = self.request.model
        while True:
            read = cache(read_gguf)  # the header of a GGUF file is read once for all that follows from it
            try:
                how = asked.dtype, self.site, self.stages, read, asked.adapter
                self.opened = OpenedModel.of(asked.source, asked.dummy_weights, *how)
                self._put_under_plan()
            except Damaged as damaged:
                self._mending.discard(damaged)
            else:
                self.tokenizer = self.opened.tokenizer(asked.tokenizer, self.spec.vocab, read)
                return

    def _put_under_plan(self) -> None:
        self.model = self.opened.model(self.plan)  # its layers as functions, for other code that runs them
        self.source = self.opened.source(self.plan, self.offload_folder, self.stages)  # where its weights come from
        if any(self.spec.windows):  # rows do not keep tokens before a window, so that no prefix is shared
            self.plan = replace(self.plan, shared_prefixes=False)
        self._refuse_useless_folder()
        check_rolling(self.spec, self.plan)
        if self.plan.head_budgets is not None:
            self.plan.head_budgets.refuse_other(self.spec)
        if self.plan.probe is not None:
            self.plan.probe.refuse_other(self.spec)

    def _refuse_useless_folder(self) -> None:
        """Refuses a folder of prefixes where none are shared."""
        if (site := self.request.site).prefix_dir is not None and not self.plan.shares_prefixes:
            given, why = site.named("prefix_dir"), self.plan.why_none_are_shared
            raise ValueError(f"{given} is {shown(str(site.prefix_dir))}, but no prefixes are shared ({why}); leave {given} out")

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def packing(self) -> Packing | None:
        """The folder of packed weights, and the bytes still to be written there. Random weights are not kept."""
        if not isinstance(self.source, PackedCheckpoint):
            return None
        return Packing(self.source.folder, self.source.bytes_to_write, self.source.bytes_to_free)

    def take_adapter(self, name: str, folder: str | Path) -> None:
        """Takes an adapter that rows may ask for by this name. It is loaded with the weights, or before the next block."""
        self.adapters.add(name, folder, self.spec, tensor_names(self.opened.config), self.opened.folder)

    # -- its engine ------------------------------------------------------------------------------------------------------

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that weights are read from in every step; none before they are loaded."""
        return self._engine.weight_files if self._engine is not None else ()

    def load_shared(self, shared: SharedWeights, on_stage: OnStage | None = None) -> Engine:
        """Loads the weights, those in host memory into a file that several processes share."""
        self._shared = shared
        return self.ready(on_stage)

    def ready(self, on_stage: OnStage | None) -> Engine:
        """The engine, with nothing of earlier workloads in memory but the weights."""
        self._refuse_in_conversation()
        self._refuse_closed()
        with self.stages.heard_by(on_stage):
            engine = self._load()
            engine.load_adapters()
        engine.trim()
        engine.restart_peaks()
        return engine

    def _load(self) -> Engine:
        self._refuse_closed()
        while self._engine is None:
            self.stages(Stage.LOADING)
            start_computing_threads(teams=2 if self.plan.attend_on == HOST else self.plan.pipeline)
            try:
                self._engine = self._new_engine()
            except Damaged as damaged:
                self._mending.discard(damaged)
                self._open()
        self.stages(Stage.GENERATING)
        return self._engine

    def _new_engine(self) -> Engine:
        """A new engine with its weights loaded, and checked if they lie in a copy."""
        shared, source = self._shared, self.source
        if shared is not None and shared.take is not None:
            source = HandedSource(source, shared.take)
        self._memories = Memories(self.device, self.offload_folder, self.plan.pin_weight, shared, self.others)
        try:
            if self._prefix_folder is not None:
                self._prefix_files = self._prefix_folder.files(self.spec, self.plan, self.site, self.device, self.adapters)
            told = self.request.trace, self._prefix_files, self.adapters
            return Engine(self.model, source, self.plan, self._memories, *told)
        except BaseException:  # the next attempt starts from nothing
            self.source.close()
            self._close_memories()
            raise

    def _close_memories(self) -> None:
        """Frees all memory, when prefixes that were computed are written."""
        if self._prefix_files is not None:
            self._prefix_files.close()
        if self._memories is not None:
            self._memories.close()

    @property
    def prefix_counts(self) -> PrefixFileCounts | None:
        """What was read from the folder of prefixes, and written to it, since weights were loaded; None if there is none."""
        return None if self._prefix_files is None else self._prefix_files.counts

    def peaks(self) -> Peaks:
        """The most bytes held since the weights were loaded; for the host, the most that the process has ever held."""
        assert self._memories is not None
        disk = self._memories.disk.meter.peak_bytes
        if self.request.model.dummy_weights:
            disk += sum(file.stat().st_size for file in self.weight_files)
        device, host = max(device.peak_bytes() for device in (self.device, *self.others)), peak_resident_bytes()
        over = self.limits.exceeded_by({DEVICE: device, HOST: host, DISK: disk})
        if host <= self._held_before:  # the peak is from before this model was opened
            over[HOST] = 0
        return Peaks({DEVICE: device, HOST: host, DISK: disk}, over)

    def _refuse_closed(self) -> None:
        refuse_forked(self._process, f"this LLM of {self.name}")
        if self._closed:
            raise ValueError(f"this LLM of {self.name} is closed; make a new one to generate")

    def _refuse_in_conversation(self) -> None:
        if self.conversation is not None and not self.conversation.closed:
            raise ValueError(f"a conversation of {self.name} is open; close it first")

    # -- the end ---------------------------------------------------------------------------------------------------------

    def unload(self) -> None:
        """Frees all memory. The next generation loads everything again."""
        refuse_forked(self._process, f"this LLM of {self.name}")
        if self.conversation is not None:
            self.conversation.close()
        self._close_memories()
        self._memories = self._engine = None  # page-locked until its memory is closed
        gc.collect()
        give_back_freed()

    def close(self) -> None:
        """Ends the disk threads, closes files and removes written ones. The object can no longer generate. In a forked process
        this does nothing: everything belongs to the parent."""
        self._closed = True
        if self._process != os.getpid():
            return
        if self.conversation is not None:
            self.conversation.close()
        self._unload()

    def _unload(self) -> None:
        try:
            self.source.close()
        finally:
            self._close_memories()
            self._engine = self._memories = None  # last: what it holds is page-locked until its memory is closed
