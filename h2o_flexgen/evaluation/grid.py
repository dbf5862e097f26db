"""Grid: the settings to compare: policies, how much each keeps and how heads share it out, in how many bits weights and KV are
held, and how weights are multiplied. Evaluation: measures the cells of a grid that are missing. The model is opened once for
each setting, for all tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.evaluation.cells import Cell, Cells
from h2o_flexgen.evaluation.tasks.task import Bound
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.formats.table import BY_BITS, PLAIN
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import HeadBudgets
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.policies.policy import PROBE

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM


WHOLE_TEXT = 100.0
Beside = tuple[tuple[str, object], ...]  # names and values of KVOptions
BITS = {codec: f"{bits} bits" for bits, codec in BY_BITS.items()}


@dataclass(frozen=True)
class BudgetShare:
    """A share of prompt and generation."""

    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent <= WHOLE_TEXT:
            raise ValueError(f"a budget of {self.percent:g} per cent is not possible; give above 0 and at most 100")

    @property
    def label(self) -> str:
        return f"{self.percent:g} %"

    @property
    def keeps_all(self) -> bool:
        return self.percent == WHOLE_TEXT

    @property
    def order(self) -> float:
        """The place among the columns: from all to little."""
        return -self.percent

    def options(self, policy: str, sinks: int | None) -> KVOptions:
        return KVOptions(kv_budget=self.percent / WHOLE_TEXT)


@dataclass(frozen=True)
class BudgetSlots:
    """A number of slots for each sequence and head; None means as many as there are tokens."""

    slots: int | None

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"a KV size of {self.slots} slots is not possible; give 1 or more, or full")

    @property
    def label(self) -> str:
        return "full" if self.slots is None else str(self.slots)

    @property
    def keeps_all(self) -> bool:
        return self.slots is None

    @property
    def order(self) -> float:
        """The place among the columns: from little to all."""
        return inf if self.slots is None else self.slots

    def options(self, policy: str, sinks: int | None) -> KVOptions:
        return KVOptions() if self.slots is None else POLICIES[policy].options_of(self.slots, sinks)


Amount: TypeAlias = "BudgetShare | BudgetSlots"  # how much of a text is kept


@dataclass(frozen=True)
class Setting:
    policy: str
    amount: Amount
    kv_codec: str = PLAIN
    weight_codec: str = PLAIN
    compute: str = EXACT
    beside: Beside = ()  # options asked for in addition to the budget
    heads: HeadBudgets | None = None  # None: all keep equally much
    probe: Probe | None = None  # where the policy asks for one
    recalls: bool = False  # everything is kept, and the amount is what a decode step attends of it

    @property
    def options(self) -> KVOptions:
        """Options that the policy cannot take are left out; `label` shows which it took."""
        if self.policy == Full.name:
            return self._recalling
        sinks = self._taken.get("sinks")
        return replace(self.amount.options(self.policy, sinks), **self._taken)  # type: ignore[arg-type]

    @property
    def _recalling(self) -> KVOptions:
        if not self.recalls:
            return KVOptions()
        if not isinstance(self.amount, BudgetShare):
            raise ValueError(f"{self.amount.label} slots are no share of what is kept; give a recall budgets in per cent")
        return KVOptions(kv_recall=self.amount.percent / WHOLE_TEXT)

    @property
    def _taken(self) -> dict[str, object]:
        accepted = () if self.policy == Full.name else POLICIES[self.policy].accepts
        return {name: value for name, value in self.beside if name in accepted}

    @property
    def label(self) -> str:
        """The heading of a row in a table."""
        taken = [name if value is True else f"{name} {value}" for name, value in self._taken.items()]
        words = [
            self.policy,
            *(["recall"] * self.recalls),
            *([] if self.heads is None else ["head budgets"]),
            *(word.replace("_", "-") for word in taken),
        ]
        codecs = {"KV": self.kv_codec, "weights": self.weight_codec}
        words += (f"{what} {BITS[codec]}" for what, codec in codecs.items() if codec != PLAIN)
        return ", ".join(words if self.compute == EXACT else [*words, f"products {self.compute}"])

    @property
    def full(self) -> Setting:
        """This setting with everything kept, and attended."""
        everything = _everything(self.amount)
        return replace(self, policy=Full.name, amount=everything, heads=None, probe=None, recalls=False)

    @property
    def is_reference(self) -> bool:
        is_plain = {self.kv_codec, self.weight_codec} == {PLAIN} and self.compute == EXACT
        return self.is_full and is_plain

    @property
    def is_full(self) -> bool:
        """Whether everything is kept and attended."""
        return self.policy == Full.name and not self.recalls

    def plan(self, base: Plan) -> Plan:
        forms = replace(base, kv_codec=self.kv_codec, weight_codec=self.weight_codec, compute=self.compute)
        return replace(forms, kv_policy=self.policy, kv_options=self.options, head_budgets=self.heads, probe=self.probe)

    @property
    def _forms(self) -> dict[str, str]:
        return {"kv_codec": self.kv_codec, "weight_codec": self.weight_codec, "compute": self.compute}

    def check(self, base: Plan, spec: ModelSpec, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuses a setting with another model's probe, and one that cannot hold texts of these sizes: pairs of prompt length
        and tokens to generate."""
        if self.probe is not None:
            self.probe.refuse_other(spec)
        for level, (prompt_len, gen_len) in product(self.plan(base).levels(spec), sizes):
            try:
                level.policy.occupancy(Batch((0,), (prompt_len,)), gen_len)
            except ValueError as error:
                raise ValueError(f"{error} (this is {self.label} at {self.amount.label}; leave one of them out)") from error

    def identity(self) -> dict[str, object]:
        """Everything in a setting that its figures depend on."""
        heads = {} if self.heads is None else {"head_budgets": self.heads.checksum}
        probe = {} if self.probe is None else {"probe": self.probe.checksum}
        return {"policy": self.policy, **asdict(self.options), **self._forms, **heads, **probe}

    def as_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "kept": self.amount.label,
            **self._forms,
            "head_budgets": None if self.heads is None else self.heads.as_json(),
            "probe": None if self.probe is None else self.probe.as_json(),
            "options": {name: value for name, value in asdict(self.options).items() if value not in (None, False)},
        }


