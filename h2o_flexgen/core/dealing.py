"""Requests dealt to several processes, so that all are busy for about the same time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from h2o_flexgen.core.prefix_groups import NO_GROUP
from h2o_flexgen.core.workload import Workload

CUTS = 4  # portions of a part's work into which those that share a prefix are cut, so that no part gets much more than others


def dealt(work: Sequence[int], parts: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """The places of requests in each part, in order. The largest go first, each to the part that has least. Those of a group
    share a prefix and stay together, as far as that leaves parts equal; `groups` has the group of each, NO_GROUP for none."""
    portions = _portions(work, [NO_GROUP] * len(work) if groups is None else groups, sum(work) / (CUTS * parts))
    dealt_to: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for portion in sorted(portions, key=lambda places: (-sum(work[place] for place in places), places[0])):
        load, part = heapq.heappop(loads)
        dealt_to[part] += portion
        heapq.heappush(loads, (load + sum(work[place] for place in portion), part))
    return [sorted(places) for places in dealt_to]


def _portions(work: Sequence[int], groups: Sequence[int], most: float) -> list[list[int]]:
    """Requests that stay together."""
    of_group: dict[int, list[list[int]]] = defaultdict(list)
    loads: dict[int, int] = {}
    for place, group in enumerate(groups):
        if group == NO_GROUP or not of_group[group] or loads[group] + work[place] > most:
            of_group[group].append([])
            loads[group] = 0
        of_group[group][-1].append(place)
        loads[group] += work[place]
    return [portion for portions in of_group.values() for portion in portions]


def longest_part(workload: Workload, parts: int) -> Workload:
    """A workload that is at least as long as each part of it, row by row: a plan for it has room for any of them."""
    if parts == 1:
        return workload
    lengths = workload.prompt_lens
    of_parts = [sorted((lengths[row] for row in rows), reverse=True) for rows in dealt(lengths, parts)]
    return Workload(tuple(max(each) for each in zip_longest(*of_parts, fillvalue=0)), workload.gen_len)
