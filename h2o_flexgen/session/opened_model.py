"""OpenedModel: a model's config and files, read once. Its shapes, its functions and the source of its weights follow from them
under any plan. ModelShapes: a model of which only the shapes are known; it can be planned for, and not run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

import psutil

from h2o_flexgen.checkpoints.adapters import NO_ADAPTERS, Adapters, merged_adapters
from h2o_flexgen.checkpoints.checkpoint import Checkpoint, WeightSource, open_checkpoint
from h2o_flexgen.checkpoints.derived import Damaged, fingerprint
from h2o_flexgen.checkpoints.dummy import DummySource, random_format
from h2o_flexgen.checkpoints.gguf_format import Gguf, is_gguf, read_gguf
from h2o_flexgen.checkpoints.model_places import ADVICE, local_place, resolve_model
from h2o_flexgen.checkpoints.packed import PackedCheckpoint
from h2o_flexgen.checkpoints.quantisation import KEYS, MXFP4, Quantisation, quantisation_of
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.engine.reports import Stage, Stages
from h2o_flexgen.formats.kernel_table import TRITON, Processor
from h2o_flexgen.formats.table import can_be_parted
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.models import create_model, known_config, load_config, tensor_names
from h2o_flexgen.models.base import Model
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.planning.footprint import MemoryLimits, left_to_system
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import OFF, Plan
from h2o_flexgen.planning.plan_requirements import PlanSubject
from h2o_flexgen.profiling.gpu_checks import kept_graph_bytes
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.tokenizer import BYTES, Tokenizer

CONFIG = "config.json"
DUMMY_SEED = 0
SILENT = Stages(None)


@dataclass(frozen=True)
class OpenedModel:
    name: str
    config: Config
    dtype: str  # type of the values in computations
    folder: Path | None  # None: weights are random, and no file of them is read
    checkpoint: Checkpoint | None
    adapters: Adapters = NO_ADAPTERS  # that are merged into it
    _specs: dict[tuple[object, ...], dict[tuple[str, str], ModelSpec]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        dummy_weights: bool,
        dtype: str,
        site: Site,
        stages: Stages = SILENT,
        read: Callable[[Path], Gguf] = read_gguf,
        adapters: Sequence[str] = (),
    ) -> OpenedModel:
        """Opens a folder or a GGUF file, which `read` reads, or a name on the hub. .bin files are converted, and `stages`
        reports that. `adapters`: folders of those that are merged, each with =WEIGHT behind it if that is not 1."""
        merged = merged_adapters(adapters, None if dummy_weights else local_place(name))
        if dummy_weights:
            merged.refuse("random weights")
            folder, checkpoint, stored = None, None, None
            config = known_config(name) or load_config(name)
            _refuse_quantised(_quantisation(config))
        else:
            folder = resolve_model(name)
            config = load_config(str(folder), read)
            converting, names = stages.of(Stage.CONVERTING), tensor_names(config)
            checkpoint = open_checkpoint(folder, progress=converting, names=names, read=read, adapters=merged)
            stored = checkpoint.dtype if dtype == AUTO else None
        computed = site.usual_dtype(stored) if dtype == AUTO else dtype
        return cls(name, config, computed, folder, checkpoint and checkpoint.decoding_to(computed), merged)

    @cached_property
    def config_digest(self) -> str:
        """Identifies what the model says of itself, as its files have it."""
        if self.folder is not None and (file := self.folder / CONFIG).is_file():
            said = file.read_bytes()
        elif self.folder is not None:  # a GGUF file says it among its tensors
            said = json.dumps(vars(self.config), default=str, sort_keys=True).encode()
        else:
            said = self.name.encode()
        return blake2b(said, digest_size=8).hexdigest()

    @cached_property
    def identity(self) -> str:
        """Identifies its config, its weights, of which only parts are read, and its adapters."""
        if self.checkpoint is None:
            return f"random, seed {DUMMY_SEED}: {self.config_digest}"
        return fingerprint(self.checkpoint.origins, f"{self.config_digest} {self.adapters.identity}")

    @property
    def quantisation(self) -> str:
        """The method of quantisation that the config names; nothing if it names none."""
        return _method(self.config)

    def spec(self, plan: Plan) -> ModelSpec:
        """Its sizes. Those that differ in how KV is kept or products are made share what is worked out of weights."""
        weights = plan.sep_layer, plan.attend_on, plan.policy.keeps_all, plan.draft, plan.weight_codec, plan.state_dtype
        alike, kind = self._specs.setdefault(weights, {}), (plan.kv_codec, plan.compute)
        if kind not in alike:
            spec = self.model(plan).spec
            if alike:
                vars(spec)["worked_out"] = next(iter(alike.values())).worked_out
            alike[kind] = spec
        return alike[kind]

    def model(self, plan: Plan) -> Model:
        """The model's layers as functions, with their shapes."""
        model = create_model(self.config, self.dtype, plan.sep_layer, self.name)
        if not plan.policy.keeps_all and all(model.spec.windows):  # otherwise the policy would have no layer to work on
            model.spec = model.spec.within_windows()
        if plan.attend_on == HOST:
            model.spec = model.spec.cut_at_attention()
        if self.checkpoint is not None:
            self.checkpoint.require(model.spec.tensors)
            self.checkpoint.locate(model.spec.tensors.values())  # in the file's shapes, rows are whole blocks of their format
            model.spec = model.spec.map_tensors(self._as_stored)
            _refuse_tables(model.spec, self.checkpoint)
        elif quantisation := _quantisation(self.config):
            model.spec = _in_random_forms(model.spec, quantisation)
        model.spec = model.spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute, plan.state_dtype, plan.draft != OFF)
        return model

    def _as_stored(self, tensor: TensorSpec) -> TensorSpec:
        assert self.checkpoint is not None
        stored = self.checkpoint.stored_as(tensor.name)
        itemsize = tensor.itemsize if stored.is_merged else stored.itemsize
        return replace(tensor, stored_itemsize=itemsize, format=stored.format)

    def source(self, plan: Plan, offload_folder: Path, stages: Stages) -> WeightSource:
        """The source of the weights. Random ones that are to lie on disk are written to `offload_folder`."""
        if self.checkpoint is None:
            return DummySource(DUMMY_SEED, self.dtype, offload_folder, stages.of(Stage.WRITING, Stage.LOADING))
        spec = self.spec(plan)
        if not self.checkpoint.to_write(spec):
            return self.checkpoint
        packing, renewing = stages.of(Stage.PACKING, Stage.LOADING), partial(stages, Stage.RENEWING)
        return PackedCheckpoint(self.checkpoint, spec, progress=packing, renewing=renewing)

    def tokenizer(self, asked: str, vocab: int, read: Callable[[Path], Gguf]) -> Tokenizer:
        place = asked if asked in (AUTO, BYTES) else _place_of_tokenizer(asked)
        said = read(self.folder).metadata if self.folder is not None and is_gguf(self.folder) else None
        return load_tokenizer(self.folder, self.config, vocab, place, said)


