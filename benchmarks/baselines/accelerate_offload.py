"""Hugging Face Accelerate: layers stay in the checkpoint's safetensors and are read when they are used.

Of its three ways to offload to a disk the device map of from_pretrained is the fastest: the others copy the weights first, and
read the copies more slowly.

Options: "resident_layers" (on a CPU: so many layers stay in memory; 0), "device_weight_bytes" and "host_weight_bytes" (with a
GPU: what may lie there and in memory, in place of what is left beside the KV), "attention".
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.baselines.installed import missing_gpu, missing_package
from benchmarks.baselines.made_up import is_made_up
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import bytes_beside_weights, part_bytes, rows_beside, weight_bytes

PROCESS_BYTES = 2 << 30  # of the host, for Python and its libraries, CUDA's among them
PARTS_THERE = 2  # of a GPU: it keeps room for the largest layer that is not there, and for what is tied to the head


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        return missing_package("transformers", "accelerate") or missing_gpu(request)

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        """With as much of the GPU for KV as possible, and with all weights there."""
        return tuple(rows_beside(request, weights) for weights in (PARTS_THERE * part_bytes(request), weight_bytes(request)))

    def run(self, request: Request, ready: Ready) -> Answer:
        from benchmarks.baselines.hugging_face import generate_greedily

        began = time.perf_counter()
        placed = on_gpu(request) if request.device == "cuda" else on_cpu(request)
        model = opened(request, placed).eval()
        load_seconds = time.perf_counter() - began
        ready()
        course = generate_greedily(model, request, model.config.vocab_size)
        return course.answer(request, ("accelerate",), placement_of(model.hf_device_map), load_seconds)


def opened(request: Request, placed: dict[str, Any]) -> Any:
    from benchmarks.baselines.hugging_face import loading, made_up_model

    if not is_made_up(request.checkpoint):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            request.checkpoint, offload_folder=request.scratch, **placed, **loading(request)
        )
    from accelerate import dispatch_model, infer_auto_device_map

    model, device_map = made_up_model(request, "cpu"), placed["device_map"]
    if device_map == "auto":
        uncut = list(model._no_split_modules or ())
        device_map = infer_auto_device_map(model, max_memory=placed["max_memory"], no_split_module_classes=uncut)
    return dispatch_model(model, device_map, offload_dir=request.scratch)


def on_cpu(request: Request) -> dict[str, Any]:
    """Puts everything that is not a layer and the first `resident_layers` in memory, and the other layers on the disk."""
    resident = request.options.get("resident_layers", 0)
    layers, rest = parts_of(request.checkpoint)
    offloaded = dict.fromkeys(layers[resident:], "disk")
    return {"device_map": {name: offloaded.get(name, "cpu") for name in [*rest, *layers]}}


def on_gpu(request: Request) -> dict[str, Any]:
    """Accelerate fills the GPU, then memory, then the disk. Space for KV and activations, unknown to it, is kept free."""
    import psutil
    import torch

    device = request.device_bytes or torch.cuda.mem_get_info()[0]
    host = request.host_bytes or psutil.virtual_memory().available
    device_weights = request.options.get("device_weight_bytes", max(0, device - bytes_beside_weights(request)))
    host_weights = request.options.get("host_weight_bytes", max(0, host - PROCESS_BYTES))
    return {"device_map": "auto", "max_memory": {0: device_weights, "cpu": host_weights}}


def parts_of(checkpoint: str) -> tuple[list[str], list[str]]:
    """Names of the modules that are layers, in order, and of the largest modules without layers in them."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    stack = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    )
    layers = [f"{stack}.{number}" for number in range(config.num_hidden_layers)]
    return layers, _beside(model, stack, "")


def _beside(module: Any, stack: str, prefix: str) -> list[str]:
    names = []
    for child_name, child in module.named_children():
        name = prefix + child_name
        if name == stack:
            continue
        if stack.startswith(f"{name}."):
            names += _beside(child, stack, f"{name}.")
        else:
            names.append(name)
    return names


def placement_of(device_map: dict[str, Any]) -> str:
    """Describes how many modules lie where, and where the KV does."""
    places = [f"GPU {place}" if isinstance(place, int) else str(place) for place in device_map.values()]
    counts = ", ".join(f"{places.count(place)} on {place}" for place in dict.fromkeys(places))
    where_computed = next((place for place in places if place.startswith(("GPU", "cuda"))), "cpu")
    return f"modules of weights: {counts}; KV on {where_computed}"
