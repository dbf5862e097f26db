"""SnapKV: keeps the prompt tokens that the prompt's last queries attend to, and their neighbours; decode continues as H2O."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.kv_options import row_of
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import KVPolicy


class SnapKV(KVPolicy):
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
