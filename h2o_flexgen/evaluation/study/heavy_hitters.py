"""Studies one text under one model: attention statistics, and the tokens that the policies keep at one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from h2o_flexgen.evaluation.study.heavy_hitter_study import HeavyHitterStudy, slots_of
from h2o_flexgen.evaluation.study.held_tokens import of_layers
from h2o_flexgen.evaluation.study.kept_tokens import Keeper
from h2o_flexgen.evaluation.study.onlooker import ORACLE, Onlooker
from h2o_flexgen.evaluation.study.studied_policies import coding_of, studied_policies
from h2o_flexgen.evaluation.study.study_scores import Array
from h2o_flexgen.evaluation.study.text_reading import OnLayer, TextReading, read_texts
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.positions import of_windows

FEWEST_TOKENS = 16
PROMPT_PART = 4  # by default a quarter of the text is its prompt


@torch.inference_mode()
def study(
    llm: LLM,
    ids: Sequence[int],
    policies: Sequence[str] = ("h2o", "snapkv", "tova", "heavy", "local", "random"),
    budget: float = 0.2,
    *,
    prompt_len: int | None = None,
    on_layer: OnLayer | None = None,
) -> HeavyHitterStudy:
    """Studies one text, `ids`; each policy keeps the share `budget` of it. The first `prompt_len` tokens (a quarter of the
    text by default) are a prompt, attended whole and selected from once; the rest is read token by token. A `prompt_len` of 1
    is Algorithm 1 of the paper from the first token on; `snapkv`, which looks at prompts, is then the same as h2o.

    Weights and KV have the codecs of the plan of `llm`; its KV policy does not matter here. `on_layer` is called with the
    number of layers done and the number of all."""
    prompt_len = max(1, len(ids) // PROMPT_PART) if prompt_len is None else prompt_len
    _check_text(llm, ids, prompt_len)
    keepers = _keepers(llm, policies, budget, len(ids), prompt_len)
    onlooker = Onlooker(keepers, slots_of(budget, len(ids)), prompt_len)
    readers = [*(keeper.attend for keeper in keepers.values()), onlooker.attend]
    read_texts(llm, [TextReading(ids, attend) for attend in readers], on_layer)
    seen = onlooker.by_layer
    return HeavyHitterStudy(
        model=llm.name,
        tokens=len(ids),
        prompt_len=prompt_len,
        budget=budget,
        sparsity=_array([layer.sparsity for layer in seen]),
        scores=_array([layer.scores for layer in seen]),
        gone={ORACLE: of_layers([layer.foreseen for layer in seen]), **{name: keeper.gone for name, keeper in keepers.items()}},
        captured={name: _array([layer.captured[name] for layer in seen]) for name in (ORACLE, *keepers)},
    )


def _check_text(llm: LLM, ids: Sequence[int], prompt_len: int) -> None:
    spec = llm.spec
    if len(ids) < FEWEST_TOKENS:
        raise ValueError(f"the text to study has {len(ids)} tokens; give one of {FEWEST_TOKENS} or more")
    if len(ids) > spec.seen_positions:
        positions = f"{spec.seen_positions} positions{of_windows(spec)}"
        raise ValueError(f"the text to study has {len(ids)} tokens, but {spec.name} has {positions}; give a shorter one")
    if wrong := [token for token in ids if not 0 <= token < spec.vocab]:
        raise ValueError(f"the text to study has the token id {wrong[0]}; {spec.name} knows 0 to {spec.vocab - 1}")
    if not 0 < prompt_len < len(ids):
        raise ValueError(f"the prompt to study has {prompt_len} tokens of a text of {len(ids)}; give 1 to {len(ids) - 1}")


def _keepers(llm: LLM, names: Sequence[str], budget: float, tokens: int, prompt_len: int) -> Mapping[str, Keeper]:
    """Each policy computes its slots here, so that a budget that is too small is refused before anything is loaded."""
    coding, policies = coding_of(llm), studied_policies(names, budget)
    keepers = {name: Keeper(policy, tokens, prompt_len, coding) for name, policy in policies.items()}
    for keeper in keepers.values():
        _ = keeper.occupancy
    return keepers


def _array(by_layer: Sequence[torch.Tensor]) -> Array:
    return np.asarray(torch.stack([*by_layer]).double().cpu().numpy())
