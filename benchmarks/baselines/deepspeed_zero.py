"""DeepSpeed's ZeRO-Inference: stage 3 with its parameters on a disk or in host memory, and the hooks that fetch them.

On a disk it keeps a second copy of the weights, and reads it past the page cache. To load, it holds more than the whole model.

Options: "tier" ("nvme" or "cpu"), "buffer_count" (parameters that are read or held at once), "prefetch_parameters" (elements
that are gathered ahead), "persistent_parameters" (parameters of fewer elements are never offloaded), "aio" (of its settings
what is to be different), "attention".
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from benchmarks.baselines.installed import missing_gpu, missing_package, versions_of
from benchmarks.baselines.jit_builds import build_folder, building_in
from benchmarks.baselines.made_up import fill, is_made_up
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import ELEMENT_BYTES, part_bytes, rows_beside, tensor_shapes, weight_bytes

INSTALL = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed, after torch, ninja and py-cpuinfo"
BUFFERS = 5  # its own default: that of the layer being computed, and a layer ahead
PREFETCHED = 50_000_000  # its own default
MOST_LIVE = 1_000_000_000  # its own default: parameters that are whole on a GPU at once
PERSISTENT = 100_000  # its own default: norms and biases
ASYNC_READS = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}  # as its config names them; float32 is what it does unasked


class System:
    loads_within_cap = False

    def missing(self, request: Request) -> str | None:
        return (
            missing_package("deepspeed", how=INSTALL)
            or missing_package("transformers", "ninja")
            or missing_gpu(request)
            or _missing_tools(request)
        )

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        """Beside the parameters that it holds on a GPU at once."""
        live = MOST_LIVE * ELEMENT_BYTES[request.dtype] + part_bytes(request)
        return (rows_beside(request, min(live, weight_bytes(request))),)

    def run(self, request: Request, ready: Ready) -> Answer:
        prepare_process(request)
        from benchmarks.baselines.hugging_face import forget_peak, generate_greedily

        began = time.perf_counter()
        config = zero_config(request)
        with building_in(build_folder(versions_of(("deepspeed", "torch")))):
            engine = load(request, config)
        gc.collect()
        load_seconds = time.perf_counter() - began
        ready()
        forget_peak()
        course = generate_greedily(engine.module, request, engine.module.config.vocab_size)
        offload = config["zero_optimization"]["offload_param"]
        placement = f"weights on {offload['device']}, KV on {request.device}"
        if offload["device"] == "nvme":
            placement += f"; {offload['buffer_count']} buffers of {offload['buffer_size']:,} elements"
        return course.answer(request, ("deepspeed",), placement, load_seconds, "the peak is that of the run, without loading")


def prepare_process(request: Request) -> None:
    """DeepSpeed reads its environment when it is imported; one process is a group of one."""
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(one_process, DS_ACCELERATOR=request.device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    scripts = str(Path(sys.executable).parent)  # ninja may be installed there alone
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])


def load(request: Request, config: dict[str, Any]) -> Any:
    """The engine; its module is the model with hooks in it."""
    import deepspeed

    deepspeed.init_distributed(
        dist_backend="nccl" if request.device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        init_method=(Path(request.scratch).absolute() / "rendezvous").as_uri(),
        rank=0,
        world_size=1,
    )
    with divided(config) if not is_made_up(request.checkpoint) else deepspeed.zero.Init(config_dict_or_path=config):
        model = opened(request).eval()
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.module.eval()
    return engine


@contextmanager
def divided(config: dict[str, Any]) -> Iterator[None]:
    """A context in which from_pretrained divides every parameter as it is made."""
    from transformers.integrations import HfDeepSpeedConfig

    noticed = HfDeepSpeedConfig(config)  # as long as it lives
    yield
    del noticed


def opened(request: Request) -> Any:
    from benchmarks.baselines.hugging_face import loading, unfilled_model

    if not is_made_up(request.checkpoint):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(request.checkpoint, **loading(request))
    model = unfilled_model(request)
    fill(parameter.ds_tensor for parameter in model.parameters())
    return model


def zero_config(request: Request) -> dict[str, Any]:
    options = request.options
    largest = max(math.prod(shape) for shape in tensor_shapes(request.checkpoint).values())
    offload: dict[str, Any] = {"device": options.get("tier", "nvme"), "pin_memory": request.device == "cuda"}
    if offload["device"] == "nvme":
        count = options.get("buffer_count", BUFFERS)
        offload |= {"nvme_path": request.scratch, "buffer_count": count, "buffer_size": largest}
    precision = {PRECISIONS[request.dtype]: {"enabled": True}} if request.dtype in PRECISIONS else {}
    return {
        **precision,
        "train_micro_batch_size_per_gpu": 1,  # it insists on one; nothing is trained
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "stage3_prefetch_bucket_size": options.get("prefetch_parameters", PREFETCHED),
            "stage3_param_persistence_threshold": options.get("persistent_parameters", PERSISTENT),
            "stage3_max_reuse_distance": 0,  # tied embeddings are dropped between their two uses, and read twice
        },
        "aio": {**ASYNC_READS, **options.get("aio", {})},
    }


def _missing_tools(request: Request) -> str | None:
    """Names what is missing to compile its reader of files, which it does on first use, even if nothing goes to a disk."""
    if shutil.which("g++") is None:
        return "g++ is not installed: DeepSpeed compiles parts of itself when they are first used"
    if request.options.get("tier", "nvme") != "nvme":
        return None
    headers = [Path(folder) / "libaio.h" for folder in ("/usr/include", "/usr/local/include")]
    if find_library("aio") is None or not any(header.exists() for header in headers):
        return "libaio and its headers are not installed: apt-get install libaio-dev"
    if request.device == "cuda" and shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return "there is no CUDA toolkit (nvcc); DeepSpeed compiles its reader of files with the toolkit's headers"
    return None
