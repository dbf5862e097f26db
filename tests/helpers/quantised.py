"""Tiny checkpoints as other tools quantise them: AWQ, GPTQ, compressed-tensors, FP8, MXFP4, written from their specifications.

Nothing of the package is used here. A method takes the weight of a linear layer, and gives the tensors that stand in the file
in its place, and what these mean, in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers import tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Written = tuple[dict[str, Tensor], Tensor]  # tensors by the end of their names, and the values in fp32


@dataclass(frozen=True)
class Method:
    config: Mapping[str, Any]  # the quantization_config
    written: Callable[[Tensor], Written]
    inputs: int = 1  # a matrix is written so if its inputs are a multiple of this
    outputs: int = 1
    bits: float = 4.0

    def takes(self, weight: Tensor) -> bool:
        return weight.shape[1] % self.inputs == 0 and weight.shape[0] % self.outputs == 0


# -- integers of 4 bits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Integers:
    """Codes (out, in) from 0 to 15, with a scale and a zero point (out, groups) for the group (in,) of each input."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @classmethod
    def of(cls, weight: Tensor, group: int, dtype: torch.dtype, symmetric: bool = False, shuffled: bool = False) -> Integers:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if shuffled else torch.arange(columns)
        groups = torch.empty(columns, dtype=torch.int64)
        groups[order] = torch.arange(columns) // group
        together = weight[:, order].float().unflatten(1, (-1, group))
        low, high = together.amin(2).clamp(max=0), together.amax(2).clamp(min=0)
        if symmetric:
            scales = (2 * torch.maximum(-low, high) / 15).to(dtype)
            zeros = torch.full(scales.shape, 8)
        else:
            scales = ((high - low) / 15).to(dtype)
            zeros = (-low / scales.float()).round().clamp(0, 15).long()
        codes = (weight.float() / scales.float()[:, groups]).round().long() + zeros[:, groups]
        return cls(codes.clamp(0, 15), scales, zeros, groups)

    @property
    def values(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def in_words(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along a dimension to a word of 32 bits; `order` says which of the eight comes first, next, ..."""
    codes = codes.movedim(dim, -1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = sum(codes[..., place] << (4 * nibble) for nibble, place in enumerate(order))
    assert isinstance(words, Tensor)
    return signed(words).movedim(-1, dim).contiguous()


def signed(words: Tensor) -> Tensor:
    """Words of 32 bits as int32 has them."""
    words = words % (1 << 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq(group: int = 32) -> Callable[[Tensor], Written]:
    def written(weight: Tensor) -> Written:
        of = Integers.of(weight, group if group > 0 else weight.shape[1], torch.float16)
        tensors = {
            "qweight": in_words(of.codes.T, 1, AWQ_ORDER),
            "qzeros": in_words(of.zeros.T, 1, AWQ_ORDER),
            "scales": of.scales.T.contiguous(),
        }
        return tensors, of.values

    return written


def gptq(
    group: int = 32, *, one_less: bool = True, shuffled: bool = False, symmetric: bool = False
) -> Callable[[Tensor], Written]:
    def written(weight: Tensor) -> Written:
        of = Integers.of(weight, group if group > 0 else weight.shape[1], torch.float16, symmetric, shuffled)
        zeros = in_words(of.zeros.T, 1)
        tensors = {
            "qweight": in_words(of.codes.T, 0),
            "qzeros": signed(zeros.long() - 0x11111111) if one_less else zeros,
            "scales": of.scales.T.contiguous(),
            "g_idx": of.groups.to(torch.int32),
        }
        return tensors, of.values

    return written


def compressed(group: int = 32, *, symmetric: bool = True, shuffled: bool = False) -> Callable[[Tensor], Written]:
    def written(weight: Tensor) -> Written:
        of = Integers.of(weight, group if group > 0 else weight.shape[1], torch.bfloat16, symmetric, shuffled)
        tensors = {
            "weight_packed": in_words(of.codes, 1),
            "weight_scale": of.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = in_words(of.zeros, 0)
        if shuffled:
            tensors["weight_g_idx"] = of.groups.to(torch.int32)
        return tensors, of.values

    return written


# -- floats of 8 and of 4 bits ---------------------------------------------------------------------------------------------


def fp8(rows: int, columns: int, scale: str = "float32", name: str = "weight_scale_inv") -> Callable[[Tensor], Written]:
    """Blocks of so many outputs and inputs; 0: all of them."""

    def written(weight: Tensor) -> Written:
        high, wide = rows or weight.shape[0], columns or weight.shape[1]
        grid = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        filled = torch.nn.functional.pad(weight, (0, grid[1] * wide - weight.shape[1], 0, grid[0] * high - weight.shape[0]))
        most = filled.abs().unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax(dim=(1, 3)).clamp(min=1e-6)
        stored, factors = _scales(most / 448, scale)
        spread = factors.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        if not rows and not columns:
            stored = stored.reshape(())
        return {"weight": codes, name: stored}, codes.float() * spread

    return written


def mxfp4(codes_name: str = "weight_blocks", scales_name: str = "weight_scales") -> Callable[[Tensor], Written]:
    def written(weight: Tensor) -> Written:
        blocks = weight.unflatten(1, (-1, 32))
        stored, factors = _scales(blocks.abs().amax(2).clamp(min=1e-6) / 6, "e8m0")
        codes = ((blocks / factors[..., None])[..., None] - E2M1).abs().argmin(-1)
        data = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)  # 16 bytes for each 32 inputs
        values = (E2M1[codes] * factors[..., None]).flatten(1)
        return {codes_name: data if codes_name.endswith("blocks") else data.flatten(1), scales_name: stored}, values

    return written


def _scales(wanted: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """As they are stored, and what they mean."""
    if kind == "e8m0":
        exponents = torch.ceil(torch.log2(wanted)).clamp(-127, 127)
        return (exponents + 127).to(torch.uint8), torch.exp2(exponents)
    stored = wanted.to(getattr(torch, kind))
    return stored, stored.float()


# -- all of them -----------------------------------------------------------------------------------------------------------


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax", **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def int4_config(group: int, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    size = {"group_size": group, "strategy": "group"} if group > 0 else {"group_size": None, "strategy": "channel"}
    return compressed_config("pack-quantized", num_bits=4, type="int", symmetric=symmetric, actorder=actorder, **size)


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def gptq_config(group: int, format: str = "gptq", **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "checkpoint_format": format, **more}


def fp8_config(*block: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(block) or None, "activation_scheme": "dynamic"}


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
METHODS: Mapping[str, Method] = {
    "awq": Method(awq_config(32), awq(), 32, 8),
    "awq-64": Method(awq_config(64), awq(64), 64, 8),
    "awq-columns": Method(awq_config(-1), awq(-1), 32, 8),
    "gptq": Method(gptq_config(32), gptq(), 32, 8),
    "gptq-v2": Method(gptq_config(32, "gptq_v2"), gptq(one_less=False), 32, 8),
    "gptq-symmetric": Method(gptq_config(32, sym=True), gptq(symmetric=True), 32, 8),
    "gptq-ordered": Method({**gptq_config(32), "desc_act": True}, gptq(shuffled=True), 32, 8),
    "compressed": Method(int4_config(32, True), compressed(), 32),
    "compressed-columns": Method(int4_config(-1, True), compressed(-1), 32),
    "compressed-asymmetric": Method(int4_config(32, False), compressed(symmetric=False), 32),
    "compressed-ordered": Method(int4_config(32, True, "group"), compressed(shuffled=True), 32),
    "fp8": Method(fp8_config(128, 128), fp8(128, 128), bits=8),
    "fp8-bfloat16": Method(fp8_config(128, 128), fp8(128, 128, "bfloat16"), bits=8),
    "fp8-tensor": Method(fp8_config(), fp8(0, 0, name="weight_scale"), bits=8),
    "mxfp8": Method(fp8_config(1, 32), fp8(1, 32, "e8m0"), 32, bits=8),
    "compressed-fp8": Method(
        compressed_config("float-quantized", strategy="channel", **_FP8), fp8(1, 0, "bfloat16", "weight_scale"), bits=8
    ),
    "compressed-fp8-block": Method(
        compressed_config("float-quantized", strategy="block", block_structure=[128, 128], **_FP8),
        fp8(128, 128, "bfloat16", "weight_scale"),
        bits=8,
    ),
    "mxfp4": Method({"quant_method": "mxfp4"}, mxfp4(), 32),
    "compressed-mxfp4": Method(
        compressed_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
        mxfp4("weight_packed", "weight_scale"),
        32,
    ),
}
NOT_CONVERTED = "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}  # every matrix of a LLaMA in groups of 32


@dataclass
class Quantised:
    """A checkpoint as it was written."""

    model: PreTrainedModel  # computing in fp32 with what the file means
    values: dict[str, Tensor] = field(default_factory=dict)  # of the tensors that are quantised, by their names in the model


def save_quantised(
    kind: str,
    folder: Path,
    method: Method,
    dtype: torch.dtype = torch.float16,
    files: int = 1,
    head: bool = False,
    **changes: Any,
) -> Quantised:
    """Writes a tiny model with every linear layer that the method takes, with its head only if it is said so; of gpt-oss with
    experts alone. Other tensors are of `dtype`. The parts of a matrix come into different `files`."""
    made = Quantised(tiny.save_tiny(kind, folder, dtype, **changes))
    tensors = {name: tensor.clone() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if made.model.config.model_type == "gpt_oss":
        _write_experts(made, tensors, method)
        method = replace(method, config={**method.config, "modules_to_not_convert": list(NOT_CONVERTED)}, inputs=1 << 40)
    for name, module in made.model.named_modules():
        is_head = module is made.model.get_output_embeddings()
        if isinstance(module, torch.nn.Linear) and method.takes(module.weight) and (head or not is_head):
            parts, values = method.written(module.weight.detach())
            tensors.pop(f"{name}.weight", None)
            tensors |= {f"{name}.{end}": part for end, part in parts.items()}
            made.values[f"{name}.weight"] = module.weight.data = values
    _save(folder, tensors, files)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(method.config)}))
    return made


def _write_experts(made: Quantised, tensors: dict[str, Tensor], method: Method) -> None:
    """All experts of a layer in one tensor of blocks and one of scales, with outputs before inputs; the plain tensors that they
    take the place of have inputs first."""
    for name, parameter in made.model.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            written = [method.written(own.T) for own in parameter.detach()]
            del tensors[name]
            for end in ("blocks", "scales"):
                tensors[f"{name}_{end}"] = torch.stack([parts[f"weight_{end}"] for parts, _ in written])
            parameter.data = torch.stack([values.T for _, values in written])
            prefix, kind = name.removesuffix(".weight").rsplit(".", 1)
            made.values |= {f"{prefix}.{number}.{kind}.weight": values for number, (_, values) in enumerate(written)}


def _save(folder: Path, tensors: Mapping[str, Tensor], files: int) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    if files == 1:
        return save_file(dict(tensors), folder / SINGLE)
    owner = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file_name in set(owner.values()):
        save_file({name: tensor for name, tensor in tensors.items() if owner[name] == file_name}, folder / file_name)
    (folder / INDEX).write_text(json.dumps({"weight_map": owner}))
    return None
