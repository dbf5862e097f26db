"""KVPolicy: how many slots a sequence holds, and which. The only slot arithmetic of the project.

Allocator, cost model, simulator, engine and tests all call it, so that what is predicted is what happens. Planning imports this
file: policies do their arithmetic without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from h2o_flexgen.kv.full import Full
from h2o_flexgen.planning.workload import Batch


class KVPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def capacity(self, batch: Batch, gen_len: int) -> int:
        """Slots per row that must be allocated. The last token generated is never stored."""

    def held(self, batch: Batch, step: int) -> int:
        """Slots in use, in the row that has most, when COMPUTE of decode step `step` (1, 2, ...) begins."""

    def changed(self, batch: Batch, step: int) -> tuple[int, int]:
        """The range of slots that COMPUTE of `step` writes (0 is prefill), over all rows: what a store has to move."""


POLICIES: Mapping[str, KVPolicy] = {policy.name: policy for policy in (Full(),)}
