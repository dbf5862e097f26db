"""LLaMA's relatives with one matrix for queries, keys and values: those of all heads lie one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder

QKV = "self_attn.qkv_proj"
APART = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))


class FusedQkv(Decoder):
    def attention_parameters(self, width: int, q_width: int, kv_width: int, head_dim: int) -> tuple[Parameters, Parameters]:
        before, behind = super().attention_parameters(width, q_width, kv_width, head_dim)
        others = {name: one for name, one in before.items() if name not in APART}
        return layout.joined(others, layout.linear(QKV, q_width + 2 * kv_width, width, self._traits.qkv_bias)), behind

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        return self.parted(tensor_ops.linear(x, weights, QKV))

    def parted(self, fused: Tensor) -> Sequence[Tensor]:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        of_head = fused.shape[-1] // (heads + 2 * kv_heads)
        q, k, v = fused.split((heads * of_head, kv_heads * of_head, kv_heads * of_head), dim=-1)
        return q if self._traits.query_scale == 1.0 else q.contiguous(), k, v
