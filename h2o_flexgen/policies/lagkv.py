"""LagKV: keeps the tokens that stand out from what the next part of the text is like, in keys and values. It needs no sums
of attention (arXiv 2504.04704)."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROTECTION, SINKS, KVPolicy


class LagKV(KVPolicy):
    name: ClassVar[str] = "lagkv"
    ranks_by: ClassVar[str] = "lag"
    compares: ClassVar[bool] = True
    usual_sinks: ClassVar[int] = SINKS
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
