"""Where lm-evaluation-harness is not installed, one line names the extra that brings it."""

from __future__ import annotations

import pytest

from h2o_flexgen.lm_eval import main
from tests.helpers.missing import hide, said_by

SAID = "lm-evaluation-harness is not installed; it comes with the extra [eval]: pip install -e '.[eval]'"


@pytest.fixture(autouse=True)
def the_harness_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "lm_eval", "h2o_flexgen.evaluation.lm_eval_model")


def test_one_line_names_the_extra() -> None:
    assert said_by("h2o_flexgen.evaluation.lm_eval_model") == SAID


def test_so_does_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    assert capfd.readouterr().err == f"error: {SAID}\n"
