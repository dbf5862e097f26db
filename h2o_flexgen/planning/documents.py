"""JSON and YAML that somebody else has written: whatever is wrong with the text is a ValueError."""

from __future__ import annotations

import json
from typing import Any

import yaml

TOO_DEEP = "brackets are nested too deeply"


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
