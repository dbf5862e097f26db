"""The KV of prefixes that rows share, and the states at their ends: computed once and kept once, in the memory that computes
with them. A prefix is kept while a seated row needs it, and longer where there is room. One that was discarded is computed
again if more rows of its group come.

All prefixes lie in one region of exact size. What batches may hold at once fits in it; where gaps are in the way, the prefixes
after them move up. All heads keep the whole of a prefix, those of a level side by side. A row may share only the first tokens
of a prefix, and a longer prefix may begin with a copy of them. Where rows have states, it is shared as a whole: states are
known at its end alone. They lie behind its tokens, and the room that they take is counted in tokens.

Where there is a folder for them (`PrefixFiles`), a prefix that was computed is written there behind the work, and one that lies
there is read instead of computed. `_parts` says what a prefix consists of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from threading import Lock

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.prefix_groups import SharedPrefix, bytes_of
from h2o_flexgen.engine.stores.layer_judges import Judges, judges_by_level
from h2o_flexgen.engine.stores.prefix_files import Gone, PartInMemory, PrefixFiles, StoredPrefix
from h2o_flexgen.engine.stores.states_of_visits import States, states_over
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import Judge
from h2o_flexgen.kv.layer_cache import LayerCache, heads_by_layer
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.memory.disk import copy_here
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.sampling.completion import StepLogprobs

KV, STATES, HIDDEN = "kv", "states", "hidden"  # parts of a prefix


@dataclass
class Prefix:
    """A prefix that is kept."""

    shared: SharedPrefix
    ids: Sequence[int]  # as they are compared
    start: int  # its place in the room, in tokens
    users: int = 0  # rows that have a seat, and prefixes that are computed after a copy of it
    hidden: Tensor | None = None  # (tokens, width) of the last layer, where log-probabilities of prompts are asked for
    logprobs: list[StepLogprobs] = field(default_factory=list)  # of its tokens but the first
    likeliest: int = -1  # how many of the likeliest tokens were asked for beside each of these
    is_gone: bool = False  # its place may have other data

    @property
    def end(self) -> int:
        return self.start + self.shared.room

    @cached_property
    def text(self) -> bytes:
        return bytes_of(self.ids)


class PrefixStore:
    def __init__(
        self,
        planned: BlockPlan,
        memories: Memories,
        judges: Judges,
        files: PrefixFiles | None = None,
        notes_hidden: bool = False,
    ) -> None:
        """`files`: where prefixes outlive the process. `notes_hidden`: those that lie there are of use with their hidden states
        alone."""
        spec, device = planned.spec, memories.device
        self._spec = spec
        self._files, self._notes_hidden = files, notes_hidden
        self._longest = max((one.seats.prefixes.longest for one in planned.block.batches if one.seats is not None), default=0)
        self._moving = Lock()  # what lies in the region stays where it is while another thread reads it
        self._policies = [level.policy for level in planned.levels]
        self._noted = planned.plan.prefix_note_bytes
        self._cap = spec.attention_cap
        self._codings = [*map(Coding.of, planned.kv.specs)]  # of each level
        self._memories = memories
        self._kept: dict[int, Prefix] = {}  # by group, in the order of their last use
        self._numbers = count()
        self._room = planned.block.prefix_room
        of_one = PrefixLayout.of(spec, 1, self._noted)
        self._token_bytes, self._beside = of_one.nbytes, of_one.beside
        self._region = memories.compute.alloc(self._room * self._token_bytes) if self._room else None
        self._heads = heads_by_layer(planned.levels, device.torch_device, device.upload) if self._room else []
        self._judges = judges_by_level(judges, planned.levels, dict(zip(spec.kv_layers, self._heads)))

    def close(self) -> None:
        """Frees the region, when all that was computed is written, or could not be."""
        try:
            if self._files is not None:
                self._files.settle()
        finally:
            self._forget_all()
            if self._region is not None:
                self._memories.compute.free(self._region)
                self._region = None

    def abandon(self) -> None:
        """Frees the region as soon as possible: after an error."""
        self._forget_all()
        self.close()

    def _forget_all(self) -> None:
        with self._moving:
            while self._kept:
                self._discard(next(iter(self._kept)))

    def _discard(self, group: int) -> None:
        """Lets go of a prefix. It may still wait to be written: then it must not hold memory that is counted no more."""
        discarded = self._kept.pop(group)
        discarded.is_gone, discarded.hidden = True, None

    def __getitem__(self, group: int) -> Prefix:
        return self._kept[group]

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._kept.values())

    def serves(self, planned: BlockPlan) -> bool:
        """Whether another block of this engine can use the kept prefixes."""
        return planned.block.prefix_room == self._room

    # -- which prefixes are kept -----------------------------------------------------------------------------------------

    @property
    def may_cut(self) -> bool:
        """Whether the first tokens of a prefix can be shared without the others. They cannot where the later tokens changed the
        scores that a policy has of the first, nor where rows have states: these are kept behind the last token alone."""
        return not self._noted and not self._beside

    def new(self, tokens: int) -> SharedPrefix:
        """A prefix that is not kept yet, with the next free number, where prefixes have no numbers from before."""
        return SharedPrefix(next(self._numbers), tokens, self._beside)

    def room_beside(self, source: SharedPrefix | None) -> int:
        """Tokens of a prefix for which room can be made while prefixes in use stay, and the one that is to be copied."""
        stays = (kept for kept in self if kept.users or (source is not None and kept.shared.group == source.group))
        return self._room - self._beside - sum(kept.shared.room for kept in stays)

    def use(self, shared: SharedPrefix, ids: Sequence[int], source: SharedPrefix | None = None) -> bool:
        """Counts one more seated row as a user of its prefix; true if the prefix is to be computed now. A new prefix may begin
        with a copy of its `source`, which is in use until the caller calls `leave` for it."""
        assert shared.beside == self._beside, f"{shared.beside} tokens of room for states instead of {self._beside}"
        if source is not None:
            self._take_note(self._kept.pop(source.group))
        kept = self._kept.pop(shared.group, None)
        is_new = kept is None
        if kept is None:
            kept = Prefix(shared, ids, self._place_for(shared))
            is_new = source is not None or not self._read(kept, self._stored(kept.text))
        self._take_note(kept)
        return is_new

    def _take_note(self, used: Prefix) -> None:
        used.users += 1
        self._kept[used.shared.group] = used

    def leave(self, group: int) -> None:
        self._kept[group].users -= 1

    def _place_for(self, shared: SharedPrefix) -> int:
        with self._moving:
            return self._room_made_for(shared)

    def _room_made_for(self, shared: SharedPrefix) -> int:
        """Discards prefixes that no row uses, the longest unused first, until there is room."""
        while (held := sum(kept.shared.room for kept in self._kept.values())) + shared.room > self._room:
            unused = next((group for group, kept in self._kept.items() if not kept.users), None)
            assert unused is not None, f"{held} of {self._room} tokens of shared prefixes are in use"
            self._discard(unused)
        end = 0
        for kept in self._in_place():
            if end + shared.room <= kept.start:
                return end
            end = kept.end
        if end + shared.room > self._room:
            self._move_up()
            return held
        return end

    def _in_place(self) -> Sequence[Prefix]:
        """The kept prefixes, in the order of their places."""
        return sorted(self._kept.values(), key=lambda kept: kept.start)

    def _move_up(self) -> None:
        """Closes the gaps between kept prefixes."""
        assert self._region is not None
        end = 0
        for kept in self._in_place():
            by = (kept.start - end) * self._token_bytes
            start, behind = kept.start * self._token_bytes, kept.end * self._token_bytes
            for first in range(start, behind, by) if by else ():
                piece = self._region[first : min(first + by, behind)]
                self._region[first - by : first - by + len(piece)] = piece
            kept.start, end = end, end + kept.shared.room

    def places(self, groups: Collection[int]) -> tuple[int, ...]:
        """The places of these groups' prefixes. A prefix keeps its place unless others need room."""
        return tuple(self._kept[group].start for group in sorted(groups))

    # -- prefixes that outlive the process -------------------------------------------------------------------------------

    def computed(self, group: int) -> None:
        """Takes note that a prefix is computed, in all layers: it may be written to its folder, behind the work."""
        if self._files is not None:
            kept = self._kept[group]
            sizes = {name: part.nbytes for name, part in self._parts(kept).items()}
            read = {name: partial(self._read_out, kept, kept.start, name) for name in sizes}
            self._files.write_behind(kept.text, [PartInMemory(name, sizes[name], read[name]) for name in sizes])

    def stored_like(self, text: bytes, least: int) -> Iterator[StoredPrefix]:
        """The prefixes in the folder that begin with the same tokens as a text, so many at least, and that may have room. Those
        without a part that is needed are not among them: no room is made for them."""
        if self._files is not None:
            found = self._files.like(text, least)
            yield from (one for one in found if one.tokens <= self._longest and self._needed <= one.parts.keys())

    def take_in(self, stored: StoredPrefix) -> bool:
        """Keeps a prefix that lies in the folder, if there is room beside those in use. No row uses it yet."""
        shared = self.new(stored.tokens)
        if shared.room - shared.beside > self.room_beside(None):
            return False
        kept = Prefix(shared, stored.ids, self._place_for(shared))
        if not self._read(kept, stored):
            return False
        self._kept[shared.group] = kept
        return True

    def _stored(self, text: bytes) -> StoredPrefix | None:
        """The prefix in the folder of just these tokens, with all parts that are needed."""
        found = None if self._files is None else self._files.of(text)
        return found if found is not None and self._needed <= found.parts.keys() else None

    @property
    def _needed(self) -> Set[str]:
        """The parts without which a prefix in the folder is of no use."""
        beside = {STATES: bool(self._beside), HIDDEN: self._notes_hidden}
        return {KV, *(part for part, is_needed in beside.items() if is_needed)}

    def _parts(self, kept: Prefix) -> Mapping[str, Tensor]:
        """What a prefix consists of, as bytes where they lie."""
        layout, start = self._layout(kept), kept.start * self._token_bytes
        parts = {KV: self._part(start, layout.nbytes)}
        if layout.states:
            parts[STATES] = self._part(start + layout.state_start(0), layout.state_bytes)
        if kept.hidden is not None:
            parts[HIDDEN] = kept.hidden.flatten().view(torch.uint8)
        return parts

    def _read(self, kept: Prefix, stored: StoredPrefix | None) -> bool:
        """Fills a new prefix with what lies in the folder, if it is there."""
        if stored is None or self._files is None:
            return False
        device = self._memories.device
        if self._notes_hidden:
            dtype: torch.dtype = getattr(torch, self._spec.dtype)
            kept.hidden = torch.empty(kept.shared.tokens, self._spec.width, dtype=dtype, device=device.torch_device)
        scratch = self._memories.files.buffer if device.accelerator else None
        if self._files.read(stored, self._parts(kept), scratch):
            return True
        kept.hidden = None
        return False

    def _read_out(self, kept: Prefix, place: int, part: str, start: int, out: Tensor) -> None:
        """Copies bytes of a part, in the thread that writes. A prefix that was moved is not written: on an accelerator it might
        be on its way."""
        with self._moving:
            if kept.is_gone or kept.start != place:
                raise Gone
            source = self._parts(kept)[part][start : start + len(out)]
            if self._memories.device.accelerator:
                out.copy_(source)
            else:
                copy_here(source, out)

    # -- their data ------------------------------------------------------------------------------------------------------

    def _layout(self, kept: Prefix) -> PrefixLayout:
        return PrefixLayout.of(self._spec, kept.shared.tokens, self._noted)

    def states(self, layer: int, group: int) -> States:
        """The states at the end of a group's prefix in a layer, as those of one row."""
        kept, place = self._kept[group], self._spec.state_layers.index(layer)
        layout = self._layout(kept)
        own = layout.states[place]
        return states_over(self._part(kept.start * self._token_bytes + layout.state_start(place), own.nbytes), own)

    def caches(self, layer: int, groups: Collection[int]) -> Mapping[int, LayerCache]:
        """The caches of these groups' prefixes in a layer: many prefixes may be kept, and a batch needs few."""
        if not groups:
            return {}
        place = self._spec.kv_layers.index(layer)
        return {group: self._cache(self._kept[group], place) for group in groups}

    def _cache(self, kept: Prefix, place: int) -> LayerCache:
        heads, caches, before = self._heads[place], [], 0
        layout, start = self._layout(kept), kept.start * self._token_bytes
        image_at, notes_at, of_layer = start + layout.image_start(place), start + layout.notes_start(place), layout.heads[place]
        for level, own in heads:
            count = len(own) if len(heads) > 1 else of_layer
            share = slice(before, before + count)
            image = self._share(image_at, layout.image_bytes(place) // of_layer, share)
            noted = self._share(notes_at, layout.notes_bytes(place) // of_layer, share) if self._noted else None
            judge = self._judges[level].get(self._spec.kv_layers[place])
            caches.append(self._of_level(level, (1, count, layout.tokens), image, noted, judge))
            before += count
        return LayerCache(heads, caches)

    def _of_level(
        self, level: int, shape: tuple[int, int, int], image: Tensor, noted: Tensor | None, judge: Judge | None
    ) -> KVCache:
        policy, coding = self._policies[level], self._codings[level]
        values = image.view(coding.kept_dtype)
        scores = SlotScores.over(noted, policy, shape) if noted is not None and policy.score_bytes else None
        judge = judge if scores is not None else None
        return KVCache(values.view(coding.sets, *shape, coding.width), scores, coding, judge=judge, cap=self._cap)

    def _share(self, start: int, each: int, heads: slice) -> Tensor:
        """The share of some heads in a part in which each head has so many bytes."""
        return self._part(start + heads.start * each, (heads.stop - heads.start) * each)

    def _part(self, start: int, nbytes: int) -> Tensor:
        assert self._region is not None
        return self._region[start : start + nbytes]
