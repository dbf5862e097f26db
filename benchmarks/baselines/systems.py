"""The table of systems. A system's file is imported only when needed: peers are large, and may not be installed."""

from __future__ import annotations

from importlib import import_module

from benchmarks.baselines.request import System

SYSTEMS = {  # name -> module, which has a class of the name System
    "h2o_flexgen": "this_engine",
    "accelerate": "accelerate_offload",
    "deepspeed": "deepspeed_zero",
    "transformers": "transformers_resident",
    "continuous batching": "transformers_batching",
    "llama.cpp": "llama_cpp",
    "airllm": "airllm_layers",
    "flexgen": "flexgen_original",
    "h2o original": "h2o_original",
}


def system_named(name: str) -> System:
    system: System = import_module(f"benchmarks.baselines.{SYSTEMS[name]}").System()
    return system
