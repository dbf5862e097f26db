"""Where lm-evaluation-harness is not installed, one line names the extra that brings it."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from h2o_flexgen.lm_eval import main

SAID = "lm-evaluation-harness is not installed; it comes with the extra [eval]: pip install -e '.[eval]'"


@pytest.fixture(autouse=True)
def the_harness_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.") or name == "h2o_flexgen.lm_eval_model"]:
        monkeypatch.delitem(sys.modules, name)


def test_one_line_names_the_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module("h2o_flexgen.lm_eval_model")
    assert str(caught.value) == SAID


def test_so_does_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    assert capfd.readouterr().err == f"error: {SAID}\n"
