"""Checks the sizes in a model's config.json before anything is built from them: missing sizes, values that are no numbers and
sizes beyond any model's are refused here, so that no later code divides by zero or counts to 2**62."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH

BLOCKS, HEADS, VOCAB, POSITIONS = 1 << 12, 1 << 14, 1 << 26, 1 << 30  # as with those of a width: far more than any model has
MOST_EXPERTS = 1 << 12

REQUIRED = {
    "num_hidden_layers": BLOCKS,
    "hidden_size": MOST_WIDTH,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
}
MLP_WIDTH, MLP_WIDTH_OF_OPT = "intermediate_size", "ffn_dim"
OPTIONAL = {
    "num_key_value_heads": HEADS,
    "head_dim": MOST_HEAD_DIM,
    "word_embed_proj_dim": MOST_WIDTH,
    "sliding_window": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "query_pre_attn_scalar": MOST_WIDTH,
    "moe_intermediate_size": MOST_WIDTH,
    "shared_expert_intermediate_size": MOST_WIDTH,
    "n_shared_experts": MOST_EXPERTS,
    "decoder_sparse_step": BLOCKS,
}
NONE_IF_ZERO = ("sliding_window",)
EXPERTS, CHOSEN = ("num_experts", "num_local_experts", "n_routed_experts"), "num_experts_per_tok"  # transformers reads any name
BASE, SHARE, SMALL = (1.0, 1e12), (0.0, 1.0), (0.0, 1.0)  # smallest and largest value
LIMITS, FACTORS = (0.0, 1e6), (1e-3, 1e3)
SOFTCAP = (1e-3, 1e6)
NUMBERS = {
    "rope_theta": BASE,
    "rotary_emb_base": BASE,
    "rotary_pct": SHARE,
    "partial_rotary_factor": SHARE,
    "rms_norm_eps": SMALL,
    "layer_norm_eps": SMALL,
    "routed_scaling_factor": LIMITS,
    "first_k_dense_replace": LIMITS,
    "swiglu_limit": LIMITS,
    "swiglu_alpha": FACTORS,
    "final_logit_softcapping": SOFTCAP,
    "attn_logit_softcapping": SOFTCAP,
}
EOS = "eos_token_id"
TEXT_PART, NO_PARTS = "text_config", ("quantization_config", "generation_config")


def check_config(values: Mapping[str, Any], architecture: str, name: str) -> None:
    """`values` are the contents of config.json."""
    try:
        mlp_width = MLP_WIDTH_OF_OPT if architecture == "opt" else MLP_WIDTH
        for key, most in {**REQUIRED, mlp_width: MOST_WIDTH}.items():
            _check_size(key, values.get(key), most)
        for key, most in OPTIONAL.items():
            if values.get(key) is not None and not (key in NONE_IF_ZERO and values[key] == 0):
                _check_size(key, values[key], most)
        for place in _places_of_numbers(values):
            _check_numbers(place)
        if values.get("sliding_window") == 1:
            raise ValueError("sliding_window is 1, in which a token would see itself alone")
        _check_heads(values)
        _check_experts(values)
        eos_ids_of(values.get(EOS))
    except ValueError as error:
        raise ValueError(f"the config of {shown(name)} is not valid: {error}; download the model again") from error


def what_is_unsupported(values: Mapping[str, Any]) -> str | None:
    """The setting of a config that no architecture here knows, if it has one."""
    if rank := values.get("kv_lora_rank"):
        return f"kv_lora_rank is {shown(rank)}: keys and values that are made of one latent vector are"
    groups = values.get("n_group")
    if groups not in (None, 0, 1):
        chosen = f" and topk_group {shown(values['topk_group'])}" if "topk_group" in values else ""
        return f"n_group is {shown(groups)}{chosen}: experts that are chosen by groups are"
    return None


def parts_beside_text(values: Mapping[str, Any]) -> list[str]:
    """The parts of a model that has a config for each of them; nothing for one that is its text part alone."""
    if not isinstance(values.get(TEXT_PART), Mapping):
        return []
    own = [key for key, value in values.items() if key.endswith("_config") and key != TEXT_PART and isinstance(value, Mapping)]
    named = [key for key in own if key not in NO_PARTS]
    return named or ["other parts"]


def _check_size(key: str, value: object, most: int) -> None:
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is {shown(value)}, which is no whole number from 1 to {most}")


def _places_of_numbers(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The values, and those that say how positions are rotated, by kinds of layers where these differ."""
    yield values
    for place in (values.get("rope_parameters"), values.get("rope_scaling")):
        if isinstance(place, Mapping):
            yield place
            yield from (own for own in place.values() if isinstance(own, Mapping))


def _check_numbers(values: Mapping[str, Any]) -> None:
    for key, (least, most) in NUMBERS.items():
        value = values.get(key)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise ValueError(f"{key} is {shown(value)}, which is no number from {least:g} to {most:g}")


def _check_heads(values: Mapping[str, Any]) -> None:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if values.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size {width} is no multiple of num_attention_heads {heads}")
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


def _check_experts(values: Mapping[str, Any]) -> None:
    for key in (key for key in EXPERTS if values.get(key) is not None):
        _check_size(key, values[key], MOST_EXPERTS)
        chosen = values.get(CHOSEN)
        if chosen is not None:
            _check_size(CHOSEN, chosen, values[key])


def eos_ids_of(value: object) -> frozenset[int]:
    """The tokens that end a text: an id, a list of them, or none at all."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if wrong := [one for one in ids if type(one) is not int]:
        raise ValueError(f"{EOS} is {shown(value)}: {shown(wrong[0])} is no token id; give a whole number or a list of them")
    return frozenset(ids)
