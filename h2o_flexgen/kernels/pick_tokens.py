"""Tokens picked from logits: the likeliest or one that is drawn, with scores changed first, and the likeliest in order.

What a row draws from is its scores: the logits, or a copy in float32 in which some are changed. In C and in torch. Both pick
the same tokens, unless the last bits of a sum of weights in float64 decide.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, pointer, run, threads_for

Upload = Callable[[Tensor, torch.device], Tensor]  # a tensor of the host as one of the device
FLOOR_SLACK = 1e-6  # a floor only saves work: it may pass more tokens than the exact filter after it, never fewer
CANDIDATE_BYTES = 16  # of a token that may be drawn, as C keeps it


class Draw(NamedTuple):
    """How a row picks its token. The number that it draws is a pure function of the first four."""

    seed: int
    row: int
    step: int
    number: int  # of the completion among those of its prompt
    temperature: float  # 0: the likeliest token
    nucleus: float  # the least likely tokens, which weigh 1 - nucleus together, are left out; infinity: none is
    least: float  # and those that weigh less than this share of the likeliest
    highest: int  # and all but so many of the likeliest, and those that equal the last; 0: none is

    @property
    def is_filtered(self) -> bool:
        return self.highest > 0 or self.nucleus < 1 or self.least > 0


def uniform(seed: int, row: int, step: int, number: int = 0) -> float:
    """The random number in [0, 1) of this row at this step: a pure function of these, independent of any other draw."""
    bits = np.random.Philox(key=seed + (row << 64), counter=step + (number << 64)).random_raw()
    return (int(bits) >> 11) * 2.0**-53


class ScoreChanges(NamedTuple):
    """What is done to some scores of each row, one after the other, each time rounded to float32."""

    begins: Sequence[int]  # (rows + 1,): where the changes of a row begin and end
    ids: np.ndarray  # (changes,) int64: the token of each; none twice in a row
    added: np.ndarray  # (changes,) float32
    times: np.ndarray  # (changes,) float32: how often the row has generated the token; NaN: it has not seen it at all
    penalties: np.ndarray  # (rows, 3) float32: divides positive scores of seen tokens and multiplies others; taken off for each
    # time that a token was generated; taken off if it was
    only: Sequence[bool]  # (rows,): whether tokens without a change are forbidden


MASK_BITS = 32  # of a word of a mask


def mask_words(vocab: int) -> int:
    return -(-vocab // MASK_BITS)


class TokenMasks(NamedTuple):
    """The tokens that may come in rows that are held to something; behind all changes, others have no score."""

    bits: Tensor  # (masks, words) int32, in host memory: a bit for each token, the lowest first; it is 1 for one that may come
    of_rows: Sequence[int]  # (rows,): the mask of each row; -1: it has none


class PickedTokens(NamedTuple):
    found: Tensor  # (2, rows) int64: tokens, and whether the highest score is finite; if it is not, the token means nothing
    best: Tensor  # (rows,): the highest score; NaN if any is


# -- picking ---------------------------------------------------------------------------------------------------------------


def pick_tokens(
    logits: Tensor,
    draws: Sequence[Draw] | None,
    changes: ScoreChanges | None,
    upload: Upload,
    at_once: int,
    masks: TokenMasks | None = None,
) -> PickedTokens:
    logits = logits.contiguous()
    (rows, vocab), threads = logits.shape, _threads(logits, at_once)
    found, best = torch.empty(2, rows, dtype=torch.int64), torch.empty(rows)
    packed = None if draws is None else torch.frombuffer(_in_c(draws), dtype=torch.uint8)
    changed = [None] * 6 if changes is None else _tensors(changes)
    masked = (None, None) if masks is None else (masks.bits, torch.tensor(masks.of_rows))
    is_plain = draws is None and changes is None and masks is None
    space_bytes = 0 if is_plain else vocab * (CANDIDATE_BYTES + torch.float32.itemsize)
    space = torch.empty(threads, space_bytes, dtype=torch.uint8)
    places = (logits, packed, *changed, *masked, found, best, space)
    words = 0 if masks is None else masks.bits.shape[1]
    given = _Picking(
        *(None if place is None else pointer(place) for place in places), rows, vocab, space_bytes, words, KINDS[logits.dtype]
    )
    run("pick_tokens", given, threads)
    return PickedTokens(found, best)


def _threads(logits: Tensor, at_once: int) -> int:
    """So many that the space that they need is within the bound for temporaries."""
    return max(1, min(threads_for(logits.numel()), len(logits), 2 * at_once // logits.shape[1]))


_DRAW = Struct("=4Q3dq")  # as C has it


def _in_c(draws: Sequence[Draw]) -> bytearray:
    return bytearray().join([_DRAW.pack(*one) for one in draws])


def _tensors(changes: ScoreChanges) -> tuple[Tensor, ...]:
    begins, only = torch.tensor(changes.begins), torch.tensor(changes.only, dtype=torch.uint8)
    return begins, *map(torch.from_numpy, (changes.ids, changes.added, changes.times, changes.penalties)), only


class _Picking(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "draws", "begins", "ids", "added", "times", "penalties", "only")),
        *((name, ctypes.c_void_p) for name in ("masks", "mask_of", "found", "best", "space")),
        *((name, ctypes.c_long) for name in ("rows", "vocab", "space_bytes", "words")),
        ("kind", ctypes.c_int),
    )


def pick_tokens_twin(
    logits: Tensor,
    draws: Sequence[Draw] | None,
    changes: ScoreChanges | None,
    upload: Upload,
    at_once: int,
    masks: TokenMasks | None = None,
) -> PickedTokens:
    scores = logits if changes is None else _changed(logits, changes, upload)
    if masks is not None:
        scores = scores.to(torch.float32, copy=True) if scores is logits else scores
        _forbid(scores, masks, upload, at_once)
    best, tokens = scores.max(dim=-1)
    is_finite = torch.isfinite(best)
    for is_filtered, draw in ((False, _draw_unfiltered), (True, _draw_filtered)):
        asking = [place for place, one in enumerate(draws or ()) if one.temperature and one.is_filtered == is_filtered]
        for places in portions(asking, logits.shape[-1], at_once):
            chosen = [draws[place] for place in places]  # type: ignore[index]
            own, columns = upload(torch.tensor(places), logits.device), _Columns.of(chosen, logits.device, upload)
            distances = (scores[own].double() - best[own].double()[:, None]) / columns.heat
            distances.masked_fill_(~is_finite[own][:, None], 0.0)  # any token
            tokens[own] = draw(distances, chosen, columns, upload)
    return PickedTokens(torch.stack((tokens, is_finite.long())), best)


def portions(places: Sequence[int], vocab: int, at_once: int) -> Iterator[Sequence[int]]:
    """Splits the rows into portions small enough for small temporaries."""
    rows = max(1, at_once // vocab)
    return (places[start : start + rows] for start in range(0, len(places), rows))


def _changed(logits: Tensor, changes: ScoreChanges, upload: Upload) -> Tensor:
    scores = logits.to(torch.float32, copy=True)
    counts = torch.tensor(changes.begins).diff()
    rows = upload(torch.repeat_interleave(counts), logits.device)
    ids, added, times, of_rows = (upload(torch.from_numpy(each), logits.device) for each in changes[1:5])
    repetition, frequency, presence = of_rows[rows].unbind(1)
    before = scores[rows, ids] + added
    after = torch.where(times >= 0, torch.where(before < 0, before * repetition, before / repetition), before)
    after = torch.where(times > 0, after - frequency * times - presence, after)
    if any(changes.only):
        scores[upload(torch.tensor(changes.only), logits.device)] = -math.inf
    scores[rows, ids] = after
    return scores


def _forbid(scores: Tensor, masks: TokenMasks, upload: Upload, at_once: int) -> None:
    """Takes the scores of all tokens that a row's mask leaves out."""
    (_, vocab), device = scores.shape, scores.device
    places = torch.arange(MASK_BITS, dtype=torch.int32, device=device)
    for rows in portions([row for row, mask in enumerate(masks.of_rows) if mask >= 0], vocab, at_once):
        bits = upload(masks.bits[[masks.of_rows[row] for row in rows]], device)
        allowed = ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, :vocab]
        allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
        own = upload(torch.tensor(rows), device)
        scores[own] = scores[own].masked_fill_(~allowed, -math.inf)


