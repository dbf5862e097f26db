"""Probe: linear maps that say from a layer's input how much a token is worth to each KV head (KVzap, arXiv 2601.07891).

They are fitted once for a model, and lie in a file. Their values travel with the plan that asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, TypeAlias

from h2o_flexgen.core.model_spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float32]"


@dataclass(frozen=True, eq=False)
class Probe:
    model: str  # the model's name, for people
    source: str  # what it was fitted to, for people
    weights: Floats  # (layers with KV, KV heads, width)
    biases: Floats  # (layers with KV, KV heads)
    file: str = ""  # that it was read from, for people

    def __post_init__(self) -> None:
        if self.weights.ndim != 3 or self.biases.shape != self.weights.shape[:2]:
            raise ValueError(
                f"a probe has weights {self.weights.shape} and biases {self.biases.shape}, which do not fit; fit it anew"
            )
        if not all(isfinite(abs(values).max(initial=0.0)) for values in (self.weights, self.biases)):
            raise ValueError("a probe has values that are no numbers; fit it anew")

    @cached_property
    def checksum(self) -> str:
        """Identifies the values, by whatever names they go."""
        return blake2b(self.weights.tobytes() + self.biases.tobytes(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Probe) and self.checksum == other.checksum

    def __hash__(self) -> int:
        return hash(self.checksum)

    def as_json(self) -> dict[str, str]:
        """What a report says instead of all values."""
        return {"model": self.model, "source": self.source, "checksum": self.checksum}

    def refuse_other(self, spec: ModelSpec) -> None:
        """Refuses a model of another shape."""
        spec.refuse_unlike_heads("a probe")
        wanted = len(spec.kv_layers), spec.kv_heads, spec.width
        if self.weights.shape != wanted:
            this = f"probe {self.file}" if self.file else "the probe"
            has, needs = ("{} layers of {} KV heads over {} values".format(*shape) for shape in (self.weights.shape, wanted))
            raise ValueError(f"{this} is of {self.model}, {has}, but {spec.name} has {needs}; fit one to this model")
