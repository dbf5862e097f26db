"""JSON and YAML that somebody else has written: whatever is wrong with the text is one kind of error."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import yaml

from h2o_flexgen.core.hints import one_line, shown

TOO_DEEP = "brackets are nested too deeply"


class NotADocument(ValueError):
    """What is wrong with a text, in a few words."""


def parse_json(text: str | bytes) -> Any:
    """A name that stands twice in the same object is an error: nobody said which of the two counts."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except NotADocument:
        raise
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except ValueError as error:  # also no UTF-8, and numbers of more digits than Python reads
        raise NotADocument(one_line(error)) from error


def parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise NotADocument(TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:
        raise NotADocument(one_line(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = counted.most_common(1)[0][0]
        raise NotADocument(f"{shown(twice)} stands there twice")
    return found
