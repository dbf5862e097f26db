"""OpenRequest: which model is opened, where it computes, and under which plan. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import local_place
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.environment import cores, default_offload_folder
from h2o_flexgen.core.hints import shown
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan

SAFETENSORS = "*.safetensors"


@dataclass(frozen=True)
class ModelRequest:
    """The model: a hub name, a local folder or GGUF file, FlexGen's --path with the model in it, or random weights."""

    name: str  # as the user says it, for reports
    source: str  # hub name, folder or file
    dummy_weights: bool
    dtype: str = AUTO
    tokenizer: str = AUTO

    def without_weights(self) -> ModelRequest:
        """The request for a look at the plan: it reads headers of local files, but downloads and converts nothing."""
        has_headers = is_gguf(self.folder) or (self.folder.is_dir() and any(self.folder.glob(SAFETENSORS)))
        return self if has_headers else replace(self, dummy_weights=True)

    @property
    def folder(self) -> Path:
        """The place of the model, if it is no name on the hub."""
        return local_place(self.source)


@dataclass(frozen=True)
class SiteRequest:
    """What computes, and how much may be held there. Sizes are kept as they were written, since messages repeat them."""

    device: str = AUTO
    threads: int | None = None  # None: one for each free core
    gpu_mem: int | str | None = None  # None: what is free
    cpu_mem: int | str | None = None
    offload_dir: str | Path | None = None  # None: a folder in the user's cache
    gpus: int = 1  # so many processes, each with a GPU
    by_flags: bool = False  # of a command, which messages name

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
