"""FlexGen as its authors published it (PyPI, 0.1.8): OPT on one CUDA device, in float16.

Never run by us on a GPU: written after its sources, to be tried where there is one. Weights are made up, which costs the same
time; the shape is the checkpoint's. A shortened run stops after the first steps, where there is less to attend to than in the
middle: that is in its favour.

Options: "percent" (six numbers, of weights, KV and activations on the GPU and in memory), "gpu_batch_size", "num_gpu_batches",
"compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight", "overlap", "sep_layer", as its command line has them.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.baselines.installed import missing_package, versions_of
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import config_of, tensor_shapes

PERCENT = (0, 100, 100, 0, 100, 0)  # weights in memory, all else on the GPU
DUMMY = "_DUMMY_"  # its word for weights that are made up
SWITCHES = {  # with the defaults of its command line
    "overlap": True,
    "sep_layer": True,
    "pin_weight": True,
    "cpu_cache_compute": False,
    "compress_weight": False,
    "compress_cache": False,
}


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        return _unsuited(request) or missing_package("flexgen")

    def run(self, request: Request, ready: Ready) -> Answer:
        import numpy
        from flexgen.flex_opt import OptLM
        from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
        from flexgen.timer import timers
        from flexgen.utils import ExecutionEnv

        from benchmarks.baselines.hugging_face import disk_bytes_read, prompts_of
        from h2o_flexgen.memory.host import peak_resident_bytes

        began = time.perf_counter()
        gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(request.scratch)
        everywhere = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        policy, shape = policy_of(request), shape_of(request)
        model = OptLM(shape, everywhere, DUMMY, policy)
        try:
            load_seconds = time.perf_counter() - began
            prompts = prompts_of(request, shape.vocab_size).numpy().astype(numpy.int32)
            made = None if request.steps is None else request.steps + 1
            ready()
            model.generate(prompts[:, :32], max_new_tokens=1)  # what it does before it measures itself
            timers("generate").reset()
            before = disk_bytes_read()
            model.generate(prompts, max_new_tokens=request.gen_len, cut_gen_len=made)
            read = disk_bytes_read() - before
            prefill_seconds, *step_seconds = timers("generate").costs
        finally:
            everywhere.close_copy_threads()
        notes = ["weights are made up", "bytes read are those of a pass of all, prefill among them"]
        if made is not None:
            notes.append("steps are the first ones")
        return Answer(
            versions=versions_of(("torch", "transformers", "flexgen")),
            placement=f"percent on GPU and CPU of weights, KV, activations: {percent_of(request)}",
            load_seconds=load_seconds,
            prefill_seconds=prefill_seconds,
            step_seconds=tuple(step_seconds),
            peak_host_bytes=peak_resident_bytes(),
            read_bytes_per_step=read / (1 + len(step_seconds)),
            notes="; ".join(notes),
        )


def percent_of(request: Request) -> tuple[int, ...]:
    return tuple(request.options.get("percent", PERCENT))


def policy_of(request: Request) -> Any:
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import Policy

    options = request.options
    batch_size = options.get("gpu_batch_size", request.rows)
    batches = options.get("num_gpu_batches", request.rows // batch_size)
    if batch_size * batches != request.rows:
        raise ValueError(
            f"{batches} batches of {batch_size} are not {request.rows} rows: set gpu_batch_size and num_gpu_batches"
        )
    switches = {name: options.get(name, default) for name, default in SWITCHES.items()}
    gpu_weights, cpu_weights, gpu_kv, cpu_kv, gpu_activations, cpu_activations = percent_of(request)
    return Policy(
        gpu_batch_size=batch_size,
        num_gpu_batches=batches,
        w_gpu_percent=gpu_weights,
        w_cpu_percent=cpu_weights,
        cache_gpu_percent=gpu_kv,
        cache_cpu_percent=cpu_kv,
        act_gpu_percent=gpu_activations,
        act_cpu_percent=cpu_activations,
        attn_sparsity=1.0,
        comp_weight_config=CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False),
        comp_cache_config=CompressionConfig(num_bits=4, group_size=64, group_dim=2, symmetric=False),
        **switches,
    )


def shape_of(request: Request) -> Any:
    """The checkpoint's shape in FlexGen's words."""
    from flexgen.opt_config import OptConfig

    config = config_of(request)
    embeddings = next(
        shape for name, shape in tensor_shapes(request.checkpoint).items() if name.endswith("embed_tokens.weight")
    )
    return OptConfig(
        name="opt",
        num_hidden_layers=config["num_hidden_layers"],
        max_seq_len=config["max_position_embeddings"],
        hidden_size=config["hidden_size"],
        n_head=config["num_attention_heads"],
        input_dim=config["hidden_size"],
        ffn_embed_dim=config["ffn_dim"],
        vocab_size=embeddings[0],
    )


def _unsuited(request: Request) -> str | None:
    if request.device != "cuda":
        return "FlexGen runs on CUDA devices only: ask for the device cuda"
    model_type = config_of(request)["model_type"]
    if model_type != "opt":
        return f"FlexGen has OPT only, no {model_type}"
    if request.dtype != "float16":
        return f"FlexGen computes in float16 only, not in {request.dtype}"
    return None
