"""OpenRequest: which model is opened, where it computes, and under which plan: one that is given, or that options make.
Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from shutil import disk_usage

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import (
    FOLDER,
    divided,
    file_beside,
    local_place,
    refuse_missing_adapters,
    surely_beside,
)
from h2o_flexgen.core.allowed_values import AUTO, TRUTH, Bounds, Choice, Rule
from h2o_flexgen.core.environment import Threads, cache_folder, cores, default_offload_folder, existing_folder
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.core.option import by_own_names, check_options, option, options_of
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.core.site import DEVICE, HOST, on_tier
from h2o_flexgen.core.units import SIZE, format_bytes, parse_bytes
from h2o_flexgen.models import create_model, load_config, refuse_missing
from h2o_flexgen.planning.machine import DEVICES, Machine
from h2o_flexgen.planning.plan import MOST_GPUS, Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements, refuse_to_search_pipelines
from h2o_flexgen.planning.search import BUFFERS
from h2o_flexgen.policies import head_budgets
from h2o_flexgen.policies.head_budgets import EQUAL, OWN, HeadBudgets, read_head_budgets
from h2o_flexgen.sampling.foreign_options import OPTIONS
from h2o_flexgen.sampling.params import is_adapter_name
from h2o_flexgen.text.tokenizer import BYTES

SAFETENSORS = "*.safetensors"
PREFIX_BYTES = "10GB"  # of the folder of prefixes, unless another size is asked for


@dataclass(frozen=True)
class ModelRequest:
    """The model: a hub name, a local folder or GGUF file, FlexGen's --path with the model in it, or random weights."""

    name: str  # as the user says it, for reports
    source: str  # hub name, folder or file
    dummy_weights: bool = option(
        False, TRUTH, "", "random weights in the model's shapes: for speed, nothing is downloaded", bare=True
    )
    dtype: str = option(
        AUTO,
        Choice((AUTO, *DTYPE_BYTES)),
        "",
        f"what is computed with; {AUTO}: the fast type of the device",
    )
    tokenizer: str = option(
        AUTO,
        Rule(str, "a name or a path"),
        "NAME",
        f"a hub name, or a folder or GGUF file with a tokenizer, or {BYTES}: every byte is a token; {AUTO}: that of the model, "
        f"or {BYTES} for random weights",
    )

    adapter: tuple[str, ...] = option(
        (),
        Rule(lambda given: given, "a path, or a list of paths"),
        "PATH[=WEIGHT]",
        "a LoRA or rsLoRA of PEFT (a folder), merged once into the weights that it changes, which are copied into a cache; for "
        "a model in a GGUF file, a GGUF file with a LoRA, as llama.cpp writes it",
    )

    lora_modules: tuple[tuple[str, str], ...] = option(
        (),
        Rule(lambda given: given, "a text like NAME=PATH, or a list of such"),
        "NAME=PATH",
        "a LoRA or rsLoRA of PEFT (a folder) that requests may ask for by this name, beside the model's own weights; for a "
        "model in a GGUF file, a GGUF file with a LoRA, as llama.cpp writes it",
        flags=("--lora", "--lora-modules"),
        elsewhere=("enable_lora",),
    )

    measures_heads: bool = False  # once, if the plan shares out what is kept, and nothing is known of the heads
    is_looked_at: bool = False  # nothing is computed, so nothing is measured
    stands_for_own: bool = False  # random weights stand for the model's own, which would have to be fetched or converted

    def without_weights(self) -> ModelRequest:
        """The request for a look at the plan: it reads headers of local files, but downloads and converts nothing."""
        seen = replace(self, is_looked_at=True)
        if is_gguf(self.folder) or (self.folder.is_dir() and any(self.folder.glob(SAFETENSORS))):
            return seen
        return replace(seen, dummy_weights=True, adapter=(), stands_for_own=not self.dummy_weights)

    def refuse_missing(self) -> None:
        """Refuses a model that is nowhere on this machine, and no name on the hub, as opening it would but without torch. So it
        does with adapters that are nowhere, or that have one name."""
        refuse_missing(self.source, with_weights=not self.dummy_weights)
        refuse_missing_adapters(place for place, _ in map(divided, self.adapter))
        refuse_missing_adapters(map(local_path, self.adapters_by_name.values()))

    @property
    def without_measuring(self) -> ModelRequest:
        """The request for a model with a plan that is settled, or that is only looked at."""
        return replace(self, measures_heads=False)

    @property
    def adapters_by_name(self) -> dict[str, str]:
        """The folders of adapters that requests may ask for."""
        found = dict[str, str]()
        for name, folder in self.lora_modules:
            if found.setdefault(name, folder) != folder:
                raise ValueError(f"adapters {found[name]} and {folder} are both called {name}; give one of them another name")
        return found

    @property
    def folder(self) -> Path:
        """The place of the model, if it is no name on the hub."""
        return local_place(self.source)


