"""vLLM's documented sampling options, written down token by token: the reference for the engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from h2o_flexgen.sampling.params import SamplingParams


def adjusted_by_hand(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], ends: Collection[int]
) -> list[float]:
    """Adjusts logits; `ends` are end-of-text and stop tokens."""
    scores = []
    for token, score in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = -math.inf
        if len(generated) < params.min_tokens and token in ends:
            score = -math.inf
        if _comes_again([*prompt, *generated], token, params.no_repeat_ngram_size):
            score = -math.inf
        score += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in generated:
            score = score * params.repetition_penalty if score < 0 else score / params.repetition_penalty
        score -= params.frequency_penalty * generated.count(token)
        score -= params.presence_penalty * (token in generated)
        scores.append(score)
    return scores


def _comes_again(seen: Sequence[int], token: int, length: int) -> bool:
    """Whether the last tokens of a row and this one, so many together, are there already. Of none, no."""
    if length == 0 or len(seen) < length:
        return False
    runs = [[*seen[end - length : end]] for end in range(length, len(seen) + 1)]
    return [*seen[len(seen) + 1 - length :], token] in runs


def picked_by_hand(scores: Sequence[float], params: SamplingParams, number: float) -> int:
    """The token that a random number from 0 to 1 selects: in the order of ids, or of likelihood if some are left out."""
    best = max(scores)
    if params.is_greedy:
        return list(scores).index(best)
    weights = {token: math.exp((score - best) / params.temperature) for token, score in enumerate(scores)}
    if params.is_filtered:
        weights = _filtered(weights, params)
    reached, total = 0.0, sum(weights.values())
    for token, weight in weights.items():
        reached += weight
        if reached > number * total:
            return token
    raise AssertionError(f"{number} is not below 1")


def _filtered(weights: dict[int, float], params: SamplingParams) -> dict[int, float]:
    """The tokens that remain, likeliest first, after min_p, then top_k, then top_p."""
    weights = dict(sorted(weights.items(), key=lambda one: (-one[1], one[0])))
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p}
    if params.top_k:
        least = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {token: weight for token, weight in weights.items() if weight >= least}
    kept, reached, total = dict[int, float](), 0.0, sum(weights.values())
    for token, weight in weights.items():
        if reached < params.top_p * total:
            kept[token] = weight
        reached += weight
    return kept
