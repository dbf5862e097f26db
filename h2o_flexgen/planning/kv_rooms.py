"""KVRooms and StateRooms: the buffers through which the KV of one level passes, and states of rows, in bytes. The stores have
them allocated, and the footprint counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h2o_flexgen.core.buffer_layout import KVLayout, region_bytes
from h2o_flexgen.core.site import DISK
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.placement import Place


@dataclass(frozen=True)
class KVRooms:
    """Bytes of each buffer of a ring; none where nothing comes through it."""

    on_host: int  # on the way from the disk and back
    on_device: int
    noted: int  # on the device, of what a policy notes of the slots there
    staged: int  # on the host, for single slots that come from a device; there is one of it

    @classmethod
    def of(cls, planned: BlockPlan, layouts: Mapping[Place, KVLayout], score_bytes: int) -> KVRooms:
        """`layouts`: of the level in each layer and batch that it has heads in; `score_bytes`: of what is noted of a slot."""
        traffic = planned.schedule.traffic
        read = [layout for place, layout in layouts.items() if traffic.kv[place] == DISK]
        on_host = max((region_bytes(layout.image_bytes) for layout in read), default=0)
        moved = {place: layout for place, layout in layouts.items() if traffic.moves_kv(*place)}
        if not (moved and traffic.accelerator):
            return cls(on_host, 0, 0, 0)
        if traffic.attends_on_host:
            places = [planned.prompt_places(place, layout) for place, layout in moved.items()]
            noted = max(each.notes_bytes(score_bytes) for each in places)
            return cls(on_host, max(each.nbytes for each in places), noted, 0)
        on_device = max(region_bytes(layout.image_bytes) for layout in moved.values())
        return cls(on_host, on_device, 0, max(region_bytes(layout.staged_bytes) for layout in moved.values()))


@dataclass(frozen=True)
class StateRooms:
    """Bytes of each buffer of a ring; none where nothing comes through it."""

    on_host: int  # on the way from the disk and back
    on_device: int

    @classmethod
    def of(cls, planned: BlockPlan) -> StateRooms:
        traffic = planned.schedule.traffic
        moved = {place: layout for place, layout in planned.states.items() if traffic.moves_state(*place)}
        read = [region_bytes(layout.nbytes) for place, layout in moved.items() if traffic.state_on_disk(*place)]
        loaded = [region_bytes(layout.nbytes) for layout in moved.values()] if traffic.accelerator else []
        return cls(max(read, default=0), max(loaded, default=0))
