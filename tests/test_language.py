"""Docstrings are plain sentences or noun phrases: none begins as a fragment that only its code could complete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "h2o_flexgen"
ROOMS = ("evaluation", "kv", "models", "policies", "profiling", "sampling", "text")  # rooms whose language was revised
FRAGMENTS = frozenset(
    "That Whose Whom Of To For In On By From With Without Where Per Behind Beside Before After Between Under "
    "Into Through Not Nor And Or But Is Are Does Do Did Has Have Can May Will".split()
)


def first_words(file: Path) -> Iterator[tuple[str, str]]:
    """The place of every docstring and its first word."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = (ast.get_docstring(node) or "").split()
            if words:
                yield f"{file.relative_to(PACKAGE)}, line {node.body[0].lineno}", words[0].rstrip(",:")


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_as_a_fragment(room: str) -> None:
    found = [f"{place}: {word}" for file in sorted((PACKAGE / room).rglob("*.py")) for place, word in first_words(file)]
    assert found
    assert [one for one in found if one.rpartition(" ")[2] in FRAGMENTS] == []
