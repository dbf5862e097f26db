"""KeyDiff: keeps the tokens with keys least like the others: what occurs many times can be evicted. It needs no sums of
attention (arXiv 2504.15364)."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROTECTION, KVPolicy


class KeyDiff(KVPolicy):
    name: ClassVar[str] = "keydiff"
    ranks_by: ClassVar[str] = "key difference"
    compares: ClassVar[bool] = True
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
