"""The file of head budgets: JSON that `calibrate` writes and every command reads. Written and read here alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from h2o_flexgen.core.documents import NotADocument, parse_json
from h2o_flexgen.core.files import read_document_text, write_text
from h2o_flexgen.core.hints import shown
from h2o_flexgen.policies.head_budgets import ByHead, HeadBudgets, shape_of

FILE = "head_budgets.json"  # its name where it lies beside the model that it was measured on
OWN = "own"  # the word for that file
PARTS = ("model", "source", "layers", "kv_heads", "budgets", "shares")


def written(budgets: HeadBudgets) -> str:
    """The text of the file: a line for the shares at each budget."""
    layers, heads = budgets.shape
    said = {"model": budgets.model, "source": budgets.source, "layers": layers, "kv_heads": heads}
    head = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in said.items()]
    lines = [json.dumps(by_head, separators=(",", ":")) for by_head in budgets.shares]
    return "\n".join(["{", *head, f'"budgets": {json.dumps(budgets.budgets)},', '"shares": [', ",\n".join(lines), "]}\n"])


def write_head_budgets(budgets: HeadBudgets, path: Path) -> None:
    write_text(path, written(budgets))


def read_head_budgets(path: str | os.PathLike[str]) -> HeadBudgets:
    """The head budgets of a file; every fault is reported in one line that begins with the file's name."""
    file = os.path.expanduser(path)
    text = read_document_text(Path(file), f"head budgets {file}")
    try:
        return replace(_budgets(parse_json(text)), file=file)
    except NotADocument as error:
        raise ValueError(f"{file} is no JSON ({error}); give a file that calibrate wrote") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _budgets(found: object) -> HeadBudgets:
    if not isinstance(found, Mapping):
        raise ValueError(f"{shown(found)} is no object; give a file that calibrate wrote")
    if missing := next((part for part in PARTS if part not in found), None):
        raise ValueError(f"{missing} is missing; give a file that calibrate wrote")
    model, source = (_text(found[name], name) for name in ("model", "source"))
    shares = tuple(map(_by_head, _list(found["shares"], "shares")))
    said = found["layers"], found["kv_heads"]
    if shares and said != (has := shape_of(shares)):  # before means are looked at, which are wrong where layers are missing
        shape = "{} layers of {} KV heads".format(*has)
        raise ValueError(f"layers and kv_heads are {shown(said[0])} and {shown(said[1])}, but it has {shape}; measure anew")
    return HeadBudgets(model, source, _numbers(found["budgets"], "budgets"), shares)


def _by_head(found: object) -> ByHead:
    return tuple(_numbers(of_layer, "shares of a layer") for of_layer in _list(found, "shares at a budget"))


def _numbers(found: object, what: str) -> tuple[float, ...]:
    return tuple(_number(one, what) for one in _list(found, what))


def _number(found: object, what: str) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not _is_finite(found):
        raise ValueError(f"{what} have {shown(found)}, which is no number; measure them anew")
    return float(found)


def _is_finite(number: float) -> bool:
    try:
        return isfinite(number)
    except OverflowError:  # whole numbers have no limit
        return False


def _list(found: object, what: str) -> Sequence[object]:
    if not isinstance(found, list):
        raise ValueError(f"{what} are {shown(found)}, which is no list; measure them anew")
    return found


def _text(found: object, what: str) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{what} is {shown(found)}, which is no text; give a file that calibrate wrote")
    return found
