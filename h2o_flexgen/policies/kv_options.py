"""KVOptions: what a user may ask of a KV policy: budgets, and which tokens are protected."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from h2o_flexgen.core.allowed_values import TRUTH, Bounds, Choice
from h2o_flexgen.core.option import check_options, option, options_of
from h2o_flexgen.core.workload import MOST_TOKENS

TRUE, ROLLING = "true", "rolling"
POSITIONS = (TRUE, ROLLING)
DEFAULT_KEPT = 0.2  # of prompt and generation, as in the paper
SLOTS = Bounds(0, MOST_TOKENS)  # slots of a KV cache, which never holds more than the tokens of a text
SHARE = Bounds(0, 1, is_whole=False, without_least=True)
WHERE_ALL_IS_KEPT = ("kv_recall_together", "kv_recall_reuse")  # options of recall that policies that evict lack
BESIDE_BUDGET = ("hh_prompt_only", "value_norms", "sinks", "score_decay", "grace", "positions")  # options beside a budget


@dataclass(frozen=True)
class KVOptions:
    """The options of a policy; None is one that was not asked for."""

    heavy: int | None = option(None, SLOTS, "SLOTS", "heavy hitters kept, in slots per sequence and head")
    recent: int | None = option(None, SLOTS, "SLOTS", "slots for the newest tokens")
    hh_ratio: float | None = option(
        None, SHARE, "R", "keep a share R of each prompt as heavy hitters, and as many recent tokens"
    )
    kv_budget: float | None = option(None, SHARE, "F", "keep this share of prompt and generation, half heavy, half recent")
    sinks: int | None = option(None, SLOTS, "N", "the first N tokens are never evicted")
    score_decay: float | None = option(
        None, SHARE, "D", "multiply the scores so far by D before each step adds to them (default: 1, plain sums)"
    )
    grace: int | None = option(None, SLOTS, "N", "never evict the newest N tokens, even if --recent is less; adds no slots")
    positions: str | None = option(
        None,
        Choice(POSITIONS),
        text="positions of keys; true: as in the text (default); rolling: by their order in the cache, for texts without end",
    )
    hh_prompt_only: bool = option(
        False, TRUTH, "", "only the prompt is selected from; all that is generated is kept", bare=True
    )
    value_norms: bool = option(False, TRUTH, "", "scores are multiplied by the length (L2 norm) of a token's value", bare=True)

    kv_recall: float | None = option(
        None,
        SHARE,
        "SHARE",
        "each decode step attends this share of the tokens that are kept, chosen by its own query (1: all); if no other "
        "option says what is kept, all tokens are",
    )
    kv_recall_together: bool = option(
        False,
        TRUTH,
        "",
        "with --kv-recall: all KV heads of a layer attend the same tokens; fewer come from a disk",
        bare=True,
    )

    kv_recall_reuse: bool = option(
        False,
        TRUTH,
        "",
        "with --kv-recall and KV on disk: what steps have read stays in memory, and the next step reads only what is not there",
        bare=True,
    )

    def __post_init__(self) -> None:
        check_options(self, KVOptions)
        self._refuse_two_budgets()
        if self.kv_recall_together and self.kv_recall is None:
            raise ValueError("kv_recall_together says how kv_recall chooses; give kv_recall, or leave kv_recall_together out")
        if self.kv_recall_reuse and self.kv_recall is None:
            raise ValueError("kv_recall_reuse keeps what kv_recall has read; give kv_recall, or leave kv_recall_reuse out")

    def _refuse_two_budgets(self) -> None:
        if self.hh_ratio is not None and self.kv_budget is not None:
            raise ValueError(f"both hh_ratio={self.hh_ratio:g} and kv_budget={self.kv_budget:g} are given; give one of them")
        if self.hh_ratio is not None and (self.heavy, self.recent) != (None, None):
            raise ValueError(f"both hh_ratio {self.hh_ratio:g} and slots are given; give the ratio, or heavy and recent")
        if self.kv_budget is not None and self.heavy is not None:
            raise ValueError(
                f"both kv_budget={self.kv_budget:g} and heavy={self.heavy} are given; "
                "what recent leaves of a kv_budget is heavy: leave heavy out"
            )

    @property
    def given(self) -> tuple[str, ...]:
        """The options asked for; a 0 counts as given, though it is false in Python."""
        return tuple(name for name, one in options_of(KVOptions).items() if getattr(self, name) is not one.default)

    def refuse_all_but(self, taken: Collection[str], policy: str) -> None:
        for name in self.given:
            if name in WHERE_ALL_IS_KEPT and name not in taken:
                raise ValueError(f"{name} is for policies that keep all, and kv_policy {policy!r} evicts; leave {name} out")
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
