"""The plan on paper: the model, the work, the shares asked for beside those placed, and what each tier must hold; and what is
predicted of the run, beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.cli.report import Entry, document_of, entry, lines_of, noted, told
from h2o_flexgen.cli.report.arithmetic import Arithmetic, StoredWeights
from h2o_flexgen.cli.report.kept_by_policy import KeptByPolicy
from h2o_flexgen.cli.terminal import page_width, table
from h2o_flexgen.core.buffer_layout import ALIGNMENT, hidden_bytes
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIER_NAMES, TIERS
from h2o_flexgen.core.units import counted, format_bytes, format_seconds
from h2o_flexgen.engine.resources import Packing
from h2o_flexgen.engine.stats import Stats
from h2o_flexgen.formats.kernel_table import Processor
from h2o_flexgen.formats.table import PLAIN, chosen_format, matrix_format
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.placement import layers_of
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import Prediction
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Data
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.session.loaded_model import LoadedModel

PLACED_DATA = ("weights", "KV", "activations")
STATES = "states"  # a kind where rows have some
MUCH_MORE = 1.5  # times its bytes that KV takes of a disk before it is said why
ON_PAGE = ("model", "schedule", "KV", "numbers", "kernels")  # labels


@dataclass(frozen=True)
class PlanReport:
    model: str
    is_noise: bool  # its weights are random, as was asked for
    requested: Plan  # as it was asked for
    planned: WorkloadPlan  # in force: folded without an accelerator
    limits: MemoryLimits
    processor: Processor | None  # what computes; None for another machine, of which only its profile is known
    packing: Packing | None = None
    tokenizer_note: str = ""
    reads_texts: bool = True  # the tokenizer does
    adapters: Sequence[str] = ()  # that are merged into the model, as they were given
    stored: StoredWeights | None = None  # what was found in the checkpoint
    arriving: bool = False  # how many prompts will come is not known
    measures_heads: bool = False  # a run of it does, before
    is_of_config: bool = False  # its files were not opened
    folder_to_make: Path | None = None  # the offload folder, if it was named and is not there
    named: str = ""  # another machine, of which only its profile is known
    beyond: Sequence[str] = ()  # lines on limits that are above what the machine has

    @classmethod
    def of(cls, loaded: LoadedModel, planned: WorkloadPlan, arriving: bool = False) -> PlanReport:
        """The report of a model that is open."""
        asked = loaded.request.model
        return cls(
            model=asked.name,
            is_noise=asked.dummy_weights and not asked.stands_for_own,
            requested=loaded.requested,
            planned=planned,
            limits=loaded.limits,
            processor=processor(loaded.device.kind),
            packing=loaded.packing,
            tokenizer_note=loaded.tokenizer.note,
            reads_texts=loaded.tokenizer.reads_texts,
            adapters=asked.adapter,
            stored=StoredWeights.of(loaded.opened),
            arriving=arriving,
            measures_heads=asked.measures_heads and asked.is_looked_at,
            is_of_config=asked.stands_for_own,
            folder_to_make=loaded.folder_to_make,
            beyond=[*loaded.request.site.beyond(loaded.machines().memory)],
        )

    @property
    def first(self) -> BlockPlan:
        return self.planned.blocks.first

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.of(self.planned, self.processor)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those that there are."""
        return TIERS if self.planned.site.accelerator else (HOST, DISK)

    @property
    def words(self) -> dict[str, str]:
        """What the page of a server says of the plan, by what it is about."""
        said = {one.label: one.words[0] for one in self.entries() if one.label in ON_PAGE}
        return {**said, "model": said["model"].removeprefix(f"{self.model}: ")}

    def lines(self) -> list[str]:
        return lines_of(self.entries())

    def as_json(self) -> dict[str, object]:
        return document_of(self.entries())

    def entries(self) -> Iterator[Entry]:
        plan = self.planned.plan
        yield from self._of_model()
        yield noted(
            plan=plan.as_json(),
            requested_percent=list(self.requested.percent),
            placed_percent=[round(share, 2) for share in self.first.placed_percent],
        )
        yield from self._of_work()
        yield from self._of_schedule()
        source = "" if self.is_noise else self.planned.spec.name
        yield from KeptByPolicy(self.planned, source, self.adapters, self.reads_texts, self.measures_heads).entries()
        yield from self._of_states()
        yield entry("numbers", self.arithmetic.line(), arithmetic=self.arithmetic.as_json())
        yield from self._of_devices()
        if self.tokenizer_note:
            yield entry("tokens", self.tokenizer_note)
        yield self._of_kernels()
        nbytes = self.packing.nbytes if self.packing else 0
        yield told(*[f"the weights are packed first, once: {self.packing}"] * (nbytes > 0), bytes_to_pack=nbytes)
        if self.folder_to_make is not None:
            yield told(f"--offload-dir {self.folder_to_make} is not there: it is made, and removed at the end")
        if self.is_of_config:
            yield told("seen by its config alone: a run takes its own weights and tokenizer, in which texts have fewer tokens")
        if self.is_noise:
            yield told("weights are random, so the text is noise")
        if self._is_folded:
            yield told("no GPU: what was meant for it lives in CPU memory")
        yield told("", *self._shares(), placed_bytes=placed_bytes(self.first))
        yield from self._of_tiers()

    def _of_kernels(self) -> Entry:
        """Those that compute. What kernels in C another machine has, its profile does not name."""
        kernels = self.planned.site.processor.kernels
        if not self.named or self.planned.site.accelerator:
            return entry("kernels", kernels, kernels=kernels)
        here = f"working space is counted as with those of this machine, {kernels}"
        return entry("kernels", f"those that {self.named} was measured with; {here}", kernels=None)

    def _of_model(self) -> Iterator[Entry]:
        spec, codec = self.planned.spec, self.planned.plan.weight_codec
        weights = f"{format_bytes(spec.weight_bytes)} of weights {self._written_down()}"
        yield entry("model", f"{self.model}: {spec.architecture}, {weights}", model=self.model)
        yield noted(stored=None) if self.stored is None else self.stored.entry()
        if codec != PLAIN and not any(tensor.format == matrix_format(codec) for tensor in spec.tensors.values()):
            yield entry("packed", f"nothing: as {codec} no matrix would be smaller than it is stored")

    def _written_down(self) -> str:
        spec = self.planned.spec
        formats = [spec.dtype if format == PLAIN else chosen_format(format) for format in spec.formats]
        return f"in {spec.dtype}" if spec.formats == (PLAIN,) else f"with matrices as {' and '.join(formats)}"

    def _of_work(self) -> Iterator[Entry]:
        """What there is to do, and in which blocks."""
        plan, workload = self.planned.plan, self.planned.workload
        is_running = workload.gen_lens is not None
        length = counted(max(workload.prompt_lens), "token")
        many = f"of up to {length}" if self.arriving else f"{workload.num_prompts} of up to {length}"
        prompts = f"1 of {length}" if not self.arriving and workload.num_prompts == 1 else many
        generated = f"{'up to ' if is_running else ''}{workload.gen_len} to generate for each"
        yield entry("prompts", f"{prompts}, {generated}", num_prompts=workload.num_prompts)
        if not is_running:
            batches = f"{counted(plan.gpu_batch_size, 'row')} x {counted(plan.num_gpu_batches, 'batch')}"
            yield entry("block", f"{batches}; {counted(len(self.planned.blocks), 'block')} to run")
            return
        sizes = [batch.size for batch in self.first.block.batches]
        batches = f"{counted(max(sizes), 'seat')} x {counted(len(sizes), 'batch')}"
        yield entry("block", f"{batches}, in which rows come and go")
        if room := workload.prefix_room:
            states = f", of which the states of each take {own}" if (own := workload.prefix_states) else ""
            yield entry("prefixes", f"room for {room} tokens of what requests begin with alike{states}, {plan.prefix_policy}")
        shared = Counter(prefix for prefix in workload.prefixes if prefix is not None)
        if shared:
            saved = sum((rows - 1) * prefix.tokens for prefix, rows in shared.items())
            prompts = f"{saved} of {sum(workload.prompt_lens)} tokens of prompts need not be computed"
            yield entry("prefixes", f"{len(shared)} that prompts share, {plan.prefix_policy}: {prompts}")

    def _of_states(self) -> Iterator[Entry]:
        """What a row has of them, and what of it crosses links and disks in a step."""
        layouts, traffic = self.first.states, self.first.schedule.traffic
        if not layouts:
            return
        of_row = sum(layout.row_bytes for (_, batch), layout in layouts.items() if batch == 0)
        moved = sum(layout.nbytes for place, layout in layouts.items() if traffic.moves_state(*place))
        ways = f"; a step brings {format_bytes(moved)} of them, and takes them back" if moved else ""
        stateful, attending = len(self.planned.spec.state_layers), len(self.planned.spec.kv_layers)
        words = f"{format_bytes(of_row)} a row in {stateful} layers, for a text of any length; KV is in {attending}{ways}"
        yield entry("states", words, state_row_bytes=of_row, state_step_bytes=moved)

    def _of_schedule(self) -> Iterator[Entry]:
        schedule = self.first.schedule
        layers = "apart" if self.planned.plan.sep_layer else "as one layer"
        yield entry("schedule", f"{schedule.name}, {_buffers(schedule)}, attention and MLP {layers}")

    def _of_devices(self) -> Iterator[Entry]:
        """What each device of a pipeline computes, and what it needs at most."""
        device_of, names = self.first.schedule.traffic.device_of, self.first.spec.layer_names
        needs = [sum(parts.values()) for parts in self.planned.footprint.devices]
        for device, nbytes in enumerate(needs):
            own = layers_of(device_of, device)
            ends = dict.fromkeys(names[layer].title for layer in (own[0], own[-1]))  # which may be one layer
            yield entry(f"GPU {device}", f"{' to '.join(ends)}, needs at most {format_bytes(nbytes)}")
        yield noted(device_bytes=needs)

    def _shares(self) -> list[str]:
        tiers = self.tiers
        names = [TIER_NAMES[tier] for tier in tiers]
        asked_of = "GPU + CPU / disk" if self._is_folded else " / ".join(names)
        rows = [["", f"requested % {asked_of}", f"placed % {' / '.join(names)}", *(f"bytes on {name}" for name in names)]]
        placed, held = self.first.placed_percent, placed_bytes(self.first)
        for place, kind in enumerate(PLACED_DATA):
            pair = slice(2 * place, 2 * place + 2)
            asked, got = self._asked(*self.requested.percent[pair]), " / ".join(_three(*placed[pair])[-len(tiers) :])
            rows.append([kind, asked, got, *(format_bytes(held[kind][tier]) for tier in tiers)])
        if (states := held.get(STATES)) is not None:
            own, all_bytes = self.requested.of_states, sum(states.values())
            got = " / ".join(_three(*(100 * states[tier] / all_bytes for tier in (DEVICE, HOST)))[-len(tiers) :])
            asked = self._asked(100 * own.device, 100 * own.host)
            rows.append([STATES, asked, got, *(format_bytes(states[tier]) for tier in tiers)])
        return table(rows, page_width())

    def _asked(self, device_percent: float, host_percent: float) -> str:
        device, host, disk = _three(device_percent, host_percent)
        if self._is_folded:
            return f"{device} + {host} / {disk}"
        return f"{device} / {host} / {disk}" if self.planned.site.accelerator else f"{host} / {disk}"

    @property
    def _is_folded(self) -> bool:
        """Whether something was meant for a GPU that is not there."""
        given, kept = ((one.percent, one.attend_on) for one in (self.requested, self.planned.plan))
        return not self.planned.site.accelerator and given != kept

    def _of_tiers(self) -> Iterator[Entry]:
        needs = {tier: self.limits.needs(self.planned.footprint, tier) for tier in TIERS}
        limits = {tier: self.limits.of(tier) for tier in TIERS}
        rows = [["tier", "needs at most", "limit", "of which"]]
        for tier, need in needs.items():
            if need or tier == HOST:
                most = "none" if (limit := limits[tier]) is None else format_bytes(limit)
                rows.append([TIER_NAMES[tier], format_bytes(need), most, self._parts(tier)])
        yield told("", *table(rows, page_width()), needed_bytes=needs, budget_bytes=limits)
        yield told(*self.beyond)
        yield from self._of_pages()

    def _of_pages(self) -> Iterator[Entry]:
        """Why KV takes so much more of a disk than its bytes, where it does: a small batch fills pages badly."""
        first, placed = self.first, placed_bytes(self.first)["KV"][DISK]
        there = (place for place, tier in first.placement.kv.items() if tier == DISK)
        taken = sum(layout.disk_bytes for place in there for layout in first.kv.layouts(*place) if layout is not None)
        if taken > MUCH_MORE * placed:
            pages = f"slots fill whole pages of {format_bytes(ALIGNMENT)} there, and those that change have others beside them"
            yield told(f"KV takes {taken / placed:.1f} times its {format_bytes(placed)} on disk: {pages}")

    def _parts(self, tier: str) -> str:
        parts = self.limits.held(self.planned.footprint, tier).items()
        return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)


