"""A GGUF file with the shapes of a known model and random blocks: what both this engine and llama.cpp read as it is.

It is for measuring alone: there is no vocabulary in it, and limits of queries and keys are not; windows are those of gpt-oss
alone. Scales are such that values are as large as those of real weights, and routers are random, so that tokens are spread over
all experts. A scale is as often negative as not where the codes of a form have a mean below zero: if that were left to values,
the hidden states of all tokens would come to be alike, and all would be given to the same experts.
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
from h2o_flexgen.checkpoints.model_files import require_free_space
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.models.config_values import Config

OF_DENSE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OF_MIXTURES = {"mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
ARCHITECTURES = OF_DENSE | OF_MIXTURES  # model_type -> its name in files
APART = {"experts_apart": True}  # so have files the gate of an expert and what goes up
AT_ONCE = 1 << 22  # blocks
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


# the first bytes of a block, one of these scales, with which random codes have a spread of about 0.02
SCALES = {
    Type.Q4_0: (_half(0.02 / 4.6), _half(-0.02 / 4.6)),
    Type.Q8_0: (_half(0.02 / 74), _half(-0.02 / 74)),
    Type.MXFP4: (bytes([120]),),
}


class Forms(NamedTuple):
    """Those of matrices."""

    experts: Type
    others: Type

    @classmethod
    def of(cls, model_type: str) -> Forms:
        """llama.cpp writes gpt-oss as it was published: all but its experts has more bits."""
        return cls(Type.MXFP4, Type.Q8_0) if model_type == "gpt_oss" else cls(Type.Q4_0, Type.Q4_0)


class Planned(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # the values of a row come last
    form: Type

    @property
    def shape_of_bytes(self) -> tuple[int, ...]:
        values, nbytes = gguf.GGML_QUANT_SIZES[self.form]
        return (*self.shape[:-1], self.shape[-1] // values * nbytes) if self.form in SCALES else self.shape

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape_of_bytes, dtype=np.int64)) * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.form in SCALES else np.float32)


def random_gguf(model: str, folder: Path) -> Path:
    """The file of a known model, written once."""
    config = known_config(model, **APART)
    if config is None:
        raise ValueError(f"the shapes of {model} are not known; known are those in configs/models")
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"{model} is of type {config.model_type}; random files are written of {', '.join(ARCHITECTURES)}")
    file = folder / f"{model.replace('/', '--')}-centred-{Forms.of(config.model_type).experts.name.lower()}.gguf"
    if not file.is_file():
        write_random(config, model, file)
    return file


def write_random(config: Config, model: str, file: Path) -> None:
    """Writes the file whole or not at all."""
    spec = create_model(config, "float32", sep_layer=False, name=model).spec
    planned = list(planned_tensors(spec, config.to_dict()))
    for one in planned:
        if one.shape[-1] % gguf.GGML_QUANT_SIZES[one.form][0]:
            raise ValueError(f"{model} has rows of {one.shape[-1]} values in {one.name}, no whole blocks of {one.form.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(file.parent, sum(one.nbytes for one in planned), f"a GGUF file of {model}")
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config.model_type])
    try:
        add_sizes(writer, config.to_dict())
        _add_more(writer, config.to_dict())
        for one in planned:
            form = one.form if one.form in SCALES else None
            writer.add_tensor_info(one.name, one.shape_of_bytes, one.dtype, one.nbytes, form)
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
    experts, forms = config.get("num_local_experts") or config.get("num_experts") or 0, Forms.of(config["model_type"])
    for tensor in spec.tensors.values():
        expert = EXPERT.search(tensor.name)
        if expert and int(expert[1]):
            continue
        usual = EXPERT.sub(".experts.", tensor.name) + ".weight" * tensor.name.endswith(".sinks")
        name = names.get_name(usual, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"GGUF has no name for the tensor {tensor.name}")
        shape = (experts, *tensor.shape) if expert else tensor.shape
        is_packed = len(tensor.shape) == 2 and not tensor.is_never_packed
        form = (forms.experts if expert else forms.others) if is_packed else Type.F32
        yield Planned(name, shape[1:] if shape[0] == 1 else shape, form)


def _write(writer: gguf.GGUFWriter, planned: Planned, generator: np.random.Generator) -> None:
    """One tensor, in one piece, since the writer fills up behind each."""
    if planned.form not in SCALES:
        is_norm = len(planned.shape) == 1 and planned.name.endswith("norm.weight")
        values = np.ones(planned.shape, np.float32) if is_norm else generator.standard_normal(planned.shape, np.float32)
        writer.write_tensor_data(values if is_norm else values * np.float32(0.05))
        return
    _, block_bytes = gguf.GGML_QUANT_SIZES[planned.form]
    blocks: NDArray[np.uint8] = np.frombuffer(generator.bytes(planned.nbytes), np.uint8).reshape(-1, block_bytes).copy()
    scales = np.stack([np.frombuffer(scale, np.uint8) for scale in SCALES[planned.form]])
    for start in range(0, len(blocks), AT_ONCE):
        some = blocks[start : start + AT_ONCE]
        some[:, : scales.shape[1]] = scales[some[:, 0] % len(scales)]
    writer.write_tensor_data(blocks)


def _add_more(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Rotations, windows and experts."""
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config.get("num_experts_per_tok"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
