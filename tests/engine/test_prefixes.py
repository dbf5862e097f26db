"""The store of shared prefixes: which are kept, and where, in a region that is never larger than was said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import JUDGED, Plan
from tests.planning.worlds import tiny_spec

JUDGED_H2O = {"prefix_policy": JUDGED, "kv_policy": "h2o", "heavy": 1}
LAYERS = tiny_spec().kv_layers


@contextmanager
def opened(folder: Path, lengths: list[int], size: int, plan: Plan) -> Iterator[PrefixStore]:
    """A store for a block of so many seats, in which each prefix is one row's."""
    needs = [SeatNeed(length + 1, 1) for length in lengths]
    shared = [SharedPrefix(group, length) for group, length in enumerate(lengths)]
    ((block, _),) = Workload.running(needs, shared).alike_blocks(size, 1)
    memories = Memories(Device(), folder)
    store = PrefixStore(BlockPlan.of(tiny_spec(), plan, block, Site()), memories, {})
    try:
        yield store
    finally:
        store.close()
        assert memories.host.spare_bytes == memories.host.meter.used_bytes
        memories.close()


def write(store: PrefixStore, prefix: SharedPrefix) -> None:
    for layer in LAYERS:
        (cache,) = store.caches(layer, [prefix.group])[prefix.group]._caches
        cache.image.fill_(prefix.group * 100 + layer)
        if cache._scores is not None:
            cache._scores.positions.fill_(prefix.group * 100 + layer)


def assert_is_there(store: PrefixStore, prefix: SharedPrefix) -> None:
    for layer in LAYERS:
        (cache,) = store.caches(layer, [prefix.group])[prefix.group]._caches
        assert cache.image.shape[3] == prefix.tokens and (cache.image == prefix.group * 100 + layer).all()
        assert cache._scores is None or (cache._scores.positions == prefix.group * 100 + layer).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("plan", [Plan(), Plan.create(**JUDGED_H2O)], ids=["pinned", "judged"])
def test_what_is_in_use_is_never_lost_whatever_comes_and_goes(seed: int, plan: Plan, tmp_path: Path) -> None:
    random = Random(seed)
    lengths = [random.randint(1, 70) for _ in range(30)]
    with opened(tmp_path, lengths, 4, plan) as store, torch.inference_mode():
        seated: list[SharedPrefix] = []
        for _ in range(200):
            prefix = SharedPrefix(group := random.randrange(30), lengths[group])
            while seated and sum(one.room for one in {*seated, prefix}) > store._room:
                store.leave(seated.pop(random.randrange(len(seated))).group)
            if store.use(prefix, range(prefix.tokens)):
                write(store, prefix)
            seated.append(prefix)
            for one in seated:
                assert_is_there(store, one)


def test_a_prefix_is_kept_for_the_next_row_while_there_is_room(tmp_path: Path) -> None:
    first, second, third = (SharedPrefix(group, 16) for group in range(3))
    with opened(tmp_path, [16, 16, 16], 2, Plan()) as store, torch.inference_mode():
        assert store._room == 32 and store.use(first, range(16)) and store.use(second, range(16))
        store.leave(0)
        store.leave(1)
        assert not store.use(first, range(16)), "nothing else wanted its place"
        assert store.use(third, range(16)), "it takes the place of the second, which nothing uses"
        store.leave(2)
        assert store.use(second, range(16)), "it is computed again"
        with pytest.raises(AssertionError, match="are in use"):
            store.use(third, range(16))
