"""The policy that keeps every token: slot j of a row holds its j-th token. A decode step may attend a share of them."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.kv_options import WHERE_ALL_IS_KEPT
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import NONE, KVPolicy


class Full(KVPolicy):
    name: ClassVar[str] = "full"
    ranks_by: ClassVar[str] = NONE
    accepts: ClassVar[tuple[str, ...]] = ("kv_recall", *WHERE_ALL_IS_KEPT)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(prompt_len + gen_len)
