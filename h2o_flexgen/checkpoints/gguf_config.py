"""The config of a GGUF file: what its metadata say of a model, in the words of a config.json."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_flexgen.checkpoints.gguf_format import Gguf, GgufTensor
from h2o_flexgen.checkpoints.gguf_metadata import Metadata
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM

ARCHITECTURE, KIND, MODEL = "general.architecture", "general.type", "model"
EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
TOKENS = "tokenizer.ggml.tokens"
FLOAT32 = "float32"
OWN_KEYS = "rope_interleave", "rope_divisors", "experts_apart"  # transformers reads none of them: only a GGUF file may say so

# The architectures, as files name them (Mistral's models and Mixtral come as llama), and whether llama.cpp's rows are
# interleaved there: it has moved those of queries and keys so that values that are rotated together are neighbours.
IN_ORDER = "qwen2", "qwen3", "olmoe", "qwen2moe", "qwen3moe", "gpt-oss", "glm4moe"
INTERLEAVED: Mapping[str, bool] = {"llama": True, **dict.fromkeys(IN_ORDER, False)}
GPT_OSS, GLM = "gpt_oss", "glm4_moe"
OF_QWEN = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
MIXTURES = {"llama": "mixtral", "olmoe": "olmoe", **OF_QWEN, "gpt-oss": GPT_OSS, "glm4moe": GLM}  # where there are experts
SUMS_TO_ONE = ("mixtral", "qwen3_moe", GPT_OSS)  # the weights of a token's experts, as llama.cpp has it for these
EXPERT, SHARED_EXPERT, QUERY_NORM = (f"blk.{{}}.{name}.weight" for name in ("ffn_gate_exps", "ffn_gate_shexp", "attn_q_norm"))
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # of what a router says

# keys behind the name of the architecture
CLIP, NORMED, GATING, WEIGHTS_SCALE = "attention.clamp_kqv", "expert_weights_norm", "expert_gating_func", "expert_weights_scale"
DENSE_BLOCKS, MORE_TOKENS, ROTATED = "leading_dense_block_count", "nextn_predict_layers", "rope.dimension_count"
SCALING, WINDOW = "rope.scaling", "attention.sliding_window"
LINEAR, YARN = "linear", "yarn"
MIX = f"{SCALING}.yarn_ext_factor"
PARTLY_ROTATED = (GLM,)

# what would change a layer's arithmetic -> the values with which it does not
WITHOUT_EFFECT: Mapping[str, tuple[float, ...]] = {
    DENSE_BLOCKS: (0,),
    "expert_group_count": (0, 1),
    GATING: (0, SOFTMAX),
    WEIGHTS_SCALE: (0, 1),
    "attention.scale": (0,),
    CLIP: (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    f"{SCALING}.attn_factor": (0, 1),
    f"{SCALING}.yarn_attn_factor": (0, 1),
    f"{SCALING}.yarn_log_multiplier": (0,),
    "rope.freq_base_swa": (),
}
# architecture -> what its own layers do with it; None: whatever is said
DONE_BY: Mapping[str, Mapping[str, tuple[float, ...] | None]] = {
    "olmoe": {CLIP: None},
    "gpt-oss": {GATING: (0, SOFTMAX_OF_CHOSEN), f"{WINDOW}_pattern": (2,)},
    "glm4moe": {GATING: (0, SIGMOID), DENSE_BLOCKS: None, WEIGHTS_SCALE: None, "rope.dimension_sections": ()},
}


def config_in(gguf: Gguf) -> dict[str, Any]:
    """What a config.json would say of the model."""
    said = GgufArchitecture.of(gguf.metadata)
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    heads = _heads(said)
    return {
        "model_type": said.model_type,
        "hidden_size": said.whole("embedding_length"),
        "intermediate_size": said.whole("feed_forward_length"),
        "num_hidden_layers": said.blocks,
        "max_position_embeddings": said.whole("context_length"),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "vocab_size": _vocabulary(gguf.metadata, tensors),
        "tie_word_embeddings": HEAD not in tensors,
        "attention_bias": any(name.endswith(".bias") and ".attn_" in name for name in tensors),
        "mlp_bias": any(name.endswith(".bias") and ".ffn_" in name for name in tensors),
        "rope_interleave": INTERLEAVED[said.architecture],
        **heads,
        **_experts(said, tensors),
        **_window(said),
        **_rope(said, heads["head_dim"], tensors.get(ROPE_DIVISORS)),
        **_ids(gguf.metadata),
    }


@dataclass(frozen=True)
class GgufArchitecture:
    """The metadata of an architecture that is known. Its keys begin with its name."""

    metadata: Metadata
    architecture: str

    @classmethod
    def of(cls, metadata: Metadata) -> GgufArchitecture:
        """Refuses an architecture that is not known, and features that no layer here has."""
        kind = metadata.text(KIND, MODEL)
        if kind != MODEL:
            raise ValueError(
                f"{metadata.path} holds no model but something of the type {shown(kind)}; give the model's own file"
            )
        architecture = metadata.text(ARCHITECTURE)
        if architecture not in INTERLEAVED:
            known = ", ".join(INTERLEAVED)
            raise ValueError(
                f"{metadata.path} is of the architecture {shown(architecture)}, which is not read; known are {known}"
            )
        said = cls(metadata, architecture)
        for name, harmless in {**WITHOUT_EFFECT, **DONE_BY.get(architecture, {})}.items():
            if said.has(name) and harmless is not None and metadata.values[said.key(name)] not in harmless:
                raise said.refusal(name, "which the layers here do not do; give another model")
        if said.experts and architecture not in MIXTURES:
            raise said.refusal("expert_count", f"and {architecture} with experts is not read; give another model")
        if not said.experts and architecture != "llama" and architecture in MIXTURES:
            raise said.refusal("expert_count", f"and {architecture} without experts is not read; {AGAIN}")
        return said

    @property
    def experts(self) -> int:
        return self.whole("expert_count", 0)

    @property
    def blocks(self) -> int:
        """The blocks of the model itself. Those after them predict tokens further ahead, and are not used."""
        return self.whole("block_count") - self.whole(MORE_TOKENS, 0)

    @property
    def model_type(self) -> str:
        """The name of transformers. Of the models that files call llama, those with a sliding window are Mistral's."""
        if self.experts:
            return MIXTURES[self.architecture]
        is_mistral = self.architecture == "llama" and self.whole("attention.sliding_window", 0) > 0
        return "mistral" if is_mistral else self.architecture

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def whole(self, name: str, otherwise: int | None = None) -> int:
        return self.metadata.whole(self.key(name), otherwise)

    def number(self, name: str, otherwise: float | None = None) -> float:
        return self.metadata.number(self.key(name), otherwise)

    def refusal(self, name: str, why: str) -> ValueError:
        value = shown(self.metadata.values.get(self.key(name)))
        return ValueError(f"{self.metadata.path} has {value} as {shown(self.key(name))}, {why}")


