"""GGUF files as checkpoints: their tensors by the names that models have for them, in the formats in which they lie there.

A tensor that no layer would read is refused: it stands for arithmetic that is not done here. Experts lie in one tensor for each
of their matrices, one expert behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_config import EMBEDDING, HEAD, ROPE_DIVISORS, GgufArchitecture
from h2o_flexgen.checkpoints.gguf_format import BLOCKS, Gguf, GgufTensor, read_gguf
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.hints import shown

IN_BLOCK = re.compile(r"blk\.(?P<block>0|[1-9]\d*)\.(?P<part>[\w.]+\.(weight|bias))")

# names in files -> names in models
OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
QKV = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
ATTENTION = {**QKV, "attn_output": "self_attn.o_proj"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
BEHIND_ATTENTION = "post_attention_layernorm"
FIRST_NORM = {"attn_norm": "input_layernorm"}
NORMS = {**FIRST_NORM, "ffn_norm": BEHIND_ATTENTION}
NAMED_BY_PLACE = {**FIRST_NORM, "post_attention_norm": BEHIND_ATTENTION}
HEAD_NORMS = {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
ONE = "{}"  # stands for the number of an expert
EXPERTS = {f"{part}_exps": name.replace("mlp.", f"mlp.experts.{ONE}.") for part, name in MLP.items()}
ROUTER, ROUTER_OF_GPT_OSS = {"ffn_gate_inp": "mlp.gate"}, {"ffn_gate_inp": "mlp.router"}
SHARED = {f"{part}_shexp": name.replace("mlp.", "mlp.shared_expert.") for part, name in MLP.items()}
SHARED_GATE = "mlp.shared_expert_gate"  # a single row, which files have as a vector


def _of(kind: str, *names: Mapping[str, str]) -> dict[str, str]:
    return {f"{part}.{kind}": f"{name}.{kind}" for some in names for part, name in some.items()}


WEIGHTS, OF_MIXTURES = _of("weight", ATTENTION, MLP, NORMS), _of("weight", ATTENTION, EXPERTS, ROUTER, NORMS)
SHARED_OF_GLM = {part: name.replace("shared_expert.", "shared_experts.") for part, name in SHARED.items()}
IN_BLOCKS: Mapping[str, Mapping[str, str]] = {  # by model_type
    "glm4_moe": {
        **_of("weight", ATTENTION, HEAD_NORMS, MLP, EXPERTS, ROUTER, SHARED_OF_GLM, NAMED_BY_PLACE),
        **_of("bias", QKV),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    "gpt_oss": {
        **_of("weight", ATTENTION, EXPERTS, ROUTER_OF_GPT_OSS, NAMED_BY_PLACE),
        **_of("bias", ATTENTION, EXPERTS, ROUTER_OF_GPT_OSS),
        "attn_sinks.weight": "self_attn.sinks",
    },
    "llama": {**WEIGHTS, **_of("bias", ATTENTION, MLP)},
    "mistral": WEIGHTS,
    "mixtral": OF_MIXTURES,
    "olmoe": {**OF_MIXTURES, **_of("weight", HEAD_NORMS)},
    "qwen2": {**WEIGHTS, **_of("bias", QKV)},
    "qwen2_moe": {**OF_MIXTURES, **_of("weight", SHARED, {"ffn_gate_inp_shexp": SHARED_GATE}), **_of("bias", QKV)},
    "qwen3": {**WEIGHTS, **_of("weight", HEAD_NORMS), **_of("bias", ATTENTION)},
    "qwen3_moe": {**OF_MIXTURES, **_of("weight", HEAD_NORMS), **_of("bias", ATTENTION)},
}


def stored_in(file: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredMatrix]]:
    """The tensors of plain values and the packed matrices of a model, by its own names for them."""
    plain, packed = {}, {}
    for given, tensor in named_in_model(read_gguf(file)).items():
        for name, stored in _each_expert(given, tensor):
            if tensor.kind not in BLOCKS:
                plain[name] = stored
            elif len(stored.shape) == 2:
                packed[name] = StoredMatrix(name, tensor.kind, stored.shape, (stored,))
            else:
                raise ValueError(f"{tensor.file} has the tensor {shown(tensor.name)}, no matrix, as {tensor.kind}; {AGAIN}")
    return plain, packed


def _each_expert(name: str, tensor: GgufTensor) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor, or those of each expert in one of all: matrices (experts, outputs, inputs), or biases (experts, outputs)."""
    shape = (1, *tensor.shape) if SHARED_GATE in name and len(tensor.shape) == 1 else tensor.shape
    whole = StoredTensor(tensor.name, tensor.file, tensor.offset, tensor.nbytes, tensor.kind, shape)
    if ONE not in name:
        yield name, whole
        return
    wanted = 2 if name.endswith(".bias") else 3
    if len(shape) != wanted:
        raise ValueError(f"{tensor.file} has {shown(tensor.name)} with {len(shape)} dimensions instead of {wanted}; {AGAIN}")
    nbytes = tensor.nbytes // max(shape[0], 1)
    for number in range(shape[0]):
        yield name.format(number), replace(whole, offset=tensor.offset + number * nbytes, nbytes=nbytes, shape=shape[1:])


def named_in_model(gguf: Gguf) -> dict[str, GgufTensor]:
    """The tensors of the model by its own names for them."""
    said = GgufArchitecture.of(gguf.metadata)
    found = {}
    for tensor in gguf.tensors:
        if not _is_beside(tensor.name, said):
            name = _name_in_model(tensor.name, said)
            if name is None:
                what = f"which no layer of a {said.model_type} model reads"
                raise ValueError(f"{tensor.file} has the tensor {shown(tensor.name)}, {what}; give another model")
            found[name] = tensor
    return found


def _is_beside(name: str, said: GgufArchitecture) -> bool:
    """Whether a tensor is of no layer, and yet nothing that would be missed."""
    inside = IN_BLOCK.fullmatch(name)
    if inside is None:
        return name == ROPE_DIVISORS and said.architecture == "llama"
    return said.blocks <= int(inside["block"]) < said.whole("block_count")


def _name_in_model(name: str, said: GgufArchitecture) -> str | None:
    inside = IN_BLOCK.fullmatch(name)
    if inside is None:
        return OUTSIDE.get(name)
    part = IN_BLOCKS[said.model_type].get(inside["part"])
    return f"model.layers.{inside['block']}.{part}" if part and int(inside["block"]) < said.blocks else None
