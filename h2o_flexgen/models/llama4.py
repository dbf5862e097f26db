"""Llama 4: a mixture in which the share of an expert scales what it gets, beside an mlp for all tokens. Each last one of some
layers rotates nothing; its queries become longer the more text stands before them. The other layers attend to a chunk of a text
alone: texts are no longer than the first chunk, in which that is all before a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BY_SIGMOID,
    GATING,
    OF_LLAMA,
    OF_MIXTURES,
    WINDOW,
    GgufArchitecture,
    GgufModel,
    shared_expert,
    weights,
)
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES, MOST_WIDTH, LayerSpec
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.kernels.operations import add_weighted
from h2o_flexgen.kernels.routing import SIGMOID_OF_EACH, RouterRule
from h2o_flexgen.models import tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import BLOCKS, FULL, POSITIONS, Bounds, Config, Number, Whole
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import UNROTATED, USUAL, AttentionFunctions, Traits
from h2o_flexgen.models.mixture import MOST_TOGETHER, SHARED, ExpertGroup, Mixture, MixtureOfExperts
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import LongerQueries, Rope, Rotary

CHUNKED = "chunked_attention"
CHUNK, LONGER = 8192, 0.1  # of published models, of which files say no more
EVERY, MANY = 4, 128  # each last one of so many rotates nothing; with so many experts heads have no norms


def _rotates_all(said: GgufModel) -> bool:
    return said.has(WINDOW) and said.whole(WINDOW) == 0


def _rotating(said: GgufModel) -> list[int]:
    return [int(_rotates_all(said) or (block + 1) % EVERY != 0) for block in range(said.blocks)]


class Llama4(MixtureOfExperts):
    rotates_neighbours = True
    bounds: ClassVar[Bounds] = {
        "intermediate_size_mlp": Whole(MOST_WIDTH),
        "interleave_moe_layer_step": Whole(BLOCKS),
        "attention_chunk_size": Whole(POSITIONS),
        "floor_scale": Whole(POSITIONS),
        "attn_scale": Number(0.0, 1e3),
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.feed_forward\.router\.": ".mlp.gate.",
        r"\.feed_forward\.shared_expert\.": f".{SHARED}.",
        r"\.feed_forward\.": ".mlp.",
    }
    turned = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
    gguf: ClassVar[GgufArchitecture | None] = GgufArchitecture(
        "llama4",
        {**OF_LLAMA, **OF_MIXTURES, **weights(shared_expert(SHARED))},
        keys={
            "num_local_experts": lambda said: said.experts,
            "intermediate_size": lambda said: said.whole("expert_feed_forward_length"),
            "intermediate_size_mlp": lambda said: said.whole("feed_forward_length"),
            "moe_layers": lambda said: [*range((step := said.whole("interleave_moe_layer_step")) - 1, said.blocks, step)],
            "no_rope_layers": _rotating,
            "layer_types": lambda said: [
                CHUNKED if rotates and not _rotates_all(said) else FULL for rotates in _rotating(said)
            ],
            "attention_chunk_size": lambda said: CHUNK,
            "use_qk_norm": lambda said: said.experts != MANY,
            "attn_temperature_tuning": lambda said: True,
            "floor_scale": lambda said: CHUNK,
            "attn_scale": lambda said: LONGER,
        },
        heeds={GATING: (0, BY_SIGMOID)},
        has_experts=True,
        sums_to_one=False,
        is_interleaved=True,
        has_divisors=True,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if unlike := {*config.layer_types} - {CHUNKED, FULL}:
            raise ValueError(f"layer_types has {shown(min(unlike))}, which no layer of Llama 4 is; download the model again")
        if CHUNKED in config.layer_types and config.attention_chunk_size is None:
            raise ValueError(f"attention_chunk_size is missing, but layer_types has {CHUNKED}; download the model again")
        self._norms_heads = bool(config.use_qk_norm)
        super().__init__(config, dtype, sep_layer, name)
        nothing = torch.zeros(self.spec.head_dim // 2)  # by which none is turned
        self._longer = LongerQueries(nothing, 1.0, float(config.attn_scale), float(config.floor_scale), first=1)
        self._lengthens = bool(config.attn_temperature_tuning)

    # -- what it reads of a config ---------------------------------------------------------------------------------------

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner = config.intermediate_size
        return Mixture(config.num_local_experts, config.num_experts_per_tok, inner, sums_to_one=False, shared=inner)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return block in config.moe_layers

    @staticmethod
    def inner_of(config: Config) -> int:
        width: int = config.intermediate_size_mlp
        return width

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return USUAL if config.no_rope_layers[block] else UNROTATED

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        """Norms stand behind a rotation: how long that makes a head changes nothing."""
        made = super().rotary_of(rope, width)
        return Rotary(made.frequencies) if self._norms_heads else made

    def positions_of(self, config: Config) -> int:
        most = super().positions_of(config)
        return min(most, config.attention_chunk_size) if CHUNKED in config.layer_types else most

    # -- its layers ------------------------------------------------------------------------------------------------------

    def behind_attention(self, config: Config, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        """Experts hold their rows once more, scaled, and in fp32 before that."""
        scaled = int(MOST_TOGETHER * config.hidden_size * (1 + FLOAT_BYTES // DTYPE_BYTES[origin.dtype]))
        made = super().behind_attention(config, sep_layer, origin)
        return [replace(layer, passing_width=layer.passing_width + scaled) for layer in made]

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        made = super().new_tokens(rotary, hidden, weights)
        if rotary is None:
            return replace(made, query_rotation=self._longer) if self._lengthens else made
        if not self._norms_heads:
            return made
        q, k = (tensor_ops.bare_rms_norm(each, self._eps) for each in (made.q, made.k))
        return replace(made, q=q, k=k)

    @property
    def router_rule(self) -> RouterRule:
        return self.chosen_by(SIGMOID_OF_EACH)

    def as_given(self, asked: ExpertGroup) -> ExpertGroup:
        """The share of an expert scales its rows, and its outcome counts as it is."""
        x, count = asked.x, len(asked.x)
        scaled = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        add_weighted(scaled, x, asked.weights, torch.arange(count, device=x.device), asked.counts)
        ones = torch.full((count,), 1.0, dtype=torch.float32, device=x.device)
        return asked._replace(x=scaled.to(x.dtype), weights=ones)