def _heads(said: GgufArchitecture) -> dict[str, int]:
    heads = said.whole("attention.head_count")
    width = said.whole("attention.key_length", said.whole("embedding_length") // max(heads, 1))
    for name in ("attention.value_length", *([] if said.model_type in PARTLY_ROTATED else [ROTATED])):
        if said.whole(name, width) != width:
            raise said.refusal(name, f"but heads of {width} values; layers in which the two differ are not read")
    kv_heads = said.whole("attention.head_count_kv", heads)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}


def _experts(said: GgufArchitecture, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """How many there are, how wide they are, and how they are chosen."""
    if not said.experts:
        return {}
    is_glm = said.model_type == GLM  # its files may say either
    sums_to_one = said.metadata.flag(said.key(NORMED), False) if is_glm else said.model_type in SUMS_TO_ONE
    if said.has(NORMED) and said.metadata.values[said.key(NORMED)] is not sums_to_one:
        raise said.refusal(NORMED, f"which is not how {said.model_type} weighs its experts; give another model")
    if (dense := said.whole(DENSE_BLOCKS, 0)) >= said.blocks:
        raise said.refusal(DENSE_BLOCKS, f"and it has {said.blocks} blocks, so none with experts; give another file")
    inner = _rows(said, tensors, EXPERT.format(dense), 3)
    found: dict[str, Any] = {"num_experts_per_tok": said.whole("expert_used_count"), "norm_topk_prob": sums_to_one}
    if is_glm:
        return {**found, **_experts_of_glm(said, tensors), "moe_intermediate_size": inner}
    if said.model_type == GPT_OSS:
        found["experts_apart"] = True  # elsewhere it has gate and up in one matrix
    if said.model_type in ("mixtral", GPT_OSS):
        return {**found, "num_local_experts": said.experts, "intermediate_size": inner}
    if said.model_type == "olmoe":
        return {**found, "num_experts": said.experts, "intermediate_size": inner, "clip_qkv": said.number(CLIP, 0.0) or None}
    found |= {"num_experts": said.experts, "moe_intermediate_size": inner, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if said.model_type == "qwen2_moe":
        found["shared_expert_intermediate_size"] = _rows(said, tensors, SHARED_EXPERT.format(0), 2)
    return found


def _experts_of_glm(said: GgufArchitecture, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    return {
        "n_routed_experts": said.experts,
        "n_shared_experts": said.whole("expert_shared_count"),
        "first_k_dense_replace": said.whole(DENSE_BLOCKS, 0),
        "routed_scaling_factor": said.number(WEIGHTS_SCALE, 0.0) or 1.0,
        "use_qk_norm": QUERY_NORM.format(0) in tensors,
        "num_nextn_predict_layers": 0,
    }


def _rows(said: GgufArchitecture, tensors: Mapping[str, GgufTensor], name: str, dimensions: int) -> int:
    """The outputs of a matrix, or of each of several."""
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != dimensions:
        what = "has no" if tensor is None else f"has {len(tensor.shape)} instead of {dimensions} dimensions for"
        older = " (files from before 2024 have experts apart)" if "ffn_gate_exps" in name else ""
        raise ValueError(f"{said.metadata.path} {what} {name}{older}; {AGAIN}")
    return tensor.shape[-2]


def _window(said: GgufArchitecture) -> dict[str, Any]:
    if said.model_type == GPT_OSS:  # which says itself what layers have it
        return {"sliding_window": said.whole(WINDOW)}
    window = said.whole(WINDOW, 0)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _rope(said: GgufArchitecture, head_dim: int, divisors: GgufTensor | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": said.number("rope.freq_base", 10000.0)}
    if said.model_type in PARTLY_ROTATED:
        found["partial_rotary_factor"] = said.whole(ROTATED, head_dim) / max(head_dim, 1)
    kind = said.metadata.text(said.key(f"{SCALING}.type"), LINEAR)
    if kind not in ("none", LINEAR, YARN):
        raise said.refusal(f"{SCALING}.type", f"a scaling of positions that is not read; none, {LINEAR} and {YARN} are")
    factor = 0.0 if kind == "none" else said.number(f"{SCALING}.factor", said.number("rope.scale_linear", 0.0))
    if factor not in (0.0, 1.0):
        _refuse_other_mix(said, kind)
        if divisors is not None:
            raise said.refusal(f"{SCALING}.factor", f"and {ROPE_DIVISORS} too; positions that are scaled twice are not read")
        return {**found, "rope_scaling": {"rope_type": kind, "factor": factor, **(_yarn(said) if kind == YARN else {})}}
    if divisors is None:
        return found
    count = min(head_dim, MOST_HEAD_DIM) // 2  # wider heads are refused later, and this many are read at once
    return {**found, "rope_divisors": _divisors(divisors, count)}


def _refuse_other_mix(said: GgufArchitecture, kind: str) -> None:
    """Refuses a file if its kind of scaling and its share of YaRN's mix contradict each other. In ggml the share alone decides:
    with 0 scaling is linear, whatever it is called, and with 1 it is YaRN. llama.cpp takes the share from the kind, and from
    files of a few architectures only, which are not read here. So two that differ have no known meaning. Below 0 the kind
    decides; and where nothing is scaled a mix of the same with the same is harmless."""
    of_kind = 1.0 if kind == YARN else 0.0
    share = said.number(MIX, of_kind)
    if share >= 0 and share != of_kind:
        raise said.refusal(MIX, f"but positions are scaled by the kind {kind}, which goes with {of_kind:g}; give another file")


def _yarn(said: GgufArchitecture) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": said.whole(f"{SCALING}.original_context_length", said.whole("context_length")),
        "beta_fast": said.number(f"{SCALING}.yarn_beta_fast", 32.0),
        "beta_slow": said.number(f"{SCALING}.yarn_beta_slow", 1.0),
        "truncate": said.model_type != GPT_OSS,  # which no file says, but the config of the model does
    }


def _divisors(tensor: GgufTensor, count: int) -> list[float]:
    """What each frequency is divided by: so llama.cpp writes down the scaling of LLaMA 3."""
    if tensor.kind != FLOAT32 or tensor.shape != (count,):
        shape = f"the shape {list(tensor.shape)} and the type {tensor.kind}"
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


def _vocabulary(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> int:
    """The rows of the table, of which a tokenizer may leave some unused."""
    table = tensors.get(EMBEDDING)
    if table is None or len(table.shape) != 2:
        what = "has no" if table is None else "has no matrix as"
        raise ValueError(f"{metadata.path} {what} {EMBEDDING}, the table of its tokens; {AGAIN}")
    tokens = len(metadata.texts(TOKENS, ()))
    if tokens > table.shape[0]:
        raise ValueError(f"{metadata.path} names {tokens} tokens, but its table has rows for {table.shape[0]}; {AGAIN}")
    return table.shape[0]


def _ids(metadata: Metadata) -> dict[str, int | None]:
    """Tokens with a meaning; None where a file has none, for the library would put in some of its own."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {f"{short}_token_id": f"tokenizer.ggml.{name}_token_id" for short, name in names.items()}
    return {name: metadata.whole(key) if key in metadata else None for name, key in keys.items()}
