"""What the KV policy of a plan keeps: what was asked for, in slots, and in rows that fit the same memory.

What a model then still knows of a text was measured by `evaluate --tasks recall`: its results.json, which lies as recall.json
beside the model. Every run that evicts says so, and says where nothing was measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from h2o_flexgen.checkpoints.model_places import surely_beside
from h2o_flexgen.cli.calibrate_request import PROGRAM
from h2o_flexgen.cli.output_files import OUTPUT
from h2o_flexgen.cli.report import Entry, entry
from h2o_flexgen.core.files import NotADocument, parse_json, read_document_text
from h2o_flexgen.core.option import options_of
from h2o_flexgen.core.site import HOST
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import HeadBudgets, why_unmeasured
from h2o_flexgen.policies.kv_options import DEFAULT_KEPT, KVOptions
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.policies.recall import ALL, LEAST, attended
from h2o_flexgen.session.measured_heads import MOST_SECONDS, tokens_read
from h2o_flexgen.session.open_request import heads_of_another, with_known_heads

Counted = tuple[Occupancy, int]  # how often there is such a one
TYPED = options_of(KVOptions)
BY_FIRST_RUN = f"by the first run, once; or, if that takes more than {MOST_SECONDS / 60:g} minutes,"


def asked_of(policy: KVPolicy) -> dict[str, object]:
    return {name: getattr(policy.options, name) for name in policy.options.given}


def as_asked(policy: KVPolicy) -> str:
    """The name of a policy, and what was asked of it."""
    words = " ".join(word for name, value in asked_of(policy).items() for word in TYPED[name].written(value))
    return f"{policy.name} ({words})" if words else policy.name


@dataclass(frozen=True)
class KeptByPolicy:
    """What a KV policy keeps: what was asked for, in slots, and in rows that fit the same memory."""

    planned: WorkloadPlan
    source: str = ""  # of the model; none where weights are random
    adapters: Sequence[str] = ()  # that are merged into it, as they were given
    reads_texts: bool = True  # its tokenizer does
    measures_heads: bool = False  # a run does, before

    @property
    def policy(self) -> KVPolicy:
        return self.planned.plan.policy

    def entries(self) -> Iterator[Entry]:
        plan = self.planned.plan
        packed = "" if plan.kv_codec == PLAIN else f", as {plan.kv_codec}"
        yield entry("KV", f"{self._line()}{packed}{self._beside}", kept=self._values())
        if plan.head_budgets is not None:
            yield entry("heads", f"budgets by head: {self._by_head()}; {measured_on(plan.head_budgets)}")
        elif self.source and not plan.policy.keeps_all:
            why = plan.why_heads_are_alike or self._how_to_differ
            yield entry("heads", f"equal budgets: {why}")
        if self.source and not plan.policy.keeps_all:
            yield facts_kept(plan, self.source)
        if plan.probe is not None:
            fitted = f"fitted to {plan.probe.source}, " if plan.probe.source else ""
            yield entry("probe", f"of {plan.probe.model}: says what a token is worth ({fitted}{plan.probe.checksum})")

    @property
    def _beside(self) -> str:
        """What becomes of KV outside the GPU, where that is not fetched whole."""
        traffic = self.planned.blocks.first.schedule.traffic
        if self.planned.plan.attend_on == HOST:
            return "; outside the GPU it is attended by the CPU"
        return "; from outside the GPU only these are fetched" if traffic.accelerator and traffic.reads_chosen else ""

    @property
    def _how_to_differ(self) -> str:
        """What would give heads budgets of their own, or why nothing does."""
        is_known = with_known_heads(self.planned.plan, self.source).head_budgets is not None
        if is_known and not self.adapters:
            return "what each needs is known, and --head-budgets auto goes by it"
        if why := why_unmeasured(self.planned.spec):
            return why
        if not self.reads_texts:
            return f"what each needs is measured with texts, and the tokenizer of {self.source} reads none"
        if self.adapters:
            given = " ".join(f"--adapter {one}" for one in self.adapters)
            command = f"{PROGRAM} --model {self.source} {given} {OUTPUT} FILE"
            return f"what each needs with --adapter is measured by: {command}; and --head-budgets FILE takes it"
        if self.measures_heads and tokens_read(self.planned.spec):
            return f"what each needs is measured {BY_FIRST_RUN} by: {PROGRAM} --model {self.source}"
        other, advice = heads_of_another(self.source), f"what each needs is measured once by: {PROGRAM} --model {self.source}"
        return advice if other is None else f"{other.file} is of a model of another shape, {other.model}; {advice}"

    def _line(self) -> str:
        named = as_asked(self.policy)
        if not self.evicts:
            return f"{named} keeps all {_range(*self._held_range)} tokens of a row{self._recalled}"
        total, kept = format_bytes(self._full_row_bytes), format_bytes(self._row_bytes)
        rows = f"{self.rows_in_same_memory:.1f} times as many rows in the same memory"
        tokens = f"{_range(*self._held_range)} of {_range(*self._length_range)} tokens of a row ({100 * self.share:.1f} %)"
        return f"{named} keeps {tokens}; a row takes {kept} instead of {total}: {rows}{self._recalled}"

    @property
    def _recalled(self) -> str:
        """What decode steps attend, where they choose it, and what they choose it by."""
        if self.policy.recall == ALL:
            return ""
        least, most = (attended(self.policy.recall, held) for held in self._held_range)
        of_index = ((policy, heads * (noted - policy.score_bytes)) for (policy, heads), noted in self._noted)
        index = sum(self._capacity(policy) * noted for policy, noted in of_index)
        by = f"by an index of keys, {format_bytes(index)} a row" if index else "by their keys, which are packed"
        choosing = "the queries of all heads choose together" if self.policy.chooses_together else "its query chooses"
        floor = f" ({LEAST} is the least)" if least == LEAST else ""
        return f"; a step attends {_range(least, most)} of them{floor}, which {choosing} {by}"

    @property
    def _noted(self) -> Iterator[tuple[tuple[KVPolicy, int], int]]:
        """Each level with the bytes that are noted of a slot in each of its heads."""
        kv = self.planned.blocks.first.kv
        return zip(self._heads, map(kv.note_bytes, range(len(kv.levels))), strict=True)

    def _by_head(self) -> str:
        (first, *others), all_heads = self._kept_by_heads, sum(heads for _, heads in self._heads)
        kept = [f"{first[0]} of {all_heads} KV heads keep {100 * first[1]:.0f} %"]
        return ", ".join(kept + [f"{heads} {100 * share:.0f} %" for heads, share in others])

    def _values(self) -> dict[str, object]:
        return {
            "policy": self.policy.name,
            "asked": asked_of(self.policy),
            "slots": list(self._held_range),
            "share": round(self.share, 4),
            "evicts": self.evicts,
            "recall": self.policy.recall,
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
        noted = sum(heads * self._capacity(policy) * noted for (policy, heads), noted in self._noted)
        return self._full_row_bytes / (self._row_bytes + noted)

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
        specs = self.planned.blocks.first.kv.specs  # of each level
        each = zip(self._heads, specs, strict=True)
        return sum(heads * self._capacity(policy) * spec.kv_bytes_per_head for (policy, heads), spec in each)

    @property
    def _full_row_bytes(self) -> int:
        """The same if everything were kept."""
        spec = self.planned.spec
        return self._capacity(Full()) * spec.kv_bytes_per_token

    def _capacity(self, policy: KVPolicy) -> int:
        """Slots of a row of the first batch, which has the longest rows."""
        block = self.planned.blocks.first.block
        return policy.occupancy(block.batches[0], block.gen_len).capacity


def measured_on(budgets: HeadBudgets) -> str:
    """The texts and the file that head budgets come from."""
    file = f" ({budgets.file})" if budgets.file else ""
    return f"measured on {budgets.source}, {budgets.checksum}{file}"


def facts_kept(plan: Plan, source: str) -> Entry:
    """What is lost with what is evicted, as it was measured for the model."""
    found = survival_under(plan, source)
    if found is None:
        asked = "evaluate --tasks recall measures it"
        return entry(
            "facts", f"how many facts of a text survive this policy was not measured for {source}; {asked}", facts=None
        )
    said = f"{100 * found.visible:.0f} % of what it answers with all kept if the question stands in the prompt"
    later = f"{100 * found.hidden:.0f} % if it comes later"
    texts = f" about texts of {found.tokens} tokens" if found.tokens else ""
    words = f"with {100 * found.budget:g} % kept the model answers {said}, {later} ({found.questions} questions{texts})"
    return entry("facts", words, facts=asdict(found))


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


FILE = "recall.json"
TASK, FIGURE, QUESTIONS = "recall", "accuracy", ("visible questions", "hidden questions")
LENGTHS = re.compile(r"texts of ([\d, ]+) tokens")
BUDGET = "kv_budget"
AS_STORED = (PLAIN, PLAIN, EXACT)  # of KV, of weights, and products


@dataclass(frozen=True)
class Survival:
    """The shares of what a model answers with all kept that it still answers, where the question stands in the prompt and where
    it comes later."""

    budget: float  # that was measured, the largest up to the plan's
    visible: float
    hidden: float
    questions: int
    tokens: str = ""  # of the texts that they are about


def survival_under(plan: Plan, model: str) -> Survival | None:
    """What survives under a plan at least; None if nothing was measured."""
    file = surely_beside(model, FILE)
    return None if file is None else _found(plan, file)


def _found(plan: Plan, file: Path) -> Survival | None:
    text = read_document_text(file, f"measured recall {file}")
    try:
        task = parse_json(text)["tasks"][TASK]
        full = _answered(next(_whole(task["cells"])))
        budget, cell = max(_alike(plan, task["cells"]), key=lambda one: one[0], default=(0.0, None))
        if cell is None:
            return None
        visible, hidden = (own / of_full for own, of_full in zip(_answered(cell), full, strict=True))
        return Survival(budget, visible, hidden, int(task["asked"]["count"]), _tokens(task.get("notes", ())))
    except (NotADocument, KeyError, TypeError, ValueError, AttributeError, StopIteration, ZeroDivisionError) as error:
        advice = "remove it or measure anew"
        raise ValueError(f"{file} is no results.json of evaluate --tasks {TASK} ({error}); {advice}") from error


def _tokens(notes: Iterable[str]) -> str:
    """The lengths of the texts, of which the notes alone speak."""
    found = LENGTHS.search("\n".join(notes))
    return found[1] if found else ""


def _answered(cell: Mapping[str, Any]) -> list[float]:
    """The shares of questions that were answered rightly."""
    all_questions = (figure for figure in cell["figures"] if figure["name"] == FIGURE and not figure.get("by"))
    whole = {figure["panel"]: figure["value"] for figure in all_questions}
    return [float(whole[panel]) for panel in QUESTIONS]


def _whole(cells: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Cells in which nothing is lost, and all steps read everything."""
    return (cell for cell in cells if cell["policy"] == Full.name and not cell["options"] and _stored(cell) == AS_STORED)


def _stored(cell: Mapping[str, Any]) -> tuple[str, str, str]:
    return cell["kv_codec"], cell["weight_codec"], cell["compute"]


def _alike(plan: Plan, cells: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """The cells that differ from the plan in what is kept alone, and in that by keeping no more; with their budgets."""
    options = plan.kv_options
    if not options.is_share_of_text:
        return
    others = {name: getattr(options, name) for name in options.given if name != BUDGET}
    asked = (
        plan.kv_policy,
        (plan.kv_codec, plan.weight_codec, plan.compute),
        *map(_checksum_of, (plan.head_budgets, plan.probe)),
        others,
    )
    for cell in cells:
        budget = cell["options"].get(BUDGET, 1.0)
        rest = {name: value for name, value in cell["options"].items() if name != BUDGET}
        heads, probe = (one and one["checksum"] for one in (cell["head_budgets"], cell["probe"]))
        if (cell["policy"], _stored(cell), heads, probe, rest) == asked and budget <= (options.kv_budget or DEFAULT_KEPT):
            yield budget, cell


def _checksum_of(read: Any) -> str | None:
    return None if read is None else str(read.checksum)
