"""The plain loop that the engine must equal bit for bit: everything resident, one batch, the model's own layer functions over
the engine's own KVCache on plain tensors. No schedule, no slots, no tiers, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.kv.cache import KVCache, Pass
from h2o_flexgen.models.base import Model, Weights, block


@torch.inference_mode()
def resident_generate(
    model: Model, weights: Sequence[Weights], prompts: Sequence[Sequence[int]], steps: int, by_token: bool = False
) -> list[Tensor]:
    """Greedy: for every step the logits (rows, vocab). `by_token`: caches lie slot by slot, as beside an accelerator."""
    device = next(iter(weights[0].values())).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows, longest = torch.arange(len(prompts), device=device), int(lengths.max())
    capacity = longest + steps - 1
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    now = Pass(True, torch.arange(longest, device=device).expand(len(prompts), -1), torch.zeros_like(lengths), capacity)
    caches = {layer: KVCache(_image(model, len(prompts), capacity, by_token, device)) for layer in model.spec.kv_layers}
    last, logits = lengths - 1, []
    for step in range(steps):
        hidden = model.embed(tokens, now.positions, weights[0])
        for layer, spec in enumerate(model.spec.layers[1:-1], start=1):
            if spec.has_kv:
                attend = partial(caches[layer].attend, now)
                hidden = (partial(block, model) if spec.kind == "block" else model.attention)(hidden, weights[layer], attend)
            else:
                hidden = model.mlp(hidden, weights[layer])
        logits.append(model.head(hidden[rows, last], weights[-1]))
        tokens, last, counts = logits[-1].argmax(-1)[:, None], torch.zeros_like(lengths), lengths + step
        now = Pass(False, counts[:, None], counts, capacity)
    return logits


def _image(model: Model, rows: int, slots: int, by_token: bool, device: torch.device) -> Tensor:
    heads, dim, dtype = model.spec.kv_heads, model.spec.head_dim, getattr(torch, model.spec.dtype)
    if by_token:
        return torch.zeros(slots, 2, rows, heads, dim, dtype=dtype, device=device).permute(1, 2, 3, 0, 4)
    return torch.zeros(2, rows, heads, slots, dim, dtype=dtype, device=device)