def _everything(amount: Amount) -> Amount:
    return BudgetShare(WHOLE_TEXT) if isinstance(amount, BudgetShare) else BudgetSlots(None)


@dataclass(frozen=True)
class Grid:
    policies: tuple[str, ...]
    amounts: tuple[Amount, ...]
    kv_codecs: tuple[str, ...] = (PLAIN,)
    weight_codecs: tuple[str, ...] = (PLAIN,)
    computes: tuple[str, ...] = (EXACT,)  # where the model's weights allow them; products with others are always exact
    beside: Beside = ()
    heads: tuple[HeadBudgets | None, ...] = (None,)  # None: all heads keep equally much
    probe: Probe | None = None  # for the policies that ask for one
    recalls: bool = False  # also with everything kept, and each amount of it attended

    def settings(self, spec: Callable[[str], ModelSpec]) -> tuple[Setting, ...]:
        """The settings for a model; `spec` has its sizes by the codec of its weights. All policies are the full cache when
        they keep everything, so that one is run once, and first."""
        specs = {codec: spec(codec) for codec in self.weight_codecs}
        for compute in self.computes:
            if not any(one.can_compute(compute) for one in specs.values()):
                specs[self.weight_codecs[0]].refuse_to_compute(compute)
        found: dict[Setting, None] = {}
        for weight_codec, compute, kv_codec in product(self.weight_codecs, self.computes, self.kv_codecs):
            known = compute if specs[weight_codec].can_compute(compute) else EXACT
            found |= dict.fromkeys(self._settings(kv_codec, weight_codec, known))
        return tuple(found)

    def _settings(self, kv_codec: str, weight_codec: str, compute: str) -> list[Setting]:
        def setting(policy: str, amount: Amount, heads: HeadBudgets | None = None) -> Setting:
            probe = self.probe if POLICIES[policy].ranks_by == PROBE else None
            return Setting(policy, amount, kv_codec, weight_codec, compute, self.beside, heads, probe)

        full = [setting(Full.name, amount) for amount in self.amounts if amount.keeps_all][:1]
        if Full.name in self.policies and not full:
            full = [setting(Full.name, _everything(self.amounts[0]))]
        others = [policy for policy in self.policies if policy != Full.name]
        amounts = [amount for amount in self.amounts if not amount.keeps_all]
        if self.recalls:
            full += [replace(setting(Full.name, amount), recalls=True) for amount in amounts]
        return full + [setting(policy, amount, heads) for policy, heads, amount in product(others, self.heads, amounts)]


