"""Kimi-Linear: a relative of DeepSeek-V3 with Kimi delta attention (KDA) in most blocks. It is a gated delta rule by which
each value of a key fades by itself. Queries, keys and values pass a short convolution each. What comes out is normalised, and
has a gate. Latent attention in the other blocks rotates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BY_SIGMOID,
    DENSE_BLOCKS,
    GATING,
    KV_HEADS,
    QKV,
    WEIGHTS_SCALE,
    GgufModel,
    weights,
)
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, LayerSpec, OfToken, StateTensor
from h2o_flexgen.kernels.operations import gated_sigmoid, step_sizes
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import (
    CONVOLVED_TOKENS,
    FULL,
    HEADS,
    LINEAR,
    Bounds,
    Config,
    Whole,
    refuse_beyond,
    refuse_short,
)
from h2o_flexgen.models.deepseek import BEST_OF_GROUP, GROUP_COUNT, GROUPED, GROUPS_CHOSEN, IN_GGUF, SPARSE, GlmMoeLite
from h2o_flexgen.models.deepseek import KEYS as OF_LATENTS
from h2o_flexgen.models.glm import CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.latent import LatentAttention, Latents
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import UNROTATED, AttentionFunctions, Traits
from h2o_flexgen.models.mistral import PATTERNS_OF_MIXTRAL
from h2o_flexgen.models.mixture import ExpertGroups, Mixture
from h2o_flexgen.models.qwen_next import MATRIX, DeltaHeads
from h2o_flexgen.models.rotary import DEFAULT, Rope

PARTS = "q", "k", "v"
INTO = tuple(f"self_attn.{part}_proj" for part in (*PARTS, "b", "f_a", "g_a"))  # what is made of hidden states at once
FADING, GATE, OUT, NORM = (f"self_attn.{part}" for part in ("f_b_proj", "g_b_proj", "o_proj", "o_norm"))
KERNELS = {part: f"self_attn.{part}_conv1d.weight" for part in PARTS}
RATES, BIASES = "self_attn.A_log", "self_attn.dt_bias"
UNTURNED = Rope(DEFAULT, 10000.0, 1.0, {})  # whatever a config says: nothing is rotated
SIZES: Bounds = {
    "linear_num_heads": Whole(HEADS),
    "linear_head_dim": Whole(MOST_HEAD_DIM),
    "linear_conv_kernel_dim": CONVOLVED_TOKENS,
}
OF_RULE = {
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in PARTS},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": NORM,
}


def _kinds(said: GgufModel) -> list[str]:
    return [FULL if heads else LINEAR for heads in said.numbers_of_blocks(KV_HEADS) or ()]


def _kinds_of_mlps(said: GgufModel) -> list[str]:
    dense = said.whole(DENSE_BLOCKS, 0)
    return [SPARSE if block >= dense else "dense" for block in range(said.blocks)]


class KimiLinear(LatentAttention, CorrectedMixture):
    bounds: ClassVar[Bounds] = {
        **LatentAttention.bounds,
        **{key: bound for key, bound in GROUPED.items() if key != "first_k_dense_replace"},
        **SIZES,
    }
    called: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "model_max_length",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
    }
    patterns: ClassVar[Mapping[str, str]] = {**PATTERNS_OF_MIXTRAL, r"\.block_sparse_moe\.": ".mlp."}
    gguf = replace(
        IN_GGUF,
        name="kimi-linear",
        tensors={
            **IN_GGUF.tensors,
            **CORRECTION_IN_FILES,
            **weights(QKV, OF_RULE),
            "ssm_dt.bias": BIASES,
            "ssm_a": RATES,
        },
        keys={
            **{key: OF_LATENTS[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")},
            **{key: OF_LATENTS[key] for key in ("v_head_dim", "n_shared_experts", "moe_intermediate_size")},
            "routed_scaling_factor": OF_LATENTS["routed_scaling_factor"],
            "num_local_experts": lambda said: said.experts,
            "n_group": lambda said: said.whole(GROUP_COUNT, 1),
            "topk_group": lambda said: said.whole(GROUPS_CHOSEN, 1),
            "layer_types": _kinds,
            "mlp_layer_types": _kinds_of_mlps,
            "linear_num_heads": lambda said: said.whole("attention.head_count"),
            "linear_head_dim": lambda said: said.whole("kda.head_dim"),
            "linear_conv_kernel_dim": lambda said: said.whole("ssm.conv_kernel"),
            "rates_are_whole": lambda said: True,
        },
        heeds={GATING: (BY_SIGMOID,), DENSE_BLOCKS: None, WEIGHTS_SCALE: None, GROUP_COUNT: None},
        sums_to_one=True,
        is_interleaved=False,
        more_of_rope=None,
        convolutions=tuple(KERNELS.values()),
        between_ones=(RATES,),
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_short(config, "layer_types")
        refuse_beyond(config, SIZES)
        if unknown := {*config.layer_types} - {LINEAR, FULL}:
            raise ValueError(f"layer_types has {shown(unknown.pop())}, which is not known; give another model")
        if not getattr(config, "mla_use_nope", True):
            raise ValueError("mla_use_nope is False, but attention of kimi_linear rotates nothing here; give another model")
        tensor_ops.refuse_other_than_silu(self.activation_of(config))
        heads, width = config.linear_num_heads, config.linear_head_dim
        self._delta = DeltaHeads(heads, heads, width, width, config.linear_conv_kernel_dim)
        self._rates_are_logs = not getattr(config, "rates_are_whole", False)  # they are in all but GGUF files
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, query_scale=Latents.of(config).query_scale(UNTURNED))

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        experts, inner = config.num_local_experts, config.moe_intermediate_size
        groups, factor = ExpertGroups.of(config, experts, BEST_OF_GROUP), float(config.routed_scaling_factor)
        chosen, shared = config.num_experts_per_tok, inner * (config.n_shared_experts or 0)
        return Mixture(experts, chosen, inner, bool(config.norm_topk_prob), shared, groups=groups, factor=factor)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return GlmMoeLite.has_experts(config, block)

    def ropes_of(self, config: Config) -> list[Rope]:
        return [UNTURNED]

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return UNROTATED

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        if config.layer_types[block] == FULL:
            return super().mixing_layer(config, block, origin)
        width, own = config.hidden_size, self._delta
        sizes = dict(zip(INTO, (*[own.keys] * len(PARTS), own.heads, own.key_width, own.key_width)))
        parameters = layout.joined(
            self.norm_parameters(width, self._traits.norms.before_attention),
            *(layout.linear(part, size, width, bias=False) for part, size in sizes.items()),
            *(layout.linear(part, own.keys, own.key_width, bias=False) for part in (FADING, GATE)),
            *(layout.wide(kernel, own.keys, 1, own.mixed) for kernel in KERNELS.values()),
            layout.wide(BIASES, own.keys),
            layout.wide(RATES, 1, 1, own.heads, 1),
            layout.norm(NORM, own.value_width, bias=False),
            layout.linear(OUT, width, own.values, bias=False),
        )
        passing = 16 * own.keys + 2 * (own.heads + own.key_width)
        return layout.stateful(KimiLinear.delta, parameters, self._states, width, passing, origin)

    @property
    def _states(self) -> tuple[StateTensor, ...]:
        own, of_heads = self._delta, OfToken((self._delta.heads, self._delta.key_width))
        inputs = (StateTensor(part, (own.mixed - 1, own.keys), brings=(OfToken((own.keys,)),)) for part in PARTS)
        brings = *[of_heads] * len(PARTS), of_heads._replace(is_float32=True), OfToken((own.heads,))
        return *inputs, StateTensor(MATRIX, (own.heads, own.key_width, own.value_width), brings=brings)

    def delta(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        own, needed = (self._delta.heads, -1), tensor_ops.needed
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        *parts, beta, fading, gate = tensor_ops.linears(x, weights, *INTO)
        mixed = (given.states.convolve(name, part, needed(weights, KERNELS[name])) for name, part in zip(PARTS, parts))
        q, k, v = (part.unflatten(-1, own) for part in mixed)
        fading, rates = tensor_ops.linear(fading, weights, FADING), needed(weights, RATES).flatten()
        decay = step_sizes(fading, needed(weights, BIASES), rates, are_logs=self._rates_are_logs).unflatten(-1, own)
        out = given.states.correct(MATRIX, q, k, v, decay, gated_sigmoid(beta))
        out = tensor_ops.rms_norm(out, weights, NORM, self._eps).flatten(-2)
        out = gated_sigmoid(tensor_ops.linear(gate, weights, GATE), out)
        return self.added(tensor_ops.linear(out, weights, OUT), hidden)
