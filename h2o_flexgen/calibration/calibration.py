"""Calibration: texts are read twice, and what each head then keeps of them at several budgets makes head budgets. From the same
reading a probe is fitted: the linear map of a layer's input that best says what tokens were worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_flexgen.calibration.text_reading import (
    KeptReading,
    OnLayer,
    Pace,
    ReadModel,
    ReadSoFar,
    TextReading,
    looked_up,
    reading_of,
    turned,
)
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.positions import of_windows
from h2o_flexgen.policies.head_budgets import HeadBudgets

Scores = NDArray[np.float32]  # (layers, kv_heads, tokens)
Shares = NDArray[np.float64]  # (layers, kv_heads)
FIRST = 4  # tokens that every head keeps, of the first
PART_OF_NEWEST = 10  # one in so many slots is for the newest tokens, in every head


def shares_at(budget: float, scores: Scores) -> Shares:
    """The share of the text that each head keeps where the tokens of all heads and layers compete for one budget: the tokens of
    highest score are kept. Of equal ones the earlier layer's, head's and token's is kept."""
    layers, heads, tokens = scores.shape
    slots = int(budget * tokens)
    ranks = scores.copy()
    ranks[..., : min(FIRST, slots // 2)] = np.inf
    ranks[..., tokens - slots // PART_OF_NEWEST :] = np.inf
    best = np.argsort(-ranks, axis=None, kind="stable")[: round(budget * scores.size)]
    kept = np.bincount(best // tokens, minlength=layers * heads)
    return np.asarray(kept.reshape(layers, heads) / tokens)


class LayerRead(NamedTuple):
    """What was seen of a text and its copy in one layer that attends; queries and keys are rotated."""

    x: Tensor | None  # (2 * tokens, width), what queries, keys and values were made of, where the model tells
    q: Tensor  # (heads, 2 * tokens, dim)
    k: Tensor  # (kv_heads, 2 * tokens, dim)
    v: Tensor
    scores: Tensor  # (kv_heads, tokens), fp32, of the first copy


@dataclass(frozen=True)
class RepeatedText:
    """Reads each layer of a text and its copy, everything kept: which tokens does a model look up to repeat the text? A
    token's score is the highest attention that any query of the second copy gives it, in any head of the KV head's group
    (KVzip, arXiv 2505.23416). The listener gets what was seen there; the tensors are valid until it returns."""

    ids: Sequence[int]
    on_layer: Callable[[LayerRead], None]

    @property
    def reading(self) -> TextReading:
        return TextReading((*self.ids, *self.ids), self.attend)

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        q, k, v = turned(tokens)
        nothing = torch.zeros(1, dtype=torch.int64, device=q.device)
        x, sinks = tokens.x, tokens.sink_scores
        more = None if sinks is None else More.of_sink_scores(sinks, 1, q.shape[2])
        out, highest = prompt_attention(q, k, v, nothing, self._counted.to(q.device), more, MAX)
        assert highest is not None
        self.on_layer(LayerRead(None if x is None else x[0], q[0], k[0], v[0], highest[0, :, : len(self.ids)]))
        return out

    @cached_property
    def _counted(self) -> Tensor:
        """The queries of the second copy count, and no others."""
        return torch.arange(2 * len(self.ids)).ge(len(self.ids)).float().unsqueeze(0)


BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
FEWEST_TOKENS = 16
DIGITS = 3  # of a share


@dataclass(frozen=True, eq=False)
class Calibration:
    """What each head keeps of each text."""

    model: str
    source: str
    blocks: tuple[int, ...]  # those with KV
    shares: Mapping[float, tuple[Shares, ...]]  # of every text, at each budget

    @property
    def head_budgets(self) -> HeadBudgets:
        """The means over all texts, rounded: another text would have others anyway."""
        means = (np.mean(of_texts, axis=0).round(DIGITS).tolist() for of_texts in self.shares.values())
        shares = tuple(tuple(map(tuple, one)) for one in means)
        return HeadBudgets(self.model, self.source, tuple(self.shares), shares, blocks=self.blocks)

    def spread(self, budget: float) -> float | None:
        """How much a head's share differs from text to text: its standard deviation, averaged over heads. One text has none."""
        of_texts = self.shares[budget]
        return float(np.std(of_texts, axis=0, ddof=1).mean()) if len(of_texts) > 1 else None


@torch.inference_mode()
def calibrate(
    model: ReadModel,
    texts: Sequence[Sequence[int]],
    source: str,
    on_layer: OnLayer | None = None,
    fit: ProbeFit | None = None,
    kept: KeptReading | None = None,
    pace: Pace | None = None,
) -> Calibration:
    """Reads all texts layer by layer, so that weights are read once, and one layer's at a time lie in memory. `on_layer` is
    called with the number of layers done and the number of all; `fit` is given what is read. With `kept`, what was read is
    kept behind each layer, and a reading that was interrupted goes on; `pace` may give it up."""
    _check(model, texts, 0 if fit is None else sums_bytes(model.spec))
    begun, seen = _begun(kept, len(texts), model)
    readers = [RepeatedText(ids, partial(_note, scores, fit)) for ids, scores in zip(texts, seen)]
    readings = [reader.reading for reader in readers]
    begun = begun or looked_up(model, readings)
    if pace is not None:
        pace.begin()
    with closing(reading_of(model, readings, begun)) as reading:
        for at in reading:
            if pace is not None:
                pace.note(at, model)
            if at.texts == len(texts):
                _end_layer(at, seen, kept)
                if on_layer is not None:
                    on_layer(at.layers + 1, len(model.layers))
    by_text = [np.stack([layer.numpy() for layer in layers]) for layers in seen]
    shares = {budget: tuple(shares_at(budget, scores) for scores in by_text) for budget in BUDGETS}
    return Calibration(_name(model.name), source, model.spec.kv_blocks, shares)


def _begun(kept: KeptReading | None, texts: int, model: ReadModel) -> tuple[ReadSoFar | None, list[list[Tensor]]]:
    """The end of an earlier reading, and the scores that it made."""
    found = None if kept is None else kept.found(texts)
    if found is None:
        return None, [[] for _ in range(texts)]
    begun, seen = found
    return begun._replace(hidden=[one.to(model.device.torch_device) for one in begun.hidden]), seen


def _end_layer(at: ReadSoFar, seen: Sequence[Sequence[Tensor]], kept: KeptReading | None) -> None:
    if kept is not None and seen[0]:
        kept.keep(at.layers + 1, at.hidden, seen)


def _note(scores: list[Tensor], fit: ProbeFit | None, read: LayerRead) -> None:
    if fit is not None:
        fit.note(read)
    scores.append(read.scores.cpu().clone())


def _name(model: str) -> str:
    """The model's name, without the folder that it lies in here."""
    place = local_path(model)
    return place.name.removesuffix(".gguf") if place.exists() else model


def _check(model: ReadModel, texts: Sequence[Sequence[int]], beside: int) -> None:
    spec, longest = model.spec, max(map(len, texts))
    if min(map(len, texts)) < FEWEST_TOKENS:
        raise ValueError(f"a text has {min(map(len, texts))} tokens; give {FEWEST_TOKENS} or more")
    spec.refuse_unlike_heads("calibration")
    if 2 * longest > spec.seen_positions:
        there = f"{spec.name} has {spec.seen_positions} positions{of_windows(spec)}"
        most = spec.seen_positions // 2
        raise ValueError(f"texts of {longest} tokens are read twice, and {there}; give {most} tokens or fewer")
    tier = DEVICE if model.device.accelerator else HOST
    limit = model.limits.of(tier)
    hidden = sum(2 * len(ids) * spec.width * spec.itemsize for ids in texts)
    needed = max(layer.nbytes + layer.passed_bytes for layer in spec.layers) + hidden + beside
    if limit is not None and needed > limit:
        held = f"the largest layer of {spec.name} and what goes through it take {format_bytes(needed)}"
        raise ValueError(f"{held}, and {format_bytes(limit)} may be held; give more memory, or fewer or shorter texts")


LEAST_SCORE = 1e-6  # of tokens that get no attention, and added to all scores
RIDGE = 0.03  # of the mean square of an input
DOUBLE_BYTES = 8
FOUND = 0.2  # of a text: this share of its tokens is looked for, the best ones


def sums_bytes(spec: ModelSpec) -> int:
    """Bytes of the sums of a layer, and of what they are solved in."""
    return 3 * (spec.width + 1) * (spec.width + 1 + spec.kv_heads) * DOUBLE_BYTES


@dataclass
class _Sums:
    """Sums over the tokens of a layer; the last input is 1, for the bias."""

    squares: Tensor  # (width + 1, width + 1), fp64
    products: Tensor  # (width + 1, kv_heads), fp64

    @classmethod
    def empty(cls, width: int, heads: int, device: torch.device) -> _Sums:
        nothing = torch.zeros(width + 1, width + 1 + heads, dtype=torch.float64, device=device)
        return cls(nothing[:, : width + 1], nothing[:, width + 1 :])

    def add(self, x: Tensor, wanted: Tensor) -> None:
        x = _with_one(x)
        self.squares += x.T @ x
        self.products += x.T @ wanted.double()

    def solved(self) -> Tensor:
        """The map (width + 1, kv_heads) with the least sum of squared errors and size; the bias may be of any size."""
        size = RIDGE * self.squares.diagonal()[:-1].mean()
        penalty = torch.full_like(self.squares[0], float(size))
        penalty[-1] = 0
        solved: Tensor = torch.linalg.solve(self.squares + penalty.diag(), self.products)
        return solved


@dataclass
class ProbeFit:
    """Fits a probe while texts are read twice. What is fitted is the logarithm of a token's score, as scores differ by orders
    of magnitude and only their order matters. The fit is ridge regression in closed form, from sums over all tokens: no token
    is held, and of one layer at a time the sums.

    It takes every text in a layer, and then in the next layer. Where there are several texts, the last one of a layer shows
    how well the others predict it, before it is added as well."""

    texts: int
    found: list[float] = field(default_factory=list)  # by layer: the share of the last text's best tokens that was predicted
    _maps: list[Tensor] = field(default_factory=list)
    _sums: _Sums | None = None
    _seen: int = 0

    def note(self, read: LayerRead) -> None:
        assert read.x is not None, "layers hand over what they make keys of"
        x, wanted = read.x[: read.scores.shape[1]], (read.scores.T + LEAST_SCORE).log()
        sums = self._sums or _Sums.empty(x.shape[1], len(read.scores), x.device)
        self._seen += 1
        if self._seen == self.texts > 1:
            self.found.append(share_found(_with_one(x) @ sums.solved(), wanted))
        sums.add(x, wanted)
        self._sums = sums
        if self._seen == self.texts:
            self._maps.append(sums.solved().cpu())
            self._sums, self._seen = None, 0

    def probe(self, model: str, source: str) -> Probe:
        maps = np.stack([one.float().numpy() for one in self._maps]).transpose(0, 2, 1)  # (layers, kv_heads, width + 1)
        return Probe(model, source, np.ascontiguousarray(maps[..., :-1]), np.ascontiguousarray(maps[..., -1]))


def _with_one(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.double(), (0, 1), value=1.0)


def share_found(foretold: Tensor, wanted: Tensor) -> float:
    """The share of the best tokens that are among the best by prediction, as a mean over heads; (tokens, kv_heads) each."""
    best, guessed = (_best(each) for each in (wanted, foretold))
    return float((best & guessed).sum() / best.sum())


def _best(values: Tensor) -> Tensor:
    count = max(1, int(FOUND * len(values)))
    return torch.zeros_like(values, dtype=torch.bool).scatter(0, values.topk(count, dim=0).indices, True)
