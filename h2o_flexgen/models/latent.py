"""Latent attention (MLA): a layer keeps one key of a token, which all heads of queries attend, and its values are a part of it.

A key is what is rotated, and behind it a latent vector. Each head has matrices of its own: one that would make its keys of
latents, and one that would make its values. The first is multiplied with queries instead, and the second with the outcome of
attention: so no keys and values of heads are ever made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.rearranged import OfHeads
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, KVHeads
from h2o_flexgen.kernels.operations import halves_apart
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Bounds, Config, Whole
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder
from h2o_flexgen.models.rotary import Rope, Rotary, scale_of_scores

EPS = 1e-6  # of the norms of what queries and latents are made of, whatever a config says of others
INTO_KEYS, INTO_VALUES, OF_BOTH = (f"self_attn.{part}_b_proj" for part in ("k", "v", "kv"))
INTO_LATENTS, NORM_OF_LATENTS = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"
QUERIES, INTO_QUERIES = "self_attn.q_proj", "self_attn.q_b_proj"
OF_LATENTS = {  # names in GGUF files
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "q_a", "q_b", "k_b", "v_b", "kv_b")},
    "attn_kv_a_mqa": INTO_LATENTS,
    **{f"attn_{part}_a_norm": f"self_attn.{part}_a_layernorm" for part in ("q", "kv")},
    "attn_output": "self_attn.o_proj",
}
LATENT_QUERIES, NORM_OF_QUERIES = "self_attn.q_a_proj", "self_attn.q_a_layernorm"


@dataclass(frozen=True)
class Latents:
    """The widths of such an attention."""

    rank: int  # of a latent vector
    rotated: int  # values of a key, beside it
    unrotated: int  # values of a head's query that its own matrix makes as wide as a latent vector
    values: int  # of a head
    of_queries: int  # the rank of what queries are made of; 0: of hidden states

    @classmethod
    def of(cls, config: Config) -> Latents:
        widths = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        if None in widths:  # where a config says so in other words
            raise ValueError("one of the widths of latent attention is None, which is no number; download the model again")
        return cls(*widths, config.q_lora_rank or 0)

    @property
    def of_key(self) -> int:
        return self.rotated + self.rank

    @property
    def of_query(self) -> int:
        """Values of a head's query as it is made."""
        return self.unrotated + self.rotated

    def query_scale(self, rope: Rope) -> float:
        """Scores are divided by the root of a query's width, not by that of a key."""
        return scale_of_scores(rope) * math.sqrt(self.of_key / self.of_query)


class LatentAttention(Decoder):
    """LLaMA's relatives with latent attention."""

    rotates_parts = True  # of what they call a head; it is rotated as a whole
    bounds: ClassVar[Bounds] = {
        "kv_lora_rank": Whole(MOST_HEAD_DIM // 2, is_required=True),
        "q_lora_rank": Whole(MOST_WIDTH),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), Whole(MOST_HEAD_DIM // 2, is_required=True)),
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._latents = Latents.of(config)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def parts_of_heads(config: Config) -> Mapping[str, Mapping[str, OfHeads]]:
        heads, own = config.num_attention_heads, Latents.of(config)
        keys = OfHeads(heads, range(own.unrotated), own.rank, is_turned=True)
        values = OfHeads(heads, range(own.unrotated, own.unrotated + own.values), own.rank)
        return {f"{OF_BOTH}.weight": {f"{INTO_KEYS}.weight": keys, f"{INTO_VALUES}.weight": values}}

    def usual_kv_heads(self, config: Config) -> KVHeads:
        return KVHeads(1, self._latents.of_key)

    @property
    def values_in_keys(self) -> int:
        return self._latents.rank

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        if rope.share != 1.0:
            raise ValueError(f"partial_rotary_factor is {rope.share:g}, but here all of a part is rotated; give another model")
        return rope.rotary(self._latents.rotated)

    def attention_parameters(self, width: int, q_width: int, kv_width: int, head_dim: int) -> tuple[Parameters, Parameters]:
        own, traits = self._latents, self._traits
        heads, bias = q_width // head_dim, traits.qkv_bias
        queries, of_queries = heads * own.of_query, own.of_queries
        if of_queries:
            first = layout.linear(LATENT_QUERIES, of_queries, width, bias)
            into = layout.joined(first, traits.norm.parameters(NORM_OF_QUERIES, of_queries))
        else:
            into = {}
        before = layout.joined(
            self.norm_parameters(width, traits.norms.before_attention),
            into,
            layout.linear(INTO_QUERIES if of_queries else QUERIES, queries, of_queries or width, bias=False),
            layout.linear(INTO_LATENTS, own.of_key, width, bias),
            traits.norm.parameters(NORM_OF_LATENTS, own.rank),
            layout.linear(INTO_KEYS, heads * own.rank, own.unrotated, bias=False),
        )
        values = layout.linear(INTO_VALUES, heads * own.values, own.rank, bias=False)
        return before, layout.joined(values, layout.linear("self_attn.o_proj", width, heads * own.values, traits.out_bias))

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, x = self._latents, self.normed(hidden, weights, self._traits.norms.before_attention)
        q, made = tensor_ops.linears(x, weights, LATENT_QUERIES if own.of_queries else QUERIES, INTO_LATENTS)
        latents, turning = made.split((own.rank, own.rotated), dim=-1)
        k = self._key(turning, tensor_ops.rms_norm(latents, weights, NORM_OF_LATENTS, EPS)).unsqueeze(2)
        if own.of_queries:
            q = tensor_ops.linear(tensor_ops.rms_norm(q, weights, NORM_OF_QUERIES, EPS), weights, INTO_QUERIES)
        unrotated, turning = tensor_ops.split_heads(q, own.of_query).split((own.unrotated, own.rotated), dim=-1)
        return x, self._key(turning, tensor_ops.linear_of_heads(unrotated, weights, INTO_KEYS)), k, k

    def _key(self, turning: Tensor, latent: Tensor) -> Tensor:
        """What is to be rotated, and behind it what is as wide as a latent vector."""
        width = self._latents.rotated
        out = turning.new_empty(*turning.shape[:-1], self._latents.of_key)
        out[..., :width] = halves_apart(turning) if self._interleaved else turning
        out[..., width:] = latent
        return out

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        latent = tensor_ops.split_heads(out, self._latents.of_key)[..., self._latents.rotated :]
        return super().with_attended(hidden, tensor_ops.linear_of_heads(latent, weights, INTO_VALUES).flatten(2), weights)