@dataclass(frozen=True)
class SiteRequest:
    """What computes, and how much may be held there. Sizes are kept as they were written, since messages repeat them."""

    device: str = option(
        AUTO,
        Rule(str, "a name"),
        "NAME",
        f"{AUTO}, {' or '.join(DEVICES)}, or one of several with its number, like {DEVICES[-1]}:1",
    )
    threads: int | None = option(
        None,
        Threads(),
        "N",
        "threads that compute on the CPU; their number may change last bits of sums (default: one for each core that is free)",
    )
    gpu_mem: int | str | None = option(
        None, SIZE, "SIZE", "no more than this is held on the GPU, like 16GB or 14.9GiB (default: what is free)"
    )
    cpu_mem: int | str | None = option(
        None, SIZE, "SIZE", "no more than this is held in CPU memory by the whole process (default: what is free)"
    )
    disk_mem: int | str | None = option(
        None, SIZE, "SIZE", "no more than this is held on disk: KV, activations and random weights (default: what is free)"
    )
    offload_dir: str | Path | None = option(
        None,
        Rule(lambda path: path, "a path"),
        "FOLDER",
        "where KV, activations and random weights go on disk; what is not there is made, if the folder above it exists, and "
        "removed at the end (default: below ~/.cache/h2o_flexgen)",
    )
    prefix_dir: str | Path | None = option(
        None,
        Rule(lambda path: path, "a path"),
        "FOLDER",
        "where prefixes that requests share are kept on disk, and found again after a restart (default: they are not)",
    )
    prefix_dir_size: int | str = option(
        PREFIX_BYTES, SIZE, "SIZE", "no more than this is kept there: the longest unused goes first"
    )
    gpus: int = option(
        1,
        Bounds(1, MOST_GPUS),
        "N",
        "a process with each of N GPUs, from the first on; rows are dealt to them, and all share the weights in CPU memory; a "
        "plan, --gpu-mem and --threads are those of each",
    )
    by_flags: bool = False  # of a command, which messages name

    def __post_init__(self) -> None:
        check_options(self, SiteRequest)
        if self.prefix_dir is None and self.prefix_dir_size != PREFIX_BYTES:
            size, folder = (self.named(name) for name in ("prefix_dir_size", "prefix_dir"))
            raise ValueError(f"{size} is for a folder of prefixes; give {folder}, too, or leave {size} out")

    def named(self, name: str) -> str:
        """An option as messages name it."""
        return options_of(SiteRequest)[name].flag if self.by_flags else name

    @property
    def offload_folder(self) -> Path:
        return local_path(self.offload_dir or default_offload_folder())

    @property
    def of_each(self) -> SiteRequest:
        """The site of each process: with a share of the threads, if the user gave no number."""
        return self if self.gpus == 1 else replace(self, threads=self.threads or max(1, cores() // self.gpus))

    @property
    def folder_to_make(self) -> Path | None:
        """The offload folder, if it was named and is not there: it is made for a run, and removed at its end."""
        return None if self.offload_dir is None or self.offload_folder.exists() else self.offload_folder

    def refuse_unusable_folder(self) -> None:
        """Refuses an offload folder that was named and takes no files: no other plan would mend that. Nor would one mend a path
        that is mistyped: what lies there would go to whatever disk is above it."""
        if self.offload_dir is None:
            return
        given, whole = f"{self.named('offload_dir')} {self.offload_folder}", self.offload_folder.absolute()
        place = existing_folder(whole)
        has_files = place.is_dir() and disk_usage(place).total > 0  # /proc and the like have room for none
        if not has_files or not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"{given}: no file can be written in {place}; give another folder")
        if missing := [parent for parent in whole.parents if not parent.exists()]:
            raise ValueError(f"{given}: {missing[-1]} is not there; mend the path, or make {whole.parent}")

    def refuse_memory_of_no_gpu(self, has_gpu: bool, machine: str, otherwise: str = "") -> None:
        """Refuses a limit on GPU memory where no GPU computes: it would limit nothing, and the caller expects otherwise.
        `otherwise`: what else than leaving it out would mend that."""
        if self.gpu_mem is not None and not has_gpu:
            asked = f"--gpu-mem {self.gpu_mem}" if self.by_flags else f"gpu_mem {shown(self.gpu_mem)}"
            raise ValueError(f"{asked} is for a GPU, and {machine}; leave it out{otherwise}")

    def beyond(self, memory: Mapping[str, int]) -> Iterator[str]:
        """A line for each limit that is above what the machine has of this memory, by tier: nothing is wrong with it, but it
        may be mistyped, or the machine may be another one than the caller thinks."""
        for name, tier in (("gpu_mem", DEVICE), ("cpu_mem", HOST)):
            asked: int | str | None = getattr(self, name)
            if asked is not None and parse_bytes(asked) > memory.get(tier, inf):
                has = f"the machine has {format_bytes(memory[tier])} {on_tier(tier)}"
                yield f"{self.named(name)} {asked} is more than there is: {has}"


@dataclass(frozen=True)
class OpenRequest:
    """Everything that is asked of a model that is opened."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan
    trace: bool = False  # the trace of a run on a GPU has every task


def refuse_other_device(machine: Machine, device: str) -> None:
    """Refuses a device that is not the machine's: it says nothing of a run on another."""
    if device.partition(":")[0] != machine.device:
        raise ValueError(
            f"machine {machine.name!r} computes on {machine.device}, and not on {device}; "
            "leave --machine out or choose another --device; `python -m h2o_flexgen.plan` plans for other machines"
        )


HEAD_BUDGETS, PROBE = "head_budgets", "probe"  # options of plans that may be named by a file


def asked_plan(
    plan: Plan | None,
    percent: Sequence[float] | str | None,
    options: Mapping[str, object],
    other_names: Sequence[str],
    model: str,
    dummy_weights: bool = False,
    adapters: Sequence[str] = (),
) -> Plan:
    """The given plan, or one made of the options; its shares mean nothing if a plan is to be found."""
    refuse_unknown("option", options, [*Plan.option_names(), *other_names], OPTIONS)
    if isinstance(percent, str) and percent != AUTO:
        raise ValueError(f"percent is {shown(percent)}; give six numbers, or {AUTO!r} to have a plan found")
    if plan is None:
        asked = Plan.create(**{**options, **named_by_files(options, model)})
        if measures_heads(options, dummy_weights, adapters):
            asked = with_known_heads(asked, model)
        return asked if percent is None or isinstance(percent, str) else asked.with_percent(percent)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a {type(plan).__name__}; give a Plan, or leave it out and name its options here")
    if other := next(iter([*options, *(["percent"] if percent is not None else [])]), None):
        raise ValueError(f"both plan and {other} are given; put {other} into the plan, or leave the plan out")
    return plan


def named_by_files(options: Mapping[str, object], model: str) -> dict[str, object]:
    """Those of the options that may be named by a file, as plans take them."""
    readers: Mapping[str, Callable[[object, str], object]] = {HEAD_BUDGETS: head_budgets_of, PROBE: probe_of}
    return {name: read(options[name], model) for name, read in readers.items() if options.get(name) is not None}


def probe_of(given: object, model: str) -> Probe:
    """A probe itself, that of a file, or the one that lies beside the model."""
    if isinstance(given, Probe):
        return given
    from h2o_flexgen.checkpoints.probe_file import FILE, read_probe

    if given == OWN:
        return read_probe(file_beside(model, FILE, "is no probe", "--probe"))
    if isinstance(given, (str, os.PathLike)):
        return read_probe(given)
    raise ValueError(f"probe is a {type(given).__name__}; give a Probe, the path of a file, or {OWN!r}")


def head_budgets_of(given: object, model: str) -> HeadBudgets | None:
    """Head budgets themselves, those of a file, or those that lie beside the model. None: equal budgets, unless those
    that are known are to be taken (`with_known_heads`)."""
    if isinstance(given, HeadBudgets):
        return given
    if given in (EQUAL, AUTO):
        return None
    if given == OWN:
        return read_head_budgets(file_beside(model, head_budgets.FILE, "are no head budgets", "--output"))
    if isinstance(given, (str, os.PathLike)):
        return read_head_budgets(given)
    raise ValueError(f"head_budgets is a {type(given).__name__}; give HeadBudgets, the path of a file, or {OWN!r}")


def measures_heads(options: Mapping[str, object], dummy_weights: bool, adapters: Sequence[str]) -> bool:
    """Whether what heads need may be measured: nothing is said of them, and the weights are the model's own."""
    return options.get(HEAD_BUDGETS) in (None, AUTO) and not dummy_weights and not adapters


def with_known_heads(plan: Plan, model: str) -> Plan:
    """The plan, with the head budgets that are known of the model if they can share out what it keeps."""
    return replace(plan, head_budgets=_known_heads(model)) if plan.suits_any_head_budgets else plan


def _known_heads(model: str) -> HeadBudgets | None:
    """Those that lie beside the model and are of its shape, or else those that were measured here."""
    beside = _heads_beside(model)
    if beside is not None and _is_of(beside, model):
        return beside
    if not cache_folder(HEAD_BUDGETS).is_dir():
        return None
    from h2o_flexgen.checkpoints.derived import kept_file

    return _read_unasked(kept_file(model, HEAD_BUDGETS))


def heads_of_another(model: str) -> HeadBudgets | None:
    """Those that lie beside the model, but are of another shape."""
    beside = _heads_beside(model)
    return None if beside is None or _is_of(beside, model) else beside


def _heads_beside(model: str) -> HeadBudgets | None:
    return _read_unasked(surely_beside(model, head_budgets.FILE))


def _read_unasked(file: Path | None) -> HeadBudgets | None:
    """What a file says that the user has not named, so that the error says how to do without."""
    if file is None or not file.is_file():
        return None
    try:
        return read_head_budgets(file)
    except ValueError as error:
        raise ValueError(f"{error}, or give --head-budgets {EQUAL}") from error


def _is_of(budgets: HeadBudgets, model: str) -> bool:
    """Whether they have the model's shape. A model that cannot be opened is refused when it is; those that came with the
    package are its own, and flags are answered without torch, which makes shapes."""
    if Path(budgets.file).is_relative_to(FOLDER):
        return True
    try:
        return budgets.suits(create_model(load_config(model), next(iter(DTYPE_BYTES))).spec)  # of whatever type
    except ValueError:
        return True


def arguments_of(function: Callable[..., object]) -> list[str]:
    """The arguments that the function names."""
    return [name for name, one in signature(function).parameters.items() if one.kind is not Parameter.VAR_KEYWORD]


def what_is_searched(plan: Plan, options: Mapping[str, object]) -> PlanRequirements:
    """The sizes that are searched: those that were given are kept."""
    refuse_to_search_pipelines(plan)
    sizes, batches = ((getattr(plan, name),) if name in options else () for name in ("gpu_batch_size", "num_gpu_batches"))
    return PlanRequirements(plan, sizes, batches, buffers=() if "buffers" in by_own_names(options, Plan) else BUFFERS)


def adapters_of(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """The folders of adapters, each with its weight behind it, of one or of several."""
    each = [given] if given is None or isinstance(given, (str, os.PathLike)) else [*given]
    return tuple(name_of("adapter", one) for one in each if one is not None)


def loras_of(
    given: Mapping[str, str | os.PathLike[str]] | Sequence[str] | None, called: str = "lora"
) -> tuple[tuple[str, str], ...]:
    """Adapters of requests, a name and a folder or a GGUF file each: of a mapping, or of texts like NAME=PATH. `called`: how
    messages name what was given."""
    if isinstance(given, Mapping):
        return tuple(_named(name, name_of(called, folder), {name: folder}, called) for name, folder in given.items())
    texts = [name_of(called, one) for one in ([given] if isinstance(given, str) else given or ())]
    return tuple(_named(*text.partition("=")[::2], text, called) for text in texts)


def _named(name: str, folder: str, given: object, called: str) -> tuple[str, str]:
    if not is_adapter_name(name) or not folder:
        form = "NAME=PATH" if isinstance(given, str) else "{NAME: PATH}"
        raise ValueError(f"{called} is {shown(given)}; give {form}, where NAME has no = and no :")
    return name, folder


def name_of(what: str, given: object) -> str:
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"{what} is a {type(given).__name__}; give a name on the hub, or a folder")
    return str(given)
