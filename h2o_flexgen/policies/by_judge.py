"""Policies that rank tokens by what a judge (`kv/judges`) says of them when they are written: by their keys, their values, or
the input of the layer. None needs sums of attention."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROBE, PROTECTION, SINKS, KVPolicy


class KNorm(KVPolicy):
    """Keeps the tokens with the shortest keys, which tend to get most attention (arXiv 2406.11430)."""

    name: ClassVar[str] = "knorm"
    ranks_by: ClassVar[str] = "key norms"
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)


class KeyDiff(KVPolicy):
    """Keeps the tokens with keys least like the others: what occurs many times can be evicted (arXiv 2504.15364)."""

    name: ClassVar[str] = "keydiff"
    ranks_by: ClassVar[str] = "key difference"
    compares: ClassVar[bool] = True
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)


class LagKV(KVPolicy):
    """Keeps the tokens that stand out from what the next part of the text is like, in keys and values (arXiv 2504.04704)."""

    name: ClassVar[str] = "lagkv"
    ranks_by: ClassVar[str] = "lag"
    compares: ClassVar[bool] = True
    usual_sinks: ClassVar[int] = SINKS
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)


class KVzap(KVPolicy):
    """Keeps the tokens that a linear map of the layer's input, the probe, says the model would look at when it repeats the
    text. The score is known when a token is written, and never changes."""

    name: ClassVar[str] = "kvzap"
    ranks_by: ClassVar[str] = PROBE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
