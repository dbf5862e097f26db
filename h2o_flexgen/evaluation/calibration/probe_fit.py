"""ProbeFit: fits a probe while texts are read twice: which linear map of a layer's input best says what tokens were worth?

What is fitted is the logarithm of a token's score, as scores differ by orders of magnitude and only their order matters. The
fit is ridge regression in closed form, from sums over all tokens: no token is held, and of one layer at a time the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.evaluation.calibration.repeated import LayerRead

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
    """Takes every text in a layer, and then in the next layer. Where there are several texts, the last one of a layer shows
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
