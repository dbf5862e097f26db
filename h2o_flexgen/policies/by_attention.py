"""Policies that rank tokens by the attention that they get: H2O, as in the paper and as in its authors' fork of FlexGen, its
heavy half alone, and SnapKV, TOVA and KVzip, which ask other queries."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.policies.kv_options import KVOptions, row_of
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROTECTION, SHARES, KVPolicy


class H2O(KVPolicy):
    """As in the paper (Algorithm 1): keeps the newest tokens and, of the others, those with the most attention so far."""

    name: ClassVar[str] = "h2o"
    accepts: ClassVar[tuple[str, ...]] = (*KVPolicy.accepts, "value_norms")


class H2OFlexGen(KVPolicy):
    """The oldest recent token always becomes a heavy one and replaces the weakest heavy one, even if that one is stronger. It
    serves comparisons with published runs."""

    name: ClassVar[str] = "h2o-flexgen"

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        """The slots include the newest token's place."""
        return KVOptions(heavy=(slots + 1) - (slots + 1) // 2, recent=(slots + 1) // 2)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        """One of the recent slots is the place in which the newest token is attended."""
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        if heavy < 1 or recent < 1:
            raise ValueError(
                f"kv_policy {self.name!r} has {heavy} heavy and {recent} recent slots {row_of(prompt_len, gen_len)}; "
                "give it 1 or more of each"
            )
        return self._protecting(heavy + recent - 1, recent, recent - 1)


class Heavy(KVPolicy):
    """Heavy hitters alone, no recent tokens: one of H2O's halves, which shows that both are needed."""

    name: ClassVar[str] = "heavy"
    accepts: ClassVar[tuple[str, ...]] = ("heavy", *SHARES, *PROTECTION, "score_decay", *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return self._protecting(self.options.total(prompt_len, gen_len), window=0)


class SnapKV(KVPolicy):
    """Keeps the prompt tokens that the prompt's last queries attend to, and their neighbours; decode continues as H2O."""

    name: ClassVar[str] = "snapkv"
    accepts: ClassVar[tuple[str, ...]] = (*KVPolicy.accepts, "value_norms")
    neighbours: ClassVar[int] = 5
    last_queries: ClassVar[int | None] = 32  # the window in SnapKV's own runs

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        if recent < 1:
            raise ValueError(
                f"kv_policy {self.name!r} has no recent slots {row_of(prompt_len, gen_len)}; "
                "it observes the last queries: give it 1 or more"
            )
        return self._protecting(heavy + recent, recent, queries=min(self.last_queries or 0, recent, prompt_len))


class Tova(KVPolicy):
    """Evicts the token that gets least attention from the newest query."""

    name: ClassVar[str] = "tova"
    last_queries: ClassVar[int | None] = 1
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "value_norms", *COMMON)

    @property
    def decay(self) -> float:
        return 0.0

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return self._protecting(self.options.total(prompt_len, gen_len), window=0, queries=self.last_queries)


class KVzip(KVPolicy):
    """Keeps the prompt tokens that the model looks at when it has to repeat the prompt, whatever it will be asked later."""

    name: ClassVar[str] = "kvzip"
    gathers: ClassVar[str] = MAX
    echoes: ClassVar[bool] = True
    recent_part: ClassVar[int] = 5  # what the echo says of tokens is worth more than that they are new (docs/log/eviction.md)
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "hh_prompt_only", "kv_recall")
