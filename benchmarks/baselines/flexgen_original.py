"""FlexGen as its authors published it (PyPI, 0.1.8): OPT on one CUDA device, in float16.

Never run by us on a GPU: written after its sources, and tried on a CPU that was given out as a GPU. Weights are made up, which
costs the same time; the shape is the checkpoint's. A shortened run stops after the first steps, where there is less to attend
to than in the middle: that is in its favour.

Options: "percent" (six numbers, of weights, KV and activations on the GPU and in memory), "gpu_batch_size" and "most_rows" (of
a batch and of all, at most), "compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight", "overlap", "sep_layer", as
its command line has them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from benchmarks.baselines.installed import missing_package, versions_of
from benchmarks.baselines.process import bytes_read
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import MOST_ROWS, OWN_BYTES, config_of, kv_bytes, part_bytes, tensor_shapes, weight_bytes
from h2o_flexgen.planning.workload_plan import largest

PERCENT = (0, 100, 100, 0, 100, 0)  # weights in memory, all else on the GPU
DUMMY = "_DUMMY_"  # its word for weights that are made up
WARM_TOKENS = 32  # of the prompts that it computes before it measures itself
IN_4_BITS = 4.5 / 16
PINNED = 1.25  # torch rounds what it page-locks up to powers of two: of OPT's matrices a quarter more
RELAYS_BYTES = 8 << 30  # page-locked memory of its four threads that copy
HOST_OWN_BYTES = 10 << 30  # of the host: Python, libraries, the system; and some to spare
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
        return unsuited(request) or missing_package("flexgen", "attr")

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        return (Room(request).rows(),)

    def run(self, request: Request, ready: Ready) -> Answer:
        return answer_of(request, ready, policy_of(request), versions_of(("flexgen",)))


def answer_of(request: Request, ready: Ready, policy: Any, versions: Mapping[str, str]) -> Answer:
    """By whichever package named flexgen Python finds. `versions`: of it."""
    import numpy
    from flexgen.flex_opt import OptLM
    from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    from benchmarks.baselines.hugging_face import prompts_of
    from h2o_flexgen.memory.host import peak_resident_bytes

    began = time.perf_counter()
    gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(request.scratch)
    everywhere = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
    shape = shape_of(request)
    try:
        model = OptLM(shape, everywhere, DUMMY, policy)
        load_seconds = time.perf_counter() - began
        prompts = prompts_of(request, shape.vocab_size).numpy().astype(numpy.int32)
        made = None if request.steps is None else request.steps + 1
        ready()
        model.generate(prompts[:, :WARM_TOKENS], max_new_tokens=1)  # what it does before it measures itself
        timers("generate").reset()
        before = bytes_read()
        model.generate(prompts, max_new_tokens=request.gen_len, cut_gen_len=made)
        read = bytes_read() - before
        prefill_seconds, *step_seconds = timers("generate").costs
    finally:
        everywhere.close_copy_threads()  # else its threads keep the process alive
    notes = ["weights are made up", "bytes read are those of a pass of all, prefill among them"]
    if made is not None:
        notes.append("steps are the first ones")
    return Answer(
        versions={**versions, **versions_of(("torch", "transformers"))},
        placement=f"{placement_of(policy)} of weights, KV, activations",
        load_seconds=load_seconds,
        prefill_seconds=prefill_seconds,
        step_seconds=tuple(step_seconds),
        peak_host_bytes=peak_resident_bytes(),
        read_bytes_per_step=read / (1 + len(step_seconds)),
        notes="; ".join(notes),
    )


def placement_of(policy: Any) -> str:
    shares = policy.w_gpu_percent, policy.w_cpu_percent, policy.cache_gpu_percent, policy.cache_cpu_percent
    percent = " ".join(map(str, (*shares, policy.act_gpu_percent, policy.act_cpu_percent)))
    return f"{policy.num_gpu_batches} x {policy.gpu_batch_size} rows, percent on GPU and CPU: {percent}"


def percent_of(request: Request) -> tuple[int, ...]:
    return tuple(request.options.get("percent", PERCENT))


class Room:
    """The rows that are expected to fit, whole batches of them: what it takes is known from its sources, not measured."""

    eager_values = 4  # for every score of a prompt: it, what is masked, and its softmax, all at once
    kept_share = 1.0  # of the KV

    def __init__(self, request: Request) -> None:
        self._request, self._config = request, config_of(request)
        percent, options = percent_of(request), request.options
        self._all_weights_there, self._kv_there = percent[0] == 100, percent[2] == 100
        self._batch = options.get("gpu_batch_size", MOST_ROWS)
        bits = IN_4_BITS if options.get("compress_weight", False) else 1.0
        tables = max(
            (shape for name, shape in tensor_shapes(request.checkpoint).items() if "embed_tokens" in name), default=[0]
        )
        self._weights = int(
            bits * (weight_bytes(request) + 2 * math.prod(tables))
        )  # the head has a table of its own, in 2 bytes
        self._kv_bits = IN_4_BITS if options.get("compress_cache", False) else 1.0
        self._part = part_bytes(request)

    def rows(self) -> int:
        """0 if not even one does."""
        batch, host = self.batch(), self._request.host_bytes or psutil.virtual_memory().total
        if not batch or self._kv_there:
            return batch
        most = self._request.options.get("most_rows", MOST_ROWS)
        return batch * largest(lambda count: self._host_bytes(count * batch) <= host, max(1, most // batch))

    def batch(self) -> int:
        """The rows of a batch."""
        room = self._request.device_bytes or 0
        return largest(lambda rows: self._device_bytes(rows) <= room, self._batch)

    def _device_bytes(self, rows: int) -> int:
        weights = self._weights if self._all_weights_there else 2 * self._part  # one is computed with, the next one comes
        decoded = self._part if self._request.options.get("compress_weight", False) else 0
        kv = self._kv(rows) if self._kv_there else 0
        return weights + decoded + kv + self._prompt_bytes(rows) + OWN_BYTES

    def _host_bytes(self, rows: int) -> int:
        weights = 0 if self._all_weights_there else int(PINNED * self._weights)
        return weights + self._kv(rows) + RELAYS_BYTES + HOST_OWN_BYTES

    def _kv(self, rows: int) -> int:
        return int(self.kept_share * self._kv_bits * kv_bytes(replace(self._request, rows=rows)))

    def _prompt_bytes(self, rows: int) -> int:
        """Of one layer on the prompts of a batch, and of logits of all of their positions."""
        config, length = self._config, self._request.prompt_len
        scores = self.eager_values * config["num_attention_heads"] * length
        states = 6 * config["hidden_size"] + 2 * config["ffn_dim"]
        return 2 * rows * length * max(scores + states, config["vocab_size"] + 2 * config["hidden_size"])


def policy_of(request: Request, **more: Any) -> Any:
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import Policy

    options = request.options
    batch_size = batch_of(request)
    switches = {name: options.get(name, default) for name, default in SWITCHES.items()}
    gpu_weights, cpu_weights, gpu_kv, cpu_kv, gpu_activations, cpu_activations = percent_of(request)
    return Policy(
        gpu_batch_size=batch_size,
        num_gpu_batches=request.rows // batch_size,
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
        **more,
    )


def batch_of(request: Request) -> int:
    """The rows of a batch: they are to be whole batches, as large as fit and as the options allow."""
    largest_batch = max(1, min(request.rows, Room(request).batch()))
    return next(rows for rows in range(largest_batch, 0, -1) if request.rows % rows == 0)


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


def unsuited(request: Request) -> str | None:
    if request.device != "cuda":
        return "FlexGen runs on CUDA devices only: ask for the device cuda"
    model_type = config_of(request)["model_type"]
    if model_type != "opt":
        return f"FlexGen has OPT only, no {model_type}"
    if request.dtype != "float16":
        return f"FlexGen computes in float16 only, not in {request.dtype}"
    return None