class _Columns(NamedTuple):
    """What draws need of each row, (rows, 1) each, in float64."""

    uniforms: Tensor
    heat: Tensor
    nucleus: Tensor
    least: Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device, upload: Upload) -> _Columns:
        lines = [[uniform(*one[:4]), one.temperature, one.nucleus, one.least] for one in draws]
        return cls(*upload(torch.tensor(lines, dtype=torch.float64), device).t().unsqueeze(-1))


def _draw_unfiltered(distances: Tensor, draws: Sequence[Draw], columns: _Columns, upload: Upload) -> Tensor:
    """Looks tokens up in order of their ids, so that nothing has to be sorted. `distances`: how far each token is below its
    row's best, divided by the temperature: at most 0, so that exp cannot overflow."""
    return _invert(distances.exp(), columns.uniforms).flatten()


def _draw_filtered(distances: Tensor, draws: Sequence[Draw], columns: _Columns, upload: Upload) -> Tensor:
    vocab, nucleus, least = distances.shape[-1], columns.nucleus, columns.least
    kth = kth_largest(distances, [min(one.highest, vocab) for one in draws], upload)
    weights = distances.exp()
    total = weights.masked_fill_((distances < kth) | (weights < least), 0).sum(dim=-1, keepdim=True)
    # all tokens lighter than total * (1 - nucleus) / vocab together weigh less than the nucleus leaves out
    floor = torch.maximum(kth, torch.maximum(least.log(), ((1 - nucleus).clamp_(min=0) * total / vocab).log()))
    top, ids = ranked(distances, floor - FLOOR_SLACK)
    weights = top.exp()  # the first is 1
    weights.masked_fill_((top < kth) | (weights < least), 0)
    heavier = torch.nn.functional.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))  # the weight of all tokens before
    weights.masked_fill_(heavier >= nucleus * total, 0)
    return ids.gather(-1, _invert(weights, columns.uniforms)).flatten()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first place where the cumulative weight exceeds this share of the total; it never has weight 0. (rows, 1)"""
    reached = weights.cumsum(dim=-1)
    return torch.searchsorted(reached, uniforms * reached[:, -1:], right=True)


def kth_largest(values: Tensor, counts: Sequence[int], upload: Upload) -> Tensor:
    """Each row's k-th largest value, minus infinity where k is 0. (rows, 1)"""
    if not any(counts):
        return torch.full_like(values[:, :1], -math.inf)
    top = torch.nn.functional.pad(values.topk(max(counts), dim=-1).values, (1, 0), value=-math.inf)
    return top.gather(-1, upload(torch.tensor(counts), values.device)[:, None])


