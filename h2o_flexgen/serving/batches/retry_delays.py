"""Rests: batches that the disk or the memory has failed are left alone for a while, and meanwhile others go on."""

from __future__ import annotations

from threading import Lock

from h2o_flexgen.serving.batches.stored_batch import StoredBatch


class Rests:
    """Each lasts until a moment that is fixed when it begins, by a clock that the caller reads. A batch that comes to be in
    another state, as one that is cancelled, rests no longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = Lock()
        self._until: dict[tuple[str, str], float] = {}  # by the id of a batch and its state

    def begin(self, batch: StoredBatch, now: float) -> None:
        with self._lock:
            self._until[batch.id, batch.status] = now + self.seconds

    def over(self, now: float) -> list[str]:
        """The ids of batches with a rest that is over; the rest is forgotten."""
        with self._lock:
            found = [key for key, until in self._until.items() if until <= now]
            for key in found:
                del self._until[key]
        return [batch_id for batch_id, _ in found]

    def __contains__(self, batch: StoredBatch) -> bool:
        with self._lock:
            return (batch.id, batch.status) in self._until

    def seconds_left(self, now: float) -> float | None:
        """Until the first of them is over; None: there are none."""
        with self._lock:
            return max(0.0, min(self._until.values()) - now) if self._until else None
