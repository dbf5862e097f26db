"""Buffers that are spoilt behind their last reader, in the stream of that reader: what is early reads what was never written.

Weights and hidden states are filled with NaN, also where states wait for another device. KV is filled with a wrong number:
slots that hold nothing are masked, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from h2o_flexgen.core.site import DISK
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.executor import Action, Past
from h2o_flexgen.schedule.ops import Data, Op, Task
from h2o_flexgen.schedule.schedule import Schedule
from tests.clocked.tensor import ClockedTensor

NAN, WRONG = 0xFF, 0x4B  # bytes: of a NaN in any type, and of 1.3e7 in 32 bits


@contextmanager
def freed_is_spoilt() -> Iterator[None]:
    actions = Engine._actions

    def spoiling(engine: Engine, schedule: Schedule, state: Any) -> dict[Op, Action]:
        return _Spoiler(engine, schedule, state).behind(actions(engine, schedule, state))

    with patch.object(Engine, "_actions", spoiling):
        yield


class _Spoiler:
    def __init__(self, engine: Engine, schedule: Schedule, state: Any) -> None:
        self._engine, self._schedule, self._state = engine, schedule, state
        self._sources: dict[tuple[Op, int], Tensor] = {}  # on the device, of what is copied to the host
        self._arrived: set[tuple[int, int]] = set()  # (layer, batch): the states that this layer has passed on are in use

    def behind(self, actions: dict[Op, Action]) -> dict[Op, Action]:
        spoils = {
            Op.LOAD_W: self._loaded_weights,
            Op.COMPUTE: self._computed,
            Op.LOAD_H: self._loaded_hidden,
            Op.STORE_H: self._stored_hidden,
            Op.PASS_H: self._passed_hidden,
            Op.STORE_KV: self._stored_kv,
            Op.WRITE_KV: self._written_kv,
        }
        return {op: _then(action, spoils[op]) if op in spoils else action for op, action in actions.items()}

    # -- weights ---------------------------------------------------------------------------------------------------------

    def _loaded_weights(self, task: Task) -> None:
        weights: Any = self._engine._weights_for(task.visit)
        place = weights._place(task)
        if cuts := weights._slice(place, DISK):
            pack = weights._read_pack(place)
            for cut in cuts:
                self._spoil_host(task, pack.range(cut))

    def _computed(self, task: Task) -> None:
        visit, traffic = task.visit, self._schedule.traffic
        own = self._schedule.weight_batch(task.batch)
        users = [batch for batch in range(traffic.batches) if self._schedule.weight_batch(batch) == own]
        if traffic.moves_weights(task.layer) and task.batch == users[-1]:
            weights: Any = self._engine._weights_for(visit)
            weights._device_ring[self._schedule.weight_buffer(visit)].fill_(NAN)
        if Op.STORE_KV not in self._schedule.transfers(visit):
            self._stored_kv(task)
        self._used_hidden(task)

    # -- KV --------------------------------------------------------------------------------------------------------------

    def _stored_kv(self, task: Task) -> None:
        self._spoil_kv(task, "_device_ring")

    def _written_kv(self, task: Task) -> None:
        self._spoil_kv(task, "_host_ring")

    def _spoil_kv(self, task: Task, ring: str) -> None:
        place, traffic = (task.layer, task.batch), self._schedule.traffic
        if place in traffic.kv and traffic.moves_kv(*place) and not traffic.is_beside(*place):
            for store in self._engine._kv_for(task.visit, self._state)._of_layer[task.layer]:
                if buffers := getattr(store, ring):
                    buffers[self._schedule.buffer_of(Data.KV, task.visit)].fill_(WRONG)

    # -- hidden states ---------------------------------------------------------------------------------------------------

    def _stored_hidden(self, task: Task) -> None:
        for rings in (self._state.hidden._device_rings, self._state.hidden._host_rings):
            if ring := rings[self._schedule.traffic.lanes.device(task.layer)]:
                ring[self._schedule.buffer_of(Data.HIDDEN, task.visit)].fill_(NAN)

    def _passed_hidden(self, task: Task) -> None:
        place = task.layer, task.batch
        self._state.hidden._left[place].fill_(NAN)
        self._arrived.add(place)

    def _used_hidden(self, task: Task) -> None:
        """States that were passed on are in use until a layer leaves its own elsewhere, or makes logits of them."""
        hidden, is_head = self._state.hidden, self._engine._spec.layers[task.layer].makes_logits
        for place in [place for place in self._arrived if place[1] == task.batch and place[0] < task.layer]:
            found = hidden._found[place]
            if is_head or _memory(hidden.take(task.batch)) != _memory(found):
                self._arrived.remove(place)
                found.fill_(NAN)

    def _loaded_hidden(self, task: Task) -> None:
        if ring := self._state.hidden._host_rings[self._schedule.traffic.lanes.device(task.layer)]:
            self._spoil_host(task, ring[self._schedule.buffer_of(Data.HIDDEN, task.visit)])

    def _spoil_host(self, task: Task, region: Tensor) -> None:
        """In the stream that has read it. Each device has streams of its own, which do not wait for another one's."""
        own = task.op, self._schedule.traffic.lanes.device(task.layer)
        source = self._sources.get(own)
        if source is None or len(source) < len(region):
            device = self._engine._memories.device.torch_device
            source = self._sources[own] = torch.full((len(region),), NAN, dtype=torch.uint8, device=device)
        region.copy_(source[: len(region)], non_blocking=True)


def _memory(tensor: Tensor) -> int:
    """The address of what a tensor is a view of, on a device that is written in Python, too."""
    return (tensor.inner if isinstance(tensor, ClockedTensor) else tensor).untyped_storage().data_ptr()


def _then(action: Action, spoil: Callable[[Task], None]) -> Action:
    def both(task: Task) -> int | Past:
        moved = action(task)
        if not isinstance(moved, Past):
            spoil(task)
        return moved

    return both
