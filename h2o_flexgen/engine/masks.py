"""Masks: which tokens may come next in rows that are held to something. A thread makes those of a batch as soon as its tokens
are known, while layers are computed, and the head of the next step finds them ready."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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

    def __init__(self, held: Sequence[tuple[int, Constraint]], vocab: int, made: Event) -> None:
        """`held`: the rows that need a mask, by their places in the workload."""
        self._held = held
        self._places = {row: number for number, (row, _) in enumerate(held)}
        self._bits = torch.empty(len(held), mask_words(vocab), dtype=torch.int32)
        self._made = made
        self._broken: dict[int, BaseException] = {}  # rows of which none can be made, and why

    def make(self) -> None:
        """The work of the thread."""
        try:
            words, width = bytes_of(self._bits, writes=True).cast("B").cast("I"), self._bits.shape[1]
            for number, (row, constraint) in enumerate(self._held):
                try:
                    constraint.write_mask(words[number * width : (number + 1) * width])
                except Exception as error:
                    self._broken[row] = error
        finally:
            self._made.set()

    def of(self, rows: Sequence[RowState]) -> TokenMasks:
        """The masks of rows of the batch, when they are made; a ConstraintBroken names the place of a row that has none."""
        self._made.wait()
        for place, row in enumerate(rows):
            if (error := self._broken.get(row.row)) is not None:
                raise RowBroken(place, str(error)) from error
        return TokenMasks(self._bits, [self._places.get(row.row, -1) for row in rows])


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

    def begin(self, rows: Sequence[RowState]) -> BatchMasks | None:
        """Asks for the masks that rows need for their next token; None if they need none, as what is known is not picked."""
        held = [(row.row, row.constraint) for row in rows if row.constraint is not None and row.given is None]
        if not held:
            return None
        self._start()
        masks = BatchMasks(held, self._vocab, self._handover.event())
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
