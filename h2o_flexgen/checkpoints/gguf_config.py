"""The config of a GGUF file: what its metadata say of a model, in the words of a config.json."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

from h2o_flexgen.checkpoints.gguf_format import Gguf, GgufTensor
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION_CAP,
    BY_SOFTMAX,
    CLIP,
    DENSE_BLOCKS,
    GATING,
    KV_HEADS,
    LAYER_EPS,
    LOG_MULTIPLIER,
    LOGIT_CAP,
    NEAR_THETA,
    NEAR_VALUES,
    NEAR_WIDTH,
    NORMED,
    RMS_EPS,
    ROTATED,
    TEMPERATURE,
    WEIGHTS_SCALE,
    WINDOW,
    GgufArchitecture,
    GgufModel,
    Heeded,
)
from h2o_flexgen.core.hints import reason
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, share_of

EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
TOKENS = "tokenizer.ggml.tokens"
FLOAT32 = "float32"
# of a config: a GGUF file may say them, and a folder only where transformers reads them, too
OWN_KEYS = (
    *("rope_interleave", "rope_divisors", "experts_apart", "norms_are_whole", "qkv_apart"),
    *("rates_are_whole", "value_heads_are_tiled", "projections_are_apart", "mlps_are_apart"),
)

# keys behind the name of the architecture
SCALING = "rope.scaling"
LINEAR, YARN = "linear", "yarn"
MIX = f"{SCALING}.yarn_ext_factor"

# what would change the arithmetic of a layer -> the values with which it does not
WITHOUT_EFFECT: Heeded = {
    DENSE_BLOCKS: (0,),
    "expert_group_count": (0, 1),
    GATING: (0, BY_SOFTMAX),
    WEIGHTS_SCALE: (0, 1),
    "attention.scale": (0,),
    CLIP: (0,),
    "attention.max_alibi_bias": (0,),
    TEMPERATURE: (0,),
    "attention.causal": (True,),
    ATTENTION_CAP: (0,),
    LOGIT_CAP: (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    f"{SCALING}.attn_factor": (0, 1),
    f"{SCALING}.yarn_attn_factor": (0, 1),
    LOG_MULTIPLIER: (0,),
    NEAR_THETA: (),
}


def config_in(gguf: Gguf, known: Mapping[str, GgufArchitecture]) -> dict[str, Any]:
    """What a config.json would say of the model, if it is of one of the architectures that are known, by model_type."""
    said = GgufModel.of(gguf, known)
    _refuse_other_arithmetic(said)
    heads, weighing = _heads(said), _weighing(said)
    own = {key: read(said) for key, read in said.architecture.keys.items()}
    inner = {} if "intermediate_size" in own else {"intermediate_size": said.whole("feed_forward_length")}
    return {
        "model_type": said.model_type,
        "hidden_size": said.whole("embedding_length"),
        **inner,
        "num_hidden_layers": said.blocks,
        "max_position_embeddings": said.whole("context_length"),
        "rms_norm_eps": said.number(RMS_EPS, 0.0 if said.has(LAYER_EPS) else None),
        "hidden_act": "silu",
        "vocab_size": _vocabulary(said),
        "tie_word_embeddings": HEAD not in said.tensors,
        "attention_bias": _has_bias(said, ".attn_"),
        "mlp_bias": _has_bias(said, ".ffn_"),
        "rope_interleave": said.architecture.is_interleaved,
        **heads,
        **({"num_experts_per_tok": said.whole("expert_used_count")} if said.experts else {}),
        **weighing,
        **_window(said),
        **_rope(said, heads["head_dim"]),
        **own,
        **_ids(said),
    }


def _refuse_other_arithmetic(said: GgufModel) -> None:
    """Refuses features that no layer here has."""
    for name, harmless in {**WITHOUT_EFFECT, **said.architecture.heeds}.items():
        if said.has(name) and harmless is not None and said.value(name) not in harmless:
            raise said.refusal(name, "which the layers here do not do; give another model")


def _has_bias(said: GgufModel, part: str) -> bool:
    return any(name.endswith(".bias") and part in name for name in said.tensors)


def _heads(said: GgufModel) -> dict[str, int]:
    heads = said.whole("attention.head_count")
    if said.architecture.has_latents:
        return {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": said.whole(ROTATED)}
    width = said.whole("attention.key_length", said.whole("embedding_length") // max(heads, 1))
    for name in ("attention.value_length", *([] if said.architecture.rotates_parts else [ROTATED])):
        if said.whole(name, width) != width:
            raise said.refusal(name, f"but heads of {width} values; layers in which the two differ are not read")
    kv_heads = said.whole_of_each(KV_HEADS, heads)
    if said.architecture.near_heads:
        return {"num_attention_heads": heads, **_heads_by_kind(said, kv_heads, width)}
    if said.architecture.has_states:
        kv_heads = [count for count in kv_heads if count] or [heads]
    if len({*kv_heads}) > 1:
        raise said.refusal(KV_HEADS, "layers with unlike numbers of KV heads, which are not read; give another model")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads[0], "head_dim": width}


def _heads_by_kind(said: GgufModel, kv_heads: list[int], width: int) -> dict[str, int]:
    """The KV heads of layers with a window, and of the others."""
    near_width = said.whole(NEAR_WIDTH, width)
    if said.whole(NEAR_VALUES, near_width) != near_width:
        raise said.refusal(NEAR_VALUES, f"but keys of {near_width} values; layers in which the two differ are not read")
    slides = said.sliding_blocks(6) if len(kv_heads) > 1 else [True]
    near, far = ({count for count, own in zip(kv_heads, slides) if own is kind} for kind in (True, False))
    if max(len(near), len(far)) > 1:
        raise said.refusal(KV_HEADS, "unlike numbers in layers of one kind, which are not read; give another model")
    (near_count,), (far_count,) = near or far, far or near
    near_ones = {"num_key_value_heads": near_count, "head_dim": near_width}
    return {**near_ones, "num_global_key_value_heads": far_count, "global_head_dim": width}


def _weighing(said: GgufModel) -> dict[str, bool]:
    """How the experts of a token are weighed."""
    if not said.experts:
        return {}
    sums_to_one = said.architecture.sums_to_one
    if sums_to_one is None:
        sums_to_one = said.flag(NORMED, False)
    if said.has(NORMED) and said.value(NORMED) is not sums_to_one:
        raise said.refusal(NORMED, f"which is not how {said.model_type} weighs its experts; give another model")
    if said.whole(DENSE_BLOCKS, 0) >= said.blocks:
        raise said.refusal(DENSE_BLOCKS, f"and it has {said.blocks} blocks, so none with experts; give another file")
    return {"norm_topk_prob": sums_to_one}


def _window(said: GgufModel) -> dict[str, Any]:
    """The window of all layers, unless the architecture has keys of its own for that."""
    window = said.whole(WINDOW, 0)
    return {"sliding_window": window or None, "max_window_layers": 0}


def _rope(said: GgufModel, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": said.number("rope.freq_base", 10000.0), "rope_type": "default"}
    if said.architecture.rotates_parts:
        found["partial_rotary_factor"] = share_of(said.whole(ROTATED, head_dim), max(head_dim, 1))
    divisors = said.tensors.get(ROPE_DIVISORS)
    kind = said.metadata.text(said.key(f"{SCALING}.type"), LINEAR)
    if kind not in ("none", LINEAR, YARN):
        raise said.refusal(f"{SCALING}.type", f"a scaling of positions that is not read; none, {LINEAR} and {YARN} are")
    factor = 0.0 if kind == "none" else said.number(f"{SCALING}.factor", said.number("rope.scale_linear", 0.0))
    if factor not in (0.0, 1.0):
        _refuse_other_mix(said, kind)
        if divisors is not None:
            raise said.refusal(f"{SCALING}.factor", f"and {ROPE_DIVISORS} too; positions that are scaled twice are not read")
        found |= {"rope_type": kind, "factor": factor, **(_yarn(said) if kind == YARN else {})}
    if (near := said.architecture.near_rope) is not None:
        return {"rope_parameters": {"full_attention": found, "sliding_attention": near(said)}}
    if divisors is None:
        return {"rope_parameters": found}
    count = min(head_dim, MOST_HEAD_DIM) // 2  # wider heads are refused later, and this many are read at once
    return {"rope_parameters": found, "rope_divisors": divisors_in(divisors, count)}


def _refuse_other_mix(said: GgufModel, kind: str) -> None:
    """Refuses a file if its kind of scaling and its share of YaRN's mix contradict each other. In ggml the share alone decides:
    with 0 scaling is linear, whatever it is called, and with 1 it is YaRN. llama.cpp takes the share from the kind, and from
    files of a few architectures only, which are not read here. So two that differ have no known meaning. Below 0 the kind
    decides; and where nothing is scaled a mix of the same with the same is harmless."""
    of_kind = 1.0 if kind == YARN else 0.0
    share = said.number(MIX, of_kind)
    if share >= 0 and share != of_kind:
        raise said.refusal(MIX, f"but positions are scaled by the kind {kind}, which goes with {of_kind:g}; give another file")


def _yarn(said: GgufModel) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": said.whole(f"{SCALING}.original_context_length", said.whole("context_length")),
        "beta_fast": said.number(f"{SCALING}.yarn_beta_fast", 32.0),
        "beta_slow": said.number(f"{SCALING}.yarn_beta_slow", 1.0),
        "truncate": said.architecture.rounds_waves,
        **({} if said.architecture.more_of_rope is None else said.architecture.more_of_rope(said)),
    }


def divisors_in(tensor: GgufTensor, count: int) -> list[float]:
    """What each frequency is divided by: so llama.cpp writes down the scaling of LLaMA 3."""
    if tensor.format != FLOAT32 or tensor.shape != (count,):
        shape = f"the shape {list(tensor.shape)} and the type {tensor.format}"
        raise ValueError(f"{tensor.file} has {tensor.name} with {shape} instead of {count} values in {FLOAT32}; {AGAIN}")
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            found = array("f", file.read(tensor.nbytes))
    except OSError as error:
        raise ValueError(f"{tensor.file} cannot be read: {reason(error)}") from error
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _vocabulary(said: GgufModel) -> int:
    """The rows of the table, of which a tokenizer may leave some unused."""
    metadata, table = said.metadata, said.tensors.get(EMBEDDING)
    if table is None or len(table.shape) != 2:
        what = "has no" if table is None else "has no matrix as"
        raise ValueError(f"{metadata.path} {what} {EMBEDDING}, the table of its tokens; {AGAIN}")
    tokens = len(metadata.texts(TOKENS, ()))
    if tokens > table.shape[0]:
        raise ValueError(f"{metadata.path} names {tokens} tokens, but its table has rows for {table.shape[0]}; {AGAIN}")
    return table.shape[0]


def _ids(said: GgufModel) -> dict[str, int | None]:
    """Tokens with a meaning; None where a file has none, for the library would put in some of its own."""
    metadata, names = said.metadata, {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {f"{short}_token_id": f"tokenizer.ggml.{name}_token_id" for short, name in names.items()}
    return {name: metadata.whole(key) if key in metadata else None for name, key in keys.items()}
