"""OpenRequest: which model is opened, where it computes, and under which plan. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import local_place
from h2o_flexgen.core.allowed_values import AUTO, TRUTH, Bounds, Choice, Rule
from h2o_flexgen.core.environment import Threads, cores, default_offload_folder
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.core.option import check_options, option, options_of
from h2o_flexgen.core.units import SIZE
from h2o_flexgen.models import refuse_missing
from h2o_flexgen.planning.machine import DEVICES, Machine
from h2o_flexgen.planning.plan import MOST_GPUS, Plan
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
        "FOLDER[=WEIGHT]",
        "a LoRA or rsLoRA of PEFT, merged once into the weights that it changes, which are copied into a cache",
    )

    def without_weights(self) -> ModelRequest:
        """The request for a look at the plan: it reads headers of local files, but downloads and converts nothing."""
        has_headers = is_gguf(self.folder) or (self.folder.is_dir() and any(self.folder.glob(SAFETENSORS)))
        return self if has_headers else replace(self, dummy_weights=True, adapter=())

    def refuse_missing(self) -> None:
        """Refuses a model that is nowhere on this machine, and no name on the hub, as opening it would but without torch."""
        refuse_missing(self.source, with_weights=not self.dummy_weights)

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
    offload_dir: str | Path | None = option(
        None,
        Rule(lambda path: path, "a path"),
        "FOLDER",
        "where KV, activations and random weights go on disk; left as it was found (default: below ~/.cache/h2o_flexgen)",
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
        return Path(self.offload_dir or default_offload_folder()).expanduser()

    @property
    def of_each(self) -> SiteRequest:
        """The site of each process: with a share of the threads, if the user gave no number."""
        return self if self.gpus == 1 else replace(self, threads=self.threads or max(1, cores() // self.gpus))

    def refuse_memory_of_no_gpu(self, has_gpu: bool, machine: str) -> None:
        """Refuses a limit on GPU memory where no GPU computes: it would limit nothing, and the caller expects otherwise."""
        if self.gpu_mem is not None and not has_gpu:
            asked = f"--gpu-mem {self.gpu_mem}" if self.by_flags else f"gpu_mem {shown(self.gpu_mem)}"
            raise ValueError(f"{asked} is for a GPU, and {machine}; leave it out")


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
