"""Tokens kept at random: the floor that every other policy has to beat."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import BUDGETS, CHANCE, COMMON, KVPolicy


class Random(KVPolicy):
    name: ClassVar[str] = "random"
    ranks_by: ClassVar[str] = CHANCE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(self.options.total(prompt_len, gen_len))
