"""Progress: a line that shows how far a long job is. It is never silent for more than five seconds, even during a single task:
a ticker thread writes it, and ends with the `with` block. A terminal shows one line, a file gets few lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TextIO

SECONDS_BETWEEN_LINES = 4.0  # less than the promised five, by more than a busy machine is late
SECONDS_BETWEEN_REWRITES = 0.5


class Progress:
    """`with Progress(total, "generate") as progress: progress.update("12.3 tokens/s", done)`. Updates only remember what is to
    be shown, and so may come at any rate."""

    def __init__(
        self,
        total: int,
        label: str,
        stream: TextIO | None = None,  # None: stderr
        interval_seconds: float | None = None,  # None: depends on the stream
        late: bool = False,  # writes nothing in the first interval, for jobs that are usually quick
    ) -> None:
        self._total = total
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._is_unread = False
        self._late = late
        self._rewrites = self._stream.isatty()
        default = SECONDS_BETWEEN_REWRITES if self._rewrites else SECONDS_BETWEEN_LINES
        self._interval = default if interval_seconds is None else interval_seconds
        self._stage = self._text = ""
        self._details: tuple[str, ...] = ()
        self._done = 0
        self._counts = True  # show how many are done
        self._width = 0  # width of the line on the terminal
        self._started = time.monotonic()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name=f"progress {label}", daemon=True)

    def stage(self, name: str, text: str = "") -> None:
        """Names what is done now ("load", "prefill", "decode") and forgets the last stage's text. If a text is given, it tells
        how far the stage is."""
        self._stage, self._text, self._counts, self._details = name, text, not text, ()

    def update(self, text: str, done: int, details: Sequence[str] = ()) -> None:
        """`details` are shown before the text, the most important first; a terminal shows those that fit."""
        self._text, self._done, self._counts, self._details = text, done, True, tuple(details)

    def expect(self, total: int) -> None:
        """Corrects the amount that is to be done."""
        self._total = total

    def note(self, line: str) -> None:
        """Writes a line that stays. A terminal breaks it between words."""
        if self._rewrites:
            width = shutil.get_terminal_size().columns
            lines = textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
            line = "\n".join([f"\r{lines[0].ljust(self._width)}", *lines[1:]])
        self._put(f"{line}\n")
        self._width = 0

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if not self._late:
            self._write(self._line())
        with suppress(RuntimeError):  # if there is no memory for a thread, the job needs it more
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._ticker.ident is not None:
            self._ticker.join()
        if self._late:
            return
        self._write(self._line(" done" if kind is None else " stopped"))
        if self._rewrites:
            self._put("\n")

    def _tick(self) -> None:
        while not self._over.wait(self._interval):
            self._late = False
            self._write(self._line())

    def _line(self, end: str = "") -> str:
        """The line, at most as wide as the terminal, since a line that wraps could not be rewritten. The time left stands at
        its end, so less important parts are dropped first: details, the count, and then the end of the stage's name."""
        width = shutil.get_terminal_size().columns - 1 if self._rewrites else None
        share = f"{self._done}/{self._total}" if self._total and self._counts else ""
        seconds = f"[{time.monotonic() - self._started:.0f} s]{end}"
        details, stage = list(self._details), self._stage
        while True:
            detail = " ".join(details) + "," if details else ""
            line = " ".join(word for word in (f"{self._label}:", stage, share, detail, self._text, seconds) if word)
            if width is None or len(line) <= width:
                return line
            if details:
                details.pop()
            elif share:
                share = ""
            else:
                fits = max(0, len(stage) - (len(line) - width))
                return line.replace(f" {stage}", f" {stage[:fits]}", 1)[:width]

    def _write(self, line: str) -> None:
        if not self._rewrites:
            self._put(line + "\n")
            return
        self._put("\r" + line.ljust(self._width))
        self._width = len(line)

    def _put(self, text: str) -> None:
        if self._is_unread:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone, which is no reason to end a long job
            self._is_unread = True