def ranked(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """At least the values not below their row's floor, and their places: largest first, equal ones in order of place."""
    width = int((values >= floor).sum(dim=-1).max())
    places = values.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves the order of equal values open
    top, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return top, places.gather(-1, order)


# -- ranking ---------------------------------------------------------------------------------------------------------------
# The highest values of each row, and their places: equal ones come in the order of their places. C and torch have the same
# outcome.


def likeliest(values: Tensor, count: int, at_once: int) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    (rows, vocab), threads, space_bytes = values.shape, _threads(values, at_once), values.shape[1] * CANDIDATE_BYTES
    assert values.dtype == torch.float32 and 0 < count <= vocab
    ids, highest = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
    space = torch.empty(threads, space_bytes, dtype=torch.uint8)
    given = _Ranked(*map(pointer, (values, ids, highest, space)), rows, vocab, count, space_bytes)
    run("likeliest", given, threads)
    return highest, ids


def likeliest_twin(values: Tensor, count: int, at_once: int) -> tuple[Tensor, Tensor]:
    floor = values.topk(count, dim=-1).values[:, -1:]
    top, ids = ranked(values, floor)
    return top[:, :count], ids[:, :count]


class _Ranked(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "ids", "highest", "space")),
        *((name, ctypes.c_long) for name in ("rows", "vocab", "count", "space_bytes")),
    )
