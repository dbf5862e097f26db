"""Adapters: LoRA as PEFT and llama.cpp write it, merged into the matrices of a checkpoint while these are copied.

An adapter has two thin matrices for each matrix that it changes. W becomes W + factor * (B @ A), in float32, and is then
rounded or packed once. The factor is alpha / r, with rsLoRA alpha / sqrt(r), times the weight that the user gives. Several
adapters are added one after the other. What other kinds of adapters would do is refused by name.

For all experts of a layer that transformers holds as one parameter, PEFT has two thin matrices, too: A has r rows for each
expert, and B a column of each expert for each of r (`target_parameters`). Where two parameters of a module are changed, the
wrapper of one stands around that of the other, so that names do not say which is which. Shapes do.

llama.cpp writes a GGUF file, for a model in another one. Its matrices have the names of the model's tensors in GGUF files, and
rows in their order there. Those of all experts of a layer are in one tensor. The factor is alpha / r, or 1 where the file says
no alpha.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.gguf_format import GgufTensor, Metadata, is_gguf, read_gguf
from h2o_flexgen.checkpoints.model_files import read_object
from h2o_flexgen.checkpoints.model_places import divided, refuse_missing_adapters
from h2o_flexgen.checkpoints.named_tensors import DOWN, GATE_UP, TOGETHER, name_in_models
from h2o_flexgen.checkpoints.quantised import FoundTensors
from h2o_flexgen.checkpoints.safetensors_format import FLOATS, read_header
from h2o_flexgen.checkpoints.stored_architecture import ARCHITECTURE, KIND, GgufArchitecture, TensorNames, bare_name
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor, read_whole
from h2o_flexgen.core.hints import reason, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = "LORA"
PIECE_BYTES = 1 << 24
WHOLE_NAME = re.compile(r"base_model\.model\.(?P<module>.+?)\.lora_(?P<kind>embedding_)?(?P<half>[AB])(\.weight)?")
AGAIN = "give another adapter"
NOT_FOR_ROWS = "changes {}, and an adapter beside the weights changes no tables, heads and experts"
# names in a config that change no values of a merged matrix; any other that is set is refused
INERT = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
        "lora_dropout", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
PARAMETERS, INNER = "target_parameters", ".base_layer"
OF_EACH, SEPARATE = ".experts.", "save the model with a matrix for each expert"
Halves = Mapping[str, StoredTensor]  # A and B
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")  # of training: others change the model's weights, too


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a matrix: a product of two thin ones, B @ A, times a factor."""

    a: StoredTensor  # (r, columns)
    b: StoredTensor  # (rows, r)
    factor: float
    is_turned: bool  # the model's file has the transposed matrix

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix in the model's file."""
        rows, columns = self.b.shape[0], self.a.shape[1]
        return (columns, rows) if self.is_turned else (rows, columns)

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        a, b = self.read()
        return (a.T, b.T) if self.is_turned else (b, a)

    def read(self) -> tuple[Tensor, Tensor]:
        """A and B as the file has them, in float32."""
        return _values(self.a), _values(self.b)

    def rows(self, first: int, count: int) -> Tensor:
        """Rows of it, in float32."""
        left, right = self._halves
        return left[first : first + count] @ right * self.factor

    def forget(self) -> None:
        self.__dict__.pop("_halves", None)


def _values(half: StoredTensor) -> Tensor:
    return read_whole(half).view(getattr(torch, half.dtype)).view(half.shape).float()


@dataclass(frozen=True)
class LowRankOfExpert(LowRank):
    """What an adapter adds to a matrix of one expert, in halves of all experts of its layer."""

    number: int
    count: int  # of experts
    rows_of_b: slice  # of all that an expert's parameter has
    values: Callable[[StoredTensor], Tensor]  # of a half; they are kept for the next expert

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows_of_b.stop - self.rows_of_b.start, self.a.shape[1]

    def read(self) -> tuple[Tensor, Tensor]:
        a, b = self.values(self.a), self.values(self.b)
        own = b.view(len(b), -1, self.count)[self.rows_of_b, :, self.number]
        return a.view(self.count, -1, self.a.shape[1])[self.number], own


@dataclass(frozen=True)
class Merged:
    """What adapters add to a matrix."""

    parts: tuple[LowRank, ...]
    description: str  # all that it depends on

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape

    def to(self, first: int, rows: Tensor) -> Tensor:
        """Rows of the model's matrix, from this one on, with what is added to them, in float32."""
        merged = rows.float()
        for part in self.parts:
            merged = merged + part.rows(first, len(rows))
        if first + len(rows) == self.shape[0]:
            for part in self.parts:
                part.forget()
        return merged