def _place_of_tokenizer(asked: str) -> Path:
    try:
        return resolve_model(asked, with_weights=False)
    except ValueError as error:
        advice = f"give a folder or a GGUF file with a tokenizer, a hub name, or {BYTES}"
        raise ValueError(f"no tokenizer {shown(asked)}: {str(error).removesuffix(f'; {ADVICE}')}; {advice}") from error


def _refuse_quantised(quantisation: Quantisation | None) -> None:
    """Refuses formats that random weights do not have: measurements with other formats would mislead."""
    if quantisation is not None and quantisation.method != MXFP4:
        advice = "give its weights, or a config without quantization_config"
        raise ValueError(f"the model is quantised ({quantisation.method}), and random weights are not; {advice}")


def _quantisation(config: Config) -> Quantisation | None:
    return quantisation_of({key: getattr(config, key, None) for key in KEYS})


def _in_random_forms(spec: ModelSpec, quantisation: Quantisation) -> ModelSpec:
    """The model with its matrices, except tables of tokens, in the formats that they would have in files."""
    tables = {name for layer in spec.layers for name in (layer.token_table, layer.logit_matrix) if name is not None}
    own = {tensor.name for layer in spec.layers for name, tensor in layer.tensors if name in tables}
    found = {matrix.name: random_format(quantisation, matrix) for layer in spec.layers for matrix in layer.matrices}
    formats = {name: format for name, format in found.items() if format is not None and name not in own}
    return spec.map_tensors(lambda tensor: replace(tensor, format=formats.get(tensor.name, tensor.format)))


def _method(config: Config) -> str:
    """The method by which a config says that its checkpoint is quantised; nothing if it says none."""
    method = next(filter(None, (getattr(config, key, None) for key in KEYS)), None)
    if not method:
        return ""
    return str(method.get("quant_method", "unknown")) if isinstance(method, dict) else type(method).__name__


