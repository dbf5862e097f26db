"""KNorm: keeps the tokens with the shortest keys, which tend to get most attention. It needs no sums of attention (arXiv
2406.11430)."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROTECTION, KVPolicy


class KNorm(KVPolicy):
    name: ClassVar[str] = "knorm"
    ranks_by: ClassVar[str] = "key norms"
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
