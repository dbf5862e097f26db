"""The files that commands write: checked before the work and not after it, and the file of --output.

That file has whole texts and token ids, one JSON object per line and prompt, in the order of the prompts. While a run goes on,
finished prompts are appended line by line to a neighbour, FILE.partial; at the end FILE takes its place, whole and in order. So
FILE is never half-written, and a long run that is ended early keeps what it had. A later run leaves that as it is and appends
to FILE.partial.1, or to the first free number.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType

from h2o_flexgen.core.files import local_path, write_text
from h2o_flexgen.sampling.completion import Completion

PICTURES = (".png", ".svg", ".pdf")
OUTPUT = "--output"
RECORDED = ("index", "prompt", "prompt_token_ids", "text", "token_ids", "finish_reason", "stop_reason")


# -- before the work -------------------------------------------------------------------------------------------------------


def check_writable(file: str | None, flag: str) -> None:
    if file is None:
        return
    path = local_path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {file} cannot be written: give a file in a folder that exists")


def check_output_file(file: str | None, flag: str = OUTPUT) -> None:
    check_writable(file, flag)
    given = local_path(file or "")
    try:
        is_other = given.exists() and not given.is_file()
    except OSError as error:
        raise _unwritable(file, error, flag) from error
    if file is not None and is_other:
        raise ValueError(f"{flag} {file} is a device or a pipe, and no file can replace it; give a plain file")


def _unwritable(file: str | None, error: OSError, flag: str) -> ValueError:
    advice = "make room, or give another file" if error.errno == errno.ENOSPC else "give another file"
    return ValueError(f"{flag} {file} cannot be written ({error.strerror}); {advice}")


@contextmanager
def writing(file: str | Path, flag: str) -> Iterator[None]:
    """Names the file and the flag in an error of writing: those of a full disk name nothing."""
    try:
        yield
    except OSError as error:
        raise _unwritable(str(file), error, flag) from error


def check_picture(file: str | None, flag: str) -> None:
    if file is None:
        return
    try:
        import matplotlib.figure  # noqa: F401  # now: what it takes in memory is counted before a plan is held against it
    except ImportError as error:
        advice = "install it, or the extra [plot] from a checkout: pip install -e '.[plot]'"
        raise ValueError(f"{flag} needs matplotlib; {advice}") from error
    check_writable(file, flag)
    if Path(file).suffix.lower() not in PICTURES:
        raise ValueError(f"{flag} {file} is no kind of picture that is known; end it in {', '.join(PICTURES)}")


def open_output_folder(folder: str | None) -> Path | None:
    """Makes the folder for several files and checks that it is writable."""
    if folder is None:
        return None
    path = local_path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "nothing may be written there"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ValueError(f"{OUTPUT} {folder} cannot be written ({reason}); give another folder")
    return path


# -- completions -----------------------------------------------------------------------------------------------------------


class CompletionsFile:
    """The file of --output, used in a `with`: `add` appends what is done, `finish` writes it all."""

    def __init__(self, file: str) -> None:
        self._given, self.file = file, Path(os.path.realpath(local_path(file)))
        self._count = 0
        self._stream: FileIO | None = None  # opened for the first text: a process killed before leaves nothing
        with writing(file, OUTPUT):
            self._open_partial().close()
            self.partial.unlink()
        first = self._partial(0)
        if self.partial != first:
            print(f"{first} is there already, from another run, and is left as it is", file=sys.stderr)

    def _partial(self, number: int) -> Path:
        return self.file.with_name(f"{self.file.name}.partial{f'.{number}' if number else ''}")

    def _open_partial(self) -> FileIO:
        """Opens a file that was not there before: what another run kept is never overwritten."""
        for number in count():
            self.partial = self._partial(number)
            try:
                return FileIO(self.partial, "x")
            except FileExistsError:
                continue
        raise AssertionError("there is always a number that is free")

    def add(self, completion: Completion) -> None:
        """Appends a completion, with one write per line, so that killing the process does not cut a line. Nor does a disk that
        is full: it takes the beginning of a line, and refuses the rest."""
        with writing(self._given, OUTPUT):
            self._stream = self._stream or self._open_partial()
            whole, rest = self._stream.tell(), memoryview(_line(completion))
            try:
                while rest:
                    rest = rest[self._stream.write(rest) :]
            except OSError:
                self._stream.truncate(whole)
                raise
        self._count += 1

    def finish(self, completions: Iterable[Completion]) -> None:
        with writing(self._given, OUTPUT):
            write_text(self.file, b"".join(map(_line, completions)).decode())
        self._count = 0

    def __enter__(self) -> CompletionsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is None:
            return
        self._stream.close()
        if self._count:
            print(f"the texts that were done ({self._count}) are kept in {self.partial}", file=sys.stderr)
        else:
            self.partial.unlink(missing_ok=True)


def _line(completion: Completion) -> bytes:
    """The line of a completion. Characters that UTF-8 lacks, from an argument that was no text, are escaped as in JSON."""
    return json.dumps(record(completion), ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"


def record(completion: Completion) -> dict[str, object]:
    """The completion as JSON, with the log-probabilities of its tokens and of the likeliest in their places, if asked for."""
    found = {name: getattr(completion, name) for name in RECORDED}
    if completion.logprobs is not None:
        steps = completion.logprobs
        found["logprobs"] = [step.chosen._asdict() | {"top": [one._asdict() for one in step.top]} for step in steps]
    return found
