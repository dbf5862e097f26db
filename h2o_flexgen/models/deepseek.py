"""DeepSeek-V2 and V3: latent attention, and mixtures beside an mlp that all tokens pass through. Routers choose groups of
experts first. The first blocks have a single mlp. GLM-4.7-Flash is V3 with a list of which blocks have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.checkpoints.stored_architecture import (
    BEHIND_ATTENTION,
    BY_SIGMOID,
    BY_SOFTMAX,
    DENSE_BLOCKS,
    EXPERTS,
    FIRST_NORM,
    GATING,
    LOG_MULTIPLIER,
    MLP,
    ROTATED,
    ROUTER,
    WEIGHTS_SCALE,
    GgufArchitecture,
    GgufModel,
    Said,
    shared_expert,
    weights,
)
from h2o_flexgen.core.hints import shown
from h2o_flexgen.models.config_values import MOST_EXPERTS, Bounds, Config, Flag, Number, Whole
from h2o_flexgen.models.glm import CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.latent import INTO_KEYS, INTO_VALUES, OF_LATENTS, LatentAttention, Latents
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.mixture import NO_GROUPS, SHARED, ExpertGroups, Mixture, MixtureOfExperts
from h2o_flexgen.models.rotary import Rope


def stretch(said: GgufModel) -> dict[str, float]:
    """How YaRN makes scores larger: a file has a tenth of it."""
    if not said.has(LOG_MULTIPLIER):
        raise ValueError(f"{said.metadata.path} scales positions by YaRN and does not say {said.key(LOG_MULTIPLIER)}; {AGAIN}")
    share = round(10 * said.number(LOG_MULTIPLIER), 5)  # files have it in float32
    return {"mscale": share, "mscale_all_dim": share}


GROUP_COUNT, GROUPS_CHOSEN = "expert_group_count", "expert_group_used_count"
# A router, its experts -> their groups, and those that are chosen: as published, for older files do not say it.
OF_OLDER_FILES = {(BY_SOFTMAX, 160): (8, 3), (BY_SIGMOID, 256): (8, 4)}


def groups_of(said: GgufModel) -> tuple[int, int]:
    """The groups of experts, and those that are chosen."""
    if said.has(GROUP_COUNT):
        return said.whole(GROUP_COUNT), said.whole(GROUPS_CHOSEN, 1)
    return OF_OLDER_FILES.get((said.whole(GATING, 0) or BY_SOFTMAX, said.experts), (1, 1))


WIDTHS, RANK = "attention.key_length_mla", "attention.kv_lora_rank"
KEYS: dict[str, Said] = {
    "kv_lora_rank": lambda said: said.whole(RANK),
    "q_lora_rank": lambda said: said.whole("attention.q_lora_rank", 0) or None,
    "qk_rope_head_dim": lambda said: said.whole(ROTATED),
    "qk_nope_head_dim": lambda said: said.whole(WIDTHS, said.whole("attention.key_length")) - said.whole(ROTATED),
    "v_head_dim": lambda said: said.whole("attention.value_length_mla", said.whole("attention.value_length")),
    "n_routed_experts": lambda said: said.experts,
    "n_shared_experts": lambda said: said.whole("expert_shared_count", 0) or None,
    "first_k_dense_replace": lambda said: said.whole(DENSE_BLOCKS, 0),
    "moe_intermediate_size": lambda said: said.expert_width,
    "routed_scaling_factor": lambda said: said.number(WEIGHTS_SCALE, 0.0) or 1.0,
    "n_group": lambda said: groups_of(said)[0],
    "topk_group": lambda said: groups_of(said)[1],
    "num_mtp_layers": lambda said: 0,
}
LIKE_LLAMA = {**FIRST_NORM, "ffn_norm": BEHIND_ATTENTION}
IN_GGUF = GgufArchitecture(
    "deepseek2",
    weights(OF_LATENTS, MLP, EXPERTS, ROUTER, shared_expert(SHARED), LIKE_LLAMA),
    KEYS,
    heeds={DENSE_BLOCKS: None, WEIGHTS_SCALE: None, LOG_MULTIPLIER: None, GROUP_COUNT: None},
    has_experts=True,
    is_interleaved=True,
    rotates_parts=True,
    more_of_rope=stretch,
    of_heads=(f"{INTO_KEYS}.weight", f"{INTO_VALUES}.weight"),
    has_latents=True,
)

GREEDY, OF_GROUPS = "greedy", "group_limited_greedy"
BEST_OF_GROUP = 2  # say in V3 what a group ranks by
GROUPED: Bounds = {
    "n_group": Whole(MOST_EXPERTS, may_be_zero=True),
    "topk_group": Whole(MOST_EXPERTS, may_be_zero=True),
    "n_shared_experts": Whole(MOST_EXPERTS),
    "first_k_dense_replace": Number(0.0, 1e6),
}


class DeepSeek(LatentAttention, MixtureOfExperts):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {**LatentAttention.bounds, **GROUPED}

    @staticmethod
    def traits_of(config: Config) -> Traits:
        scale = Latents.of(config).query_scale(Rope.of(config))
        return Traits(config.attention_bias, config.attention_bias, query_scale=scale)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return block >= int(config.first_k_dense_replace)


class DeepSeekV2(DeepSeek):
    rotates_neighbours = routes_wide = True
    gguf = replace(
        IN_GGUF,
        keys={**KEYS, "topk_method": lambda said: OF_GROUPS if groups_of(said)[0] > 1 else GREEDY},
        heeds={**IN_GGUF.heeds, GATING: (0, BY_SOFTMAX)},
        sums_to_one=False,
        routers=(0, BY_SOFTMAX),
    )

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, method = config.moe_intermediate_size, config.topk_method
        if method not in (GREEDY, OF_GROUPS):
            raise ValueError(f"topk_method is {shown(method)}; {GREEDY} and {OF_GROUPS} are supported; give another model")
        if getattr(config, "mlp_bias", False):
            raise ValueError("mlp_bias is True, but matrices of experts have no biases here; give another model")
        groups = ExpertGroups.of(config, config.n_routed_experts, 1) if method == OF_GROUPS else NO_GROUPS
        sizes = config.n_routed_experts, config.num_experts_per_tok, inner
        shared, factor = inner * (config.n_shared_experts or 0), float(config.routed_scaling_factor)
        return Mixture(*sizes, sums_to_one=False, shared=shared, groups=groups, factor=factor)


class DeepSeekV3(DeepSeek, CorrectedMixture):
    bounds: ClassVar[Bounds] = {**DeepSeek.bounds, "rope_interleave": Flag()}
    gguf: ClassVar[GgufArchitecture | None] = replace(
        IN_GGUF,
        tensors={**IN_GGUF.tensors, **CORRECTION_IN_FILES},
        heeds={**IN_GGUF.heeds, GATING: (BY_SIGMOID,)},
        routers=(BY_SIGMOID,),
    )

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, groups = config.moe_intermediate_size, ExpertGroups.of(config, config.n_routed_experts, BEST_OF_GROUP)
        sizes = config.n_routed_experts, config.num_experts_per_tok, inner
        shared, factor = inner * (config.n_shared_experts or 0), float(config.routed_scaling_factor)
        return Mixture(*sizes, bool(config.norm_topk_prob), shared=shared, groups=groups, factor=factor)


SPARSE = "sparse"


class GlmMoeLite(DeepSeekV3):
    gguf = None  # its files have the name of DeepSeek's, and are read as such
    bounds: ClassVar[Bounds] = {key: bound for key, bound in DeepSeekV3.bounds.items() if key != "first_k_dense_replace"}

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        kinds, blocks = config.mlp_layer_types, config.num_hidden_layers
        if len(kinds) < blocks:
            raise ValueError(f"mlp_layer_types has {len(kinds)} entries for {blocks} blocks; download the model again")
        return bool(kinds[block] == SPARSE)
