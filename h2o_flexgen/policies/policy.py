"""KVPolicy: a policy as data: how many slots a row has, which tokens are protected, and by what the others are ranked.

Planning reads policies too, so their arithmetic does without torch; kv/slots.py and kv/cache.py carry them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.core.seats import SeatNeed, Seats
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_table import SUM
from h2o_flexgen.policies.kv_options import ROLLING, TRUE, KVOptions, row_of
from h2o_flexgen.policies.occupancy import Occupancy, RowBudget, StepSlots
from h2o_flexgen.policies.recall import ALL, Choosing

NONE, ATTENTION, AGE, CHANCE = "none", "attention", "age", "chance"  # what tokens are ranked by, if no judge says it
VALUE_NORMS, PROBE = "value norms", "probe"  # judges that an option or a file brings; others have one policy, which names them
SINKS = 4  # of policies that cannot do without
WORD_BYTES = 4  # of a position, of a score, and of what a token is worth
SHARES = ("hh_ratio", "kv_budget")
BUDGETS = ("heavy", "recent", *SHARES)
PROTECTION = ("sinks", "grace")
COMMON = ("positions", "hh_prompt_only", "kv_recall")  # options of all policies that evict


@dataclass(frozen=True)
class KVPolicy:
    options: KVOptions = field(default_factory=KVOptions)
    least_slots: int = 0  # that a share of a text is rounded up to: few heads of a model may be left nothing of a short one

    name: ClassVar[str]
    ranks_by: ClassVar[str] = ATTENTION  # or the name of a judge (kv/judges.py), which says it when a token is written
    compares: ClassVar[bool] = False  # the judge compares all tokens of a row
    recent_part: ClassVar[int] = 2  # one of so many parts of a budget is recent, unless slots are given
    usual_sinks: ClassVar[int] = 0  # unless others are asked for
    gathers: ClassVar[str] = SUM  # how the attention that a token gets becomes its score: the sum, or the highest share
    neighbours: ClassVar[int] = 1  # a prompt's scores are averaged over this many positions
    last_queries: ClassVar[int | None] = None  # of a prompt, which alone may count; None: all count
    echoes: ClassVar[bool] = False  # prompts are read twice: only attention in the second copy makes scores
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "score_decay", *COMMON)

    def __post_init__(self) -> None:
        self.options.refuse_all_but(self.accepts, self.name)
        if self.rolls and self.recall != ALL:
            raise ValueError(
                f"kv_recall {self.recall:g} compares keys as they stand in the text, and positions are {ROLLING!r}; "
                f"take positions {TRUE!r}, or leave kv_recall out"
            )

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        """The budget of a row with a prompt of this length: the last `recent` tokens, and `heavy` of the others."""
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len, self.recent_part)
        return self._protecting(heavy + recent, recent)

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        """The options for a budget of `slots`, sinks included: half heavy, half recent, if the policy has both."""
        if "heavy" not in cls.accepts:
            return KVOptions(recent=slots)
        if "recent" not in cls.accepts:
            return KVOptions(heavy=slots)
        return KVOptions(heavy=slots - slots // 2, recent=slots // 2)

    @property
    def decay(self) -> float:
        """The factor applied to a score before what a pass gives is added, or compared."""
        return 1.0 if self.options.score_decay is None else self.options.score_decay

    @property
    def sinks(self) -> int:
        """The first tokens of a text, which are never evicted."""
        return self.usual_sinks if self.options.sinks is None else self.options.sinks

    @property
    def sees(self) -> int | None:
        """The tokens that a token of a prompt sees, itself included; None: all before it."""
        return None

    @property
    def rolls(self) -> bool:
        return self.options.positions == ROLLING

    @property
    def keeps_all(self) -> bool:
        return self.ranks_by == NONE

    @property
    def recall(self) -> float:
        """The share of what a row holds that its decode steps attend."""
        return ALL if self.options.kv_recall is None else self.options.kv_recall

    @property
    def chooses_together(self) -> bool:
        """Whether the KV heads of a layer attend the same tokens, where steps choose them."""
        return self.options.kv_recall_together

    @property
    def reuses_read(self) -> bool:
        """Whether what steps have read from disk stays in memory for later ones. Where steps attend all, it passes by."""
        return self.options.kv_recall_reuse and self.recall != ALL

    def choosing(self, heads: int) -> Choosing:
        """How so many KV heads of a layer choose."""
        return Choosing(self.recall, 1 if self.chooses_together else heads, self.keeps_all, self.reuses_read)

    def reused_tokens(self, layout: KVLayout) -> int:
        """The tokens of each row for which there is room in memory between the steps that read them."""
        return self.choosing(layout.heads).kept(layout.slots) if self.reuses_read else 0

    @property
    def attends_all(self) -> bool:
        """Whether every token sees all before it, as a model says."""
        return self.keeps_all and self.recall == ALL

    @property
    def judge(self) -> str | None:
        """What says how much a token is worth when it is written. Policies rank by it, or weigh scores with it."""
        if self.options.value_norms:
            return VALUE_NORMS
        return None if self.ranks_by in (NONE, ATTENTION, AGE, CHANCE) else self.ranks_by

    @property
    def has_scores(self) -> bool:
        return self.ranks_by == ATTENTION

    @property
    def score_words(self) -> int:
        """32-bit words kept for a slot of a KV head beside key and value: its position, and its score and its worth if the
        policy has these."""
        return 0 if self.keeps_all else 1 + self.has_scores + (self.judge is not None)

    @property
    def score_bytes(self) -> int:
        """Bytes kept for a slot of a KV head beside key and value."""
        return self.score_words * WORD_BYTES

    def occupancy(self, batch: Batch, gen_len: int) -> Occupancy:
        """The slots of every row at every step. A batch that lives on has its share of the context that it may grow to. Where
        rows come and go, each has a budget of its own, and a seat has the slots of the row that needs most."""
        if batch.seats is not None:
            return Occupancy(batch, (RowBudget(self._slots_of(batch.seats), recall=self.recall),) * batch.size, gen_len)
        if batch.context is not None:
            return Occupancy(batch, (self._checked(batch.context, 0),) * batch.size, gen_len)
        budgets = {length: self._checked(length, gen_len) for length in set(batch.lengths)}
        rows = tuple(budgets[length] for length in batch.lengths)
        return Occupancy(batch, rows, gen_len, self.options.hh_prompt_only)

    def _slots_of(self, seats: Seats) -> int:
        return max(self.alone(need).capacity for need in seats.largest)

    def alone(self, need: SeatNeed) -> Occupancy:
        """The slots of one row by itself."""
        return self.occupancy(Batch((0,), (need.prompt_len,)), max(1, need.gen_len))

    def suits(self, need: SeatNeed) -> bool:
        """Whether a row has the budget that it must have: a share of its few tokens outside of a prefix may be none."""
        try:
            self.alone(need)
        except ValueError:
            return False
        return True

    def whole(self, tokens: int) -> StepSlots:
        """The pass over a prefix that rows share: all of it is kept, whatever they keep of it. A policy that counts the last
        queries of a prompt counts none of these."""
        budget = RowBudget(tokens, queries=None if self.last_queries is None else 0)
        return StepSlots(True, (0,), (tokens,), (0,), (tokens,), (budget,))

    def _checked(self, prompt_len: int, gen_len: int) -> RowBudget:
        try:
            return self._valid(self.budget(prompt_len, gen_len), row_of(prompt_len, gen_len))
        except ValueError as error:
            if not self.least_slots:
                raise
            raise ValueError(f"by head budgets some heads keep {self.options.kv_budget or 0:.3g} of a text: {error}") from error

    def _valid(self, budget: RowBudget, row: str) -> RowBudget:
        budget = replace(budget, slots=max(budget.slots, self.least_slots), recall=self.recall)
        if budget.slots < 1:
            raise ValueError(f"kv_policy {self.name!r} has a budget of {budget.slots} slots {row}; give it 1 or more")
        protected = budget.sinks + max(budget.window, budget.prompt_window)
        if protected > budget.slots:
            raise ValueError(
                f"kv_policy {self.name!r} protects {protected} tokens (sinks {budget.sinks}), but has {budget.slots} slots "
                f"{row}; give it more slots or fewer sinks, recent and grace"
            )
        return budget

    def _protecting(self, slots: int, window: int, prompt_window: int | None = None, queries: int | None = None) -> RowBudget:
        """A budget that also protects the options' tokens, beside the policy's own window."""
        grace, before = self.options.grace or 0, window if prompt_window is None else prompt_window
        return RowBudget(slots, self.sinks, max(window, grace), max(before, grace), queries)
