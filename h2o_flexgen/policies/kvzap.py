"""KVzap: keeps the tokens that a linear map of the layer's input says the model would look at when it repeats the text. The
score is known when a token is written, and never changes: attention is not summed."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROBE, PROTECTION, KVPolicy


class KVzap(KVPolicy):
    name: ClassVar[str] = "kvzap"
    ranks_by: ClassVar[str] = PROBE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
