"""How much longer a tokenizer may make a text before it cuts it into tokens, or after it has put tokens together. Rules that
replace characters work one after the other: each multiplies what those before it have made. A few of them fill all memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from h2o_flexgen.core.files import read_document
from h2o_flexgen.core.hints import shown

FILE = "tokenizer.json"
LARGEST_GROWTH = 256  # times: rules that are meant for texts make them a few times as long
MAY_MATCH_NOTHING = "*?^$|\\{"  # characters of expressions that may match between two characters
ADVICE = "mend it, or get the tokenizer from another place"


def refuse_growth(folder: Path) -> None:
    """Refuses a tokenizer with rules that may make a text very much longer."""
    path = folder / FILE
    try:
        tokenizer = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError):  # none is there, or the library says what is wrong with it
        return
    if not isinstance(tokenizer, dict):
        return
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growths = [growth for rule in _rules(tokenizer.get(part)) if (growth := _growth_of(rule)) > 1]
        if (growth := prod(growths)) > LARGEST_GROWTH:
            rules = f"the {len(growths)} rules of its {part} may make a text {shown(round(growth))} times as long"
            raise ValueError(f"{path}: {rules}, and {LARGEST_GROWTH} is the most; {ADVICE}")


def _rules(part: object) -> Iterator[Mapping[str, object]]:
    """The rules of a part in their order, those of sequences in sequences too."""
    open_parts = [part]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, list):
            open_parts.extend(reversed(part))
        elif isinstance(part, dict):
            yield part
            open_parts.extend(inner for inner in part.values() if isinstance(inner, list))


def _growth_of(rule: Mapping[str, object]) -> float:
    """How many times as long a rule may make a text, about."""
    pattern, content = rule.get("pattern"), rule.get("content")
    if rule.get("type") != "Replace" or not isinstance(pattern, dict) or not isinstance(content, str):
        return 1.0  # the library refuses what it does not understand
    string, expression = pattern.get("String"), pattern.get("Regex")
    if isinstance(string, str) and string:
        return max(1.0, len(content.encode()) / len(string.encode()))
    stays = not isinstance(expression, str) or any(mark in expression for mark in MAY_MATCH_NOTHING)
    return max(1.0, float(len(content.encode()) + stays))
