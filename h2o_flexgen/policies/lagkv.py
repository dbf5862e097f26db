"""LagKV: keeps the tokens that stand out from what the next part of the text is like, in keys and values. It needs no sums
of attention (arXiv 2504.04704)."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, COMMON, LAG, PROTECTION, SINKS, WORTH, KVPolicy


class LagKV(KVPolicy):
    name: ClassVar[str] = "lagkv"
    ranks_by: ClassVar[str] = WORTH
    judged_by: ClassVar[str | None] = LAG
    usual_sinks: ClassVar[int] = SINKS
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        return self._protecting(heavy + recent, recent)
