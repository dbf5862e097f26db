"""Phi-3: LLaMA with one matrix for queries, keys and values, and one for both ways into the mlp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from h2o_flexgen.checkpoints.gguf_config import divisors_in
from h2o_flexgen.checkpoints.stored_architecture import NORMS, ROTATED, GgufArchitecture, GgufModel, weights
from h2o_flexgen.core.model_spec import LayerSpec, share_of
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Config, same_windows
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import Decoder, MlpNames, Traits
from h2o_flexgen.models.rotary import DEFAULT, LONGROPE, ORIGINAL_LENGTH

QKV = "self_attn.qkv_proj"
APART = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))
INTO_MLP, OUT_OF_MLP = "mlp.gate_up_proj", "mlp.down_proj"
FUSED_STATES = 4  # of the inner width, at once: gate and what goes up, as they come and side by side


class FusedQkv(Decoder):
    """LLaMA's relatives with one matrix for queries, keys and values: those of all heads lie one behind the other."""

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


class FusedMlp(Decoder):
    """LLaMA's relatives with one matrix for both ways into the mlp."""

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        made = self._gating(*(half.contiguous() for half in tensor_ops.linear(x, weights, INTO_MLP).chunk(2, dim=-1)))
        return tensor_ops.linear(made, weights, OUT_OF_MLP)

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        ways_in = layout.linear(INTO_MLP, 2 * inner, width, bias=False)
        return layout.joined(ways_in, layout.linear(OUT_OF_MLP, width, inner, bias=False))

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        return replace(super().mlp_layer(width, inner, origin), passing_width=FUSED_STATES * inner)


DIVISORS = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}  # of a config, and in files
STRETCH = "rope.scaling.attn_factor"


def _rope(said: GgufModel) -> dict[str, Any]:
    width = said.whole("embedding_length") // max(said.whole("attention.head_count"), 1)
    rotated = said.whole(ROTATED, width)
    found = {"rope_theta": said.number("rope.freq_base", 10000.0), "partial_rotary_factor": share_of(rotated, max(width, 1))}
    tensors = {key: said.tensors[name] for key, name in DIVISORS.items() if name in said.tensors}
    if not tensors:
        return {**found, "rope_type": DEFAULT}
    divisors = {key: divisors_in(tensor, rotated // 2) for key, tensor in tensors.items()}
    length = said.whole("rope.scaling.original_context_length")
    return {**found, **divisors, "rope_type": LONGROPE, ORIGINAL_LENGTH: length, "attention_factor": said.number(STRETCH)}


class Phi3(FusedQkv, FusedMlp):
    rotates_parts = True
    gguf = GgufArchitecture(
        "phi3",
        weights({"attn_qkv": QKV, "attn_output": "self_attn.o_proj", "ffn_up": INTO_MLP, "ffn_down": OUT_OF_MLP}, NORMS),
        keys={"rope_parameters": _rope},
        heeds={STRETCH: None},
        rotates_parts=True,
        outside={name: f"model.{name}" for name in DIVISORS.values()},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=same_windows(config))
