"""Docstrings are plain sentences or noun phrases: none begins as a fragment that only its code could complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "h2o_flexgen"
FRAGMENT = re.compile(
    "(That|Which|Whose|Whom|Of|To|For|In|On|By|From|With|Without|Where|Per|Behind|Beside|Before|After|Between|Under|Into|Through|"
    r"Not|Nor|And|Or|But|Is|Are|Does|Do|Did|Has|Have|Can|May|Will)\b"
)


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Every docstring of a file, and its place."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield f"{file.relative_to(PACKAGE)}, line {node.body[0].lineno}", text


def test_no_docstring_begins_as_a_fragment() -> None:
    found = [one for file in sorted(PACKAGE.rglob("*.py")) for one in docstrings(file)]
    assert found
    assert [f"{place}: {text}" for place, text in found if FRAGMENT.match(text)] == []
