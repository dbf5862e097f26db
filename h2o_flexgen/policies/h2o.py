"""H2O as in the paper (Algorithm 1): keeps the newest tokens and, of the others, those with the most attention so far."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import KVPolicy


class H2O(KVPolicy):
    name: ClassVar[str] = "h2o"
    accepts: ClassVar[tuple[str, ...]] = (*KVPolicy.accepts, "value_norms")
