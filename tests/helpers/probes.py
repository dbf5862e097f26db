"""Probes of made-up values, for models of any shape."""

from __future__ import annotations

from functools import cache

import numpy as np

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.probe import Probe


@cache
def made_up_probe(layers: int, heads: int, width: int) -> Probe:
    drawn = np.random.default_rng(layers * heads + width)
    weights, biases = (drawn.standard_normal(shape).astype(np.float32) for shape in ((layers, heads, width), (layers, heads)))
    return Probe("a made-up model", "nothing", weights, biases)


def probe_for(spec: ModelSpec) -> Probe:
    return made_up_probe(len(spec.kv_layers), spec.kv_heads, spec.width)


OF_NO_MODEL = made_up_probe(1, 1, 1)