@dataclass(frozen=True)
class Adapter:
    """An adapter in a folder, and its weight."""

    merging: ClassVar[str] = "merge it: --adapter FOLDER"  # what to do where rows cannot have it
    folder: Path
    weight: float
    config: Mapping[str, Any]

    @classmethod
    def in_folder(cls, folder: Path, weight: float = 1.0) -> Adapter:
        """Reads what a folder says."""
        if not folder.is_dir():
            raise ValueError(f"adapter {folder} is no folder; give one with {CONFIG} and {WEIGHTS}")
        adapter = cls(folder, weight, read_object(folder / CONFIG, AGAIN))
        adapter._refuse_other_kinds()
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"adapter {folder} has no {WEIGHTS}; save it as safetensors")
        return adapter

    def _refuse_other_kinds(self) -> None:
        kind = self.config.get("peft_type")
        if kind != LORA:
            raise self.refused(f"is of the kind {shown(kind)}, and only {LORA} can be used")
        if self.config.get("use_dora"):
            raise self.refused("is of the kind DoRA (use_dora), and only LoRA and rsLoRA can be used")
        if (bias := self.config.get("bias", "none")) != "none":
            raise self.refused(f"has biases of its own (bias {shown(bias)}), which are not used")
        if (begun := self.config.get("init_lora_weights")) not in PLAIN_BEGINNINGS:
            raise self.refused(f"is for a model that its training changed first (init_lora_weights {shown(begun)})")
        known = {*INERT, PARAMETERS} if self._parameters else INERT
        if others := sorted(name for name, value in self.config.items() if value and name not in known):
            raise self.refused(f"sets {others[0]} ({shown(self.config[others[0]])}), which is not supported")

    @property
    def _parameters(self) -> Sequence[str]:
        """The parameters of all experts of a layer that it may change; none where it names others."""
        given = self.config.get(PARAMETERS) or ()
        kinds = [str(name).rpartition(".")[2] for name in given] if isinstance(given, list) else []
        return kinds if {*kinds} <= TOGETHER.keys() else ()

    def refused(self, what: str, advice: str = AGAIN) -> ValueError:
        return ValueError(f"adapter {self.folder} {what}; {advice}")

    @property
    def file(self) -> Path:
        """What has its matrices."""
        return self.folder / WEIGHTS

    def usual(self, module: str, names: TensorNames) -> str:
        """The usual name of the matrix that it changes in a module."""
        return names.usual(f"{module}.weight")

    @cached_property
    def identity(self) -> str:
        """Identifies all that it adds."""
        digest = blake2b(repr((self.weight, sorted(self.config.items(), key=str))).encode(), digest_size=12)
        try:
            with self.file.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {reason(error)}; {AGAIN}") from error
        return digest.hexdigest()

    def parts(self) -> dict[str, LowRank]:
        """What it adds, by the names of the modules that it changes."""
        halves: dict[str, dict[str, StoredTensor]] = {}
        embeddings = set[str]()
        for tensor in read_header(self.file):
            named = WHOLE_NAME.fullmatch(tensor.name)
            if named is None or tensor.dtype not in FLOATS.values() or len(tensor.shape) != 2:
                raise self.refused(f"has the tensor {shown(tensor.name)} ({tensor.dtype}, {tensor.shape}), no half of a LoRA")
            halves.setdefault(named["module"], {})[named["half"]] = tensor
            embeddings |= {named["module"]} if named["kind"] else set()
        found = dict[str, LowRank]()
        inner = {module: both for module, both in halves.items() if module.endswith(INNER)}
        read = lru_cache(maxsize=2 * len(TOGETHER))(_values)
        for module, both in halves.items():
            if self._parameters and module.endswith(".experts"):
                wrapped = [own for own in (both, inner.pop(module + INNER, None)) if own is not None]
                found |= self._of_experts(module, wrapped, read)
            elif not module.endswith(INNER):
                found[module] = self._part(module, both, module in embeddings)
        return found | {module: self._part(module, both, False) for module, both in inner.items()}

    def _of_experts(
        self, module: str, wrapped: Sequence[Halves], values: Callable[[StoredTensor], Tensor]
    ) -> Iterator[tuple[str, LowRank]]:
        """What it adds to each expert's matrices of a layer, by module."""
        for kind, both in self._by_parameter(module, wrapped):
            a, b, rank, factor = self._checked(f"{module}.{kind}", both, of_experts=True)
            own = b.shape[0] // len(TOGETHER[kind])
            for number in range(count := a.shape[0] // rank):
                for place, part in enumerate(TOGETHER[kind]):
                    rows = slice(place * own, (place + 1) * own)
                    yield f"{module}.{number}.{part}", LowRankOfExpert(a, b, factor, False, number, count, rows, values)

    def _by_parameter(self, module: str, wrapped: Sequence[Halves]) -> Sequence[tuple[str, Halves]]:
        """Finds the parameter that each pair of halves changes. What goes up goes down again, so that shapes say it."""
        kinds = sorted({*self._parameters}, reverse=True)  # what goes up first
        for each in (wrapped, wrapped[::-1]):
            found = dict(zip(kinds, each))
            whole = {kind: both for kind, both in found.items() if both.keys() == {"A", "B"}}
            shapes = {kind: (both["B"].shape[0], both["A"].shape[1]) for kind, both in whole.items()}
            up, down = shapes.get(GATE_UP, (0, 0)), shapes.get(DOWN, (0, 0))
            if len(wrapped) == len(kinds) == len(shapes) and (len(kinds) == 1 or up == (2 * down[1], down[0])):
                return [*found.items()]
        raise self.refused(f"has halves for {module} that are not of its {' and '.join(kinds)}")

    def _part(self, module: str, both: Halves, is_embedding: bool) -> LowRank:
        a, b, _, factor = self._checked(module, both)
        return LowRank(a, b, factor, is_embedding or bool(self.config.get("fan_in_fan_out")))

    def _checked(self, module: str, both: Halves, of_experts: bool = False) -> tuple[StoredTensor, StoredTensor, int, float]:
        """The halves for a module, their rank and their factor."""
        if both.keys() != {"A", "B"}:
            raise self.refused(f"has only one half of {module}")
        a, b, rank = both["A"], both["B"], self._of_module("r", "rank_pattern", module)
        if a.shape[0] != b.shape[1] or (a.shape[0] % rank if of_experts else a.shape[0] != rank):
            raise self.refused(f"has halves of the shapes {b.shape} and {a.shape} for {module}, and its config says r {rank:g}")
        alpha, is_rs = self._of_module("lora_alpha", "alpha_pattern", module), bool(self.config.get("use_rslora"))
        return a, b, int(rank), alpha / (sqrt(rank) if is_rs else rank) * self.weight

    def _of_module(self, name: str, pattern: str, module: str) -> float:
        """A number of the config, which some modules have their own of."""
        own = self.config.get(pattern) or {}
        value = next((own[key] for key in own if re.match(rf"(.*\.)?({key})$", module)), self.config.get(name))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refused(f"has the {name} {shown(value)} for {module}, which is no number above 0")
        return value


@dataclass(frozen=True)
class Adapters:
    """All adapters that are merged, in this order."""

    each: tuple[Adapter, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    @cached_property
    def identity(self) -> str:
        return " ".join(adapter.identity for adapter in self.each)

    def refuse(self, what: str) -> None:
        """Refuses adapters where nothing can be added."""
        if self.each:
            advice = "give the model's folder of safetensors"
            raise ValueError(f"adapter {self.each[0].folder} cannot be merged into {what}; {advice}, or leave adapter out")

    def on(self, found: FoundTensors, names: TensorNames, place: Path) -> FoundTensors:
        """The tensors of a checkpoint, each with what is added to it."""
        if not self.each:
            return found
        usual = _by_usual_name([*found.tensors, *found.matrices], names)
        parts: dict[str, list[tuple[Adapter, LowRank]]] = {}
        for adapter in self.each:
            for module, part in adapter.parts().items():
                wanted = bare_name(adapter.usual(module, names))
                name = usual.get(wanted)
                if name is None and wanted.partition(OF_EACH)[0] + OF_EACH + GATE_UP in usual:
                    raise adapter.refused(f"changes {module}, and {place} has one tensor of all experts of a layer", SEPARATE)
                if name is None:
                    raise adapter.refused(f"changes {module}, and {place} has no such matrix: it is of another model")
                parts.setdefault(name, []).append((adapter, part))
        changed = {name: self._merged(found, name, own, place) for name, own in parts.items()}
        tensors = {name: replace(one, added=changed.get(name)) for name, one in found.tensors.items()}
        return FoundTensors(tensors, {name: replace(one, added=changed.get(name)) for name, one in found.matrices.items()})

    def _merged(self, found: FoundTensors, name: str, own: Sequence[tuple[Adapter, LowRank]], place: Path) -> Merged:
        matrix: StoredTensor | StoredMatrix = found.tensors.get(name) or found.matrices[name]
        for adapter, part in own:
            if matrix.shape != part.shape:
                wanted = f"{name} of {place} has the shape {matrix.shape}, and what is to be added {part.shape}"
                raise adapter.refused(f"is of another model: {wanted}")
        return Merged(tuple(part for _, part in own), " ".join(adapter.identity for adapter, _ in own))


NO_ADAPTERS = Adapters()


def _by_usual_name(given: Iterable[str], names: TensorNames) -> dict[str, str]:
    return {bare_name(names.usual(name)): name for name in given}


# -- in GGUF files -----------------------------------------------------------------------------------------------------

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
