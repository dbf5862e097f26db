"""KVzip: keeps the prompt tokens that the model looks at when it has to repeat the prompt, whatever it will be asked later.
KVzap: does so by what a probe says of a token when it is written."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.policies.policy import BUDGETS, COMMON, PROBE, PROTECTION, KVPolicy


class KVzip(KVPolicy):
    name: ClassVar[str] = "kvzip"
    gathers: ClassVar[str] = MAX
    echoes: ClassVar[bool] = True
    recent_part: ClassVar[int] = 5  # what the echo says of tokens is worth more than that they are new (docs/log/eviction.md)
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, "hh_prompt_only", "kv_recall")


class KVzap(KVPolicy):
    """Keeps the tokens that a linear map of the layer's input says the model would look at when it repeats the text. The score
    is known when a token is written, and never changes: attention is not summed."""

    name: ClassVar[str] = "kvzap"
    ranks_by: ClassVar[str] = PROBE
    accepts: ClassVar[tuple[str, ...]] = (*BUDGETS, *PROTECTION, *COMMON)
