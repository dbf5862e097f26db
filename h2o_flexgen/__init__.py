"""h2o_flexgen: large language models in little memory. Weights, KV cache and activations on any mix of GPU, CPU and disk.

The public names are looked up on first use, so importing the package costs nothing: torch is imported with the first name that
needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from h2o_flexgen.core.environment import let_threads_sleep_soon

if TYPE_CHECKING:
    from h2o_flexgen.core.workload import Workload
    from h2o_flexgen.engine.conversation import ContextFull, Conversation, Reply
    from h2o_flexgen.engine.scoring import Scored
    from h2o_flexgen.engine.stats import Stats
    from h2o_flexgen.llm import LLM
    from h2o_flexgen.planning.machine import Machine
    from h2o_flexgen.planning.plan import Plan, Shares
    from h2o_flexgen.sampling.completion import Completion, StepLogprobs, TokenLogprob
    from h2o_flexgen.sampling.params import LoRARequest, SamplingParams
    from h2o_flexgen.sampling.pooling import Classification, Embedding, Ranked
    from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"  # pyproject.toml reads it here

_MODULES = {
    "LLM": "llm",
    "Stats": "engine.stats",
    "ContextFull": "engine.conversation",
    "Conversation": "engine.conversation",
    "Reply": "engine.conversation",
    "Machine": "planning.machine",
    "Plan": "planning.plan",
    "Shares": "planning.plan",
    "Workload": "core.workload",
    "Completion": "sampling.completion",
    "StepLogprobs": "sampling.completion",
    "TokenLogprob": "sampling.completion",
    "LoRARequest": "sampling.params",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.structured_outputs",
    "Embedding": "sampling.pooling",
    "Classification": "sampling.pooling",
    "Ranked": "sampling.pooling",
    "Scored": "engine.scoring",
}

__all__ = [
    "LLM",
    "Classification",
    "Completion",
    "ContextFull",
    "Conversation",
    "Embedding",
    "LoRARequest",
    "Machine",
    "Plan",
    "Ranked",
    "Reply",
    "SamplingParams",
    "Scored",
    "Shares",
    "Stats",
    "StepLogprobs",
    "StructuredOutputsParams",
    "TokenLogprob",
    "Workload",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    let_threads_sleep_soon()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
