"""StreamingLLM: keeps the newest tokens and the first few (sinks), which models attend to regardless of content."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.kv_options import KVOptions, row_of
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import AGE, COMMON, SHARES, SINKS, KVPolicy


class Streaming(KVPolicy):
    name: ClassVar[str] = "streaming"
    ranks_by: ClassVar[str] = AGE
    usual_sinks: ClassVar[int] = SINKS
    accepts: ClassVar[tuple[str, ...]] = ("recent", *SHARES, "sinks", *COMMON)

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        return KVOptions(recent=max(0, slots - (SINKS if sinks is None else sinks)))

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        """Sinks come on top of recent slots, but count among those of a ratio."""
        options, sinks = self.options, self.sinks
        total = options.total(prompt_len, gen_len)
        if options.recent is not None and options.kv_budget is None:
            total += sinks
        if total <= sinks:
            raise ValueError(
                f"kv_policy {self.name!r} has a budget of {total} slots {row_of(prompt_len, gen_len)}, "
                f"of which {sinks} are sinks; give it recent ones as well"
            )
        return RowBudget(total, sinks)