# -- measuring it ------------------------------------------------------------------------------------------------------

Open = Callable[[Plan], "LLM"]
References = dict[str, "FullCache"]


class ProgressListener(Protocol):
    """Shows progress."""

    def begin(self, doing: str) -> None:
        """Names what is measured next."""

    def advance(self, tokens: int) -> None:
        """Counts tokens that were run."""


@dataclass(frozen=True)
class Evaluation:
    model: Mapping[str, object]  # its identity
    settings: tuple[Setting, ...]
    tasks: Mapping[str, Bound]
    plan: Plan  # its policy and codecs are those of the setting
    cells: Cells

    def check(self, spec: ModelSpec) -> None:
        """Refuses impossible settings of a model before anything is loaded."""
        for setting in self.settings:
            for bound in self.tasks.values():
                setting.check(self.plan, spec, bound.sizes)

    def identity(self, task: str, setting: Setting) -> dict[str, object]:
        asked = dict(self.tasks[task].identity)
        return {"model": dict(self.model), "task": task, "asked": asked, "setting": setting.identity()}

    def find(self, task: str, setting: Setting) -> Cell | None:
        return self.cells.find(self.identity(task, setting))

    @property
    def num_cells(self) -> int:
        return len(self.settings) * len(self.tasks)

    def missing(self, setting: Setting) -> list[str]:
        return [task for task in self.tasks if self.find(task, setting) is None]

    @property
    def num_missing(self) -> int:
        return sum(len(self.missing(setting)) for setting in self.settings)

    @property
    def num_tokens(self) -> int:
        """Tokens still to run, those of the references included."""
        cells = sum(self.tasks[task].num_tokens for setting in self.settings for task in self.missing(setting))
        return cells + sum(self.tasks[task].num_tokens for task in self._to_refer)

    @property
    def _to_refer(self) -> list[str]:
        """Tasks with missing cells that are compared with the full cache."""
        wanted = {task for setting in self.settings for task in self.missing(setting)}
        return [task for task, bound in self.tasks.items() if bound.needs_reference and task in wanted]

    def run(self, open_llm: Open, folder: Path, listener: ProgressListener) -> None:
        """`folder` holds the references while they are needed."""
        with ExitStack() as stack:
            references: References = {}
            for setting in self._in_order():
                tasks = self.missing(setting) if setting in self.settings else []
                referred = self._to_refer if setting.is_reference else []
                if not tasks and not referred:
                    continue
                listener.begin(f"opening {setting.label}, {setting.amount.label}")
                with open_llm(setting.plan(self.plan)) as llm:
                    for task in referred:
                        listener.begin(f"{task}: what the full cache says")
                        references[task] = self.tasks[task].refer(llm, folder, listener.advance)
                        stack.enter_context(closing(references[task]))
                    self._measure(llm, setting, tasks, references, listener)

    def _in_order(self) -> Sequence[Setting]:
        """The setting that others are compared with comes first, even if the grid does not ask for it."""
        reference = next((one for one in self.settings if one.is_reference), None)
        if reference is None and self.settings and self._to_refer:
            reference = Setting(Full.name, self.settings[0].full.amount)
        others = [one for one in self.settings if one != reference]
        return others if reference is None else [reference, *others]

    def _measure(
        self, llm: LLM, setting: Setting, tasks: Sequence[str], references: References, listener: ProgressListener
    ) -> None:
        for task in tasks:
            listener.begin(f"{task}: {setting.label}, {setting.amount.label}")
            begun = time.perf_counter()
            figures = self.tasks[task].measure(llm, listener.advance, references.get(task))
            self.cells.add(Cell(self.identity(task, setting), figures, round(time.perf_counter() - begun, 3)))
