"""Slots of a KV head: how their values are stored, what an evicting policy knows of each, and what guessed tokens change in
them, so that it can be taken back.

A guessed token is computed as in a later step of its row: it adds to scores, and takes over the slot of another token. Until it
is known to be right, what was there before is kept beside the cache. So no guess changes what a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.evict import LAST, Notes, chances, weighed
from h2o_flexgen.kernels.operations import evict, note
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.policies.policy import AGE, CHANCE, KVPolicy


@dataclass(frozen=True)
class Coding:
    """How the values of a slot are stored: in the dtype of computation, or as a format's bytes. Each head's values of
    one token are encoded separately, so that a slot can be rewritten by itself."""

    format: str
    dtype: torch.dtype  # used in computation
    head_dim: int
    values_in_keys: int = 0  # so many last values of a key are the values of its head; 0: these are stored apart
    position_values: int = 0  # so many first values of a key say where it stands, and of a value they are 0

    @classmethod
    def of(cls, spec: ModelSpec) -> Coding:
        return cls(spec.kv_codec, getattr(torch, spec.dtype), spec.head_dim, spec.values_in_keys, spec.position_values)

    @property
    def sets(self) -> int:
        """The sets of values that are stored of a token in a head: keys and values, or keys alone."""
        return 1 if self.values_in_keys else 2

    def values_of(self, keys: Tensor) -> Tensor:
        """The values in keys (..., head_dim), where they are not stored apart."""
        return keys[..., self.head_dim - self.values_in_keys :]

    def of_head(self, kept: Tensor) -> Tensor:
        """Keys or values (..., head_dim) without what says where they stand: a judge is to see those of a head alone."""
        return kept[..., self.position_values :]

    @cached_property
    def is_plain(self) -> bool:
        return self.format == PLAIN

    @cached_property
    def kept_dtype(self) -> torch.dtype:
        return self.dtype if self.is_plain else torch.uint8

    @cached_property
    def width(self) -> int:
        """The stored length of a head's values for one token, in elements of `kept_dtype`."""
        return FORMATS[self.format].nbytes((self.head_dim,), self.dtype.itemsize) // self.kept_dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Encodes (..., head_dim) to (..., width)."""
        if self.is_plain:
            return values
        kept = torch.empty(*values.shape[:-1], self.width, dtype=torch.uint8, device=values.device)
        operations.encode(self.format, values, kept)
        return kept

    def decode(self, kept: Tensor) -> Tensor:
        """Decodes (..., width) to (..., head_dim)."""
        if self.is_plain:
            return kept
        values = torch.empty(*kept.shape[:-1], self.head_dim, dtype=self.dtype, device=kept.device)
        operations.decode(self.format, kept.contiguous(), values)
        return values


def image_over(region: Tensor, shape: tuple[int, int, int], coding: Coding, by_token: bool) -> Tensor:
    """A view (sets, rows, kv_heads, slots, width) of the bytes of a region; `shape` is (rows, kv_heads, slots)."""
    rows, heads, slots = shape
    values = region[: coding.sets * prod(shape) * coding.width * coding.kept_dtype.itemsize].view(coding.kept_dtype)
    if by_token:
        return values.view(slots, coding.sets, rows, heads, coding.width).permute(1, 2, 3, 0, 4)
    return values.view(coding.sets, rows, heads, slots, coding.width)


def image_by_row(region: Tensor, shape: tuple[int, int, int], coding: Coding) -> Tensor:
    """The same where rows lie one behind the other, each token by token."""
    rows, heads, slots = shape
    values = region[: coding.sets * prod(shape) * coding.width * coding.kept_dtype.itemsize].view(coding.kept_dtype)
    return values.view(rows, slots, coding.sets, heads, coding.width).permute(2, 0, 3, 1, 4)


NO_TOKEN = -1  # position of a slot that was never filled


