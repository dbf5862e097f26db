"""A GGUF file with the shapes of a known model and random blocks: what both this engine and llama.cpp read as it is.

It is for measuring alone: there is no vocabulary in it, and neither windows nor limits of queries and keys are. Scales are
such that values are as large as those of real weights, and routers are random, so that tokens are spread over all experts. A
scale is as often negative as not, because codes of 4 bits have a mean below zero: if that were left to values, the hidden
states of all tokens would come to be alike, and all would be given to the same experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from benchmarks.baselines.gguf_file import add_sizes
from h2o_flexgen.checkpoints.files import require_free_space
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.models import create_model, known_config

OF_DENSE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OF_MIXTURES = {"mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
ARCHITECTURES = OF_DENSE | OF_MIXTURES  # model_type -> its name in files
FORM, BLOCK, BLOCK_BYTES = Type.Q4_0, 32, 18  # two bytes of scale, and 32 codes of 4 bits
SPREAD = 0.02 / 4.6  # of values, by that of codes
AT_ONCE = 1 << 22  # blocks
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Planned(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # the values of a row come last
    packed: bool


def random_gguf(model: str, folder: Path) -> Path:
    """The file of a known model, written once."""
    file = folder / f"{model.replace('/', '--')}-{FORM.name.lower()}.gguf"
    if not file.is_file():
        write_random(model, file)
    return file


def write_random(model: str, file: Path) -> None:
    """Writes the file whole or not at all."""
    config = known_config(model)
    if config is None:
        raise ValueError(f"the shapes of {model} are not known; known are those in configs/models")
    spec = create_model(config, "float32", sep_layer=False, name=model).spec
    planned = list(planned_tensors(spec, config.to_dict()))
    file.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(file.parent, sum(_nbytes(one) for one in planned), f"a GGUF file of {model}")
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config.model_type])
    try:
        add_sizes(writer, config.to_dict())
        _add_more(writer, config.to_dict())
        for one in planned:
            shape = (*one.shape[:-1], one.shape[-1] // BLOCK * BLOCK_BYTES) if one.packed else one.shape
            dtype = np.dtype(np.uint8 if one.packed else np.float32)
            writer.add_tensor_info(one.name, shape, dtype, _nbytes(one), FORM if one.packed else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        generator = np.random.default_rng(0)
        for one in planned:
            _write(writer, one, generator)
        writer.close()
        os.replace(partial, file)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def planned_tensors(spec: ModelSpec, config: Mapping[str, Any]) -> Iterator[Planned]:
    """The model's tensors by their names in files, the matrices of all experts of a layer together."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    for tensor in spec.tensors.values():
        expert = EXPERT.search(tensor.name)
        if expert and int(expert[1]):
            continue
        name = names.get_name(EXPERT.sub(".experts.", tensor.name), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"GGUF has no name for the tensor {tensor.name}")
        shape = (experts, *tensor.shape) if expert else tensor.shape
        is_packed = len(tensor.shape) == 2 and not tensor.is_never_packed
        yield Planned(name, shape[1:] if shape[0] == 1 else shape, is_packed)


def _nbytes(planned: Planned) -> int:
    values = int(np.prod(planned.shape, dtype=np.int64))
    return values // BLOCK * BLOCK_BYTES if planned.packed else 4 * values


def _write(writer: gguf.GGUFWriter, planned: Planned, generator: np.random.Generator) -> None:
    """One tensor, in one piece, since the writer fills up behind each."""
    if not planned.packed:
        is_norm = len(planned.shape) == 1 and planned.name.endswith("norm.weight")
        values = np.ones(planned.shape, np.float32) if is_norm else generator.standard_normal(planned.shape, np.float32)
        writer.write_tensor_data(values if is_norm else values * np.float32(0.05))
        return
    blocks: NDArray[np.uint8] = np.frombuffer(generator.bytes(_nbytes(planned)), np.uint8).reshape(-1, BLOCK_BYTES).copy()
    scales = np.array([SPREAD, -SPREAD], np.float16).view(np.uint8).reshape(2, 2)
    for start in range(0, len(blocks), AT_ONCE):
        some = blocks[start : start + AT_ONCE]
        some[:, :2] = scales[some[:, 0] % 2]
    writer.write_tensor_data(blocks)


def _add_more(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Rotations and experts."""
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    if config.get("num_experts_per_tok"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
