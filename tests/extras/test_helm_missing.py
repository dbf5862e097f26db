"""Where HELM is not installed, one line names the extra that brings it."""

from __future__ import annotations

import pytest

from tests.helpers.missing import hide, said_by


def test_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "helm", "h2o_flexgen.helm")
    said = "HELM is not installed; it comes with the extra [helm]: pip install -e '.[helm]'"
    assert said_by("h2o_flexgen.helm") == said
