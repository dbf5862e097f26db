"""The data folder of a server: what clients have left there, and what became of it. One server uses it at a time.

    files/ID.jsonl      the bytes of a file
    files/ID.json       its name, its size and what it is for; without this the file is not there
    batches/ID.json     a batch: what was asked, and how far it is
    batches/ID.jsonl    the records of a batch that has begun and not ended

Names that begin with a dot are on their way in.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from h2o_flexgen.core.files import lock, parse_json, read_text, write_durably
from h2o_flexgen.core.hints import reason

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
