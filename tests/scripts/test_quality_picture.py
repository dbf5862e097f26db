"""The picture of an evaluation that is drawn again has what its document says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts.loading import load_script

BUDGETS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "quality" / "budgets.json"


def test_a_document_gives_a_panel_for_each_figure_and_a_line_for_each_policy() -> None:
    panels = {panel.title: panel for panel in load_script("quality_picture.py").panels_in(json.loads(BUDGETS.read_text()))}
    hidden = panels["recall: share of answers that are right in full, hidden questions"]
    assert len(panels) == 7 and all(len(panel.lines) == 7 for panel in panels.values())
    assert hidden.amounts == ("100 %", "50 %", "20 %", "10 %", "5 %") and hidden.full == 1.0 and hidden.is_share
    assert [place for place, _, _ in hidden.lines["h2o"]] == [0, 1, 2, 3, 4]
    assert hidden.lines["h2o"][0] == (0, 1.0, 0.0) and hidden.lines["h2o"][-1][1] < 0.8
