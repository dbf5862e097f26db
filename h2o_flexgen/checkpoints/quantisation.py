"""What a config says of how its checkpoint is quantised, and the refusals of what is not read.

Methods write matrices in tensors of their own; which of them is written so is seen by its tensors, not by the lists of layers
that configs have. From the config comes what tensors do not tell: sizes of groups and blocks, and how zero points are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_flexgen.checkpoints.model_files import AGAIN, read_object
from h2o_flexgen.core.hints import shown

KEYS = ("quantization_config", "compression_config")  # the second one in older checkpoints
AWQ, GPTQ, COMPRESSED, FP8, MXFP4 = "awq", "gptq", "compressed-tensors", "fp8", "mxfp4"
WHOLE = -1  # instead of the size of a group: all inputs are one
BITS = 4  # of codes that are whole numbers
READ = f"{AWQ} (gemm), {GPTQ} and {COMPRESSED} in {BITS} bits, {FP8}, {MXFP4} and GGUF files"
GEMM, GPTQ_V1, GPTQ_V2 = "gemm", "gptq", "gptq_v2"
DETAILS = ("quant_algo", "bnb_4bit_quant_type", "quant_type", "packing_format")  # what other methods say more exactly
DENSE, MIXED = "dense", "mixed-precision"
COMPRESSED_FORMATS = (
    DENSE,
    MIXED,  # each of its groups has one
    "pack-quantized",
    "naive-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
COMPRESSED_TYPES = (("int", 4), ("float", 8), ("float", 4))


@dataclass(frozen=True)
class Quantisation:
    method: str
    groups: tuple[int, ...] = ()  # sizes that groups of inputs may have
    blocks: tuple[tuple[int, int], ...] = ()  # outputs and inputs that share a scale, where these are blocks
    zeros_one_less: bool = False  # zero points are written less one
    plain: tuple[str, ...] = ()  # modules that are not quantised, where the config names them; a star stands for anything


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """`config` are the contents of config.json. None: nothing is quantised."""
    stored = next((config[key] for key in KEYS if config.get(key)), None)
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise ValueError(f"the config's {KEYS[0]} is {shown(stored)}, which is no object; {AGAIN}")
    method = stored.get("quant_method")
    reader = METHODS.get(method) if isinstance(method, str) else None
    if method is None:
        raise ValueError(f"the config's {KEYS[0]} names no quant_method, which says how the weights are written; {AGAIN}")
    if reader is None:
        detail = next((f" ({shown(stored[key])})" for key in DETAILS if stored.get(key)), "")
        raise _refused(f"{shown(method)}{detail}")
    return reader(stored)


def folder_quantisation(folder: Path) -> Quantisation | None:
    """Reads the config beside the weights; None also where there is none."""
    file = folder / "config.json"
    return quantisation_of(read_object(file, AGAIN)) if file.is_file() else None


def _awq(stored: Mapping[str, Any]) -> Quantisation:
    _check_bits(AWQ, stored)
    _checked_form(AWQ, stored.get("version", GEMM), (GEMM,))
    return Quantisation(AWQ, groups=(_group(stored),))


def _gptq(stored: Mapping[str, Any]) -> Quantisation:
    _check_bits(GPTQ, stored)
    said = stored.get("checkpoint_format") or stored.get("format") or GPTQ_V1
    form = _checked_form(GPTQ, "marlin" if stored.get("is_marlin_format") else said, (GPTQ_V1, GPTQ_V2))
    others = stored.get("dynamic")  # layers with sizes of their own
    own = (_group(one) for one in _objects(others) if "group_size" in one)
    return Quantisation(GPTQ, groups=(_group(stored), *own), zeros_one_less=form == GPTQ_V1)


def _compressed(stored: Mapping[str, Any]) -> Quantisation:
    for part in (stored, *_objects(stored.get("config_groups"))):
        _checked_form(COMPRESSED, part.get("format") or DENSE, COMPRESSED_FORMATS)
    if stored.get("transform_config"):
        raise _refused(f"{COMPRESSED} with a transform_config (rotations around its products)")
    sparsity = stored.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", DENSE) != DENSE:
        raise _refused(f"{COMPRESSED} with sparsity ({shown(sparsity['format'])})")
    weights = [one["weights"] for one in _objects(stored.get("config_groups")) if isinstance(one.get("weights"), Mapping)]
    for one in weights:
        kind = one.get("type", "int"), one.get("num_bits", 8)
        if kind not in COMPRESSED_TYPES:
            raise _refused(f"{COMPRESSED} with weights of type {shown(kind[0])} in {shown(kind[1])} bits")
    groups = tuple(_group(one, WHOLE) for one in weights)
    return Quantisation(COMPRESSED, groups, tuple(_blocks(one.get("block_structure") for one in weights)))


def _fp8(stored: Mapping[str, Any]) -> Quantisation:
    return Quantisation(FP8, blocks=tuple(_blocks([stored.get("weight_block_size")])))


def _mxfp4(stored: Mapping[str, Any]) -> Quantisation:
    plain = stored.get("modules_to_not_convert") or ()
    if not isinstance(plain, (list, tuple)) or not all(isinstance(one, str) for one in plain):
        raise ValueError(f"the config's modules_to_not_convert is {shown(plain)}, which is no list of names; {AGAIN}")
    return Quantisation(MXFP4, plain=tuple(plain))


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    AWQ: _awq,
    GPTQ: _gptq,
    COMPRESSED: _compressed,
    FP8: _fp8,
    "fbgemm_fp8": _fp8,
    MXFP4: _mxfp4,
}


# -- checks ----------------------------------------------------------------------------------------------------------------


def _refused(what: str) -> ValueError:
    return ValueError(f"the checkpoint is quantised as {what}, which is not read; read are {READ}, or give one in 16 bits")


def _check_bits(method: str, stored: Mapping[str, Any]) -> None:
    bits = stored.get("bits", stored.get("w_bit", BITS))
    if type(bits) is not int or bits != BITS:
        raise _refused(f"{method} in {shown(bits)} bits")


def _checked_form(method: str, form: object, known: tuple[str, ...]) -> str:
    """The format as it is known; AutoAWQ writes some in capitals."""
    if not isinstance(form, str) or form.lower() not in known:
        raise _refused(f"{method} in the form {shown(form)}")
    return form.lower()


def _group(stored: Mapping[str, Any], default: int = 128) -> int:
    size = stored.get("group_size", stored.get("q_group_size", default))
    size = default if size is None else size
    if type(size) is not int or (size < 1 and size != WHOLE):
        raise ValueError(f"the config's group_size is {shown(size)}, which is no number of inputs; {AGAIN}")
    return size


def _blocks(found: Any) -> Iterator[tuple[int, int]]:
    for block in found:
        if block is None:
            continue
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise ValueError(f"the config's block of weights is {shown(block)}, and not two sizes; {AGAIN}")
        yield block[0], block[1]


def _objects(found: object) -> list[Mapping[str, Any]]:
    """The objects among the values of an object; configs name some kinds of layers by lists instead."""
    return [one for one in found.values() if isinstance(one, Mapping)] if isinstance(found, Mapping) else []
