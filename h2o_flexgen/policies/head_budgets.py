"""HeadBudgets: which share of a text each KV head keeps, so that all heads together keep what was asked for.

Few heads of a model look far back, and what they keep decides what the model can recall; the others live on the newest tokens.
A file says what each needs at several budgets of the whole model; it is measured once for a model (docs/policies.md). That
file is JSON, which `calibrate` writes and every command reads. It is written and read here alone.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from h2o_flexgen.core.files import NotADocument, local_path, parse_json, read_document_text, write_text
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import ModelSpec

ByHead: TypeAlias = "tuple[tuple[float, ...], ...]"  # (layers with KV, KV heads)
TOLERANCE = 0.01  # between a budget and the mean of its shares


@dataclass(frozen=True)
class HeadBudgets:
    model: str = field(compare=False)  # the model's name, for people
    source: str = field(compare=False)  # what they were measured on, for people
    budgets: tuple[float, ...]  # of the whole model, ascending
    shares: tuple[ByHead, ...]  # at each of them
    file: str = field(default="", compare=False)  # that they were read from, for people
    blocks: tuple[int, ...] | None = None  # the numbers of the blocks with KV, layer by layer; None: older files name none

    def __post_init__(self) -> None:
        if not self.budgets or len(self.budgets) != len(self.shares):
            raise ValueError(f"head budgets have {len(self.budgets)} budgets and shares for {len(self.shares)}; give as many")
        if list(self.budgets) != sorted(set(self.budgets)) or not 0 < self.budgets[0] <= self.budgets[-1] <= 1:
            raise ValueError(f"the budgets of head budgets are {list(self.budgets)}; give them ascending, above 0 and up to 1")
        for budget, by_head in zip(self.budgets, self.shares):
            _check(budget, by_head, self.shape)
        if self.blocks is not None and (len(self.blocks) != self.shape[0] or list(self.blocks) != sorted({*self.blocks})):
            named = f"{shown(list(self.blocks))}, which are no {self.shape[0]} blocks one behind the other"
            raise ValueError(f"the blocks of head budgets are {named}; measure them anew")

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with KV, and KV heads of each."""
        return shape_of(self.shares)

    @cached_property
    def checksum(self) -> str:
        """Identifies the budgets, by whatever names they go."""
        return blake2b(repr((self.budgets, self.shares)).encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, str]:
        """What a report says instead of all shares."""
        return {"model": self.model, "source": self.source, "checksum": self.checksum}

    def suits(self, spec: ModelSpec) -> bool:
        """Whether a model has as many layers and heads, in the same blocks."""
        are_there = self.blocks in (None, spec.kv_blocks)
        return are_there and all((own.kv_heads, len(spec.kv_layers)) == self.shape[::-1] for own in spec.of_heads)

    def refuse_other(self, spec: ModelSpec) -> None:
        """Refuses a model of another shape."""
        spec.refuse_unlike_heads("head budgets")
        if not self.suits(spec):
            these = f"head budgets {self.file}" if self.file else "the head budgets"
            own, other = _placed(self.blocks), "" if self.blocks is None else _placed(spec.kv_blocks)
            raise ValueError(
                f"{these} are of {self.model}, {self.shape[0]} layers of {self.shape[1]} KV heads{own}, but {spec.name} has "
                f"{len(spec.kv_layers)} layers of {spec.kv_heads}{other}; measure them for this model, or give --head-budgets "
                f"{EQUAL}"
            )

    def at(self, budget: float) -> ByHead:
        """The shares at a budget of the whole model, between those that were measured in proportion."""
        known = {0.0: _filled(self.shape, 0.0), **dict(zip(self.budgets, self.shares))}
        known.setdefault(1.0, _filled(self.shape, 1.0))
        return _between(known, budget)


def why_unmeasured(spec: ModelSpec) -> str:
    """Why calibration does not take such a model; nothing where it does."""
    lacks = {
        "KV heads of another number in some layers": len({own.kv_heads for own in spec.of_heads}) != 1,
        "a cap on scores": spec.attention_cap is not None,
    }
    return next((f"calibrate does not read models with {what}" for what, is_there in lacks.items() if is_there), "")


