"""From shapes to LayerSpecs: what the architectures share when they say which tensors they consist of.

Inside a layer a tensor goes by its name in the checkpoint less the prefix of its block, so attention and mlp never collide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from h2o_flexgen.core.model_spec import DTYPE_BYTES, LayerSpec, TensorSpec

Shapes = Mapping[str, tuple[int, ...]]  # name inside the layer -> shape


class Config(Protocol):
    """A PretrainedConfig of transformers, or anything with its attributes: they differ by architecture and version."""

    def __getattr__(self, name: str) -> Any: ...


def linear(name: str, out_width: int, in_width: int, bias: bool) -> Shapes:
    weight = {f"{name}.weight": (out_width, in_width)}
    return {**weight, f"{name}.bias": (out_width,)} if bias else weight


def norm(name: str, width: int, weight: bool = True, bias: bool = True) -> Shapes:
    present = {"weight": weight, "bias": bias}
    return {f"{name}.{part}": (width,) for part, is_there in present.items() if is_there}


def joined(*parts: Shapes) -> Shapes:
    return {name: shape for part in parts for name, shape in part.items()}


def layer(
    kind: str,
    shapes: Shapes,
    out_width: int,
    dtype: str,
    prefix: str,
    index: int = 0,
    stored_as: Mapping[str, str] | None = None,
    table: str | None = None,
) -> LayerSpec:
    """The checkpoint's name of a tensor is the prefix and its own, unless `stored_as` says another. `table` names the one that
    has a row for every token."""
    itemsize, names = DTYPE_BYTES[dtype], stored_as or {}
    tensors = tuple(
        (name, TensorSpec(names.get(name, prefix + name), shape, itemsize, itemsize)) for name, shape in shapes.items()
    )
    return LayerSpec(kind, index, tensors, out_width, table)


def in_order(
    embed: LayerSpec, blocks: int, parts: Callable[[int], tuple[LayerSpec, LayerSpec]], head: LayerSpec, sep_layer: bool
) -> tuple[LayerSpec, ...]:
    """Embedding, then each block's attention and mlp (as two layers or as one), then the head."""
    middle: list[LayerSpec] = []
    for index in range(blocks):
        attention, mlp = parts(index)
        joined = LayerSpec("block", index, attention.tensors + mlp.tensors, mlp.out_width)
        middle += [attention, mlp] if sep_layer else [joined]
    return (embed, *middle, head)
