"""What a server keeps: files, and batches of requests.

The data folder has what clients have left there, and what became of it. One server uses it at a time.

    files/ID.jsonl      the bytes of a file
    files/ID.json       its name, its size and what it is for; without this the file is not there
    batches/ID.json     a batch: what was asked, and how far it is
    batches/ID.jsonl    the records of a batch that has begun and not ended

Names that begin with a dot are on their way in. Of each batch it is known what was asked, how far it is, and what came of it.
Each change of one is on the disk before it can be seen.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from io import BufferedWriter
from pathlib import Path
from threading import Lock, RLock
from types import TracebackType
from typing import Any, TypeVar

from h2o_flexgen.core.files import lock, parse_json, read_text, sync_folder, write_durably
from h2o_flexgen.core.hints import reason
from h2o_flexgen.jobs.index import InputPart
from h2o_flexgen.jobs.openai_answers import Said
from h2o_flexgen.jobs.output import Manifest, Settings
from h2o_flexgen.server.problems import Refused, file_in_use, no_longer, other_purpose, unknown_batch, unknown_file

LOCK = "lock"
OURS_ALONE = 0o700  # what clients have sent is for this user alone
FORM = 1  # counted up when older documents can no longer be read
DOCUMENT, LINES = ".json", ".jsonl"
T = TypeVar("T")


@dataclass(frozen=True)
class DataFolder:
    path: Path

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def batches(self) -> Path:
        return self.path / "batches"


@contextmanager
def data_folder(path: Path, flag: str) -> Iterator[DataFolder]:
    """A context in which the folder is this server's. `flag`: what a person names it by."""
    folder = DataFolder(path)
    try:
        for each in (path, folder.files, folder.batches):
            each.mkdir(OURS_ALONE, parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be used ({reason(error)}); give another folder") from error
    try:
        if not lock(descriptor):
            raise ValueError(f"{flag} {path} is another server's, which runs; wait for its end, or give another folder")
        yield folder
    finally:
        os.close(descriptor)


def new_id(kind: str) -> str:
    """A name that no other has; later ones come behind earlier ones."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(6)}"


def write_document(path: Path, said: Mapping[str, object]) -> None:
    write_durably(path, json.dumps({"form": FORM, **said}, indent=1, default=str) + "\n")


def documents(folder: Path, of: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Everything that is written down in a folder. What was on its way there when a server was killed is removed."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            path.unlink()
        elif path.suffix == DOCUMENT:
            yield _read(path, of)


def _read(path: Path, of: Callable[[dict[str, Any]], T]) -> T:
    text = read_text(path, str(path))
    try:
        said = parse_json(text)
        if said.pop("form") != FORM:
            raise ValueError("another form")
        return of(said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not understood by this version; move it away") from error


# -- files -----------------------------------------------------------------------------------------------------------------

OF_INPUT, OF_OUTPUT = "batch", "batch_output"  # what files are for
KIND_OF_FILE = "file-"


@dataclass(frozen=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970

    @property
    def said(self) -> Said:
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None, "expires_at": None}


class NewFile:
    """A file on its way in. Used in a `with`, behind which nothing is left of it unless it was kept."""

    def __init__(self, file_id: str, path: Path) -> None:
        self.id, self.path = file_id, path
        self._opened: BufferedWriter = path.open("wb")

    def write(self, data: bytes) -> None:
        self._opened.write(data)

    def settle(self) -> int:
        """Returns when all of it is on the disk, with its size."""
        self._opened.flush()
        os.fsync(self._opened.fileno())
        return self._opened.tell()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._opened.close()
        finally:
            self.path.unlink(missing_ok=True)


class StoredFiles:
    """All files of a folder, by their ids. A change is on the disk before it can be seen. Readers never wait for the disk, as
    the lock guards the known state alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._known = {one.id: one for one in documents(folder, lambda said: StoredFile(**said))}
        for path in folder.glob(f"*{LINES}"):
            if path.stem not in self._known:
                path.unlink()  # a server was killed before it was there, or when it was removed

    def all(self) -> list[StoredFile]:
        """The oldest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda one: (one.created_at, one.id))

    def one(self, file_id: str) -> StoredFile:
        with self._lock:
            if file_id not in self._known:
                raise Refused(unknown_file(file_id))
            return self._known[file_id]

    def lines(self, file_id: str) -> Path:
        """The file with its bytes."""
        return self._folder / f"{file_id}{LINES}"

    def new(self, file_id: str | None = None) -> NewFile:
        """A file that is to be written. `file_id`: of one that may have been begun before."""
        given = new_id(KIND_OF_FILE) if file_id is None else file_id
        return NewFile(given, self._folder / f".{given}{LINES}")

    def keep(self, new: NewFile, filename: str, purpose: str) -> StoredFile:
        """Makes it one that is there."""
        file = StoredFile(new.id, filename, purpose, new.settle(), int(time.time()))
        os.replace(new.path, self.lines(file.id))
        try:
            write_document(self._document(file.id), asdict(file))
        except BaseException:
            if not self._is_known(file.id):
                self._unlink(file.id)
            raise
        with self._lock:
            self._known[file.id] = file
        return file

    def remove(self, file_id: str) -> None:
        """It is known until nothing of it is left, so that a removal that fails can be asked for again."""
        self._unlink(file_id)
        with self._lock:
            del self._known[file_id]

    def _is_known(self, file_id: str) -> bool:
        with self._lock:
            return file_id in self._known

    def _unlink(self, file_id: str) -> None:
        self._document(file_id).unlink(missing_ok=True)
        sync_folder(self._folder)
        self.lines(file_id).unlink(missing_ok=True)

    def _document(self, file_id: str) -> Path:
        return self._folder / f"{file_id}{DOCUMENT}"


# -- batches ---------------------------------------------------------------------------------------------------------------

KIND_OF_BATCH = "batch_"
WINDOW = "24h"  # the only one that OpenAI has; nothing expires here
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
UNDER_WAY = (IN_PROGRESS, FINALIZING, CANCELLING)
ENDED = (COMPLETED, FAILED, CANCELLED)
STATES = (VALIDATING, *UNDER_WAY, *ENDED)


@dataclass(frozen=True)
class BatchOutcome:
    """What came of a batch: how many requests have an answer, or an error, and the files of these, if there are any."""

    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None


@dataclass(frozen=True)
class StoredBatch:
    id: str
    input_file_id: str
    endpoint: str
    created_at: int  # seconds since 1970
    seed: int  # of requests that bring none
    metadata: Mapping[str, str] | None = None
    status: str = VALIDATING
    since: Mapping[str, int] = field(default_factory=dict)  # when it came to be in each state
    total: int = 0  # requests
    completed: int = 0
    failed: int = 0
    checked: InputPart | None = None  # its input, as it was found to be sound
    begun: Manifest | None = None  # what the answers depend on, once there may be some
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Mapping[str, object], ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def now(self, status: str) -> StoredBatch:
        return replace(self, status=status, since={**self.since, status: int(time.time())})

    def checked_as(self, whole: InputPart | None, requests: int, errors: Sequence[Said]) -> StoredBatch:
        """The batch behind its check."""
        return replace(self, checked=whole, total=requests, errors=tuple(errors)).now(FAILED if errors else IN_PROGRESS)

    def ended_as(self, status: str, outcome: BatchOutcome, errors: Sequence[Said]) -> StoredBatch:
        return replace(self, **asdict(outcome), errors=tuple(errors)).now(status)

    def begins(self, settings: Settings, noted: Settings) -> StoredBatch:
        assert self.checked is not None, "it was validated"
        return replace(self, begun=Manifest(self.created_at, self.seed, self.checked, settings, noted))

    @property
    def said(self) -> Said:
        """The batch in OpenAI's form."""
        times = {f"{state}_at": self.since.get(state) for state in (*UNDER_WAY, *ENDED)}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **times,
            "expires_at": None,
            "expired_at": None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }

    # -- its document --------------------------------------------------------------------------------------------------

    @property
    def document(self) -> Said:
        return asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> StoredBatch:
        checked, begun, errors = said.pop("checked"), said.pop("begun"), tuple(said.pop("errors"))
        batch = cls(
            **said,
            errors=errors,
            checked=None if checked is None else InputPart(**checked),
            begun=None if begun is None else Manifest(**{**begun, "checked": InputPart(**begun["checked"])}),
        )
        if batch.status not in STATES:
            raise ValueError("another state")
        return batch


def failing(message: str, line: int | None = None, code: str = "invalid_request") -> Said:
    """Why a batch has failed; `line`: the one of its input that is to blame."""
    return {"code": code, "line": line, "message": message, "param": None}


class Rests:
    """Batches that the disk or the memory has failed are left alone for a while, and meanwhile others go on. A rest lasts until
    a moment that is fixed when it begins, by a clock that the caller reads. A batch that comes to be in
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
            batch = StoredBatch(new_id(KIND_OF_BATCH), input_file_id, endpoint, int(time.time()), seed, metadata)
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