def together(processes: int, requests: int, accelerator: bool) -> Entry:
    """What a plan is for that several processes run, each its part of all requests."""
    where = "with a GPU each" if accelerator else "on the CPU"
    words = (
        f"{processes} processes {where} share {requests} prompts, and one copy of the weights in CPU memory",
        "the plan is that of the process with most to do; bytes of CPU memory and disk are those of all",
    )
    return entry("together", words if processes > 1 else (), num_prompts=requests, gpus=processes)


def placed_bytes(planned: BlockPlan) -> dict[str, dict[str, int]]:
    """Bytes by kind of data and tier."""
    placement, spec = planned.placement, planned.spec
    return {
        "weights": _per_tier((placement.weights[name], tensor.nbytes) for name, tensor in spec.tensors.items()),
        "KV": _per_tier(_kv_bytes(planned)),
        "activations": _per_tier(
            (tier, hidden_bytes(spec, batch)) for tier, batch in zip(placement.hidden, planned.block.batches)
        ),
        **({STATES: _per_tier(_state_bytes(planned))} if planned.states else {}),
    }


def _kv_bytes(planned: BlockPlan) -> list[tuple[str, int]]:
    """The tier and the bytes of each home of keys and values."""
    return _homes(planned, [(tier, planned.kv.image_bytes(*place)) for place, tier in planned.placement.kv.items()])


