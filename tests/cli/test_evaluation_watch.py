"""EvaluationWatch: what a long evaluation says of itself."""

from __future__ import annotations

import io

from h2o_flexgen.cli.watch import EvaluationWatch
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import Stage


def test_it_says_what_is_measured_and_how_many_tokens_are_done() -> None:
    out = io.StringIO()
    with Progress(40, "evaluate", stream=out, interval_seconds=60) as progress:
        watch = EvaluationWatch(progress)
        watch.begin("recall: h2o, 20 %")
        watch.advance(8)
        watch.advance(4)
        watch.stage(Stage.GENERATING, 0, 0)  # the model has been opened: what is measured stays there
        watch.stage(Stage.MENDING, 0, 0)
        watch.begin("recall: h2o, 20 %")
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("evaluate: recall: h2o, 20 % 12/40 tokens [")
    assert any(line.endswith("was damaged: it is made again from the checkpoint") for line in lines), "a line that stays"
