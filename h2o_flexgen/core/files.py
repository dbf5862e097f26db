"""Files: texts are read with an error that names them, and all are written so that they are either there whole or not at
all. JSON and YAML are parsed, with one kind of error for every fault of the text."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from h2o_flexgen.core.hints import one_line, shown

JSON_LINES, DOCUMENT = ".jsonl", ".json"  # how names of files end
TEXTS = (".txt", "")  # the same where each line is a text
TOO_DEEP = "brackets are nested too deeply"


class NotADocument(ValueError):
    """An error that says in a few words what is wrong with a text."""


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. A name that occurs twice in one object is an error, because it is not known which of the two counts."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except NotADocument:
        raise
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except ValueError as error:  # also raised for invalid UTF-8, and for numbers of more digits than Python reads
        raise NotADocument(one_line(error)) from error


def parse_yaml(text: str) -> Any:
    import yaml  # scripts/fetch_smollm2 runs where nothing is installed

    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:
        raise NotADocument(one_line(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = counted.most_common(1)[0][0]
        raise NotADocument(f"{shown(twice)} stands there twice")
    return found


LARGEST_DOCUMENT = 1 << 28  # bytes: far more than any description that is read at once


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, with the folder of a user for ~ in front. That of a user that the machine does not know stays as it is."""
    return Path(os.path.expanduser(path))  # Path's own raises for an unknown user


def may_hold_texts(path: Path) -> bool:
    """Whether a file is called as one with a text per line is. Each line of a page or a table would be taken for one."""
    return path.suffix.lower() in TEXTS


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; `what` begins the error of one that cannot be read. A pipe or a device may not
    end: no more is read of it than of a document."""
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
            text = file.read(LARGEST_DOCUMENT + 1)
            if len(text) > LARGEST_DOCUMENT:
                raise _too_large()
            return text
    except OSError as error:
        raise ValueError(f"{what} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text (byte {error.start})") from error


def read_document(path: Path) -> bytes:
    """The bytes of a small file. An OSError refuses a pipe, for which reading would wait, a device, and what is too large."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # of a folder, reading says it best
        raise OSError(errno.EINVAL, "it is a pipe or a device; give a plain file")
    with path.open("rb") as file:
        data = file.read(LARGEST_DOCUMENT + 1)
    if len(data) > LARGEST_DOCUMENT:
        raise _too_large()
    return data


def read_document_text(path: Path, what: str) -> str:
    """The text of a small file that the user named; `what` begins the error of one that cannot be read."""
    try:
        return read_document(path).decode()
    except OSError as error:
        raise ValueError(f"{what} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text (byte {error.start})") from error


def _too_large() -> OSError:
    return OSError(errno.EFBIG, f"it has more than {LARGEST_DOCUMENT} bytes; give a smaller file")


def write_text(path: str | Path, text: str) -> None:
    """Writes the text to a temporary file that is then renamed, so that neither a reader nor a crash leaves half of it. A link
    stays a link, and a device or a pipe is written to, not replaced."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes bytes as `write_text` does a text."""
    path = Path(path)
    if path.exists() and not path.is_file():  # the path is not resolved: a link to an open pipe leads to no path
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        neighbour.write_bytes(data)
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Writes the text as `write_text` does; when this returns, the text survives a loss of power."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with neighbour.open("w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder as durable as the files; where the file system cannot, that is left to it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Locks an open file for this process, until it ends or closes the file. Returns whether no other process has it; where the
    file system has no locks, that is not known."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class Check(Protocol):
    """A check of stored bytes: of whole stretches of a tensor, or up to its end (checkpoints/stored_tensors.py)."""

    def __call__(self, offset: int, data: memoryview) -> None:
        """Raises an error if these bytes, which begin at this place of the file, differ from those that were written."""

    def unreadable(self, error: OSError) -> Exception:
        """The error to raise when the bytes cannot be read."""
