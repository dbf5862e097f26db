"""KVOptions: what a user may ask of a KV policy: budgets, and which tokens are protected."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from h2o_flexgen.core.allowed_values import Rule, number, optional, truth, whole
from h2o_flexgen.core.hints import shown

TRUE, ROLLING = "true", "rolling"
POSITIONS = (TRUE, ROLLING)
DEFAULT_KEPT = 0.2  # of prompt and generation, as in the paper
RULES: Mapping[Rule, Sequence[str]] = {
    Rule(optional(whole(0)), "a whole number of slots, 0 or more"): ("heavy", "recent", "sinks", "grace"),
    Rule(optional(number(0, 1, without_least=True)), "a number above 0 and not above 1"): (
        "hh_ratio",
        "kv_budget",
        "score_decay",
    ),
    Rule(truth, "True or False"): ("hh_prompt_only", "value_norms"),
}


@dataclass(frozen=True)
class KVOptions:
    """The options of a policy; None is one that was not asked for."""

    heavy: int | None = None
    recent: int | None = None
    hh_ratio: float | None = None
    kv_budget: float | None = None
    sinks: int | None = None
    score_decay: float | None = None
    grace: int | None = None
    positions: str | None = None
    hh_prompt_only: bool = False
    value_norms: bool = False

    def __post_init__(self) -> None:
        for rule, names in RULES.items():
            for name in names:
                object.__setattr__(self, name, rule.value(name, getattr(self, name)))  # a number of numpy becomes Python's
        if self.positions is not None and self.positions not in POSITIONS:
            raise ValueError(f"positions {shown(self.positions)} is unknown; known: {', '.join(POSITIONS)}")
        self._refuse_two_budgets()

    def _refuse_two_budgets(self) -> None:
        if self.hh_ratio is not None and self.kv_budget is not None:
            raise ValueError(f"both hh_ratio {self.hh_ratio:g} and kv_budget {self.kv_budget:g} are given; give one of them")
        if self.hh_ratio is not None and (self.heavy, self.recent) != (None, None):
            raise ValueError(f"both hh_ratio {self.hh_ratio:g} and slots are given; give the ratio, or heavy and recent")
        if self.kv_budget is not None and self.heavy is not None:
            raise ValueError(
                f"both kv_budget {self.kv_budget:g} and heavy {self.heavy} are given; "
                "what recent leaves of a kv_budget is heavy: leave heavy out"
            )

    @property
    def given(self) -> tuple[str, ...]:
        """The options asked for; a 0 counts as given, though it is false in Python."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not field.default)

    def refuse_all_but(self, taken: Collection[str], policy: str) -> None:
        for name in self.given:
            if name not in taken:
                what = f"it takes {', '.join(taken)}" if taken else "it takes none"
                raise ValueError(f"kv_policy {policy!r} does not take {name}; {what}")

    @property
    def is_share_of_text(self) -> bool:
        """True if the budget is a share of prompt and generation, and so depends on how many tokens are generated."""
        return self.kv_budget is not None or (self.hh_ratio is None and (self.heavy, self.recent) == (None, None))

    def total(self, prompt_len: int, gen_len: int) -> int:
        return sum(self.heavy_and_recent(prompt_len, gen_len))

    def heavy_and_recent(self, prompt_len: int, gen_len: int, recent_part: int = 2) -> tuple[int, int]:
        """Heavy and recent slots of one row. Of a share of the text, a part is recent unless slots are given."""
        if self.hh_ratio is not None:
            each = int(self.hh_ratio * prompt_len)
            return each, each
        if not self.is_share_of_text:
            return self.heavy or 0, self.recent or 0
        total = int((self.kv_budget or DEFAULT_KEPT) * (prompt_len + gen_len))
        recent = total // recent_part if self.recent is None else self.recent
        if recent > total:
            raise ValueError(
                f"recent is {recent}, but the budget {row_of(prompt_len, gen_len)} is {total} slots; "
                "give fewer recent or a larger kv_budget"
            )
        return total - recent, recent


def row_of(prompt_len: int, gen_len: int) -> str:
    """Describes a row in messages."""
    return f"for a prompt of {prompt_len} and {gen_len} to generate" if gen_len else f"for a text of {prompt_len} tokens"
