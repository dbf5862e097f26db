"""Sections: which layers each device of a pipeline computes. They are ranges, about equally heavy,
and begin at an attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec


def device_of_layers(spec: ModelSpec, devices: int) -> tuple[int, ...]:
    """The device of every layer; none if there is only one device. The heaviest range is as light as can be, where
    a layer weighs as many values as a token is multiplied with."""
    if devices == 1:
        return ()
    if devices > len(spec.kv_layers):
        raise ValueError(
            f"a pipeline of {devices} devices was asked for, and {spec.name} has {len(spec.kv_layers)} decoder layers; "
            "give no more devices than that"
        )
    starts = (0, *spec.kv_layers[1:], len(spec.layers))  # the embedding comes with the first, the head with the last
    weights = [sum(layer.matmul_values for layer in spec.layers[first:behind]) for first, behind in pairwise(starts)]
    sizes = _even_cuts(weights, devices)
    ranges = enumerate(pairwise(sizes))
    return tuple(device for device, (first, behind) in ranges for _ in range(starts[first], starts[behind]))


def layers_of(device_of: tuple[int, ...], device: int) -> tuple[int, ...]:
    return tuple(layer for layer, own in enumerate(device_of) if own == device)


def only_layers(spec: ModelSpec, layers: tuple[int, ...]) -> ModelSpec:
    """The model as seen by the device that computes these layers: all others are there, and empty."""
    return replace(spec, layers=tuple(one if at in layers else _emptied(one) for at, one in enumerate(spec.layers)))


def _emptied(layer: LayerSpec) -> LayerSpec:
    return replace(
        layer,
        tensors=(),
        products=(),
        has_kv=False,
        passing_width=0,
        token_table=None,
        logit_matrix=None,
        halves=(),
        behind=frozenset(),
    )


def _even_cuts(weights: list[float], parts: int) -> list[int]:
    """The beginnings of parts, and the end of the last, where the heaviest part is as light as can be. For every number of
    items the best cuts into one part are found, then into one more."""
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    best: list[tuple[float, list[int]]] = [(total, [0]) for total in before]
    for part in range(1, parts):
        best = [
            min(
                ((max(best[cut][0], before[end] - before[cut]), [*best[cut][1], cut]) for cut in range(part, end)),
                default=(float("inf"), []),
            )
            for end in range(len(before))
        ]
    return [*best[-1][1], len(weights)]
