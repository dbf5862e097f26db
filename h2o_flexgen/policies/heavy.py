"""Heavy hitters alone, no recent tokens: one half of H2O, to show that both are needed."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import COMMON, PROTECTION, SHARES, KVPolicy


class Heavy(KVPolicy):
    name: ClassVar[str] = "heavy"
    accepts: ClassVar[tuple[str, ...]] = ("heavy", *SHARES, *PROTECTION, "score_decay", *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return self._protecting(self.options.total(prompt_len, gen_len), window=0)
