"""H2O as in the paper (Algorithm 1): keeps the newest tokens and, of the others, those with the most attention so far."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import KVPolicy


class H2O(KVPolicy):
    name: ClassVar[str] = "h2o"
    accepts: ClassVar[tuple[str, ...]] = (*KVPolicy.accepts, "value_norms")

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        return self._protecting(heavy + recent, recent)