def _placed(blocks: Sequence[int] | None) -> str:
    """Says in which blocks layers are."""
    return "" if blocks is None else f" in the blocks {', '.join(map(str, blocks))}"


def shape_of(shares: Sequence[ByHead]) -> tuple[int, int]:
    """Layers and heads of the shares at the first budget."""
    return len(shares[0]), len(shares[0][0]) if shares[0] else 0


def _check(budget: float, by_head: ByHead, shape: tuple[int, int]) -> None:
    layers, heads = shape
    if len(by_head) != layers or any(len(of_layer) != heads for of_layer in by_head) or not heads:
        raise ValueError(f"head budgets at {budget:g} are not {layers} layers of {heads} heads; measure them anew")
    shares = [*chain.from_iterable(by_head)]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"head budgets at {budget:g} have a share outside 0 to 1; measure them anew")
    if abs(fmean(shares) - budget) > TOLERANCE:
        raise ValueError(f"head budgets at {budget:g} have shares that are {fmean(shares):.3f} on average; measure them anew")


def _filled(shape: tuple[int, int], share: float) -> ByHead:
    return ((share,) * shape[1],) * shape[0]


def _between(known: Mapping[float, ByHead], budget: float) -> ByHead:
    steps: Sequence[float] = sorted(known)
    place = bisect_left(steps, budget)
    if steps[place] == budget:
        return known[budget]
    low, high = steps[place - 1], steps[place]
    part = (budget - low) / (high - low)
    pairs = zip(known[low], known[high], strict=True)
    return tuple(tuple((1 - part) * one + part * other for one, other in zip(*layer, strict=True)) for layer in pairs)


FILE = "head_budgets.json"  # its name where it lies beside the model that it was measured on
OWN = "own"  # the word for that file
EQUAL = "equal"  # the word for equal budgets of all heads
BLOCKS = "blocks"  # in files of older versions they are missing
PARTS = ("model", "source", "layers", "kv_heads", "budgets", "shares")


def written(budgets: HeadBudgets) -> str:
    """The text of the file: a line for the shares at each budget."""
    layers, heads = budgets.shape
    placed = {} if budgets.blocks is None else {BLOCKS: list(budgets.blocks)}
    said = {"model": budgets.model, "source": budgets.source, "layers": layers, "kv_heads": heads, **placed}
    head = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in said.items()]
    lines = [json.dumps(by_head, separators=(",", ":")) for by_head in budgets.shares]
    return "\n".join(["{", *head, f'"budgets": {json.dumps(budgets.budgets)},', '"shares": [', ",\n".join(lines), "]}\n"])


def write_head_budgets(budgets: HeadBudgets, path: Path) -> None:
    write_text(path, written(budgets))


def read_head_budgets(path: str | os.PathLike[str]) -> HeadBudgets:
    """The head budgets of a file; every fault is reported in one line that begins with the file's name."""
    place = local_path(path)
    file = str(place)
    text = read_document_text(place, f"head budgets {file}")
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
    blocks = tuple(_block(one) for one in _list(found[BLOCKS], BLOCKS)) if BLOCKS in found else None
    return HeadBudgets(model, source, _numbers(found["budgets"], "budgets"), shares, blocks=blocks)


def _by_head(found: object) -> ByHead:
    return tuple(_numbers(of_layer, "shares of a layer") for of_layer in _list(found, "shares at a budget"))


def _numbers(found: object, what: str) -> tuple[float, ...]:
    return tuple(_number(one, what) for one in _list(found, what))


def _number(found: object, what: str) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not _is_finite(found):
        raise ValueError(f"{what} have {shown(found)}, which is no number; measure them anew")
    return float(found)


def _block(found: object) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ValueError(f"{BLOCKS} have {shown(found)}, which is no whole number from 0; measure them anew")
    return found


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
