"""TOVA: evicts the token that gets least attention from the newest query."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROTECTION, KVPolicy


class Tova(KVPolicy):
    name: ClassVar[str] = "tova"
    last_queries: ClassVar[int | None] = 1
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "value_norms", *COMMON)

    @property
    def decay(self) -> float:
        return 0.0

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return self._protecting(self.options.total(prompt_len, gen_len), window=0, queries=self.last_queries)
