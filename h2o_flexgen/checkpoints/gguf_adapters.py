"""Adapters as llama.cpp writes them: a LoRA in a GGUF file, for a model in another one.

Its matrices have the names of the model's tensors in GGUF files, and rows in their order there. Those of all experts of a layer
are in one tensor. The factor is alpha / r, or 1 where the file says no alpha.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from h2o_flexgen.checkpoints.adapter_places import divided, refuse_missing_adapters
from h2o_flexgen.checkpoints.adapters import LORA, Adapter, Adapters, LowRank
from h2o_flexgen.checkpoints.gguf_format import GgufTensor, Metadata, is_gguf, read_gguf
from h2o_flexgen.checkpoints.named_tensors import name_in_models
from h2o_flexgen.checkpoints.safetensors_format import FLOATS
from h2o_flexgen.checkpoints.stored_architecture import ARCHITECTURE, KIND, GgufArchitecture, TensorNames
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.core.hints import shown

OWN_KIND, OWN_METHOD, ALPHA = "adapter", "adapter.type", "adapter.lora.alpha"
HALF = re.compile(r"(?P<tensor>.+)\.lora_(?P<half>[ab])")
DIMENSIONS_OF_EXPERTS = 3  # of a half: there is one for each expert
OF_EXPERT = " of expert "


@dataclass(frozen=True)
class GgufAdapter(Adapter):
    """An adapter in a file, which stands in the place of a folder."""

    merging: ClassVar[str] = "merge it: --adapter FILE"
    metadata: Metadata = field(kw_only=True)
    tensors: tuple[GgufTensor, ...] = field(kw_only=True)

    @classmethod
    def in_file(cls, file: Path, weight: float = 1.0) -> GgufAdapter:
        gguf = read_gguf(file)
        adapter = cls(file, weight, dict(gguf.metadata.values), metadata=gguf.metadata, tensors=gguf.tensors)
        if (kind := gguf.metadata.text(KIND, "model")) != OWN_KIND:
            raise adapter.refused(f"is a GGUF file of the type {shown(kind)}, no adapter")
        if (method := gguf.metadata.text(OWN_METHOD)) != LORA.lower():
            raise adapter.refused(f"is of the kind {shown(method)}, and only {LORA} can be used")
        return adapter

    @property
    def file(self) -> Path:
        return self.folder

    def usual(self, module: str, names: TensorNames) -> str:
        own = names.gguf
        self._refuse_other_architecture(own)
        tensor, _, number = module.partition(OF_EXPERT)
        name = None if own is None else name_in_models(tensor, own)
        return module if name is None else name.format(number)

    def _refuse_other_architecture(self, known: GgufArchitecture | None) -> None:
        found = self.metadata.text(ARCHITECTURE)
        if known is not None and found not in (known.name, *known.other_names):
            raise self.refused(f"is for models of the architecture {shown(found)}, and this one is {shown(known.name)}")

    def parts(self) -> dict[str, LowRank]:
        halves: dict[str, dict[str, StoredTensor]] = {}
        for tensor in self.tensors:
            named = HALF.fullmatch(tensor.name)
            if named is None or tensor.format not in FLOATS.values() or len(tensor.shape) not in (2, DIMENSIONS_OF_EXPERTS):
                raise self.refused(f"has the tensor {shown(tensor.name)} ({tensor.format}, {tensor.shape}), no half of a LoRA")
            for of_expert, stored in _each_expert(tensor):
                halves.setdefault(named["tensor"] + of_expert, {})[named["half"]] = stored
        return {module: self._low_rank(module, both) for module, both in halves.items()}

    def _low_rank(self, module: str, both: Mapping[str, StoredTensor]) -> LowRank:
        if both.keys() != {"a", "b"}:
            raise self.refused(f"has only one half of {module}")
        a, b, alpha = both["a"], both["b"], self.metadata.number(ALPHA, 0.0)
        if a.shape[0] != b.shape[1]:
            raise self.refused(f"has halves of the shapes {b.shape} and {a.shape} for {module}")
        return LowRank(a, b, (alpha / a.shape[0] if alpha else 1.0) * self.weight, is_turned=False)


def _each_expert(tensor: GgufTensor) -> Iterator[tuple[str, StoredTensor]]:
    """A half, or those of each expert in one tensor; and what to add to its name."""
    whole = StoredTensor(tensor.name, tensor.file, tensor.offset, tensor.nbytes, tensor.format, tensor.shape)
    if len(tensor.shape) != DIMENSIONS_OF_EXPERTS:
        yield "", whole
        return
    nbytes = tensor.nbytes // tensor.shape[0]
    for number in range(tensor.shape[0]):
        own = replace(whole, offset=tensor.offset + number * nbytes, nbytes=nbytes, shape=tensor.shape[1:])
        yield f"{OF_EXPERT}{number}", own


def merged_adapters(given: Iterable[str], model: Path | None) -> Adapters:
    """Adapters that are merged, each as PATH or PATH=WEIGHT. `model`: its folder or file."""
    each = map(divided, given)
    return Adapters(tuple(adapter_for(place, model, str(place), weight) for place, weight in each))


def adapter_for(place: Path, model: Path | None, name: str, weight: float = 1.0) -> Adapter:
    """The adapter in a folder, or in a GGUF file. Each is for models of its own form: rows lie in other orders."""
    refuse_missing_adapters([place])
    of_model = model is not None and is_gguf(model)
    if of_model and not is_gguf(place):
        raise ValueError(
            f"adapter {shown(name)} is for matrices as safetensors have them, and {model} is a GGUF file; give the model's "
            "folder of safetensors, or the adapter as a GGUF file"
        )
    if is_gguf(place) and not of_model:
        raise ValueError(
            f"adapter {shown(name)} is a GGUF file, for matrices as these have them, and the model is none; give the folder "
            "that PEFT has saved, or the model as a GGUF file"
        )
    return GgufAdapter.in_file(place, weight) if is_gguf(place) else Adapter.in_folder(place, weight)
