"""Wanted: the experts that the rows of a pass need, known as soon as the router of their block has decided for all rows.

Slices that follow soon are fetched before that, so all their experts are fetched. Later slices wait for a buffer until then,
and only their needed experts are fetched: no transfer waits for a router. Experts that were not fetched are not read, since a
slice computes only with the experts that its rows were given to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec, rows_asking
from h2o_flexgen.schedule.ops import Visit
from h2o_flexgen.schedule.schedule import Schedule

Pass = tuple[int, int, int]  # step, block, and the batch that the weights come with

ALL = None  # so many rows have chosen that hardly any expert is left out
NOTHING: frozenset[str] = frozenset()


class Wanted:
    def __init__(self, spec: ModelSpec, schedule: Schedule) -> None:
        self._layers = spec.layers
        self._weight_batch = schedule.weight_batch
        self._batches = Counter(map(schedule.weight_batch, range(schedule.traffic.batches)))  # that share a pass over weights
        self._routers = _routers(spec, schedule)
        self._chosen: dict[Pass, set[int] | None] = {}
        self._over: Counter[Pass] = Counter()
        self._known: dict[Pass, frozenset[int]] = {}

    # -- for the thread that computes --------------------------------------------------------------------------------------

    def waits_for(self, layer: int) -> bool:
        """Whether what is fetched depends on what the router of this layer chooses."""
        return layer in self._routers

    def chose(self, visit: Visit, experts: Tensor) -> None:
        """Records the experts (..., chosen) that the router of a visit has chosen for some of its rows."""
        if not self.waits_for(visit.layer):
            return
        place = self._pass(visit.step, visit.layer, visit.batch)
        before = self._chosen.setdefault(place, set())
        if before is ALL or experts[..., 0].numel() >= self._routers[visit.layer]:
            self._chosen[place] = ALL
        else:
            before.update(experts.unique().tolist())

    def computed(self, visit: Visit) -> None:
        """Records that a visit is over, or had nothing to compute."""
        if not self.waits_for(visit.layer):
            return
        place = self._pass(visit.step, visit.layer, visit.batch)
        self._over[place] += 1
        if self._over[place] == self._batches[place[-1]]:
            if chosen := self._chosen.pop(place, ALL):
                self._known = {place: frozenset(chosen)}  # nothing of the block before is fetched any more
            del self._over[place]

    # -- for the lanes that fetch ------------------------------------------------------------------------------------------

    def left_out(self, visit: Visit) -> frozenset[str]:
        """The tensors of a layer, by their names in the model, that are known by now not to be needed."""
        experts = self._known.get(self._pass(*visit))
        if experts is None:
            return NOTHING
        return frozenset(name for name, number in self._layers[visit.layer].expert_of.items() if number not in experts)

    def _pass(self, step: int, layer: int, batch: int) -> Pass:
        block = self._layers[layer].block
        return step, -1 if block is None else block, self._weight_batch(batch)


def _routers(spec: ModelSpec, schedule: Schedule) -> Mapping[int, int]:
    """The layers that choose among experts that are fetched, and how many tokens need nearly all of them."""
    with_experts = [number for number, layer in enumerate(spec.layers) if layer.expert_of]
    found: dict[int, int] = {}
    first: dict[int | None, int] = {}
    for number in with_experts:
        layer = spec.layers[number]
        router = first.setdefault(layer.block, number)
        if router != number and schedule.traffic.moves_weights(number):
            found[router] = rows_asking(min(share for _, share in layer.products))
    return found
