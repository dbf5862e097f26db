"""SeatedRows: the rows of one batch of a running block. Whoever ends leaves a seat, and those who wait take the free ones.

Newcomers have their prompts read in the next pass over the weights, beside the decode step of the others: a visit is then
computed in parts, of which the first has the newest tokens of those who were there, and each other one the prompts of a few
newcomers. From the pass after that on they are rows like the others. What a row may hold depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from h2o_flexgen.core.seats import Need
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, Part, padded
from h2o_flexgen.engine.waiting import Waiting
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.queues import read_together
from h2o_flexgen.policies.occupancy import Occupancy, StepSlots


class SeatedRows(BatchRows):
    def __init__(self, place: int, batch: Batch, waiting: Waiting, plan: Plan, gen_len: int, device: torch.device) -> None:
        self._place = place
        self._waiting = waiting
        self._prefill_tokens = plan.prefill_tokens
        self._slots: dict[int, Occupancy] = {}  # of each row, by its place in the workload
        super().__init__(batch, [], plan, gen_len, device)

    def _prompts(self, tokens: int) -> tuple[Part, ...]:
        return self._next_parts(0)

    def _next_parts(self, step: int) -> tuple[Part, ...]:
        """The decode step of those who stay, and the prompts of those who come."""
        staying = slice(len(self._rows))
        parts = (Part(staying, self._step(self._rows), self._newest()),) if self._rows else ()
        self._join()
        return parts + tuple(self._reading(rows) for rows in self._together(staying.stop))

    def _join(self) -> None:
        newcomers = self._waiting.take(self._place, len(self._rows))
        for row in newcomers:
            self._slots[row.row] = self._policy.alone(Need(row.prompt_len, row.max_tokens))
        self._rows += newcomers

    def _step(self, rows: Sequence[RowState]) -> KVStep:
        steps = [self._slots[row.row].at(row.num_generated) for row in rows]
        return KVStep.of(StepSlots.of_rows(steps), self._capacity, self._device)

    def _together(self, first: int) -> Iterator[slice]:
        """Newcomers whose prompts are read at once."""
        for part in read_together([row.prompt_len for row in self._rows[first:]], self._prefill_tokens):
            yield slice(first + part.start, first + part.stop)

    def _reading(self, rows: slice) -> Part:
        newcomers = self._rows[rows]
        tokens = padded(newcomers, [row.prompt_len for row in newcomers], self._device)
        return Part(rows, self._step(newcomers), tokens)

    def drop_finished(self, step: int) -> None:
        for row in self._rows:
            if row.finished:
                self._waiting.end(row)
                del self._slots[row.row]
        super().drop_finished(step)

    def _keep(self, places: Sequence[int]) -> None:
        """The seats stay as they are, whoever leaves."""
