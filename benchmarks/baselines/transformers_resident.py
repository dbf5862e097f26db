"""transformers with all weights in memory: the usual choice while a model fits, and so the bar for such models."""

from __future__ import annotations

import time

import psutil

from benchmarks.baselines.installed import missing_gpu, missing_package
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import rows_beside, weight_bytes


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        return missing_package("transformers") or missing_gpu(request) or missing_memory(request)

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        return (rows_beside(request, weight_bytes(request)),)

    def run(self, request: Request, ready: Ready) -> Answer:
        from benchmarks.baselines.hugging_face import generate_greedily, resident_model

        began = time.perf_counter()
        model = resident_model(request)
        load_seconds = time.perf_counter() - began
        ready()
        course = generate_greedily(model, request, model.config.vocab_size)
        return course.answer(request, (), f"weights and KV on {request.device}", load_seconds)


def missing_memory(request: Request) -> str | None:
    if request.device == "cuda":
        place, room = "the GPU has", request.device_bytes
    elif request.host_bytes is not None:
        place, room = "the cap is", request.host_bytes
    else:
        place, room = "the machine has", psutil.virtual_memory().total
    weights = weight_bytes(request)
    if room is None or weights <= room:
        return None
    return f"its weights of {weights / 1e9:.2f} GB do not fit in memory, {place} {room / 1e9:.2f} GB: it cannot offload"
