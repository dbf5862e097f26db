"""The plan on paper: the shares asked for beside those placed, with bytes; what each tier must hold, what the KV policy keeps,
and what is predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from h2o_flexgen.cli.arithmetic import Arithmetic
from h2o_flexgen.cli.common_requests import ModelRequest
from h2o_flexgen.cli.stored_weights import StoredWeights
from h2o_flexgen.cli.terminal import page_width, table
from h2o_flexgen.core.buffer_layout import hidden_bytes
from h2o_flexgen.core.tiers import DEVICE, DISK, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.opened_limits import Packing
from h2o_flexgen.engine.stats import Stats
from h2o_flexgen.formats.kernel_table import Processor
from h2o_flexgen.formats.table import PLAIN, chosen_format, matrix_format
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.memory_limits import MemoryLimits
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import Prediction
from h2o_flexgen.planning.sections import layers_of
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.full import Full
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.schedule.schedule import Schedule

if TYPE_CHECKING:  # a plan for another machine opens no model
    from h2o_flexgen.session.loaded_model import ModelUnderPlan

NAMES = {DEVICE: "GPU", HOST: "CPU", DISK: "disk"}
KINDS = ("weights", "KV", "activations")
Counted = tuple[Occupancy, int]  # how often there is such a one


@dataclass(frozen=True)
class PlanReport:
    model: str
    dummy_weights: bool
    requested: Plan  # as it was asked for
    planned: WorkloadPlan  # in force: folded without an accelerator
    limits: MemoryLimits
    processor: Processor | None  # what computes; None for another machine, of which only its profile is known
    packing: Packing | None = None
    tokenizer_note: str = ""
    stored: StoredWeights | None = None  # what was found in the checkpoint

    @classmethod
    def of(cls, llm: ModelUnderPlan, model: ModelRequest, planned: WorkloadPlan) -> PlanReport:
        """The report of a model that is open."""
        return cls(
            model=model.name,
            dummy_weights=model.dummy_weights,
            requested=llm.requested,
            planned=planned,
            limits=llm.limits,
            processor=processor(llm.device.kind),
            packing=llm.packing,
            tokenizer_note=llm.tokenizer.note,
            stored=StoredWeights.of(llm.opened),
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
        """What is said of the plan, by what it is about."""
        spec, plan, schedule = self.planned.spec, self.planned.plan, self.first.schedule
        packed = "" if plan.kv_codec == PLAIN else f", as {plan.kv_codec}"
        beside = "; outside the GPU it is attended by the CPU" if plan.attend_on == HOST else ""
        layers = "apart" if plan.sep_layer else "as one layer"
        return {
            "model": f"{spec.architecture}, {format_bytes(spec.weight_bytes)} of weights {self._written_down()}",
            "schedule": f"{schedule.name}, {_buffers(schedule)}, attention and MLP {layers}",
            "KV": f"{KeptByPolicy(self.planned).line()}{packed}{beside}",
            "numbers": self.arithmetic.line(),
            "kernels": self.planned.site.processor.kernels,
        }

    def lines(self) -> list[str]:
        return [*self._head(), "", *self._shares(), "", *self._needs()]

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "stored": self.stored.as_json() if self.stored else None,
            "plan": self.planned.plan.as_json(),
            "requested_percent": list(self.requested.percent),
            "placed_percent": [round(share, 2) for share in self.first.placed_percent],
            "arithmetic": self.arithmetic.as_json(),
            "kept": KeptByPolicy(self.planned).as_json(),
            "kernels": self.planned.site.processor.kernels,
            "bytes_to_pack": self.packing.nbytes if self.packing else 0,
            "num_prompts": self.planned.workload.num_prompts,
            "placed_bytes": placed_bytes(self.first),
            "needed_bytes": {tier: self.limits.needs(self.planned.footprint, tier) for tier in TIERS},
            "device_bytes": [sum(parts.values()) for parts in self.planned.footprint.devices],
            "budget_bytes": {tier: self.limits.of(tier) for tier in TIERS},
        }

    def _head(self) -> list[str]:
        words = self.words
        lines = [
            f"model     {self.model}: {words['model']}",
            *self._found(),
            *self._work(),
            f"schedule  {words['schedule']}",
            f"KV        {words['KV']}",
            *KeptByPolicy(self.planned).by_head(),
            *probe_lines(self.planned.plan),
            f"numbers   {words['numbers']}",
        ]
        lines += self._devices()
        if self.tokenizer_note:
            lines.append(f"tokens    {self.tokenizer_note}")
        lines.append(f"kernels   {words['kernels']}")
        if self.packing and self.packing.nbytes:
            lines.append(f"the weights are packed first, once: {self.packing}")
        if self.dummy_weights:
            lines.append("weights are random, so the text is noise")
        if self._is_folded:
            lines.append("no GPU: what was meant for it lives in host memory")
        return lines

    def _devices(self) -> Iterator[str]:
        """What each device of a pipeline computes, and what it needs at most."""
        device_of, names = self.first.schedule.traffic.device_of, self.first.spec.layer_names
        for device, parts in enumerate(self.planned.footprint.devices):
            own = layers_of(device_of, device)
            ends = dict.fromkeys(names[layer].title for layer in (own[0], own[-1]))  # which may be one layer
            yield f"GPU {device}     {' to '.join(ends)}, needs at most {format_bytes(sum(parts.values()))}"

    def _work(self) -> Iterator[str]:
        """What there is to do, and in which blocks."""
        plan, workload = self.planned.plan, self.planned.workload
        prompts = f"prompts   {workload.num_prompts} of up to {max(workload.prompt_lens)} tokens"
        if workload.gen_lens is None:
            yield f"{prompts}, {workload.gen_len} to generate for each"
            blocks = f"{len(self.planned.blocks)} of them to run"
            yield f"block     {plan.gpu_batch_size} rows x {plan.num_gpu_batches} batches; {blocks}"
            return
        yield f"{prompts}, up to {workload.gen_len} to generate for each"
        sizes = [batch.size for batch in self.first.block.batches]
        yield f"block     {max(sizes)} seats x {len(sizes)} batches, in which rows come and go"
        if workload.prefix_room:
            yield f"prefixes  room for {workload.prefix_room} tokens of what requests begin with alike, {plan.prefix_policy}"
        shared = Counter(prefix for prefix in workload.prefixes if prefix is not None)
        if shared:
            saved = sum((rows - 1) * prefix.tokens for prefix, rows in shared.items())
            prompts = f"{saved} of {sum(workload.prompt_lens)} tokens of prompts need not be computed"
            yield f"prefixes  {len(shared)} that prompts share, {plan.prefix_policy}: {prompts}"

    def _found(self) -> Iterator[str]:
        if self.stored is not None:
            yield f"found     {self.stored.line()}"
        codec = self.planned.plan.weight_codec
        if codec != PLAIN and not any(tensor.format == matrix_format(codec) for tensor in self.planned.spec.tensors.values()):
            yield f"packed    nothing: as {codec} no matrix would be smaller than it is stored"

    def _written_down(self) -> str:
        spec = self.planned.spec
        formats = [spec.dtype if format == PLAIN else chosen_format(format) for format in spec.formats]
        return f"in {spec.dtype}" if spec.formats == (PLAIN,) else f"with matrices as {' and '.join(formats)}"

    def _shares(self) -> list[str]:
        tiers = self.tiers
        names = [NAMES[tier] for tier in tiers]
        asked_of = "GPU + CPU / disk" if self._is_folded else " / ".join(names)
        rows = [["", f"requested % {asked_of}", f"placed % {' / '.join(names)}", *(f"bytes on {name}" for name in names)]]
        placed, held = self.first.placed_percent, placed_bytes(self.first)
        for place, kind in enumerate(KINDS):
            pair = slice(2 * place, 2 * place + 2)
            asked, got = self._asked(*self.requested.percent[pair]), " / ".join(_three(*placed[pair])[-len(tiers) :])
            rows.append([kind, asked, got, *(format_bytes(held[kind][tier]) for tier in tiers)])
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

    def _needs(self) -> list[str]:
        rows = [["tier", "needs at most", "limit", "of which"]]
        for tier in TIERS:
            need, limit = self.limits.needs(self.planned.footprint, tier), self.limits.of(tier)
            if need or tier == HOST:
                most = format_bytes(limit) if limit is not None else "none"
                rows.append([NAMES[tier], format_bytes(need), most, self._parts(tier)])
        return table(rows, page_width())

    def _parts(self, tier: str) -> str:
        parts = self.limits.held(self.planned.footprint, tier).items()
        return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)


def probe_lines(plan: Plan) -> Iterator[str]:
    """What says how much tokens are worth, where that is a probe."""
    if plan.probe is not None:
        fitted = f"fitted to {plan.probe.source}, " if plan.probe.source else ""
        yield f"probe     of {plan.probe.model}: says what a token is worth ({fitted}{plan.probe.checksum})"


def together_lines(processes: int, requests: int, accelerator: bool) -> Iterator[str]:
    """What a plan is for that several processes run, each its part of all requests."""
    if processes > 1:
        where = "with a GPU each" if accelerator else "on the CPU"
        yield f"together  {processes} processes {where} share {requests} prompts, and one copy of the weights in host memory"
        yield "          the plan is that of the process with most to do; bytes of CPU and disk are those of all"


def placed_bytes(planned: BlockPlan) -> dict[str, dict[str, int]]:
    """Bytes by kind of data and tier."""
    placement, spec = planned.placement, planned.spec
    return {
        "weights": _per_tier((placement.weights[name], tensor.nbytes) for name, tensor in spec.tensors.items()),
        "KV": _per_tier((tier, planned.kv.image_bytes(*place)) for place, tier in placement.kv.items()),
        "activations": _per_tier(
            (tier, hidden_bytes(spec, batch)) for tier, batch in zip(placement.hidden, planned.block.batches)
        ),
    }


def _per_tier(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = dict.fromkeys(TIERS, 0)
    for tier, nbytes in sizes:
        total[tier] += nbytes
    return total


def _buffers(schedule: Schedule) -> str:
    weights, others = schedule.weight_buffers, schedule.buffers
    if weights == others:
        return "1 buffer, nothing overlaps" if weights == 1 else f"{weights} buffers"
    return f"{weights} buffers for weights and {others} for KV and activations"


def _three(device_percent: float, host_percent: float) -> tuple[str, str, str]:
    disk_percent = max(0.0, round(100 - device_percent - host_percent, 4))
    return f"{device_percent:.4g}", f"{host_percent:.4g}", f"{disk_percent:.4g}"


# -- what is kept ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptByPolicy:
    """What a KV policy keeps: what was asked for, in slots, and in rows that fit the same memory."""

    planned: WorkloadPlan

    @property
    def policy(self) -> KVPolicy:
        return self.planned.plan.policy

    def line(self) -> str:
        asked = ", ".join(f"{name} {value}" for name, value in self._asked.items())
        named = f"{self.policy.name} ({asked})" if asked else self.policy.name
        if not self.evicts:
            return f"{named} keeps all {_range(*self._held_range)} tokens of a row"
        total, kept = format_bytes(self._full_row_bytes), format_bytes(self._row_bytes)
        rows = f"{self.rows_in_same_memory:.1f} times as many rows in the same memory"
        tokens = f"{_range(*self._held_range)} of {_range(*self._length_range)} tokens of a row ({100 * self.share:.1f} %)"
        return f"{named} keeps {tokens}; a row takes {kept} instead of {total}: {rows}"

    def by_head(self) -> Iterator[str]:
        """What heads keep, where they have budgets of their own."""
        budgets = self.planned.plan.head_budgets
        if budgets is not None:
            (first, *others), all_heads = self._kept_by_heads, sum(heads for _, heads in self._heads)
            kept = [f"{first[0]} of {all_heads} KV heads keep {100 * first[1]:.0f} %"]
            kept += [f"{heads} {100 * share:.0f} %" for heads, share in others]
            yield f"heads     budgets by head: {', '.join(kept)}; measured on {budgets.source}, {budgets.checksum}"

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy.name,
            "asked": self._asked,
            "slots": list(self._held_range),
            "share": round(self.share, 4),
            "evicts": self.evicts,
            "rows_in_same_memory": round(self.rows_in_same_memory, 3),
            "heads": [{"heads": heads, "share": round(share, 4)} for heads, share in self._kept_by_heads],
        }

    @property
    def evicts(self) -> bool:
        return any(occupancy.evicts for occupancy, _ in self._occupancies)

    @property
    def share(self) -> float:
        """The share of all tokens that is held at the end, over all heads."""
        weighed = [(heads * held, heads * all_tokens) for heads, (held, all_tokens) in zip(self._numbers, self._counted)]
        return sum(held for held, _ in weighed) / sum(all_tokens for _, all_tokens in weighed)

    @property
    def _kept_by_heads(self) -> Sequence[tuple[int, float]]:
        """Numbers of KV heads, and the share of all tokens that these hold at the end."""
        return [(heads, held / totals) for heads, (held, totals) in zip(self._numbers, self._counted)]

    @property
    def _numbers(self) -> Sequence[int]:
        return [heads for _, heads in self._heads]

    @property
    def _counted(self) -> Sequence[tuple[int, int]]:
        """Tokens that are held at the end, and all tokens, at each level."""
        return [(_sum(_held, level), _sum(_totals, level)) for level in self._by_level]

    @property
    def rows_in_same_memory(self) -> float:
        """Memory of a full-cache row over that of a row under this policy, scores included."""
        noted = sum(heads * self._capacity(policy) * policy.score_bytes for policy, heads in self._heads)
        return self._full_row_bytes / (self._row_bytes + noted)

    @property
    def _asked(self) -> dict[str, object]:
        return {name: getattr(self.policy.options, name) for name in self.policy.options.given}

    @cached_property
    def _heads(self) -> Sequence[tuple[KVPolicy, int]]:
        """The policies of KV heads, and how many heads of all layers have each; a single one where all keep the same."""
        levels = self.planned.plan.levels(self.planned.spec)
        return [(level.policy, sum(map(len, level.heads))) for level in levels]

    @cached_property
    def _by_level(self) -> Sequence[Sequence[Counted]]:
        """At each level the occupancies of the batches of one block of each shape, and how many blocks have that shape; where
        rows come and go, those of every kind of row."""
        if self.planned.workload.gen_lens is not None:
            needs = Counter(self.planned.workload.needs)
            return [[(policy.alone(need), count) for need, count in needs.items()] for policy, _ in self._heads]
        alike = self.planned.blocks.alike
        return [
            [(occupancy, count) for block, count in alike for occupancy in block.kv.occupancies[level]]
            for level in range(len(self._heads))
        ]

    @property
    def _occupancies(self) -> Sequence[Counted]:
        return [*chain.from_iterable(self._by_level)]

    @property
    def _held_range(self) -> tuple[int, int]:
        return _least_and_most(_held(occupancy) for occupancy, _ in self._occupancies)

    @property
    def _length_range(self) -> tuple[int, int]:
        return _least_and_most(_totals(occupancy) for occupancy, _ in self._occupancies)

    @property
    def _row_bytes(self) -> int:
        """Bytes of the KV of a row, over all layers."""
        return sum(heads * self._capacity(policy) for policy, heads in self._heads) * self.planned.spec.kv_bytes_per_head

    @property
    def _full_row_bytes(self) -> int:
        """The same if everything were kept."""
        spec = self.planned.spec
        return self._capacity(Full()) * spec.kv_bytes_per_slot * len(spec.kv_layers)

    def _capacity(self, policy: KVPolicy) -> int:
        """Slots of a row of the first batch, which has the longest rows."""
        block = self.planned.blocks.first.block
        return policy.occupancy(block.batches[0], block.gen_len).capacity


def _sum(each: Callable[[Occupancy], Sequence[int]], counted: Iterable[Counted]) -> int:
    return sum(count * sum(each(one)) for one, count in counted)


def _held(occupancy: Occupancy) -> Sequence[int]:
    """Slots held when the last token is generated, which is never stored itself."""
    return occupancy.counts(occupancy.gen_len)


def _totals(occupancy: Occupancy) -> Sequence[int]:
    return [total + occupancy.gen_len - 1 for total in occupancy.taken_in]


def _least_and_most(each: Iterable[Sequence[int]]) -> tuple[int, int]:
    counts = [count for one in each for count in one]
    return min(counts), max(counts)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


# -- what is predicted -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """What was predicted of a run beside what was measured: seconds, lanes, and what each tier held."""

    prediction: Prediction
    machine: str  # the machine that the prediction is for
    limits: MemoryLimits

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes per tier, with what the process holds by itself."""
        base = {tier: self.limits.host_base if tier == HOST else 0 for tier in TIERS}
        return {tier: nbytes + base[tier] for tier, nbytes in self.prediction.peak_bytes.items()}

    def as_json(self) -> dict[str, object]:
        """The prediction, under the names of a run's own figures."""
        one = self.prediction
        return {
            "machine": self.machine,
            "prefill_seconds": round(one.prefill_seconds, 6),
            "decode_seconds": round(one.decode_seconds, 6),
            "total_seconds": round(one.total_seconds, 6),
            "tokens_per_second": round(one.tokens_per_second, 3),
            "step_seconds_mean": round(one.step_seconds, 6),
            "busy_seconds": {lane: round(seconds, 6) for lane, seconds in one.lane_seconds.items()},
            "peak_bytes": self.peak_bytes,
        }

    def line(self) -> str:
        """The line shown before the run."""
        one = self.prediction
        return (
            f"predicted prefill {one.prefill_seconds:.3g} s, {one.step_seconds:.3g} s a step, "
            f"{one.tokens_per_second:.3g} tokens/s; {one.busiest_lane} is busiest"
        )

    def lines(self, stats: Stats) -> Iterator[str]:
        """The lines shown beside a run's figures."""
        rows = [["", "predicted", "measured", "predicted / measured"]]
        one, steps = self.prediction, len(stats.step_seconds)
        rows.append(_seconds("prefill", one.prefill_seconds, stats.prefill_seconds))
        if steps:
            rows.append(_seconds("a decode step, mean", one.step_seconds, stats.decode_seconds / steps))
        rows.append(_seconds("all", one.total_seconds, stats.total_seconds))
        for lane in dict.fromkeys([*one.lane_seconds, *stats.busy_seconds]):
            rows.append(_seconds(f"{lane}, busy", one.lane_seconds.get(lane, 0.0), stats.busy_seconds.get(lane, 0.0)))
        for tier, nbytes in self.peak_bytes.items():
            if nbytes or stats.peak_bytes[tier]:
                ratio = _ratio(nbytes, stats.peak_bytes[tier])
                rows.append([f"peak on {NAMES[tier]}", format_bytes(nbytes), format_bytes(stats.peak_bytes[tier]), ratio])
        yield from table(rows, page_width())


def _seconds(name: str, predicted: float, measured: float) -> list[str]:
    return [name, f"{predicted:.3g} s", f"{measured:.3g} s", _ratio(predicted, measured)]


def _ratio(predicted: float, measured: float) -> str:
    return f"{predicted / measured:.2f}" if measured else ""
