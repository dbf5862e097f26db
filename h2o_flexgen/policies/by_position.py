"""Policies that need to know nothing of a token but where it stands: Full keeps all, Local and StreamingLLM the newest, and
Random keeps any."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.kv_options import WHERE_ALL_IS_KEPT, KVOptions, row_of
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import AGE, BUDGETS, CHANCE, COMMON, NONE, SHARES, SINKS, KVPolicy


class Full(KVPolicy):
    """Keeps every token: slot j of a row holds its j-th token. A decode step may attend a share of them."""

    name: ClassVar[str] = "full"
    ranks_by: ClassVar[str] = NONE
    accepts: ClassVar[tuple[str, ...]] = ("kv_recall", *WHERE_ALL_IS_KEPT)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(prompt_len + gen_len)


class Local(KVPolicy):
    """The newest tokens alone: H2O's other half, and the paper's baseline."""

    name: ClassVar[str] = "local"
    ranks_by: ClassVar[str] = AGE
    accepts: ClassVar[tuple[str, ...]] = ("recent", *SHARES, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(self.options.total(prompt_len, gen_len))


class Streaming(KVPolicy):
    """StreamingLLM: keeps the newest tokens and the first few (sinks), which models attend to regardless of content."""

    name: ClassVar[str] = "streaming"
    ranks_by: ClassVar[str] = AGE
    usual_sinks: ClassVar[int] = SINKS
    accepts: ClassVar[tuple[str, ...]] = ("recent", *SHARES, "sinks", *COMMON)

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        return KVOptions(recent=max(0, slots - (SINKS if sinks is None else sinks)))

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        """Sinks come on top of recent slots, but count among those of a ratio."""
        options, sinks = self.options, self.sinks
        total = options.total(prompt_len, gen_len)
        if options.recent is not None and options.kv_budget is None:
            total += sinks
        if total <= sinks:
            raise ValueError(
                f"kv_policy {self.name!r} has a budget of {total} slots {row_of(prompt_len, gen_len)}, "
                f"of which {sinks} are sinks; give it recent ones as well"
            )
        return RowBudget(total, sinks)


class Random(KVPolicy):
    """Keeps tokens at random: the floor that every other policy has to beat."""

    name: ClassVar[str] = "random"
    ranks_by: ClassVar[str] = CHANCE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(self.options.total(prompt_len, gen_len))
