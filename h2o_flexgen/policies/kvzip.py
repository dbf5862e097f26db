"""KVzip: keeps the prompt tokens that the model looks at when it has to repeat the prompt, whatever it will be asked later."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, PROTECTION, KVPolicy

RECENT_PART = 5  # of the budget: what the echo says of tokens is worth more than that they are new (docs/log/eviction.md)


class KVzip(KVPolicy):
    name: ClassVar[str] = "kvzip"
    gathers: ClassVar[str] = MAX
    echoes: ClassVar[bool] = True
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "hh_prompt_only")

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len, RECENT_PART)
        return self._protecting(heavy + recent, recent)