def _state_bytes(planned: BlockPlan) -> list[tuple[str, int]]:
    """The same of states."""
    return _homes(planned, [(tier, planned.states[place].nbytes) for place, tier in planned.placement.state.items()])


def _homes(planned: BlockPlan, each: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """All layers and batches have one home where no later visit needs what is in it."""
    return [max(each)] if planned.block.only_reads and each else each


def _per_tier(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = dict.fromkeys(TIERS, 0)
    for tier, nbytes in sizes:
        total[tier] += nbytes
    return total


def _buffers(schedule: Schedule) -> str:
    weights, named = schedule.weight_buffers, {Data.KV: "KV", Data.STATE: "states", Data.HIDDEN: "activations"}
    passing = [data for data in named if data is not Data.STATE or schedule.traffic.state]
    alike: dict[int, list[str]] = {}
    for data in passing:
        alike.setdefault(schedule.buffers_of(data), []).append(named[data])
    if [*alike] == [weights]:
        return "1 buffer, nothing overlaps" if weights == 1 else f"{weights} buffers"
    *first, last = [f"{weights} buffers for weights", *(f"{count} for {' and '.join(names)}" for count, names in alike.items())]
    return f"{', '.join(first)} and {last}"


def _three(device_percent: float, host_percent: float) -> tuple[str, str, str]:
    disk_percent = max(0.0, round(100 - device_percent - host_percent, 4))
    return f"{device_percent:.4g}", f"{host_percent:.4g}", f"{disk_percent:.4g}"


@dataclass(frozen=True)
class Predicted:
    """Seconds, lanes, and what each tier holds; in JSON under the names of a run's own figures."""

    prediction: Prediction
    machine: str  # the machine that the prediction is for
    limits: MemoryLimits

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes per tier, with what the process holds by itself."""
        base = {tier: self.limits.host_base if tier == HOST else 0 for tier in TIERS}
        return {tier: nbytes + base[tier] for tier, nbytes in self.prediction.peak_bytes.items()}

    def entries(self) -> Iterator[Entry]:
        """The line shown before the run, and the values of its document."""
        one = self.prediction
        yield noted(machine=self.machine)
        yield entry(
            "predicted",
            f"prefill {format_seconds(one.prefill_seconds)}, {format_seconds(one.step_seconds)} a step, "
            f"{one.tokens_per_second:.3g} tokens/s; {one.busiest_lane} is busiest",
            prefill_seconds=round(one.prefill_seconds, 6),
            decode_seconds=round(one.decode_seconds, 6),
            total_seconds=round(one.total_seconds, 6),
            tokens_per_second=round(one.tokens_per_second, 3),
            step_seconds_mean=round(one.step_seconds, 6),
        )
        yield noted(busy_seconds={lane: round(seconds, 6) for lane, seconds in one.lane_seconds.items()})
        yield noted(peak_bytes=self.peak_bytes)

    def as_json(self) -> dict[str, object]:
        return document_of(self.entries())

    def beside(self, stats: Stats) -> list[str]:
        """A table of what was predicted and what was measured."""
        one, steps = self.prediction, len(stats.step_seconds)
        rows = [["", "predicted", "measured", "predicted / measured"]]
        rows.append(_seconds("prefill", one.prefill_seconds, stats.prefill_seconds))
        if steps:
            rows.append(_seconds("a decode step, mean", one.step_seconds, stats.decode_seconds / steps))
        rows.append(_seconds("all", one.total_seconds, stats.total_seconds))
        for lane in dict.fromkeys([*one.lane_seconds, *stats.busy_seconds]):
            rows.append(_seconds(f"{lane}, busy", one.lane_seconds.get(lane, 0.0), stats.busy_seconds.get(lane, 0.0)))
        for tier, nbytes in self.peak_bytes.items():
            held = stats.peak_bytes[tier]
            if nbytes or held:
                rows.append([f"peak on {TIER_NAMES[tier]}", format_bytes(nbytes), format_bytes(held), _ratio(nbytes, held)])
        return table(rows, page_width())


def _seconds(name: str, predicted: float, measured: float) -> list[str]:
    return [name, format_seconds(predicted), format_seconds(measured), _ratio(predicted, measured)]


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured else ""
