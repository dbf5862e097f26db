"""Latent attention (MLA): a layer keeps one key of a token, which all heads of queries attend, and its values are a part of it.

A key is what is rotated, and behind it a latent vector. Each head has matrices of its own: one that would make its keys of
latents, and one that would make its values. The first is multiplied with queries instead, and the second with the outcome of
attention: so a step makes no keys and values of heads. Those of heads are shorter, so prompts are attended with them where that
takes fewer operations: some heads at a time, as they are kept nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import OfHeads
from h2o_flexgen.core.model_spec import IN_HEADS_BYTES, MOST_HEAD_DIM, MOST_WIDTH, KVHeads, PromptHeads
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import add_scaled, halves_apart, of_all_heads, plain_product, prompt_attention
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Whole
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rope, Rotary, scale_of_scores

EPS = 1e-6  # of the norms of what queries and latents are made of, whatever a config says of others
INTO_KEYS, INTO_VALUES, OF_BOTH = (f"self_attn.{part}_b_proj" for part in ("k", "v", "kv"))
OF_HEADS = INTO_KEYS, INTO_VALUES
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
    def tells_heads(self) -> bool:
        """Whether what is attended is as wide as values of heads only where it is made of these."""
        return self.values != self.of_key

    @property
    def in_heads(self) -> PromptHeads:
        return PromptHeads(self.rank, self.rotated, self.unrotated, self.values, tuple(f"{name}.weight" for name in OF_HEADS))

    @property
    def of_query(self) -> int:
        """Values of a head's query as it is made."""
        return self.unrotated + self.rotated

    def heads_together(self, rows: int, tokens: int, keys: int, itemsize: int) -> int:
        """The heads of which keys and values are made at once."""
        return max(1, IN_HEADS_BYTES // self.in_heads.nbytes(rows, tokens, keys, itemsize))

    def query_scale(self, rope: Rope) -> float:
        """Scores are divided by the root of a query's width, not by that of a key."""
        return scale_of_scores(rope) * math.sqrt(self.of_key / self.of_query)


@dataclass(frozen=True, eq=False)
class HeadsOfLatents:
    """Keys and values of heads, made of latents for prompts that are attended with them."""

    own: Latents
    weights: Weights
    scale: float  # of queries that attend latents

    def pays(self, tokens: int, keys: int) -> bool:
        return self.own.in_heads.pays(tokens, keys)

    def without(self, tokens: NewTokens) -> NewTokens:
        turning, unrotated = tokens.q.split((self.own.rotated, self.own.unrotated), dim=-1)
        q = _joined(turning, tensor_ops.linear_of_heads(unrotated, self.weights, INTO_KEYS))
        return replace(tokens, q=add_scaled(q, scale=self.scale), in_heads=None)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        before: Tensor,
        weights: Tensor | None,
        more: More | None,
        gathers: str,
        window: int | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        assert more is None, "these queries attend nothing elsewhere"
        (rows, heads, tokens, _), width = q.shape, self.own.in_heads.width
        out, got = q.new_empty(rows, tokens, heads, self.own.values), list[Tensor]()
        together = self.own.heads_together(rows, tokens, k.shape[2], q.itemsize)
        for start in range(0, heads, together):
            some = slice(start, min(start + together, heads))
            keys, values = self._made(k[:, 0], some)
            asked = add_scaled(_filled_up(q[:, some], width), scale=self.scale_in_heads)
            made, shares = prompt_attention(asked, keys, values, before, weights, None, gathers, window, cap)
            out[:, :, some] = made.view(rows, tokens, -1, width)[..., : self.own.values]
            if shares is not None:
                got.append(of_all_heads(shares, gathers))
        return out.flatten(2), of_all_heads(torch.cat(got, dim=1), gathers) if got else None

    @property
    def scale_in_heads(self) -> float:
        """The same of queries of heads: scores are divided by the root of what a key is filled up to."""
        return self.scale * math.sqrt(self.own.in_heads.width / self.own.of_key)

    def _made(self, kept: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, heads, keys, width) of some heads, of what is kept of all (rows, keys, values of a key)."""
        own, width = self.own, self.own.in_heads.width
        turned, latents = kept.split((own.rotated, own.rank), dim=-1)
        into_keys, into_values = (tensor_ops.needed(self.weights, f"{name}.weight") for name in OF_HEADS)
        of_keys = into_keys.view(-1, own.rank, own.unrotated)[heads].transpose(1, 2).reshape(-1, own.rank)
        of_values = into_values.view(-1, own.values, own.rank)[heads].reshape(-1, own.rank)
        factor, shape = Factor(latents.contiguous()), (*latents.shape[:2], heads.stop - heads.start)
        made = (plain_product(factor, matrix, None).view(*shape, -1).transpose(1, 2) for matrix in (of_keys, of_values))
        keys, values = (latents.new_zeros(shape[0], shape[2], shape[1], width) for _ in range(2))
        keys[..., : own.rotated] = turned.unsqueeze(1)
        keys[..., own.rotated : own.of_query] = next(made)
        values[..., : own.values] = next(made)
        return keys, values


def _joined(turning: Tensor, latent: Tensor) -> Tensor:
    """What is to be rotated, and behind it what is as wide as a latent vector."""
    width = turning.shape[-1]
    out = turning.new_empty(*turning.shape[:-1], width + latent.shape[-1])
    out[..., :width], out[..., width:] = turning, latent
    return out


def _filled_up(x: Tensor, width: int) -> Tensor:
    out = x.new_zeros(*x.shape[:-1], width)
    out[..., : x.shape[-1]] = x
    return out


class LatentAttention(Decoder):
    """LLaMA's relatives with latent attention."""

    rotates_parts = True  # of what they call a head; it is rotated as a whole
    _lengths: Rotary | None = None  # by which queries are longer
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

    @property
    def prompt_heads(self) -> PromptHeads | None:
        return self._latents.in_heads if self._latents.tells_heads else None

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

    def attended_by(self, rotary: Rotary | None, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        """Queries of prompts stay those of heads, for `attend` knows which keys take fewer operations."""
        matrices = (weights[f"{name}.weight"] for name in OF_HEADS)
        has_heads = given.in_heads and self._latents.tells_heads
        if not has_heads or not all(isinstance(matrix, Tensor) for matrix in matrices):
            return super().attended_by(rotary, hidden, weights, given)
        x, turning, unrotated, k = self._made(hidden, weights)
        of_heads = HeadsOfLatents(self._latents, weights, self._traits.query_scale)
        q = _joined(turning, unrotated)
        return given.attend(NewTokens(q, k, k, rotary, x, query_lengths=self._lengths, in_heads=of_heads))

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        return replace(super().new_tokens(rotary, hidden, weights), query_lengths=self._lengths)

    def before_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return super().before_attended(hidden, weights, replace(given, in_heads=False))

    def before_unrotated_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return super().before_unrotated_attended(hidden, weights, replace(given, in_heads=False))

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, turning, unrotated, k = self._made(hidden, weights)
        return x, _joined(turning, tensor_ops.linear_of_heads(unrotated, weights, INTO_KEYS)), k, k

    def _made(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a layer makes queries and keys of; what is rotated of queries, and the rest of them; and keys."""
        own, x = self._latents, self.normed(hidden, weights, self._traits.norms.before_attention)
        q, made = tensor_ops.linears(x, weights, LATENT_QUERIES if own.of_queries else QUERIES, INTO_LATENTS)
        latents, turning = made.split((own.rank, own.rotated), dim=-1)
        k = _joined(self._apart(turning), tensor_ops.rms_norm(latents, weights, NORM_OF_LATENTS, EPS)).unsqueeze(2)
        if own.of_queries:
            q = tensor_ops.linear(tensor_ops.rms_norm(q, weights, NORM_OF_QUERIES, EPS), weights, INTO_QUERIES)
        unrotated, turning = tensor_ops.split_heads(q, own.of_query).split((own.unrotated, own.rotated), dim=-1)
        return x, self._apart(turning), unrotated, k

    def _apart(self, turning: Tensor) -> Tensor:
        """What is to be rotated, with values that turn together half a width apart."""
        return halves_apart(turning) if self._interleaved else turning

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        """What is attended of a prompt may be made of values of heads already."""
        own, heads = self._latents, self.spec.heads
        if out.shape[-1] != heads * own.of_key:
            return super().with_attended(hidden, out, weights)
        latent = tensor_ops.split_heads(out, own.of_key)[..., own.rotated :]
        return super().with_attended(hidden, tensor_ops.linear_of_heads(latent, weights, INTO_VALUES).flatten(2), weights)
