"""All batches of a server. Each change of one is on the disk before it can be seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock, RLock

from h2o_flexgen.serving.batches.data_folder import DOCUMENT, LINES, documents, new_id, write_document
from h2o_flexgen.serving.batches.stored_batch import (
    CANCELLED,
    CANCELLING,
    IN_PROGRESS,
    KIND,
    STATES,
    UNDER_WAY,
    VALIDATING,
    StoredBatch,
)
from h2o_flexgen.serving.batches.stored_files import OF_INPUT, StoredFiles
from h2o_flexgen.serving.problems import Refused, file_in_use, no_longer, other_purpose, unknown_batch


class Batches:
    """Readers never wait for the disk: a change holds one lock, and the known state has a lock of its own."""

    def __init__(self, folder: Path, files: StoredFiles) -> None:
        self._folder, self._files, self._changing = folder, files, RLock()
        self._looking = Lock()
        self._known = {one.id: one for one in documents(folder, StoredBatch.of)}
        for path in folder.glob(f"*{LINES}"):
            if path.stem not in self._known or self._known[path.stem].has_ended:
                path.unlink()  # a server was killed when its outcome was there, and this no longer needed

    # -- for requests of clients -------------------------------------------------------------------------------------------

    def all(self) -> list[StoredBatch]:
        """The oldest first."""
        with self._looking:
            return sorted(self._known.values(), key=lambda one: (one.created_at, one.id))

    def one(self, batch_id: str) -> StoredBatch:
        with self._looking:
            if batch_id not in self._known:
                raise Refused(unknown_batch(batch_id))
            return self._known[batch_id]

    def create(self, input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None, seed: int) -> StoredBatch:
        with self._changing:  # meanwhile the file is not removed
            purpose = self._files.one(input_file_id).purpose
            if purpose != OF_INPUT:
                raise Refused(other_purpose(input_file_id, purpose, OF_INPUT))
            batch = StoredBatch(new_id(KIND), input_file_id, endpoint, int(time.time()), seed, metadata)
            try:
                return self._keep(batch)
            except BaseException:
                self._document(batch.id).unlink(missing_ok=True)  # the client is told that there is none
                raise

    def cancel(self, batch_id: str) -> StoredBatch:
        """Ends a batch early. If it has begun, the thread that runs it ends it, with the records that there are."""
        with self._changing:
            batch = self.one(batch_id)
            if batch.status == CANCELLING:
                return batch
            if batch.status not in (VALIDATING, IN_PROGRESS):
                raise Refused(no_longer(batch_id, batch.status))
            return self._keep(batch.now(CANCELLING) if batch.begun else batch.now(CANCELLING).now(CANCELLED))

    def remove_file(self, file_id: str) -> None:
        with self._changing:
            self._files.one(file_id)
            for batch in self.all():
                if batch.input_file_id == file_id and not batch.has_ended:
                    raise Refused(file_in_use(file_id, batch.id))
            self._files.remove(file_id)

    @property
    def states(self) -> Mapping[str, int]:
        """How many batches are in each."""
        found = Counter(batch.status for batch in self.all())
        return {state: found[state] for state in STATES}

    @property
    def requests(self) -> Mapping[str, int]:
        """How many requests have a record, by what became of them."""
        known = self.all()
        return {name: sum(getattr(one, name) for one in known) for name in ("completed", "failed")}

    # -- for the thread that runs them -------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[StoredBatch]:
        """The oldest first."""
        return [batch for batch in self.all() if batch.status in UNDER_WAY]

    def records(self, batch_id: str) -> Path:
        """The file of its records, until it ends."""
        return self._folder / f"{batch_id}{LINES}"

    def change(
        self, batch_id: str, change: Callable[[StoredBatch], StoredBatch], only_if: Collection[str] = STATES
    ) -> StoredBatch:
        """The batch as it is now: changed, if it is in one of these states."""
        with self._changing:
            batch = self.one(batch_id)
            return self._keep(change(batch)) if batch.status in only_if else batch

    def count(self, batch_id: str, completed: int, failed: int) -> None:
        """Says how far it is. Its records are the truth, so nothing is written."""
        with self._changing:
            self._know(replace(self.one(batch_id), completed=completed, failed=failed))

    def _keep(self, batch: StoredBatch) -> StoredBatch:
        write_document(self._document(batch.id), batch.document)
        self._know(batch)
        return batch

    def _document(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}{DOCUMENT}"

    def _know(self, batch: StoredBatch) -> None:
        with self._looking:
            self._known[batch.id] = batch
