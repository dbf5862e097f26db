"""The exchange of a device with the host where the host attends beside the KV: what the device asks, and the answers.

A COMPUTE that ends with an attention writes queries, keys and values of its decode step to page-locked memory. The ATTEND of
its visit appends them to the host's image, attends and evicts there, and writes the outcome beside them. The COMPUTE of the
next layer copies the outcome into its hidden states. Both copies are in the stream that computes: in a lane they would wait for
the weights queued before them. A batch has one place for all of it, as it asks again only when it has used the answer.

KV of prompts goes to the host part by part, while the next part is computed; the host attends it later. A buffer has two
places, which the parts of a batch take in turn. When a part begins, the one before it goes home. The copy is in the stream of
the lane that stores, and so beside the computation, which waits for it only where it wants the place again. The last part is
left for the STORE_KV of the visit: it goes home while the next visit is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import Arena, asked_arena
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Block
from h2o_flexgen.engine.executor import MovedBefore, MovedInParts
from h2o_flexgen.kv.cache import AttentionInput
from h2o_flexgen.kv.layer_cache import LayerCache, Steps
from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.models.new_tokens import NewTokens, Rotation
from h2o_flexgen.schedule.ops import STORE
from h2o_flexgen.schedule.schedule import Schedule

HOST_MEMORY = torch.device("cpu")


class _Question(NamedTuple):
    now: Steps
    asked: AttentionInput  # in the memory of the host
    rotation: Rotation | None


class AskedStore:
    def __init__(self, spec: ModelSpec, judged: bool, block: Block, schedule: Schedule, memories: Memories) -> None:
        """`judged`: a policy uses the worth of tokens."""
        self._spec = spec
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._places: dict[int, tuple[Arena, Tensor]] = {}  # of each batch
        self._questions: dict[int, _Question] = {}
        self._widths: dict[int, int] = {}  # of the answer of each batch
        self._steps: dict[int, tuple[Steps, Steps]] = {}  # of each batch, as the device has it and as the host needs it
        asking = {batch for layer, batch in schedule.traffic.kv if schedule.traffic.is_beside(layer, batch)}
        with ExitStack() as held:
            for batch in asking:
                arena = asked_arena(spec, block.batches[batch].size, bool(block.prefix_room), judged)
                region = memories.host.alloc(arena.nbytes)
                held.callback(memories.host.free, region)
                self._places[batch] = arena, region
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()
        for kept in (self._places, self._questions, self._steps):
            kept.clear()

    # -- before and after it, on the device that computes ----------------------------------------------------------------

    def ask(self, batch: int, cache: LayerCache, now: Steps, tokens: NewTokens) -> Tensor:
        """An `attend` that only asks; it returns zeros, which the answer replaces."""
        asked = cache.asked(now, tokens)
        sent_q, sent_k = (self._sent(batch, place, tensor) for place, tensor in enumerate((asked.q, asked.k)))
        sent_v = None if asked.v is None else self._sent(batch, 2, asked.v)
        places = count(4)
        more = asked.more and asked.more.each(lambda x: self._sent(batch, next(places), x))
        worth = None if asked.worth is None else self._sent(batch, -1, asked.worth)
        self._questions[batch] = _Question(now, AttentionInput(sent_q, sent_k, sent_v, more, worth), tokens.rotation)
        self._widths[batch] = tokens.q.shape[2] * tokens.q.shape[3]
        return tokens.q.new_zeros(len(tokens.q), 1, self._widths[batch])

    def fill_in(self, batch: int, hidden: Tensor) -> None:
        """Writes the answer into its place in the hidden states (rows, 1, width) that a COMPUTE has handed on: it is last."""
        out = hidden[..., -self._widths[batch] :]
        out.copy_(self._outcome(batch, out.shape), non_blocking=True)

    def _sent(self, batch: int, place: int, tensor: Tensor) -> Tensor:
        target = self._view(batch, place, tensor.shape, tensor.dtype)
        return target.copy_(tensor.contiguous(), non_blocking=True)

    # -- between them, on the host ---------------------------------------------------------------------------------------

    def attend(self, batch: int, cache: LayerCache) -> int:
        """Answers what a batch has asked, if anything, with the host's cache; returns the bytes that were exchanged for it."""
        if (question := self._questions.pop(batch, None)) is None:
            return 0
        made = cache.answer(self._on_host(batch, question.now), question.asked, question.rotation)
        outcome = self._outcome(batch, made.shape).copy_(made)
        q, k, v, more, worth = question.asked
        return sum(tensor.nbytes for tensor in (q, k, v, *(more or ()), worth, outcome) if tensor is not None)

    def _on_host(self, batch: int, now: Steps) -> Steps:
        known = self._steps.get(batch)
        if known is None or known[0] is not now:
            known = self._steps[batch] = now, [level.on(HOST_MEMORY) for level in now]
        return known[1]

    # -- what is exchanged -----------------------------------------------------------------------------------------------

    def _outcome(self, batch: int, shape: torch.Size) -> Tensor:
        return self._view(batch, 3, shape, self._dtype)

    def _view(self, batch: int, place: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        arena, region = self._places[batch]
        start = arena.starts[place]
        return region[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class PartOfPrompts(NamedTuple):
    number: int  # among those of its batch
    rows: slice


class PartsOnTheWay:
    """Those of one visit, of one level of KV heads."""

    def __init__(self, device: Device, places: int, send: Callable[[PartOfPrompts], int] | None) -> None:
        """`send`: copies a part to the host, and returns the bytes; none where its KV is not needed after the visit."""
        self._device = device
        self._send = send
        self._last: PartOfPrompts | None = None
        self._home: list[Marker | None] = [None] * places  # where the part that had the place before is at home
        self._sent: list[MovedBefore] = []
        self._moved = 0  # bytes of parts that were at home when their copy returned

    def begin(self, rows: slice) -> PartOfPrompts:
        """Finds a place for the next part, and lets the one before it go."""
        number = 0
        if self._last is not None:
            number = self._last.number + 1
            self._go(self._last)
        self._last = PartOfPrompts(number, rows)
        self._device.wait(self._home[number % len(self._home)])
        return self._last

    def _go(self, part: PartOfPrompts) -> None:
        if self._send is None:
            return
        computed = self._device.mark()
        with self._device.stream(STORE):
            self._device.wait(computed)
            begun = self._device.mark(timed=True)
            moved = self._send(part)
            self._home[part.number % len(self._home)] = ended = self._device.mark(timed=True)
        if begun is None or ended is None:
            self._moved += moved
        else:
            self._sent.append(MovedBefore(begun, ended, moved))

    def finish(self) -> MovedInParts:
        """Sends the last part, in the lane that stores."""
        assert self._last is not None and self._send is not None, "a visit with prompts has a part"
        return MovedInParts(self._moved + self._send(self._last), self._sent)
