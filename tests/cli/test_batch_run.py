"""How far a job is: figures of a tick, the line of progress, and the lines of JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen.cli import batch_run
from h2o_flexgen.cli.batch_run import JobFigures, JobWatch, Metrics
from h2o_flexgen.cli.report import document_of, lines_of
from h2o_flexgen.engine.job import RequestSize
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.jobs.file_job import RequestSizes
from h2o_flexgen.jobs.recovery import DONE, FAILED, OPEN, Finished
from h2o_flexgen.sampling.completion import Completion

TICK = Tick(9, 1, 3, 4, 60, 30, 100, 2.0, 1.0, {"compute": 2.0, "read": 9.0})


def figures(share: float = 0.25, tick: Tick = TICK) -> JobFigures:
    return JobFigures(8, 3, 1, 10.0, share, 4, tick)


def test_figures_of_a_tick() -> None:
    one = figures()
    assert (one.prompt_rate, one.decode_rate, one.seconds_left, one.busiest) == (6.0, 3.0, 30.0, ("read", 0.9))
    assert one.useful_share == 0.86, "of four rows the last token was not computed with"
    document = document_of(one.entries())
    assert (document["requests"], document["requests_done"], document["requests_failed"]) == (8, 3, 1)
    assert (document["rows_alive"], document["rows_possible"], document["seconds_left"]) == (3, 4, 30.0)
    assert json.loads(json.dumps(document)) == document
    assert "speed     6.0 tokens/s read and 3.0 generated, both over the whole time" in lines_of(one.entries())


def test_guessed_tokens_are_told_where_there_are_any() -> None:
    assert "drafts" not in document_of(figures().entries())
    entries = [*figures(tick=replace(TICK, proposed_tokens=10, accepted_tokens=4)).entries()]
    assert document_of(entries)["drafts"] == {"proposed": 10, "accepted": 4, "tokens_per_pass": 3.333}
    assert "drafts    4 of 10 guessed tokens were right; 3.33 tokens a pass, of all its rows together" in lines_of(entries)


def test_before_anything_is_known_nothing_is_foretold() -> None:
    one = figures(0.0, Tick(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, {}))
    assert (one.seconds_left, one.useful_share, one.busiest) == (None, None, None)


def test_requests_that_end_early_bring_the_end_nearer() -> None:
    sizes = RequestSizes()
    for size in (RequestSize(10, 90), RequestSize(10, 40, 2)):
        sizes.add(size)  # 200 tokens at most
    stream = io.StringIO()
    finished = Finished(bytearray([DONE, FAILED, OPEN, OPEN]))
    with Progress(4, "batch", stream, interval_seconds=100) as progress:
        watch = JobWatch(progress, Metrics(None), sizes, finished)
        watch.tick(Tick(1, 0, 3, 4, 30, 20, 50, 1.0, 1.0, {"compute": 1e9}))
        assert watch.figures.share == 0.25
        watch.finished(Completion(0, None, (1,) * 10, "", (1,) * 10, None, "stop"), 90)
        assert watch.figures.share == pytest.approx(50 / 120)
        finished.note(2, failed=False)
        watch.tick(Tick(2, 1, 2, 4, 30, 20, 50, 1.0, 1.0, {"compute": 1e9}))
        finished.note(3, failed=False)
        assert watch.end().seconds_left == 0, "nothing is left of a job that is over"
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("batch: 3/4 2 of 4 rows, compute 100% busy, ") and " tokens/s read and " in last and "ETA" in last


def test_what_requests_share_is_read_once() -> None:
    sizes = RequestSizes()
    for _ in range(3):
        sizes.add(RequestSize(40, 10))
    with Progress(3, "batch", io.StringIO()) as progress:
        watch = JobWatch(progress, Metrics(None), sizes, Finished(bytearray(3)), shared_tokens=60)
        watch.tick(Tick(1, 0, 3, 3, 60, 15, 75, 1.0, 1.0, {}))
    assert watch.figures.share == pytest.approx(75 / 90)


def test_figures_are_appended_and_the_last_ones_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 1e6))  # all come at once
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with Metrics(path) as metrics:
            metrics.add(figures(0.1))
            metrics.add(figures(0.2))
            metrics.add(figures(0.5), at_once=True)
    left = [json.loads(line)["seconds_left"] for line in path.read_text().splitlines()]
    assert left == [90.0, 10.0, 90.0, 10.0], "those that follow at once are left out"


def test_a_job_goes_on_without_figures_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(Path("/dev/full")) as metrics:
        metrics.add(figures())
        metrics.add(figures(), at_once=True)
    assert capsys.readouterr().err == "--metrics /dev/full cannot be written any more (No space left on device)\n"
