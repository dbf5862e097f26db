"""The newest tokens alone: the other half of H2O, and the paper's baseline."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import AGE, COMMON, SHARES, KVPolicy


class Local(KVPolicy):
    name: ClassVar[str] = "local"
    ranks_by: ClassVar[str] = AGE
    accepts: ClassVar[tuple[str, ...]] = ("recent", *SHARES, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(self.options.total(prompt_len, gen_len))
