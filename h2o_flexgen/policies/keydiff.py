"""KeyDiff: keeps the tokens with keys least like the others: what occurs many times can be evicted. It needs no sums of
attention (arXiv 2504.15364)."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, COMMON, KEY_DIFFERENCE, PROTECTION, WORTH, KVPolicy


class KeyDiff(KVPolicy):
    name: ClassVar[str] = "keydiff"
    ranks_by: ClassVar[str] = WORTH
    judged_by: ClassVar[str | None] = KEY_DIFFERENCE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        return self._protecting(heavy + recent, recent)
