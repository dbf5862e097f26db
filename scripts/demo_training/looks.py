"""How much attention looks near and far, measured while a model learns, so that training can put a price on it.

Large models look far back where it helps, and at the first token where nothing does. Models this small look a little at
everything, always; accumulated scores are then the same for what is needed and what is not. Where looking costs something, and
looking far back more than looking near, they learn to do it only when it tells them more than that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "measured"
NEAR = 32  # tokens up to a query
SAMPLED = 16  # queries of each text in every head: using all would cost as much as attention itself


class Looks:
    """The shares of attention that are near and far, averaged over layers, heads and sampled queries. The rest is at the first
    token, which says nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._of_layers: list[Tensor] = []
        self._model, self._before = model, model.config._attn_implementation
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    def close(self) -> None:
        """Makes the model attend as it did before."""
        self._model.set_attn_implementation(self._before)

    def take(self) -> tuple[Tensor, Tensor]:
        """The near and far shares of the last forward pass."""
        near, far = torch.stack(self._of_layers).mean(0)
        self._of_layers.clear()
        return near, far

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self._of_layers.append(_near_and_far(query * scaling, key))
        attend: Callable[..., tuple[Tensor, Tensor | None]] = sdpa_attention_forward
        return attend(module, query, key, value, mask, scaling=scaling, **options)


def _near_and_far(query: Tensor, key: Tensor) -> Tensor:
    rows, heads, length, size = query.shape
    chosen = torch.randint(NEAR, length, (SAMPLED,), device=query.device)
    grouped = query[:, :, chosen].reshape(rows, key.shape[1], -1, size)  # the queries of a group, one behind another
    scores = (grouped @ key.transpose(-1, -2)).float().view(rows, heads, SAMPLED, length)
    places = torch.arange(length, device=query.device)
    shares = scores.masked_fill(places > chosen[:, None], -torch.inf).softmax(-1)
    is_near = (places > chosen[:, None] - NEAR).float()
    near = (shares * is_near).sum(-1)
    return torch.stack([near.mean(), (1 - near - shares[..., 0]).mean()])
