"""Reading the JSON objects of a model folder: the outcome is one, or an error of one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h2o_flexgen.core.documents import NotADocument, parse_json
from h2o_flexgen.core.hints import reason


def read_object(path: Path, advice: str) -> Mapping[str, Any]:
    """The JSON object that a file holds; `advice` is what to do about one that cannot be read."""
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); {advice}") from error
    except NotADocument as error:
        raise ValueError(f"{path} is no JSON ({error}); {advice}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; {advice}")
    return found
