"""Nemotron-H and Nemotron 3: each block is one thing alone: a scan of Mamba-2, an attention that rotates nothing, an mlp
without a gate, or such mlps as experts. Steps of scans have the bounds of `time_step_limit`, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from h2o_flexgen.checkpoints.gguf_config import HEAD
from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    EXPERTS,
    FIRST_NORM,
    KV_HEADS,
    NORMED,
    RMS_EPS,
    ROUTER,
    UNGATED_MLP,
    WEIGHTS_SCALE,
    GgufArchitecture,
    GgufModel,
    shared_expert,
    weights,
)
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, LayerSpec
from h2o_flexgen.models.config_values import (
    BLOCKS,
    CONVOLVED_TOKENS,
    FULL,
    HEADS,
    MOST_EXPERTS,
    Bounds,
    Config,
    Flag,
    Number,
    Whole,
)
from h2o_flexgen.models.glm import CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import UNROTATED, AttentionFunctions, NormPlaces, Traits
from h2o_flexgen.models.mamba import IN_FILES, KERNEL, KEYS, SCAN, VECTORS, Mamba, ScanBiases, ScanHeads
from h2o_flexgen.models.mixture import INTO_LATENT, OUT_OF_LATENT, SHARED, ExpertGroups, Mixture

MLP, MOE = "mlp", "moe"  # what configs call blocks without a scan and without attention
ONE_NORM = NormPlaces(before_mlp="input_layernorm")  # a block has one
BEST_OF_GROUP = 2  # say what a group of experts ranks by
INNER = "feed_forward_length"  # a key of metadata
TIED_IN_FILE = "tied_in_file"  # a key of configs of GGUF files


def _kinds(said: GgufModel) -> list[str]:
    """The kind of each block: those with neither KV heads nor an mlp have a scan."""
    heads, inner = said.numbers_of_blocks(KV_HEADS) or (), said.numbers_of_blocks(INNER) or ()
    mlp = MOE if said.experts else MLP
    return [FULL if kv_heads else mlp if width else SCAN for kv_heads, width in zip(heads, inner)]


class NemotronH(Mamba, CorrectedMixture):
    bounds: ClassVar[Bounds] = {
        "num_hidden_layers": Whole(BLOCKS),  # the list of their kinds says how many there are
        **dict.fromkeys(("mamba_num_heads", "n_groups"), Whole(HEADS)),
        **dict.fromkeys(("mamba_head_dim", "ssm_state_size"), Whole(MOST_HEAD_DIM)),
        "conv_kernel": CONVOLVED_TOKENS,
        "layer_norm_epsilon": Number(0.0, 1.0),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), Whole(MOST_WIDTH)),
        **dict.fromkeys(("use_conv_bias", "use_bias"), Flag()),
        **dict.fromkeys(("n_group", "topk_group"), Whole(MOST_EXPERTS, may_be_zero=True)),
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"^backbone\.": "model.",
        r"^model\.embeddings\.": "model.embed_tokens.",
        r"^model\.norm_f\.": "model.norm.",
        r"^(model\.layers\.\d+)\.norm\.": r"\1.input_layernorm.",
        r"\.mixer\.([qkvo])_proj\.": r".self_attn.\1_proj.",
        r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts|fc[12]_latent_proj)\b": r".mlp.\1",
        r"\.mixer\.": ".mamba.",
    }
    gguf = GgufArchitecture(
        "nemotron_h",
        {
            **weights(ATTENTION, FIRST_NORM, UNGATED_MLP, EXPERTS, ROUTER, shared_expert(SHARED)),
            **weights({"ffn_latent_down": INTO_LATENT, "ffn_latent_up": OUT_OF_LATENT}),
            **CORRECTION_IN_FILES,
            **IN_FILES,
        },
        keys={
            "mamba_num_heads": KEYS["mamba_n_heads"],
            "n_groups": KEYS["mamba_n_groups"],
            "mamba_head_dim": lambda said: said.whole("ssm.inner_size") // max(1, said.whole("ssm.time_step_rank")),
            "ssm_state_size": KEYS["mamba_d_state"],
            "conv_kernel": KEYS["mamba_d_conv"],
            "use_conv_bias": KEYS["mamba_conv_bias"],
            "use_bias": lambda said: False,
            "rates_are_whole": KEYS["rates_are_whole"],
            TIED_IN_FILE: lambda said: HEAD not in said.tensors,
            "mlp_hidden_act": lambda said: "relu2",
            "mamba_hidden_act": lambda said: "silu",
            "layer_norm_epsilon": lambda said: said.number(RMS_EPS),
            "layers_block_type": _kinds,
            "intermediate_size": lambda said: max(said.whole_of_each(INNER, 0)),
            "n_routed_experts": lambda said: said.experts or 1,
            "num_experts_per_tok": lambda said: said.whole("expert_used_count", 1),
            "norm_topk_prob": lambda said: said.flag(NORMED, True),
            "moe_intermediate_size": lambda said: said.whole("expert_feed_forward_length", 1),
            "moe_shared_expert_intermediate_size": lambda said: said.whole("expert_shared_feed_forward_length", 1),
            "routed_scaling_factor": lambda said: said.number(WEIGHTS_SCALE, 0.0) or 1.0,
            "n_group": lambda said: said.whole("expert_group_count", 1),
            "topk_group": lambda said: said.whole("expert_group_used_count", 1),
            "moe_latent_size": lambda said: said.whole("moe_latent_size", 0) or None,
        },
        heeds={WEIGHTS_SCALE: None, "expert_group_count": None},
        has_experts=None,
        other_names=("nemotron_h_moe",),
        convolutions=(KERNEL,),
        vectors=VECTORS,
        has_states=True,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if unknown := {*config.layers_block_type} - {SCAN, FULL, MLP, MOE}:
            raise ValueError(f"layers_block_type has {shown(min(unknown))}, which is not known; give another model")
        if not 0 < len(config.layers_block_type) <= BLOCKS:
            raise ValueError(f"layers_block_type names {len(config.layers_block_type)} blocks; download the model again")
        width, latent = config.hidden_size, getattr(config, "moe_latent_size", None)
        if (width + (latent or 0)) % 2:  # fp32 follows them in 16 bits
            told = f"hidden_size is {width} and moe_latent_size {latent}, which are odd together"
            raise ValueError(f"{told}; give another model")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(mlp_bias=config.mlp_bias, gated=False, norms=ONE_NORM)

    @staticmethod
    def ties_head(config: Config) -> bool:
        """transformers ties none, whatever a config says; a file of llama.cpp may leave out the head."""
        return bool(getattr(config, TIED_IN_FILE, False))

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.mlp_hidden_act
        return name

    @classmethod
    def activation_of_scan(cls, config: Config) -> str:
        name: str = config.mamba_hidden_act
        return name

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_epsilon
        return eps

    @staticmethod
    def scan_of(config: Config) -> ScanHeads:
        heads, groups = config.mamba_num_heads, config.n_groups
        return ScanHeads.checked(heads, groups, config.mamba_head_dim, config.ssm_state_size, config.conv_kernel)

    @staticmethod
    def biases_of(config: Config) -> ScanBiases:
        return ScanBiases(bool(config.use_bias), bool(config.use_conv_bias), bool(config.use_bias))

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        sizes = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
        groups, factor = ExpertGroups.of(config, config.n_routed_experts, BEST_OF_GROUP), float(config.routed_scaling_factor)
        shared, latent = config.moe_shared_expert_intermediate_size, getattr(config, "moe_latent_size", None) or 0
        return Mixture(*sizes, shared, groups=groups, factor=factor, latent=latent)

    @staticmethod
    def attends_in(config: Config, block: int) -> bool:
        kind: str = config.layers_block_type[block]
        return kind == FULL

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        kind: str = config.layers_block_type[block]
        return kind == MOE

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return UNROTATED

    def layers_of_block(self, config: Config, block: int, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        if config.layers_block_type[block] in (MLP, MOE):
            return self.behind_attention(config, sep_layer, origin)
        return [self.mixing_layer(config, block, origin)]
