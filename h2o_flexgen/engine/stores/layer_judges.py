"""The judges of a run: one for each layer with KV, where a policy uses the worth of tokens at the time they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import probe_bytes
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.kv.judges import Judge, Linear, judge_of
from h2o_flexgen.kv.layer_cache import HeadsOfLayer
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.levels import Level

Judges = Mapping[int, Judge]  # by layer


def judges_of(spec: ModelSpec, section: ModelSpec, plan: Plan, memories: Memories) -> Judges:
    """The judges that a plan asks for in the layers of a section of the model. Their data lie in the memory where these layers
    attend."""
    if plan.probe is not None:
        region, places = memories.compute.alloc(probe_bytes(section)), map(spec.kv_layers.index, section.kv_layers)
        return dict(zip(section.kv_layers, linear_judges(plan.probe, [*places], region)))
    judge = judge_of(plan.policy)
    return {} if judge is None else dict.fromkeys(section.kv_layers, judge)


def linear_judges(probe: Probe, layers: Sequence[int], region: Tensor) -> list[Linear]:
    """The judges of these layers of a probe; the probe's values are copied to a region of memory."""
    values, start, placed = region.view(torch.float32), 0, list[Tensor]()
    for known in (probe.weights[layers], probe.biases[layers]):
        placed.append(values[start : start + known.size].view(known.shape).copy_(torch.from_numpy(known)))
        start += known.size
    return [Linear(weight, bias) for weight, bias in zip(*placed)]


def judges_by_level(judges: Judges, levels: Sequence[Level], heads: Mapping[int, HeadsOfLayer]) -> list[Judges]:
    """The judges of each level's heads; `heads`: the levels of each layer. A level that keeps everything asks none."""
    found: list[dict[int, Judge]] = [{} for _ in levels]
    for layer, of_layer in heads.items() if judges else ():
        for level, own in of_layer:
            if levels[level].policy.judge is not None:
                found[level][layer] = judges[layer] if len(levels) == 1 else judges[layer].of_heads(own)
    return [*found]
