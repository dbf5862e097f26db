"""LayerCache: the KV of one (layer, batch), behind one attention: a cache for each level of KV heads.

Heads of a level keep the same number of tokens, so they are one image with slots of its own. Each level attends with its heads
of queries, keys and values, and the outcome is written to the places of these heads in the layer. A layer with all heads at one
level passes everything on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from h2o_flexgen.kernels.operations import put_rows, take_rows
from h2o_flexgen.kernels.pick_tokens import Upload
from h2o_flexgen.kv.cache import AttentionInput, KVCache
from h2o_flexgen.kv.slots import Guesses
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens, Rotation, by_kv_head, picked
from h2o_flexgen.policies.levels import Level

Steps: TypeAlias = "Sequence[KVStep]"  # a step as each level of the plan has it
HeadsOfLayer: TypeAlias = "tuple[tuple[int, Tensor], ...]"  # the levels that a layer has heads of, each with these


def heads_by_layer(levels: Sequence[Level], device: torch.device, upload: Upload = Tensor.to) -> list[HeadsOfLayer]:
    """The levels that each layer with KV has heads of, by number, and the numbers of these heads on a device, copied there
    once. They are not needed where there is one level."""
    layers = [*zip(*(level.heads for level in levels))]
    several = len(levels) > 1
    numbers = torch.tensor([*chain.from_iterable(chain.from_iterable(layers))] if several else [], dtype=torch.long)
    there, found, end = upload(numbers, device) if several else numbers, [], 0
    for layer in layers:
        own = []
        for level, heads in enumerate(layer):
            start, end = end, end + len(heads)
            if heads:
                own.append((level, there[start:end]))
        found.append(tuple(own))
    return found


class OnlyChosen(Exception):
    """Raised to end the computation of a layer where it would attend, because that was all that it was to do."""


class LayerCache:
    def __init__(self, heads: HeadsOfLayer, caches: Sequence[KVCache], guesses: Guesses | None = None) -> None:
        """`caches`: one for each level that the layer has heads of. `guesses`: what guessed tokens change is noted there."""
        self._heads = heads
        self._caches = caches
        self._guesses = guesses
        self.prefixes: Mapping[int, LayerCache] = {}  # what rows share, each with one row that has all of it

    def attend(self, now: Steps, tokens: NewTokens) -> Tensor:
        """Attends as a KVCache does, level by level."""
        if len(self._caches) == 1:
            ((level, _),) = self._heads
            return self._caches[0].attend(now[level], tokens)
        q, kv_heads = tokens.q, tokens.k.shape[2]
        out = q.new_empty(*q.shape[:2], kv_heads, q.shape[2] * q.shape[3] // kv_heads)
        for level, heads, cache in self._levels():
            _put(out, heads, cache.attend(now[level], tokens.of_heads(heads)))
        return out.flatten(2)

    def choose(self, now: Steps, tokens: NewTokens) -> NoReturn:
        """Notes what a decode step attends, where it chooses that, and ends the computation of its layer there."""
        for level, heads, cache in self._levels():
            cache.choose(now[level], tokens if len(self._caches) == 1 else tokens.of_heads(heads))
        raise OnlyChosen

    def attend_in_turn(self, now: Steps, ahead: Sequence[tuple[slice, Steps, bool, int | None]], tokens: NewTokens) -> Tensor:
        """A decode step, and behind it tokens that follow the newest ones of some rows, each as in a later step; or several of
        one row. What rows hold afterwards, and what each token has seen, is what it would be with a pass for each token. What
        guessed ones change is noted: their number is not None."""
        start = now[0].rows
        first = self.attend(now, tokens.of_rows(slice(start)))
        out = first.new_empty(len(tokens.q), *first.shape[1:])
        out[:start] = first
        for rows, own, of_one, number in ahead:
            end = start + own[0].rows
            there = self.repeated(rows.start, own[0].rows) if of_one else self.part(rows)
            if number is not None:
                there._note_changes(rows, number, self._guesses)
            out[start:end] = there.attend(own, tokens.of_rows(slice(start, end)))
            start = end
        return out

    def _note_changes(self, rows: slice, number: int, guesses: Guesses | None) -> None:
        assert guesses is not None, "nothing is noted of what guesses change here"
        for cache in self._caches:
            cache.note_change = guesses.noting(rows, number)

    def share(self, prefixes: Mapping[int, LayerCache]) -> None:
        """Sets the prefixes that rows share now."""
        self.prefixes = prefixes
        for place, cache in enumerate(self._caches):
            cache.prefixes = {group: prefix._caches[place] for group, prefix in prefixes.items()}

    def part(self, rows: slice) -> LayerCache:
        """The cache of some of the rows."""
        return LayerCache(self._heads, [cache.part(rows) for cache in self._caches], self._guesses)

    def repeated(self, row: int, times: int) -> LayerCache:
        """The cache of one row as that of several, for tokens that it takes one behind the other."""
        return LayerCache(self._heads, [cache.repeated(row, times) for cache in self._caches])

    def forget_replaced(self) -> None:
        """Forgets which slots the last step changed one by one."""
        for cache in self._caches:
            cache.replaced = None

    def replacements(self, kept: Callable[[Tensor], Tensor]) -> list[Callable[[object], None]]:
        """What says again which slots a step has changed one by one, each time that the step is repeated."""
        changed = [(cache, kept(cache.replaced)) for cache in self._caches if cache.replaced is not None]
        return [partial(_replaces, cache, slots) for cache, slots in changed]

    @property
    def kind(self) -> Hashable:
        """What attention does here, apart from what is held: equal for two layers that do the same."""
        levels = tuple(level for level, _ in self._heads), tuple(cache.kind for cache in self._caches)
        return levels, tuple((group, prefix.kind) for group, prefix in self.prefixes.items())

    @property
    def memory(self) -> Sequence[Tensor]:
        """The tensors in which it lies, in the order of `kind`."""
        heads = [heads for _, heads in self._heads] if len(self._heads) > 1 else []
        own = [*heads, *chain.from_iterable(cache.memory for cache in self._caches)]
        return [*own, *chain.from_iterable(prefix.memory for prefix in self.prefixes.values())]

    # -- attention on the host -------------------------------------------------------------------------------------------

    def asked(self, now: Steps, tokens: NewTokens) -> AttentionInput:
        """What a decode step asks of a cache in other memory, of all heads in their order."""
        if len(self._caches) == 1:
            ((level, _),) = self._heads
            return self._caches[0].asked(now[level], tokens)
        q, kv_heads = tokens.q, tokens.k.shape[2]
        all_q, all_k, more, worth = torch.empty_like(q), torch.empty_like(tokens.k), None, None
        for level, heads, cache in self._levels():
            own = cache.asked(now[level], tokens.of_heads(heads))
            _put(by_kv_head(all_q, kv_heads), heads, own.q)
            _put(by_kv_head(all_k, kv_heads), heads, own.k)
            if own.more is not None:
                more = more or own.more.each(lambda x: x.new_empty(*q.shape[:3], *x.shape[3:]))
                for whole, part in zip(more, own.more, strict=True):
                    if whole is not None and part is not None:
                        _put(by_kv_head(whole, kv_heads), heads, part)
            if own.worth is not None:
                worth = own.worth.new_zeros(len(q), kv_heads) if worth is None else worth
                put_rows(worth, heads, 1, own.worth)
        return AttentionInput(all_q, all_k, tokens.v, more, worth)

    def answer(self, now: Steps, asked: AttentionInput, rotation: Rotation | None) -> Tensor:
        """The same step in the memory with the slots. (rows, 1, heads * head_dim)"""
        if len(self._caches) == 1:
            ((level, _),) = self._heads
            return self._caches[0].answer(now[level], asked, rotation)
        (q, k, v, more, worth), kv_heads = asked, asked.k.shape[2]
        out = q.new_empty(*q.shape[:2], kv_heads, q.shape[2] * q.shape[3] // kv_heads)
        for level, heads, cache in self._levels():
            own_more = more and more.each(partial(picked, heads=heads, kv_heads=kv_heads))
            own_worth = None if worth is None else take_rows(worth, heads, axis=1)
            own_q, own_k = (picked(each, heads, kv_heads) for each in (q, k))
            own_v = None if v is None else picked(v, heads, kv_heads)
            own = AttentionInput(own_q, own_k, own_v, own_more, own_worth)
            _put(out, heads, cache.answer(now[level], own, rotation))
        return out.flatten(2)

    def _levels(self) -> Iterator[tuple[int, Tensor, KVCache]]:
        for (level, heads), cache in zip(self._heads, self._caches, strict=True):
            yield level, heads, cache


class LayerByPart(LayerCache):
    """The same for prompts that are computed part by part, each in a place of its own. Parts are asked for in their order."""

    def __init__(self, heads: HeadsOfLayer, opened: Callable[[slice], Sequence[KVCache]]) -> None:
        """`opened`: the caches of some rows, one for each level."""
        super().__init__(heads, ())
        self._opened = opened

    def part(self, rows: slice) -> LayerCache:
        return LayerCache(self._heads, self._opened(rows))


def _replaces(cache: KVCache, slots: Tensor, visit: object) -> None:
    cache.replaced = slots.clone()  # the next step has others, and a journal keeps these


def _put(out: Tensor, heads: Tensor, made: Tensor) -> None:
    """Writes the outcome of some KV heads to their places in `out` (rows, tokens, kv_heads, ...)."""
    put_rows(out, heads, 2, made.view(*out.shape[:2], len(heads), *out.shape[3:]))
