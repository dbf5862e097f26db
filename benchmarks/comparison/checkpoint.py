"""A checkpoint of random weights as the Hugging Face hub would have it: what every system can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.baselines.made_up import is_made_up, write_shapes
from h2o_flexgen.checkpoints.dummy import DummySource
from h2o_flexgen.checkpoints.model_files import require_free_space
from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, write_safetensors
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.session.opened_model import OpenedModel

SHARD_BYTES = 2 << 30
UNKNOWN = "the shapes of {} are not known; known are those in configs/models"
DONE = "model.safetensors.index.json"  # written last


def checkpoint_of(model: str, dtype: str, folder: Path) -> Path:
    """A checkpoint with a known model's shapes, written once."""
    own = folder / f"{model.replace('/', '--')}-{dtype}"
    if not (own / DONE).is_file():
        write_checkpoint(model, dtype, own)
    return own


def made_up_of(model: str, dtype: str, folder: Path) -> Path:
    """A folder with a known model's config and the shapes of its tensors: every system makes the weights up in memory."""
    own = folder / f"{model.replace('/', '--')}-{dtype}-made-up"
    if not is_made_up(str(own)):
        _save_config(model, dtype, own)
        write_shapes(own, {tensor.name: tensor.shape for tensor in spec_of(model, dtype).tensors.values()})
    return own


def made_up_spec(model: str, dtype: str) -> ModelSpec:
    """With the matrices in the formats that random weights of this model have."""
    return OpenedModel.of(model, True, dtype, Site()).spec(Plan(sep_layer=False))


def spec_of(model: str, dtype: str) -> ModelSpec:
    return create_model(_known(model), dtype, sep_layer=False, name=model).spec


def _known(model: str) -> Config:
    config = known_config(model)
    if config is None:
        raise ValueError(UNKNOWN.format(model))
    return config


def _save_config(model: str, dtype: str, folder: Path) -> None:
    """Other systems read it with transformers, so transformers writes it."""
    from transformers import CONFIG_MAPPING

    values = vars(_known(model))
    folder.mkdir(parents=True, exist_ok=True)
    CONFIG_MAPPING[values["model_type"]].from_dict({**values, "dtype": dtype}).save_pretrained(folder)


def spec_in(file: Path, dtype: str, plan: Plan | None = None) -> ModelSpec:
    """The shapes of the model in a GGUF file, with weights as they lie in it, and the rest as a plan has it."""
    return OpenedModel.of(str(file), False, dtype, Site()).spec(plan or Plan())


def write_checkpoint(model: str, dtype: str, folder: Path) -> None:
    spec = spec_of(model, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    require_free_space(folder, spec.weight_bytes, f"a checkpoint of {model}")
    source = DummySource(seed=0, dtype=dtype, offload_dir=folder)

    def value(name: str) -> torch.Tensor:
        tensor = spec.tensors[name]
        out = torch.empty(tensor.shape, dtype=getattr(torch, dtype))
        source.fill(tensor, out)
        return out

    shards = list(_shards(spec))
    places = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, [TensorHeader(one.name, getattr(torch, dtype), one.shape) for one in tensors], value)
        places |= {one.name: name for one in tensors}
    _save_config(model, dtype, folder)
    index = {"metadata": {"total_size": spec.weight_bytes}, "weight_map": places}
    (folder / DONE).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _shards(spec: ModelSpec) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    for tensor in spec.tensors.values():
        if shard and sum(one.nbytes for one in shard) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard
