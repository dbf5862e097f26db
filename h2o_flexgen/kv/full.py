"""The policy that keeps every token: slot j of a row holds its j-th token."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.planning.workload import Batch


@dataclass(frozen=True)
class Full:
    name: str = "full"

    def capacity(self, batch: Batch, gen_len: int) -> int:
        return batch.prompt_len + gen_len - 1

    def held(self, batch: Batch, step: int) -> int:
        return batch.prompt_len + step - 1

    def changed(self, batch: Batch, step: int) -> tuple[int, int]:
        if step == 0:
            return 0, batch.prompt_len
        return min(batch.lengths) + step - 1, batch.prompt_len + step
