"""Qwen3-Next, Qwen3.5 and 3.6: in three of four blocks the gated delta rule takes the place of attention. A row keeps a matrix
for each head there, and the last inputs of a short convolution. Attention has a gate, which comes out of the matrix of its
queries. Norms count from one, but for that of the delta rule's outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    NORMS_BY_PLACE,
    ROUTER,
    GgufArchitecture,
    GgufModel,
    shared_expert,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, LayerSpec, OfToken, StateTensor
from h2o_flexgen.kernels.operations import gated_norm, gated_sigmoid, step_sizes
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import CONVOLVED_TOKENS, FULL, HEADS, LINEAR, Bounds, Config, Whole, refuse_short
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import RMS_FROM_ONE, RMS_WIDE, Decoder, Traits, head_width
from h2o_flexgen.models.mixture import Mixture
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.qwen import SHARED, SHARED_GATE, Qwen2Moe
from h2o_flexgen.models.whole_configs import Usual

CONVOLVED, MATRIX = "inputs", "matrix"  # the states of a row
NAME = "linear_attn"
SIZES: Bounds = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), Whole(HEADS)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), Whole(MOST_HEAD_DIM)),
    "linear_conv_kernel_dim": CONVOLVED_TOKENS,
}


KERNEL = f"{NAME}.conv1d.weight"
RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"  # keys of metadata
OF_RULE = {
    **{f"attn_{part}": f"{NAME}.in_proj_{own}" for part, own in (("qkv", "qkv"), ("gate", "z"))},
    **{f"ssm_{part}": f"{NAME}.in_proj_{own}" for part, own in (("alpha", "a"), ("beta", "b"))},
    "ssm_conv1d": f"{NAME}.conv1d",
    "ssm_norm": f"{NAME}.norm",
    "ssm_out": f"{NAME}.out_proj",
}
IN_FILES = {
    **weights(ATTENTION, HEAD_NORMS, NORMS_BY_PLACE, OF_RULE),
    "ssm_dt.bias": f"{NAME}.dt_bias",
    "ssm_a": f"{NAME}.A_log",
}


def _kinds(said: GgufModel) -> list[str]:
    """The kind of each block. Where the file does not say it, each last one of some has attention."""
    is_listed = said.has(RECURRENT)
    is_linear = said.listed_blocks(RECURRENT) if is_listed else said.all_but_each_last(said.whole(INTERVAL, 4))
    return [LINEAR if one else FULL for one in is_linear]


def _value_width(said: GgufModel) -> int:
    return said.whole("ssm.inner_size") // max(1, said.whole("ssm.time_step_rank"))


OF_FILES = GgufArchitecture(
    "qwen35",
    {**IN_FILES, **weights(MLP)},
    keys={
        "layer_types": _kinds,
        "linear_num_key_heads": lambda said: said.whole("ssm.group_count"),
        "linear_num_value_heads": lambda said: said.whole("ssm.time_step_rank"),
        "linear_key_head_dim": lambda said: said.whole("ssm.state_size"),
        "linear_value_head_dim": _value_width,
        "linear_conv_kernel_dim": lambda said: said.whole("ssm.conv_kernel"),
        **dict.fromkeys(("norms_are_whole", "rates_are_whole", "value_heads_are_tiled"), lambda said: True),
    },
    rotates_parts=True,
    convolutions=(KERNEL,),
)


OF_MIXTURES = replace(
    OF_FILES,
    name="qwen35moe",
    tensors={**IN_FILES, **weights(EXPERTS, ROUTER, shared_expert(SHARED), {"ffn_gate_inp_shexp": SHARED_GATE})},
    keys={
        **OF_FILES.keys,
        "num_experts": lambda said: said.experts,
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), lambda said: said.expert_width),
        "shared_expert_intermediate_size": lambda said: said.shared_expert_width,
    },
    has_experts=True,
    sums_to_one=True,
    single_rows=(f"{SHARED_GATE}.weight",),
)


class DeltaHeads(NamedTuple):
    """The heads of the delta rule. Each key head serves some value heads, which follow one another."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    mixed: int  # tokens that the convolution mixes

    @classmethod
    def of(cls, config: Config) -> DeltaHeads:
        found = cls(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )
        if found.heads % found.key_heads:
            raise ValueError(
                f"linear_num_value_heads {found.heads} is no multiple of linear_num_key_heads {found.key_heads}; "
                "download the model again"
            )
        return found

    @property
    def keys(self) -> int:
        """Values of all keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.heads * self.value_width

    @property
    def convolved(self) -> int:
        """Values of queries, keys and values, which lie side by side."""
        return 2 * self.keys + self.values

    @property
    def states(self) -> tuple[StateTensor, ...]:
        inputs = StateTensor(CONVOLVED, (self.mixed - 1, self.convolved), brings=(OfToken((self.convolved,)),))
        key, value = OfToken((self.key_heads, self.key_width)), OfToken((self.heads, self.value_width))
        brings = key, key, value, OfToken((self.heads,), is_float32=True), OfToken((self.heads,))
        return inputs, StateTensor(MATRIX, (self.heads, self.key_width, self.value_width), brings=brings)


class Projected(NamedTuple):
    """What the delta rule gets of tokens: (rows, tokens, ...)."""

    qkv: Tensor
    gate: Tensor  # of what comes out
    beta: Tensor  # how much is added of what is new, before its sigmoid
    step: Tensor  # how much fades, before its bias


class DeltaNet(Decoder):
    """What all have in common."""

    bounds: ClassVar[Bounds] = SIZES
    rotates_parts = True

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_short(config, "layer_types")
        tensor_ops.refuse_other_than_silu(self.activation_of(config))
        self._delta = DeltaHeads.of(config)
        self._rates_are_logs = not getattr(config, "rates_are_whole", False)
        self._is_tiled = bool(getattr(config, "value_heads_are_tiled", False))
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        norm = RMS_WIDE if getattr(config, "norms_are_whole", False) else RMS_FROM_ONE  # the first in GGUF files alone
        return Traits(config.attention_bias, config.attention_bias, norm=norm, head_norm=True)

    # -- attention with a gate -------------------------------------------------------------------------------------------

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        if config.layer_types[block] == LINEAR:
            return self._delta_layer(config, origin)
        layer = super().mixing_layer(config, block, origin)
        assert layer.halves is not None
        gate = config.num_attention_heads * head_width(config)  # which is needed behind it
        return replace(layer, halves=replace(layer.halves, beside=gate))

    def attention_parameters(self, width: int, q_width: int, kv_width: int, head_dim: int) -> tuple[Parameters, Parameters]:
        before, behind = super().attention_parameters(width, q_width, kv_width, head_dim)
        return layout.joined(before, layout.linear("self_attn.q_proj", 2 * q_width, width, self._traits.qkv_bias)), behind

    @property
    def _gate_width(self) -> int:
        return self.spec.heads * self.spec.head_dim

    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return gated_sigmoid(*self._gate_and_attended(hidden, weights, given))

    def before_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return torch.cat((hidden, *self._gate_and_attended(hidden, weights, given)), dim=-1)

    def behind_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        hidden, gate, out = hidden.split((self.spec.width, self._gate_width, self._gate_width), dim=-1)
        return self.with_attended(hidden, gated_sigmoid(gate.contiguous(), out.contiguous()), weights)

    def _gate_and_attended(self, hidden: Tensor, weights: Weights, given: Given) -> tuple[Tensor, Tensor]:
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        both, k, v = self.projected(x, weights)
        width = self.spec.head_dim
        q, gate = (each.contiguous() for each in tensor_ops.split_heads(both, 2 * width).chunk(2, dim=-1))
        q, k = self.queries_and_keys_normed(q, tensor_ops.split_heads(k, width), weights)
        out = given.attend(NewTokens(q, k, tensor_ops.split_heads(v, width), self._rotary, x))
        return gate.flatten(-2), out

    # -- the delta rule --------------------------------------------------------------------------------------------------

    def _delta_layer(self, config: Config, origin: Origin) -> LayerSpec:
        width, own = config.hidden_size, self._delta
        parameters = layout.joined(
            self.norm_parameters(width, self._traits.norms.before_attention),
            self.projections(width),
            layout.wide(KERNEL, own.convolved, 1, own.mixed),
            layout.wide(f"{NAME}.dt_bias", own.heads),
            layout.wide(f"{NAME}.A_log", own.heads),
            layout.norm(f"{NAME}.norm", own.value_width, bias=False),
            layout.linear(f"{NAME}.out_proj", width, own.values, bias=False),
        )
        passing = 3 * own.convolved + 4 * own.values + 4 * own.heads
        return layout.stateful(DeltaNet.delta, parameters, own.states, width, passing, origin)

    def projections(self, width: int) -> Parameters:
        """The matrices that make what the delta rule gets."""
        own = self._delta
        sizes = {"qkv": own.convolved, "z": own.values, "b": own.heads, "a": own.heads}
        return layout.joined(*(layout.linear(f"{NAME}.in_proj_{part}", size, width, False) for part, size in sizes.items()))

    def asked_of_states(self, x: Tensor, weights: Weights) -> Projected:
        return Projected(*tensor_ops.linears(x, weights, *(f"{NAME}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))))

    def delta(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        own, needed = self._delta, tensor_ops.needed
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        qkv, gate, beta, step = self.asked_of_states(x, weights)
        mixed = given.states.convolve(CONVOLVED, qkv, needed(weights, KERNEL))
        q, k, v = mixed.split((own.keys, own.keys, own.values), dim=-1)
        q, k = q.unflatten(-1, (own.key_heads, -1)), k.unflatten(-1, (own.key_heads, -1))
        rates, of_step = needed(weights, f"{NAME}.A_log"), needed(weights, f"{NAME}.dt_bias")
        decay = step_sizes(step, of_step, rates, are_logs=self._rates_are_logs)
        v = v.unflatten(-1, (own.heads, -1))
        out = given.states.correct(MATRIX, q, k, v, decay, gated_sigmoid(beta), self._is_tiled)
        out = gated_norm(out, gate.unflatten(-1, (own.heads, -1)), needed(weights, f"{NAME}.norm.weight"), self._eps)
        return self.added(tensor_ops.linear(out.flatten(-2), weights, f"{NAME}.out_proj"), hidden)


class Qwen35(DeltaNet):
    """This is Qwen3.6 as well: its configs have the same name. In GGUF files rates are no logarithms, and a key head serves
    value heads that are as far apart as there are key heads."""

    gguf = OF_FILES


class DeltaNetMoe(DeltaNet, Qwen2Moe):
    usual: ClassVar[Mapping[str, Usual]] = {}  # it reads more than the class above
    bounds: ClassVar[Bounds] = {**Qwen2Moe.bounds, **SIZES}
    gguf: ClassVar[GgufArchitecture | None] = None

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return DeltaNet.traits_of(config)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        experts, chosen, inner = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        shared = config.shared_expert_intermediate_size
        return Mixture(experts, chosen, inner, sums_to_one=True, shared=shared, shared_name=SHARED)


class Qwen35Moe(DeltaNetMoe):
    gguf = OF_MIXTURES
    bounds: ClassVar[Bounds] = {**DeltaNetMoe.bounds, "intermediate_size": Whole(MOST_WIDTH)}  # its configs have none

    @staticmethod
    def inner_of(config: Config) -> int:
        inner: int = config.moe_intermediate_size
        return inner

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return True


class Qwen3Next(DeltaNetMoe):
    """All that a key head has to do with comes out of two matrices, head by head. In GGUF files the first is two, in which
    queries, keys and values of all heads lie side by side."""

    gguf = replace(
        OF_MIXTURES,
        name="qwen3next",
        tensors={**OF_MIXTURES.tensors, "ssm_ba.weight": f"{NAME}.in_proj_ba.weight"},
        keys={
            **{
                key: said for key, said in OF_MIXTURES.keys.items() if key not in ("value_heads_are_tiled", "intermediate_size")
            },
            "projections_are_apart": lambda said: True,
        },
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._are_apart = bool(getattr(config, "projections_are_apart", False))
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return replace(DeltaNetMoe.mixture_of(config), sums_to_one=bool(config.norm_topk_prob))

    def projections(self, width: int) -> Parameters:
        own = self._delta
        both = {"qkv": own.convolved, "z": own.values} if self._are_apart else {"qkvz": own.convolved + own.values}
        sizes = {**both, "ba": 2 * own.heads}
        return layout.joined(*(layout.linear(f"{NAME}.in_proj_{part}", size, width, False) for part, size in sizes.items()))

    def asked_of_states(self, x: Tensor, weights: Weights) -> Projected:
        own, served = self._delta, self._delta.heads // self._delta.key_heads
        if self._are_apart:
            qkv, gate, ba = tensor_ops.linears(x, weights, *(f"{NAME}.in_proj_{part}" for part in ("qkv", "z", "ba")))
            return Projected(qkv, gate, *_of_heads(ba, own.key_heads, (served, served)))
        qkvz, ba = tensor_ops.linears(x, weights, f"{NAME}.in_proj_qkvz", f"{NAME}.in_proj_ba")
        widths = own.key_width, own.key_width, served * own.value_width, served * own.value_width
        q, k, v, gate = _of_heads(qkvz, own.key_heads, widths)
        beta, step = _of_heads(ba, own.key_heads, (served, served))
        qkv = q.new_empty(*q.shape[:-1], own.convolved)
        for there, part in zip(qkv.split((own.keys, own.keys, own.values), dim=-1), (q, k, v)):
            there.copy_(part)
        return Projected(qkv, gate, beta, step)


def _of_heads(x: Tensor, heads: int, widths: Sequence[int]) -> list[Tensor]:
    """Parts of these widths, which each head has side by side, with those of all heads side by side."""
    return [part.flatten(-2).contiguous() for part in x.unflatten(-1, (heads, -1)).split(list(widths), dim=-1)]
