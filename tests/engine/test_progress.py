"""Progress: never silent, never a flood, no thread left behind."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from h2o_flexgen.engine import progress as progress_module
from h2o_flexgen.engine.progress import SECONDS_BETWEEN_LINES, Progress
from tests.helpers.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def no_second_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes, its lines say that it is at its beginning."""
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def tickers(label: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"progress {label}"]


def wait_for(text: str, stream: io.StringIO) -> None:
    wait_until(lambda: text in stream.getvalue())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_lines_keep_coming_while_nothing_is_updated() -> None:
    stream = io.StringIO()
    with Progress(8, "job", stream, interval_seconds=0.01) as progress:
        assert stream.getvalue().startswith("job: 0/8")
        progress.stage("prefill")
        progress.update("one long task", 3)
        wait_for("one long task", stream)
        seen = stream.getvalue().count("\n")
        wait_until(lambda: stream.getvalue().count("\n") >= seen + 3)
    assert "job: prefill 3/8 one long task [0 s] done\n" in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_the_interval_keeps_the_promise_of_five_seconds() -> None:
    assert SECONDS_BETWEEN_LINES < 5


def test_many_updates_are_no_flood() -> None:
    stream = io.StringIO()
    with Progress(10_000, "job", stream, interval_seconds=PATIENCE_SECONDS) as progress:
        for done in range(10_000):
            progress.update("fast", done)
    assert stream.getvalue().count("\n") == 2


def test_a_new_stage_forgets_the_text_of_the_last() -> None:
    stream = io.StringIO()
    with Progress(2, "job", stream) as progress:
        progress.stage("load")
        progress.update("3.1 GB/s", 1)
        progress.stage("decode")
    assert stream.getvalue().endswith("job: decode 1/2 [0 s] done\n")


def test_a_stage_with_a_text_of_its_own_shows_that_instead_of_a_count() -> None:
    stream = io.StringIO()
    with Progress(2, "job", stream, interval_seconds=0.01) as progress:
        progress.stage("write", "1.20 GB of 3.40 GB")
        wait_for("job: write 1.20 GB of 3.40 GB [", stream)
        progress.update("3.1 tokens/s", 1)
    assert stream.getvalue().endswith("job: write 1/2 3.1 tokens/s [0 s] done\n")


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    with Progress(5, "job", stream, interval_seconds=0.01) as progress:
        progress.update("a rather long text", 1)
        wait_for("a rather long text", stream)
        progress.update("short", 2)
        wait_for("short", stream)
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert shown.endswith("\n")
    lines = shown.rstrip("\n").split("\r")
    first_short = next(place for place, line in enumerate(lines) if "short" in line)
    assert len(lines[first_short]) >= len(lines[first_short - 1].rstrip()), "the longer line before is not wiped out"


def test_a_line_never_wraps_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with Progress(5, "job", stream) as progress:
        progress.update("x" * 200, 1)
    assert max(map(len, stream.getvalue().rstrip("\n").split("\r"))) < 30


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_note_is_a_line_of_its_own_that_stays(is_terminal: bool) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    with Progress(5, "job", stream, interval_seconds=PATIENCE_SECONDS) as progress:
        progress.note("noted")
    lines = [line.split("\r")[-1].rstrip() for line in stream.getvalue().rstrip("\n").split("\n")]
    assert "noted" in lines and lines[-1].startswith("job: 0/5") and lines[-1].endswith("done")


def test_the_thread_is_gone_after_the_end() -> None:
    with Progress(5, "ending job", io.StringIO()):
        assert len(tickers("ending job")) == 1
    assert not tickers("ending job")


def test_the_thread_is_gone_after_an_exception_and_the_line_says_stopped() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(5, "failing job", stream):
        raise KeyboardInterrupt
    assert not tickers("failing job")
    assert stream.getvalue().endswith("stopped\n")


def test_the_end_does_not_wait_for_the_interval() -> None:
    before = time.monotonic()
    with Progress(5, "job", io.StringIO(), interval_seconds=2 * PATIENCE_SECONDS):
        pass
    assert time.monotonic() - before < PATIENCE_SECONDS


def test_a_reader_that_has_gone_does_not_end_the_job() -> None:
    with Progress(5, "piped job", ClosedPipe(), interval_seconds=0.001) as progress:
        progress.update("text", 1)
        time.sleep(0.01)
    assert not tickers("piped job")


def test_a_late_line_is_not_written_for_what_is_quick() -> None:
    stream = io.StringIO()
    with Progress(3, "job", stream, interval_seconds=PATIENCE_SECONDS, late=True) as progress:
        progress.update("quick", 3)
    assert stream.getvalue() == ""


def test_a_late_line_is_as_any_other_once_the_interval_is_over() -> None:
    stream = io.StringIO()
    with Progress(3, "job", stream, interval_seconds=0.01, late=True) as progress:
        progress.update("slow", 3)
        wait_for("slow", stream)
    assert stream.getvalue().endswith("job: 3/3 slow [0 s] done\n")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (100, "run: decode 7/90 block 1/2 step 3/9 layer 4/8, 1.50 tokens/s, ETA 0:12 [0 s]"),
        (80, "run: decode 7/90 block 1/2 step 3/9 layer 4/8, 1.50 tokens/s, ETA 0:12 [0 s]"),
        (70, "run: decode 7/90 block 1/2 step 3/9, 1.50 tokens/s, ETA 0:12 [0 s]"),
        (50, "run: decode 7/90 1.50 tokens/s, ETA 0:12 [0 s]"),
        (46, "run: decode 1.50 tokens/s, ETA 0:12 [0 s]"),
        (38, "run: de 1.50 tokens/s, ETA 0:12 [0 s]"),
    ],
)
def test_a_narrow_terminal_shows_the_time_left_before_anything_else(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(90, "run", Terminal())
    progress.stage("decode")
    progress.update("1.50 tokens/s, ETA 0:12", 7, ["block 1/2", "step 3/9", "layer 4/8"])
    assert progress._line() == shown and len(shown) < columns
