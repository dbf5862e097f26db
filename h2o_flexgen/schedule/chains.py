"""Chains: what a task waits for.

Data of one kind goes through a chain of tasks in every visit: the transfers that fetch it, the COMPUTE, and those that bring it
home. A task needs its source: the one before it in the chain, or the one that has brought the data home for it. The first of a
chain to work in a buffer also needs those that worked in it last for its former user.

KV that the host attends is fetched for its ATTEND, which comes after the COMPUTE that asks and before what is stored. The
COMPUTE itself waits for none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import NamedTuple

from h2o_flexgen.schedule.ops import MOVED, Data, Op

HOME_AGO = {Data.KV: (1, 0), Data.HIDDEN: (0, 1)}  # steps and layers since the visit that brought data home


Rings = tuple[tuple[str, ...], tuple[str, ...]]  # those that data passes through, and those that it is computed with in


class ChainLink(NamedTuple):
    """A task of a chain."""

    op: Op
    data: Data
    source: Op | None
    ago: tuple[int, int]  # steps and layers between the visit of the source and this one
    takes: list[str]  # rings in which it is the first to work, in one buffer of each
    leaves: list[str]  # rings in which it is the last


class Chains(NamedTuple):
    """The links of a visit, in the order in which they are issued."""

    fetches: Mapping[Data, list[ChainLink]]
    computes: list[ChainLink]
    attends: list[ChainLink]
    stores: list[ChainLink]


@cache
def chains(transfers: tuple[Op, ...], rings: tuple[Rings, ...], begins_pass: bool, stored_before: bool) -> Chains:
    """`rings` are those of weights, KV and hidden states; `stored_before`: the step before has stored the KV of prompts."""
    links = {data: list(_chain(data, transfers, own, begins_pass, stored_before)) for data, own in zip(MOVED, rings)}
    fetches = {data: [link for link in own if link.op.fetches] for data, own in links.items()}
    computes = [link for own in links.values() for link in own if link.op is Op.COMPUTE]
    # hidden states before KV: they are fetched again for the next layer
    attends = [link for link in links[Data.KV] if link.op is Op.ATTEND]
    return Chains(fetches, computes, attends, [link for data in reversed(MOVED) for link in links[data] if link.op.stores])


def _chain(data: Data, transfers: tuple[Op, ...], rings: Rings, begins_pass: bool, stored_before: bool) -> Iterator[ChainLink]:
    moved, (passed, computed_in) = [op for op in transfers if op.data is data], rings
    fetches = [op for op in moved if op.fetches]
    ops = [*fetches, Op.COMPUTE, *(op for op in moved if op is Op.ATTEND), *(op for op in moved if op.stores)]
    used = [list(computed_in) if op is Op.COMPUTE else op.works_in(passed) for op in ops]
    held = data is Data.WEIGHTS and not begins_pass  # the first visit of a pass has taken the buffer for all others
    for at, op in enumerate(ops):
        source, ago = (ops[at - 1], (0, 0)) if at else (op.reverse, HOME_AGO.get(data, (0, 0)))
        if Op.ATTEND in ops and op is Op.COMPUTE:
            source = None
        elif op is Op.ATTEND:
            source, ago = _source_of_attending(fetches, stored_before)
        takes = [ring for ring in used[at] if not held and ring not in chain(*used[:at])]
        leaves = [ring for ring in used[at] if ring not in chain(*used[at + 1 :])]
        yield ChainLink(op, data, source, ago, takes, leaves)


def _source_of_attending(fetches: list[Op], stored_before: bool) -> tuple[Op | None, tuple[int, int]]:
    """What has brought the KV to where it is attended. The COMPUTE that asks is needed as well."""
    if fetches:
        return fetches[-1], (0, 0)
    return (Op.STORE_KV, HOME_AGO[Data.KV]) if stored_before else (None, (0, 0))
