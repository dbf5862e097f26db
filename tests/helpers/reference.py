"""The contract: a plain loop over one batch with everything resident. What the engine generates must equal what this does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.models.base import Given, Model, Weights, computed, logits
from h2o_flexgen.models.new_tokens import NewTokens

LayerKV = dict[str, Tensor]  # "k" and "v" of one layer: (rows, slots, kv_heads, head_dim); slot j holds a row's j-th token


def weights_by_layer(model: Model, tensors: Mapping[str, Tensor]) -> list[Weights]:
    """Groups `tensors`, given by their names in the checkpoint, by layer."""
    dtypes = {model.spec.itemsize: getattr(torch, model.spec.dtype), 4: torch.float32}
    return [{name: tensors[spec.name].to(dtypes[spec.itemsize]) for name, spec in layer.tensors} for layer in model.spec.layers]


@torch.inference_mode()
def reference_generate(
    model: Model, weights: Sequence[Weights], prompts: Sequence[Sequence[int]], steps: int
) -> tuple[list[list[int]], list[Tensor]]:
    """Generates greedily: returns the tokens of each row, and for every step the logits (rows, vocab)."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest, every_row = int(lengths.max()), torch.arange(len(prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    positions, last = torch.arange(longest).repeat(len(prompts), 1), lengths - 1
    *layers, head = model.spec.layers
    cache: dict[int, LayerKV] = {layer: {} for layer in model.spec.kv_layers}
    made: list[Tensor] = []
    for step in range(steps):
        hidden = tokens
        for layer, spec in enumerate(layers):
            attend = partial(_attend, cache.get(layer, {}), positions, longest + steps, spec.window, model.spec.attention_cap)
            hidden = computed(model, spec, hidden, weights[layer], Given(positions, attend))
        made.append(logits(model, head, hidden[every_row, last], weights[-1:]))
        tokens, positions, last = made[-1].argmax(-1)[:, None], (lengths + step)[:, None], torch.zeros_like(lengths)
    return torch.stack(made).argmax(-1).T.tolist(), made


def _attend(
    slots: LayerKV, positions: Tensor, capacity: int, window: int | None, cap: float | None, tokens: NewTokens
) -> Tensor:
    """Padding stands behind a row's text, in slots that its own queries never look at and later tokens take over."""
    q, k, v, sink_scores = tokens.q, tokens.k, tokens.v, tokens.sink_scores
    if tokens.rotation is not None:
        q, k = tokens.rotation(q, positions), tokens.rotation(k, positions)
    rows = torch.arange(len(positions))[:, None]
    for name, new in (("k", k), ("v", v)):
        slots.setdefault(name, new.new_zeros(len(rows), capacity, *new.shape[2:]))[rows, positions] = new
    held = int(positions.max()) + 1
    group = q.shape[2] // k.shape[2]
    keys, values = (slots[name][:, :held].float().repeat_interleave(group, dim=2).transpose(1, 2) for name in "kv")
    scores = q.float().transpose(1, 2) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5  # (rows, heads, tokens, slots)
    scores = scores if cap is None else cap * (scores / cap).tanh()
    visible = torch.arange(held) <= positions[:, None, :, None]
    if window is not None:
        visible &= torch.arange(held) > positions[:, None, :, None] - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_scores is not None:
        scores = torch.cat((scores, sink_scores.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    mixed = scores.softmax(-1)[..., :held] @ values
    return mixed.transpose(1, 2).flatten(2).to(q.dtype)
