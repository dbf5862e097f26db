"""The judges of a run: one for each layer with KV, where a policy asks what tokens are worth when they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.kv.judges.judge import Judge
from h2o_flexgen.kv.judges.value_norms import ValueNorms
from h2o_flexgen.kv.layer_cache import HeadsOfLayer
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.policies.policy import VALUE_NORMS, KVPolicy

Judges = Mapping[int, Judge]  # by layer


def judges_of(spec: ModelSpec, policy: KVPolicy) -> Judges:
    return dict.fromkeys(spec.kv_layers, ValueNorms()) if policy.judge == VALUE_NORMS else {}


def judges_by_level(judges: Judges, levels: Sequence[Level], heads: Mapping[int, HeadsOfLayer]) -> list[Judges]:
    """The judges of each level's heads; `heads`: the levels of each layer. A level that keeps everything asks none."""
    found: list[dict[int, Judge]] = [{} for _ in levels]
    for layer, of_layer in heads.items() if judges else ():
        for level, own in of_layer:
            if levels[level].policy.judge is not None:
                found[level][layer] = judges[layer] if len(levels) == 1 else judges[layer].of_heads(own)
    return [*found]
