"""A GGUF file with the shapes of a known model and random blocks: what both this engine and llama.cpp read as it is.

It is for measuring alone: there is no vocabulary in it, and limits of queries and keys are not; windows are those of gpt-oss
and Gemma 4 alone. Scales are such that values are as large as those of real weights, and routers are random, so that tokens are
spread over all experts. A scale is as often negative as not where the codes of a form have a mean below zero: if that were left
to values, the hidden states of all tokens would come to be alike, and all would be given to the same experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from benchmarks.baselines.gguf_metadata import add_metadata
from h2o_flexgen.checkpoints.gguf_config import ROPE_DIVISORS
from h2o_flexgen.checkpoints.model_files import require_free_space
from h2o_flexgen.checkpoints.named_tensors import GATE, GATE_UP, OUTSIDE, UP
from h2o_flexgen.checkpoints.stored_architecture import ONE, GgufArchitecture
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.models import architecture, create_model, known_config
from h2o_flexgen.models.config_values import Config

DENSE = "llama", "mistral", "qwen2", "qwen3"
MIXTURES = "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma4_text", "glm4_moe_lite", "qwen3_5_moe_text"
WRITTEN = DENSE + MIXTURES
READ_AS = {"glm4_moe_lite": "deepseek_v3"}  # files have the name of that one
APART = {"experts_apart": True}  # so have files the gate of an expert and what goes up
AT_ONCE = 1 << 22  # blocks
IN_BLOCK, EXPERT = re.compile(r"model\.layers\.(\d+)\.(.*)"), re.compile(r"\.experts\.(\d+)\.")
OF_ONES = re.compile(r".*(norm(_\d)?|layer_output_scale)\.weight|.*\.scale")  # names of tensors
NOT_ROTATED = 1e30  # what is divided by it is 0


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
    rotated: int | None = None  # pairs of values; None: it does not say which are rotated

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
    known = known_config(model)
    if known is None:
        raise ValueError(f"the shapes of {model} are not known; known are those in configs/models")
    if known.model_type not in WRITTEN:
        raise ValueError(f"{model} is of type {known.model_type}; random files are written of {', '.join(WRITTEN)}")
    config = cast("Config", SimpleNamespace(**vars(known), **APART))
    file = folder / f"{model.replace('/', '--')}-centred-{Forms.of(config.model_type).experts.name.lower()}.gguf"
    if not file.is_file():
        write_random(config, model, file)
    return file


def write_random(config: Config, model: str, file: Path) -> None:
    """Writes the file whole or not at all."""
    spec, kind = create_model(config, "float32", sep_layer=False, name=model).spec, config.model_type
    files = architecture(READ_AS.get(kind, kind)).gguf
    assert files is not None, f"there are files of {kind}"
    planned = [*planned_tensors(spec, files, Forms.of(kind)), *_divisors(config)]
    for one in planned:
        if one.shape[-1] % gguf.GGML_QUANT_SIZES[one.form][0]:
            raise ValueError(f"{model} has rows of {one.shape[-1]} values in {one.name}, no whole blocks of {one.form.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(file.parent, sum(one.nbytes for one in planned), f"a GGUF file of {model}")
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, files.name)
    try:
        add_metadata(writer, vars(config))
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


def planned_tensors(spec: ModelSpec, files: GgufArchitecture, forms: Forms) -> Iterator[Planned]:
    """The model's tensors by their names in files, the matrices of all experts of a layer together."""
    inside, outside = ({own: there for there, own in names.items()} for names in (files.tensors, OUTSIDE | files.outside))
    experts = 1 + max((int(found[1]) for name in spec.tensors if (found := EXPERT.search(name))), default=0)
    for tensor in spec.tensors.values():
        expert, found = EXPERT.search(tensor.name), IN_BLOCK.fullmatch(tensor.name)
        own = EXPERT.sub(f".experts.{ONE}.", found[2] if found else tensor.name)
        if expert and (int(expert[1]) or _joined(own, UP) in inside):
            continue  # what is behind the first one's matrix
        is_both = _joined(own, GATE) in inside
        name = inside.get(_joined(own, GATE) if is_both else own) if found else outside.get(own)
        if name is None:
            raise ValueError(f"GGUF has no name for the tensor {tensor.name}")
        rows, *columns = _shape_in_file(own, tensor.shape, files, spec.heads)
        shape = (experts, rows * (1 + is_both), *columns) if expert else (rows, *columns)
        is_packed = len(tensor.shape) == 2 and not tensor.is_never_packed
        form = (forms.experts if expert else forms.others) if is_packed else Type.F32
        yield Planned(f"blk.{found[1]}.{name}" if found else name, shape, form)


def _joined(name: str, part: str) -> str:
    """The name of what is the gate of an expert and what goes up, if it is that of this part of it."""
    return name.replace(part, GATE_UP) if part in name else ""


def _shape_in_file(name: str, shape: tuple[int, ...], files: GgufArchitecture, heads: int) -> tuple[int, ...]:
    """The shape that a file has for a tensor of this name in a block: the reader's rules, the other way round."""
    if name.endswith(files.single_rows):
        return shape[1:]
    if name.endswith(files.convolutions):
        return shape[0], shape[2]
    return (heads, shape[0] // heads, shape[1]) if name.endswith(files.of_heads) else shape


def _divisors(config: Config) -> Iterator[Planned]:
    """Files of Gemma 4 say by divisors which pairs of values are rotated in layers without a window."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("full_attention", {})
    if rope.get("rope_type") == "proportional":
        pairs = config.global_head_dim // 2
        yield Planned(ROPE_DIVISORS, (pairs,), Type.F32, int(rope["partial_rotary_factor"] * pairs))


def _write(writer: gguf.GGUFWriter, planned: Planned, generator: np.random.Generator) -> None:
    """One tensor, in one piece, since the writer fills up behind each."""
    if planned.form not in SCALES:
        writer.write_tensor_data(_plain(planned, generator))
        return
    _, block_bytes = gguf.GGML_QUANT_SIZES[planned.form]
    blocks: NDArray[np.uint8] = np.frombuffer(generator.bytes(planned.nbytes), np.uint8).reshape(-1, block_bytes).copy()
    scales = np.stack([np.frombuffer(scale, np.uint8) for scale in SCALES[planned.form]])
    for start in range(0, len(blocks), AT_ONCE):
        some = blocks[start : start + AT_ONCE]
        some[:, : scales.shape[1]] = scales[some[:, 0] % len(scales)]
    writer.write_tensor_data(blocks)


def _plain(planned: Planned, generator: np.random.Generator) -> NDArray[np.float32]:
    if planned.rotated is not None:
        return np.where(np.arange(*planned.shape) < planned.rotated, 1, NOT_ROTATED).astype(np.float32)
    if OF_ONES.fullmatch(planned.name):
        return np.ones(planned.shape, np.float32)
    values = generator.standard_normal(planned.shape, np.float32)
    return -np.exp(values) if planned.name.endswith(".ssm_a") else values * np.float32(0.05)
