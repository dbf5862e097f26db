"""Traffic: what a plan moves in one block, and so the transfers of each visit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from h2o_flexgen.core.site import DEVICE, DISK, HOST
from h2o_flexgen.schedule.ops import Data, Lanes, Op, Visit, ring


@dataclass(frozen=True)
class Traffic:
    """Everything that a schedule must know of a plan."""

    steps: int
    layers: int
    batches: int
    buffers: int = 2
    accelerator: bool = False  # a device with its own memory
    weights_on_disk: frozenset[int] = frozenset()  # layers with some of their weights there
    weights_on_host: frozenset[int] = frozenset()
    prompt_weights: tuple[frozenset[int], frozenset[int]] | None = (
        None  # both, of the first step, where others are in its layers
    )
    kv: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (layer, batch) -> tier, for layers that have KV
    choosing: frozenset[int] = frozenset()  # layers in which decode steps attend slots that they choose
    state: Mapping[tuple[int, int], str] = field(default_factory=dict)  # alike, for layers in which rows have a state
    hidden: tuple[str, ...] = ()  # tier of each batch's activations
    kv_before: bool = False  # KV of an earlier block exists before the first step, and states
    kv_after: bool = False  # they are kept after the last step
    attends_on_host: bool = False  # in decode, KV outside the accelerator is attended by the host instead of being fetched
    rows_join: bool = False  # prompts may come in any step, beside the decode steps of others
    device_of: tuple[int, ...] = ()  # of every layer, where several devices compute

    def __post_init__(self) -> None:
        if min(self.steps, self.layers, self.batches, self.buffers) < 1:
            raise ValueError("steps, layers, batches and buffers must be 1 or more")

    @property
    def visits(self) -> int:
        return self.steps * self.layers * self.batches

    @cached_property
    def lanes(self) -> Lanes:
        return Lanes(self.device_of)

    # -- which transfers there are -----------------------------------------------------------------------------------

    def transfers(self, visit: Visit, brings_weights: bool) -> tuple[Op, ...]:
        """The transfers of a visit, kind by kind, from home and back. They are enumerated nowhere else."""
        step, layer, batch = visit
        fetches_kv, stores_kv, on_disk = self.fetches_kv(visit), self.stores_kv(visit), self.kv_on_disk(layer, batch)
        is_moved = {
            Op.READ_W: brings_weights and self.reads_weights(step, layer),
            Op.LOAD_W: brings_weights and self.loads_weights(step, layer),
            Op.CHOOSE: self.chooses(visit),
            Op.READ_KV: fetches_kv and on_disk,
            Op.LOAD_KV: fetches_kv and self.loads_kv(visit),
            Op.READ_S: self.fetches_state(visit) and self.state_on_disk(layer, batch),
            Op.LOAD_S: self.fetches_state(visit) and self.accelerator,
            Op.ATTEND: self.attends_beside(visit),
            Op.STORE_KV: stores_kv and self.works_on_device(visit),
            Op.WRITE_KV: stores_kv and on_disk,
            Op.STORE_S: self.stores_state(visit) and self.accelerator,
            Op.WRITE_S: self.stores_state(visit) and self.state_on_disk(layer, batch),
            Op.LOAD_H: self.moves_hidden(batch) and layer > 0,
            Op.PASS_H: self.passes_on(layer, batch),
            Op.STORE_H: self.moves_hidden(batch) and layer < self.layers - 1,
        }
        return tuple(op for op, moved in is_moved.items() if moved)

    @property
    def phases(self) -> tuple[range, ...]:
        """Ranges of steps in which the visits have the same transfers: the first step, those between, and the last."""
        cuts = sorted({0, 1, max(1, self.steps - 1), self.steps})
        return tuple(map(range, cuts, cuts[1:]))

    # -- what is moved -----------------------------------------------------------------------------------------------

    def is_of_prompts(self, step: int) -> bool:
        """True if no row of a step is decoded. All pass the layers then as prompts do."""
        return step == 0 and not self.rows_join

    def reads_weights(self, step: int, layer: int) -> bool:
        return layer in self._weights_of(step)[0]

    def loads_weights(self, step: int, layer: int) -> bool:
        return self.accelerator and any(layer in layers for layers in self._weights_of(step))

    def moves_of_weights(self, step: int, layer: int) -> tuple[bool, bool]:
        """Both of these."""
        return self.reads_weights(step, layer), self.loads_weights(step, layer)

    def _weights_of(self, step: int) -> tuple[frozenset[int], frozenset[int]]:
        """The layers that have weights on disk, and those that have some on the host."""
        if self.prompt_weights is not None and self.is_of_prompts(step):
            return self.prompt_weights
        return self.weights_on_disk, self.weights_on_host

    def moves_weights(self, layer: int) -> bool:
        """True if weights are moved for a layer in any step."""
        return layer in self._moving

    @property
    def moves_any_weights(self) -> bool:
        """True if weights are moved for any layer in any step."""
        return bool(self._moving)

    @cached_property
    def _moving(self) -> frozenset[int]:
        """The layers for which weights are moved in any step: each visit asks."""
        places = map(self._weights_of, (0, 1))
        return frozenset().union(*(on_disk | (on_host if self.accelerator else frozenset()) for on_disk, on_host in places))

    def is_beside(self, layer: int, batch: int) -> bool:
        """True if the host attends this KV in decode. The device attends prompts, and what is kept of them goes to the host."""
        return self.accelerator and self.attends_on_host and self.kv.get((layer, batch), DEVICE) != DEVICE

    def attends_beside(self, visit: Visit) -> bool:
        """True if this visit has a decode step that the host attends."""
        return visit.step > 0 and self.is_beside(visit.layer, visit.batch)

    def works_on_device(self, visit: Visit) -> bool:
        """True if a COMPUTE works with KV that has its home elsewhere: with all of it, or only with that of prompts."""
        if not self.accelerator or not self.moves_kv(visit.layer, visit.batch):
            return False
        return not self.is_beside(visit.layer, visit.batch) or self.reads_prompts(visit.step)

    def reads_prompts(self, step: int) -> bool:
        return step == 0 or self.rows_join

    @property
    def passes_parts(self) -> bool:
        """True if of prompts that the host attends later a device holds some parts alone: each goes home while the next one is
        computed. Where rows join others, the host must first make room for them; where texts go on, all that they hold is
        needed at once."""
        return self.accelerator and self.attends_on_host and not (self.rows_join or self.kv_before or self.kv_after)

    def passes_parts_of(self, visit: Visit) -> bool:
        return self.passes_parts and visit.step == 0 and self.is_beside(visit.layer, visit.batch)

    def loads_kv(self, visit: Visit) -> bool:
        """True if the KV that is held crosses the link before a COMPUTE."""
        return self.works_on_device(visit) and (visit.step == 0 or not self.is_beside(visit.layer, visit.batch))

    def moves_kv(self, layer: int, batch: int) -> bool:
        return self._moves(self.kv.get((layer, batch), DEVICE))

    def _moves(self, tier: str) -> bool:
        return tier == DISK or (self.accelerator and tier == HOST)

    def fetches_kv(self, visit: Visit) -> bool:
        """True if KV must be brought to the place of computation."""
        return self.moves_kv(visit.layer, visit.batch) and (visit.step > 0 or self.kv_before)

    def chooses(self, visit: Visit) -> bool:
        """True if slots that the queries of this visit choose are brought to where it is computed."""
        return visit.step > 0 and self.brings_chosen(visit.layer, visit.batch)

    def brings_chosen(self, layer: int, batch: int) -> bool:
        """True if decode steps choose what is brought of KV. Where it rests or the host attends it, it is attended in place."""
        return layer in self.choosing and self.moves_kv(layer, batch) and not self.is_beside(layer, batch)

    def in_pages(self, layer: int, batch: int) -> bool:
        """True if KV lies row by row on disk, in page groups, as steps ask for single tokens."""
        return layer in self.choosing and self.kv_on_disk(layer, batch)

    @cached_property
    def reads_chosen(self) -> bool:
        """True if any visit chooses what is brought of its KV."""
        return any(self.brings_chosen(*place) for place in self.kv)

    def stores_kv(self, visit: Visit) -> bool:
        """True if KV must be brought home. That of the last step is not read, unless it lives on."""
        return self.moves_kv(visit.layer, visit.batch) and (visit.step < self.steps - 1 or self.kv_after)

    def kv_on_disk(self, layer: int, batch: int) -> bool:
        return self.kv.get((layer, batch)) == DISK

    def takes_several(self, batch: int) -> bool:
        """Whether a step may take several tokens of a row: keys and values stay where they are. Otherwise it would store more
        than the newest of each row. States are of one size."""
        return not any(self.moves_kv(*place) for place in self.kv if place[1] == batch)

    def spares_passes(self, batch: int) -> bool:
        """Whether a step that takes several tokens of a row is a pass fewer that moves less: weights come for each pass."""
        return self.takes_several(batch) and self.moves_any_weights

    def moves_state(self, layer: int, batch: int) -> bool:
        return self._moves(self.state.get((layer, batch), DEVICE))

    def moved_places(self, data: Data) -> Iterator[tuple[int, int]]:
        """The layers and batches of which KV, or states, are moved."""
        homes = {Data.KV: self.kv, Data.STATE: self.state}
        return (place for place, tier in homes[data].items() if self._moves(tier))

    def fetches_state(self, visit: Visit) -> bool:
        """True if a state must be brought to the place of computation."""
        return self.moves_state(visit.layer, visit.batch) and (visit.step > 0 or self.kv_before)

    def stores_state(self, visit: Visit) -> bool:
        """True if a state must be brought home."""
        return self.moves_state(visit.layer, visit.batch) and (visit.step < self.steps - 1 or self.kv_after)

    def state_on_disk(self, layer: int, batch: int) -> bool:
        return self.state.get((layer, batch)) == DISK

    def moves_hidden(self, batch: int) -> bool:
        return bool(self.hidden) and self._moves(self.hidden[batch])

    def passes_on(self, layer: int, batch: int) -> bool:
        """True if hidden states go from the device of a layer to another one. Those that have a home elsewhere go by it."""
        is_last = layer == self.layers - 1
        return not is_last and self.lanes.device(layer) != self.lanes.device(layer + 1) and not self.moves_hidden(batch)

    @cached_property
    def is_still(self) -> bool:
        """True if nothing moves for any layer and batch."""
        places = ((layer, batch) for layer in range(self.layers) for batch in range(self.batches))
        return self.lanes.devices == 1 and all(self.rests(*place) for place in places)

    def rests(self, layer: int, batch: int) -> bool:
        """True if nothing moves for this layer and batch in any step."""
        of_rows = self.moves_kv(layer, batch) or self.moves_state(layer, batch) or self.moves_hidden(batch)
        return not (of_rows or self.moves_weights(layer))

    # -- where it passes ---------------------------------------------------------------------------------------------

    def rings(self, data: Data, visit: Visit) -> tuple[str, ...]:
        """The rings of buffers that data passes through, from its home to where it is computed with."""
        on_host = on_device = False
        step, layer, batch = visit
        if data is Data.WEIGHTS:
            on_host, on_device = self.reads_weights(step, layer), self.loads_weights(step, layer)
        elif data is Data.KV:
            on_host, on_device = self.kv_on_disk(layer, batch), self.works_on_device(visit)
        elif data is Data.STATE:
            on_host, on_device = self.state_on_disk(layer, batch), self.accelerator and self.moves_state(layer, batch)
        elif data is Data.HIDDEN:
            on_device = self.moves_hidden(batch)
        return (ring(data, HOST),) * on_host + (ring(data, DEVICE),) * on_device

    def computed_in(self, data: Data, visit: Visit) -> tuple[str, ...]:
        """Those of the rings that a COMPUTE works in: the last, but what the host attends is not there, and parts of prompts
        are on their way through all."""
        rings = self.rings(data, visit)
        if data is Data.KV and self.attends_beside(visit):
            return tuple(name for name in rings if name == ring(data, DEVICE))
        if data is Data.KV and self.passes_parts_of(visit) and self.stores_kv(visit):
            return rings
        return rings[-1:]

    def uses_disk(self, op: Op) -> bool:
        """True if tasks of this op may read or write the disk."""
        return DISK in self.hidden if op in (Op.LOAD_H, Op.STORE_H) else op.uses_disk
