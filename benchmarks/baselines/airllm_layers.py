"""AirLLM: splits the checkpoint into one file for each layer, and reads a layer into fresh memory whenever it is used.

Its model is one of transformers with hooks, so the loop is that of the others. It knows models that are laid out as LLaMA is.
"""

from __future__ import annotations

import time

from benchmarks.baselines.installed import missing_gpu, missing_package
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import config_of, tensor_shapes

LAYERS = "model.layers."


class System:
    loads_within_cap = False  # it splits the checkpoint first, which is done once and is not what is compared

    def missing(self, request: Request) -> str | None:
        return missing_package("airllm") or missing_gpu(request) or _missing_model(request)

    def run(self, request: Request, ready: Ready) -> Answer:
        import torch
        from airllm.airllm_base import AirLLMBaseModel

        from benchmarks.baselines.hugging_face import forget_peak, generate_greedily

        class WithoutTokenizer(AirLLMBaseModel):
            """Takes token ids, so that a checkpoint needs no tokenizer."""

            def get_tokenizer(self, hf_token: str | None = None) -> None:
                return None

        began = time.perf_counter()
        layered = WithoutTokenizer(
            request.checkpoint,
            device="cuda:0" if request.device == "cuda" else "cpu",
            dtype=getattr(torch, request.dtype),
            max_seq_len=request.prompt_len + request.gen_len,
            layer_shards_saving_path=request.scratch,
        )
        load_seconds = time.perf_counter() - began
        ready()
        forget_peak()
        course = generate_greedily(layered.model, request, layered.config.vocab_size)
        placement = f"weights on disk, a file for each layer; KV on {request.device}"
        return course.answer(request, ("airllm", "accelerate"), placement, load_seconds, "splitting counts as loading")


def _missing_model(request: Request) -> str | None:
    if any(name.startswith(LAYERS) for name in tensor_shapes(request.checkpoint)):
        return None
    return f"AirLLM has no {config_of(request)['model_type']}: only models with layers named as LLaMA's"
