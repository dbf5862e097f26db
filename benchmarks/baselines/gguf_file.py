"""A checkpoint as a GGUF file, which is what llama.cpp reads: 16-bit matrices as they are, norms and biases in fp32.

It is for measuring alone: there is no vocabulary in it, and rows of q and k stay in the order of the hub, in which llama.cpp
does not turn them. The time is the same; the text would be another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.baselines.gguf_metadata import add_metadata

GGML_TYPES = {torch.bfloat16: gguf.GGMLQuantizationType.BF16, torch.float16: gguf.GGMLQuantizationType.F16}
SUFFIXES = (".weight", ".bias")


def write_gguf(checkpoint: Path, config: Mapping[str, Any], architecture: str, file: Path) -> None:
    """Writes the file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, architecture)
    try:
        add_metadata(writer, config)
        named = _names(config, architecture)
        for name, value in _tensors(checkpoint):
            form = GGML_TYPES.get(value.dtype)
            writer.add_tensor_info(named(name), value.shape, _as_stored(value).dtype, value.nbytes, form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, value in _tensors(checkpoint):
            writer.write_tensor_data(_as_stored(value))
        writer.close()
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _names(config: Mapping[str, Any], architecture: str) -> Callable[[str], str]:
    """The names of GGUF for those of the hub."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])

    def named(name: str) -> str:
        found = names.get_name(name, try_suffixes=SUFFIXES)
        if found is None:
            raise ValueError(f"GGUF has no name for the tensor {name} in the architecture {architecture}")
        return str(found)

    return named


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, one at a time; what has one dimension in fp32, as llama.cpp wants it."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                value = opened.get_tensor(name)
                yield name, value.float() if value.ndim == 1 else value


def _as_stored(value: Tensor) -> numpy.ndarray[Any, Any]:
    """The values for numpy, which has no bf16."""
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
