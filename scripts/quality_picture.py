"""Draws the picture of an evaluation again, from its JSON document.

python scripts/quality_picture.py benchmarks/results/quality/budgets.json docs/pictures/quality.png  # needs [plot]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs where the package is not installed

from h2o_flexgen.evaluation.results import Panel, draw_quality, panel_title
from h2o_flexgen.evaluation.tasks import TASKS
from h2o_flexgen.policies.by_position import Full


def main(arguments: Sequence[str]) -> int:
    file, picture = map(Path, arguments)
    document = json.loads(file.read_text(encoding="utf-8"))
    draw_quality(list(panels_in(document)), picture, f"{document['model']}: quality against what is kept")
    return 0


def panels_in(document: Mapping[str, Any]) -> Iterator[Panel]:
    for task, found in document["tasks"].items():
        cells = found["cells"]
        amounts = tuple(dict.fromkeys(cell["kept"] for cell in cells))
        for part in dict.fromkeys(one.get("panel", "") for cell in cells for one in cell["figures"]):
            for shown in TASKS[task].shown:
                whole = [(cell, one) for cell in cells for one in cell["figures"] if _is(one, shown.name, part)]
                full = next((one["value"] for cell, one in whole if cell["policy"] == Full.name), None)
                lines: dict[str, list[tuple[int, float, float]]] = {}
                for cell, one in whole:
                    if cell["policy"] != Full.name:
                        point = amounts.index(cell["kept"]), one["value"], one["error"] or 0.0
                        lines.setdefault(cell["policy"], [] if full is None else [(0, full, 0.0)]).append(point)
                yield Panel(panel_title(task, shown, part), amounts, full, lines, shown.is_share)


def _is(figure: Mapping[str, Any], name: str, panel: str) -> bool:
    """Whether it is the figure of all examples."""
    return (figure["name"], figure.get("panel", ""), figure.get("by", "")) == (name, panel, "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