@dataclass(frozen=True)
class SlotScores:
    """What an evicting policy knows of each slot of a KV head: the token's position in the text, its score, and
    its worth when it was written. They stay in the compute device's memory even if keys and values are moved. Here a
    policy's data become tensors: which prompt tokens are kept, and which slot the newest token takes over in decode."""

    policy: KVPolicy
    positions: Tensor  # (rows, kv_heads, slots), int32
    scores: Tensor | None  # (rows, kv_heads, slots), fp32; None if the policy does not rank by attention
    worth: Tensor | None = None  # alike; None if the policy has no judge

    @classmethod
    def over(cls, region: Tensor, policy: KVPolicy, shape: tuple[int, int, int]) -> SlotScores:
        """Views of a region of memory; `shape` is (rows, kv_heads, slots). First come all positions, then all scores, then the
        worth of all."""
        positions, *others = region[: policy.score_bytes * prod(shape)].view(torch.int32).view(policy.score_words, *shape)
        numbers = [other.view(torch.float32) for other in others]
        scores = numbers.pop(0) if policy.has_scores else None
        return cls(policy, positions, scores, numbers[0] if numbers else None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(noted for noted in (self.positions, self.scores, self.worth) if noted is not None)

    def part(self, rows: slice) -> SlotScores:
        return self._each(lambda noted: noted[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> SlotScores:
        scores, worth = (None if noted is None else change(noted) for noted in (self.scores, self.worth))
        return SlotScores(self.policy, change(self.positions), scores, worth)

    def copied_as_it_is(self) -> SlotScores:
        return self._each(Tensor.clone)

    def copy_row(self, target: int, source: int) -> None:
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    # -- several tokens at once -------------------------------------------------------------------------------------------

    def oldest_first(self, now: KVStep) -> Tensor:
        """The slots in use, by age; a row that holds fewer is filled up with unused slots. (rows, kv_heads, held)"""
        return self.positions.masked_fill(now.behind_held, LAST).argsort(-1)[..., : now.held]

    def weights(self, now: KVStep) -> Tensor | None:
        """How much each new query contributes to scores; pads contribute nothing. (rows, tokens), fp32"""
        if self.scores is None:
            return None
        tokens = torch.arange(now.positions.shape[1], device=now.positions.device)
        age = now.lengths[:, 0] - 1 - tokens  # of each query: 0 for the last, below 0 for pads
        return torch.pow(self.policy.decay, age.clamp(min=0).float()) * ((age >= 0) & (age < now.queries[:, 0]))

    def held(self, now: KVStep) -> SlotScores:
        """The scores of the tokens held, oldest first."""
        index = self.oldest_first(now)
        return self._each(lambda noted: noted.gather(-1, index))

    def copied(self, now: KVStep, prefixes: Mapping[int, SlotScores]) -> SlotScores:
        """The scores of the tokens that come from shared prefixes, with which the rows' texts begin."""
        shape = (*self.positions.shape[:2], now.held)
        copies = self._each(lambda noted: noted.new_zeros(shape))
        copies.positions.copy_(now.held_order)
        for prefix, rows in now.groups:
            for copy, noted in zip(copies.tensors[1:], prefixes[prefix.group].tensors[1:]):
                copy[rows, :, : prefix.tokens] = noted[:, :, : prefix.tokens]
        return copies

    def keep_best(self, now: KVStep, got: Tensor | None, held: SlotScores, worth: Tensor | None = None) -> Tensor:
        """Chooses which of the held and the new tokens stay after a pass of several tokens, and records them.

        got (rows, kv_heads, held + tokens): the weighted attention each token got from the new queries, oldest first. worth: of
        the same shape, the judge's worth of each. Returns places among them (rows, kv_heads, kept), ascending; a row that keeps
        fewer ends with arbitrary places."""
        rows, kv_heads = self.positions.shape[:2]
        new = now.positions.unsqueeze(1).expand(-1, kv_heads, -1)
        positions = torch.cat((held.positions.long(), new), dim=-1)
        is_pad = torch.arange(new.shape[-1], device=self.positions.device) >= now.lengths
        exists = torch.cat((now.is_held, ~is_pad), dim=-1)
        scores = self._scores_of(now, got, held.scores)
        kept = now.slots.kept
        staying = now.places_if_all_stay.expand(rows, kv_heads, -1)
        chosen = self._best(now, positions, exists, scores, worth) if now.evicts else staying
        filled = torch.arange(kept, device=self.positions.device) < now.after
        self.positions.fill_(NO_TOKEN)[..., :kept] = positions.gather(-1, chosen).masked_fill(~filled, NO_TOKEN).int()
        for noted, of_places in ((self.scores, scores), (self.worth, worth)):
            if noted is not None and of_places is not None:
                noted.zero_()[..., :kept] = of_places.gather(-1, chosen).masked_fill(~filled, 0.0)
        return chosen

    def _scores_of(self, now: KVStep, got: Tensor | None, held: Tensor | None) -> Tensor | None:
        """The scores of the held tokens, with the new queries' attention added, and then those of the new tokens."""
        if got is None or held is None:
            return None
        around = self.policy.neighbours
        if around > 1:  # only for prompts
            in_turn = now.without_gaps.expand(got.shape)
            means = functional.avg_pool1d(got.gather(-1, in_turn), around, stride=1, padding=around // 2)
            got = torch.where(now.is_new, means.gather(-1, in_turn.argsort(-1)), got)
        faded, of_held = held * torch.pow(self.policy.decay, now.lengths.float()), got[..., : now.held]
        of_held.copy_(torch.maximum(of_held, faded) if self.policy.gathers == MAX else of_held + faded)
        return got

    def _best(self, now: KVStep, positions: Tensor, exists: Tensor, scores: Tensor | None, worth: Tensor | None) -> Tensor:
        """Chooses the places of the highest ranks. Places are in the order of positions."""
        stays = (positions < now.sinks) | (positions >= now.window)
        if scores is not None and worth is not None:
            stays = stays | self._first_half(now, stays, exists, scores)
        places, kept = positions.shape[-1], now.slots.kept
        best = _by_rank(self._rank(positions, scores, worth), stays, exists)[..., :kept]
        outside = torch.arange(kept, device=best.device) >= now.after
        return best.masked_fill(outside, places).sort(dim=-1).values.clamp(max=places - 1)

    @staticmethod
    def _first_half(now: KVStep, stays: Tensor, exists: Tensor, scores: Tensor) -> Tensor:
        """Marks the tokens that stay by their scores alone, where worth weighs the scores: half of those that a text's first
        pass has to choose."""
        protected = (stays & exists).sum(-1, keepdim=True)
        chosen = torch.where(now.is_new, (now.after - protected).clamp(min=0) // 2, 0)
        order = _by_rank(scores, stays, exists)
        first = torch.arange(scores.shape[-1], device=scores.device) < protected + chosen
        return torch.zeros_like(first).expand(order.shape).scatter(-1, order, first)

    def best_first(self) -> Tensor:
        """All slots by the rank of their tokens, protected or not; empty slots come last. (rows, kv_heads, slots)"""
        exists = self.positions != NO_TOKEN
        return _by_rank(self._rank(self.positions, self.scores, self.worth), torch.zeros_like(exists), exists)

    # -- decode ----------------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> Notes:
        return Notes(self.positions, self.scores, self.policy.ranks_by == CHANCE, self.worth)

    def evict(self, now: KVStep, image: Tensor, got: Tensor | None) -> Tensor | None:
        """Records what slots got, (rows, kv_heads, slots), fp32: the newest query's attention to each, gathered over a group's
        query heads. If rows have to evict, the newest token then takes over a slot of the image for each row and head; returns
        these slots, (rows, kv_heads)."""
        if now.evicts:
            return evict(image, self.notes, now.newest, now.leaving, got, self.policy.decay, self.policy.gathers)
        note(self.notes, now.newest, got, self.policy.decay, self.policy.gathers)
        return None

    def order(self, now: KVStep) -> Tensor:
        """Each slot's place by age among those that a head holds in decode. (rows, kv_heads, slots)"""
        return self.positions.masked_fill(now.behind_newest, LAST).argsort(-1).argsort(-1)

    def _rank(self, positions: Tensor, scores: Tensor | None, worth: Tensor | None) -> Tensor:
        known = weighed(scores, worth)
        if known is not None:
            return known
        return positions.double() if self.policy.ranks_by == AGE else chances(positions)


def _by_rank(rank: Tensor, stays: Tensor, exists: Tensor) -> Tensor:
    """All places (rows, kv_heads, places), the highest rank first; of equals the older comes later. Places that `stays` marks
    rank above all others, and places without a token below."""
    rank = rank.masked_fill(stays, torch.inf).masked_fill(~exists, -torch.inf)
    return rank.shape[-1] - 1 - torch.sort(rank.flip(-1), dim=-1, descending=True, stable=True).indices


# -- what guesses change -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What a step changed in the slots of some rows, as it was before. All tensors are on the device that computes."""

    image: Tensor  # (sets, rows, kv_heads, slots, width) of these rows
    noted: SlotScores  # alike
    before: SlotScores  # what was noted then
    slots: Tensor | None  # (rows, kv_heads): those that the newest tokens took over; None: no token went
    values: Tensor | None  # (sets, rows, kv_heads, width): what was in these

    @classmethod
    def by(cls, now: KVStep, image: Tensor, noted: SlotScores, got: Tensor | None) -> Change:
        """Ends a decode step as `SlotScores.evict` does. Which slot goes follows from what is noted. So keys and values are
        left out there, and moved here, once those that go were copied."""
        before = noted.copied_as_it_is()
        if not now.evicts:
            noted.evict(now, image, got)
            return cls(image, noted, before, None, None)
        slots = noted.evict(now, image.new_empty(*image.shape[:4], 1), got)
        assert slots is not None, "rows that evict say which slots"
        row, head = now.row_index[:, None], torch.arange(slots.shape[1], device=slots.device)
        values = image[:, row, head, slots]
        image[:, row, head, slots] = image[:, row, head, now.counts[:, None]]
        return cls(image, noted, before, slots, values)

    def take_back(self, row: int) -> None:
        """Makes the slots of one of the rows what they were."""
        for own, before in zip(self.noted.tensors, self.before.tensors, strict=True):
            own[row] = before[row]
        if self.slots is not None and self.values is not None:
            head = torch.arange(self.slots.shape[1], device=self.slots.device)
            self.image[:, row, head, self.slots[row]] = self.values[:, row]


class _Turn(NamedTuple):
    rows: slice  # their places in the batch
    number: int  # of their tokens behind the newest ones, from 0
    change: Change


class Guesses:
    """What the guesses of a batch changed in a pass, in all layers."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def noting(self, rows: slice, number: int) -> Callable[[Change], None]:
        """Notes what is changed by tokens of some rows, each of which is so many behind the newest of its row."""
        return lambda change: self._turns.append(_Turn(rows, number, change))

    def take_back(self, staying: Sequence[int]) -> None:
        """Takes back all but so many tokens behind the newest of each row, the last ones first."""
        for rows, number, change in reversed(self._turns):
            for place in range(rows.start, rows.stop):
                if number >= staying[place]:
                    change.take_back(place - rows.start)
        self._turns.clear()
