"""Masks: which tokens may come next in rows that are held to something. A thread makes those of a batch as soon as its tokens
are known, while layers are computed, and the head of the next step finds them ready. Where layers are computed by the same
processor, masks take from them what they cost. So there a row that takes its likeliest token has one only if that may not come.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType

import torch

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.kernels.pick_tokens import TokenMasks, mask_words
from h2o_flexgen.kernels.raw_memory import bytes_of
from h2o_flexgen.memory.threads import Event, Handover, starting
from h2o_flexgen.sampling.structured_outputs import Constraint, ConstraintBroken

THREAD = "masks"


class BatchMasks:
    """The masks of a batch for one step."""

    def __init__(self, held: Mapping[int, Constraint], tried: Mapping[int, Constraint], vocab: int, made: Event) -> None:
        """Rows by their places in the workload. `held` need a mask. Of `tried` the likeliest token is picked first, and one
        needs a mask only if that may not come."""
        self._held, self._tried, self._made = held, tried, made
        self._numbers = {row: number for number, row in enumerate((*held, *tried))}
        self._bits = torch.empty(len(self._numbers), mask_words(vocab), dtype=torch.int32)
        self._has_mask = {*held}
        self._broken: dict[int, BaseException] = {}  # rows of which none can be made, and why
        if not held:
            made.set()

    @property
    def tries(self) -> bool:
        return bool(self._tried)

    def make(self) -> None:
        """The work of the thread."""
        try:
            for row, constraint in self._held.items():
                self._make(row, constraint)
        finally:
            self._made.set()

    def _make(self, row: int, constraint: Constraint) -> None:
        try:
            constraint.write_mask(bytes_of(self._bits[self._numbers[row]], writes=True).cast("B").cast("I"))
        except Exception as error:
            self._broken[row] = error

    def of(self, rows: Sequence[RowState]) -> TokenMasks:
        """The masks of rows of the batch, when they are made; a ConstraintBroken names the place of a row that has none."""
        self._made.wait()
        for place, row in enumerate(rows):
            if (error := self._broken.get(row.row)) is not None:
                raise RowBroken(place, str(error)) from error
        return TokenMasks(self._bits, [self._numbers[row.row] if row.row in self._has_mask else -1 for row in rows])

    def refuse(self, rows: Sequence[RowState], tokens: Sequence[int]) -> TokenMasks | None:
        """Makes the masks of rows of which the likeliest token may not come; None if there are none."""
        found = False
        for row, token in zip(rows, tokens):
            constraint = self._tried.get(row.row)
            if constraint is not None and not constraint.allows(token):
                self._make(row.row, constraint)
                self._has_mask.add(row.row)
                found = True
        return self.of(rows) if found else None


class RowBroken(ConstraintBroken):
    """The row at this place cannot go on."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


class MaskMaker:
    """The thread of a run. It starts with the first row that is held to something."""

    def __init__(self, vocab: int, handover: Handover) -> None:
        self._vocab, self._handover = vocab, handover
        self._queue: SimpleQueue[BatchMasks | None] = handover.queue()
        self._thread: threading.Thread | None = None

    def begin(self, rows: Sequence[RowState], tries: bool = False) -> BatchMasks | None:
        """Asks for the masks that rows need for their next token; None if they need none, as what is known is not picked.
        `tries`: those of rows without draws are made at the head, and only where the likeliest token may not come."""
        held, tried = dict[int, Constraint](), dict[int, Constraint]()
        for row in rows:
            if row.constraint is not None and row.given is None:
                (tried if tries and row.params.is_greedy else held)[row.row] = row.constraint
        if not held and not tried:
            return None
        masks = BatchMasks(held, tried, self._vocab, self._handover.event())
        if held:
            self._start()
            self._queue.put(masks)
        return masks

    def _start(self) -> None:
        if self._thread is None:
            thread = self._handover.thread(self._work, (), THREAD)
            with starting():
                thread.start()
            self._thread = thread

    def _work(self) -> None:
        while (masks := self._queue.get()) is not None:
            masks.make()

    def close(self) -> None:
        """Ends the thread, once all is made that was asked for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> MaskMaker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
