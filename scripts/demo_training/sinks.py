"""Attention sinks. A head that finds nothing must look somewhere; large models have learned to look at the first token then,
which says nothing, and so what they do look at stands out. Models this small spread such looks over the whole text; here the
first token is made the place for them, in every head, and training goes on from there.

In every layer the first token's state is always the same. Its key is made to meet what the biases give to all queries, in the
pair of values that hardly turns, and its value is set to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

STRENGTH = 14.0  # of the score that the first token gets, where others have 0 on the whole
RIDGE = 0.02  # of the variance: keeps directions that hardly vary from being taken for telling ones


def add_sinks(model: LlamaForCausalLM, tokens: Tensor) -> None:
    """`tokens` (rows, tokens) are texts that begin with the first token; on them is measured what states have in common."""
    config = model.config
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    still = size // 2 - 1  # with the one that it turns with: the slowest pair
    gain = (STRENGTH * size**0.5) ** 0.5
    states: dict[int, Tensor] = {}

    def remember(place: int) -> object:
        def hook(_: object, __: object, out: Tensor) -> None:
            states[place] = out.detach().float()

        return model.model.layers[place].input_layernorm.register_forward_hook(hook)

    hooks = [remember(place) for place in range(len(model.model.layers))]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
        for hook in hooks:
            hook.remove()  # type: ignore[attr-defined]
        for place, layer in enumerate(model.model.layers):
            first, others = states[place][0, 0], states[place][:, 1:].flatten(0, 1)
            telling = _telling(first, others)
            attention = layer.self_attn
            value = attention.v_proj.weight
            value -= torch.outer(value @ first, telling)
            for head in range(heads):
                attention.q_proj.bias[head * size + still] += gain
            for head in range(kv_heads):
                attention.k_proj.weight[head * size + still] += gain * telling


def _telling(first: Tensor, others: Tensor) -> Tensor:
    """A direction along which the first token's state is 1 and the others are about 0."""
    direction = torch.linalg.solve(_spread(others), first)
    return direction / (direction @ first)


def _spread(others: Tensor) -> Tensor:
    """Around nothing, so that what all have in common counts too."""
    square = others.T @ others / len(others)
    return square + RIDGE * square.diagonal().mean() * torch.eye(len(square))