def _refuse_tables(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuses tables of tokens in formats that do not store rows separately."""
    for layer in spec.layers:
        table = layer.packed_tensor(layer.token_table)
        if table is not None and not can_be_parted(table.format):
            problem = f"the table of tokens {table.name} in {checkpoint.place} is quantised ({table.format})"
            raise ValueError(f"{problem}, and this format stores no separate rows; give a checkpoint with an unpacked table")


class Mending:
    """Removes damaged copies of weights, so that the next opening makes them again."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._mended: set[Path] = set()

    def discard(self, damaged: Damaged) -> None:
        """Removes a damaged copy; a second damage of the same copy is an error. If another process has removed it, the next
        opening uses that process's new copy, or makes one."""
        if damaged.copy.path in self._mended and damaged.copy.is_still_there:
            advice = "it was made again just now: is the disk sound? Set XDG_CACHE_HOME to a folder on another"
            raise ValueError(f"{damaged.what}; {advice}") from damaged
        if not damaged.copy.discard():
            return
        self._mended.add(damaged.copy.path)
        if not self._stages.is_heard:
            warnings.warn(f"{damaged.what}; it is made again", RuntimeWarning, stacklevel=2)
        self._stages(Stage.MENDING)


ANOTHER_MACHINE = ", or name a machine that has one with --machine"
PROCESS_STEP = 64 << 20  # what a process holds varies a little; plans should not. One step more is for a tokenizer


@dataclass(frozen=True)
class ModelShapes:
    model: ModelRequest
    site: SiteRequest
    named: Machine | None  # None: this machine
    _opened: dict[Site, OpenedModel] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.model.name

    def adopt(self, plan: Plan) -> None:
        """A model that is not open has no plan."""

    def subject_on(self, machine: Machine) -> PlanSubject:
        return PlanSubject(self.opened_on(machine).spec, self._limits(machine), self._site(machine))

    def opened_on(self, machine: Machine) -> OpenedModel:
        """The model from shapes alone, in the type that is usual there: no weights are fetched or converted for it."""
        site, seen = self._site(machine), self.model.without_weights()
        if site not in self._opened:
            opened = OpenedModel.of(seen.source, seen.dummy_weights, seen.dtype, site, adapters=seen.adapter)
            self._opened[site] = opened
        return self._opened[site]

    def _site(self, machine: Machine) -> Site:
        site = own_site(machine.device, machine.has_accelerator, self.model.dummy_weights)
        if not machine.has_accelerator:
            return site
        if self.named is not None:  # another machine's, where torch brings Triton
            return replace(site, processor=Processor(machine.device, TRITON, machine.multiplies))
        return replace(site, graph_bytes=kept_graph_bytes(machine.device))

    # -- what may be held ------------------------------------------------------------------------------------------------

    def _limits(self, machine: Machine) -> MemoryLimits:
        site = self.site
        site.refuse_memory_of_no_gpu(machine.has_accelerator, f"{machine.name} has none", ANOTHER_MACHINE)
        left = system_share(self.named, site)
        return MemoryLimits(
            device=_size(site.gpu_mem, machine.device_bytes - left.get(DEVICE, 0)) if machine.has_accelerator else None,
            host=_size(site.cpu_mem, machine.host_bytes - left.get(HOST, 0)),
            disk=_size(site.disk_mem, machine.disk_bytes),
            host_base=self._process_bytes,
            processes=site.gpus,
        )

    @cached_property
    def _process_bytes(self) -> int:
        return process_bytes()


def system_share(named: Machine | None, site: SiteRequest) -> Mapping[str, int]:
    """Bytes per tier that the plan must leave free. A named machine is described whole, so its system needs a share. A profile
    of this machine has only what was free, and memory that the user gave as a size is used in full."""
    if named is None:
        return {}
    asked = {DEVICE: site.gpu_mem, HOST: site.cpu_mem}
    return {tier: nbytes for tier, nbytes in left_to_system(named).items() if nbytes and asked[tier] is None}


def process_bytes() -> int:
    """Bytes that a run's process holds before anything is loaded: about as many as this one."""
    held = int(psutil.Process().memory_info().rss)
    return (held // PROCESS_STEP + 2) * PROCESS_STEP


def _size(asked: int | str | None, of_machine: int) -> int:
    return of_machine if asked is None else parse_bytes(asked)
