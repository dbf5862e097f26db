"""The greedy loop of every peer that is a model of transformers with hooks of its own: they differ in nothing else.

A whole run decodes every token. A shortened run makes up the keys and values of the first half of the text, times some steps
there, and makes up those of the rest for one last step: a batch that does not fit at its longest dies as in a whole run.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache

from benchmarks.baselines.installed import versions_of
from benchmarks.baselines.made_up import fill, is_made_up
from benchmarks.baselines.process import bytes_read
from benchmarks.baselines.request import Answer, Request
from h2o_flexgen.memory.host import peak_resident_bytes

PROMPT_SEED = 0
WARM_TOKENS = 32
ATTENTION = "sdpa"  # option "attention": "eager" decodes faster in bfloat16 on CPUs, prefills slower and in more memory


@dataclass(frozen=True)
class Course:
    """The results of the loop."""

    tokens: Tensor  # (rows, tokens made); in a shortened run only those before keys and values are made up
    prefill_seconds: float
    step_seconds: tuple[float, ...]
    read_bytes: int  # from the disk, in the steps that are timed
    last_step_seconds: float | None  # with the whole text held; None in a whole run, which has it among its steps

    def answer(
        self, request: Request, packages: tuple[str, ...], placement: str, load_seconds: float, notes: str = ""
    ) -> Answer:
        last = f"last step, {request.last} tokens held: {self.last_step_seconds:.3f} s" if self.last_step_seconds else ""
        return Answer(
            versions=versions_of(("torch", "transformers", *packages)),
            placement=placement,
            load_seconds=load_seconds,
            prefill_seconds=self.prefill_seconds,
            step_seconds=self.step_seconds,
            peak_host_bytes=peak_resident_bytes(),
            read_bytes_per_step=self.read_bytes / max(1, len(self.step_seconds)),
            notes="; ".join(note for note in (last, notes) if note),
        )


def loading(request: Request) -> Mapping[str, Any]:
    """The arguments that from_pretrained gets for every request."""
    dtype_word = "dtype" if Version(version("transformers")) >= Version("4.56") else "torch_dtype"
    attention = request.options.get("attention", ATTENTION)
    return {dtype_word: getattr(torch, request.dtype), "attn_implementation": attention, "use_safetensors": True}


def resident_model(request: Request) -> Any:
    """The model with all weights on the device."""
    if is_made_up(request.checkpoint):
        return made_up_model(request, request.device).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(request.checkpoint, **loading(request)).eval().to(request.device)


def made_up_model(request: Request, device: str) -> Any:
    """The model that the config describes, with values that are made up on a device."""
    with torch.device(device):
        model = unfilled_model(request)
    fill(model.parameters())
    return model


def unfilled_model(request: Request) -> Any:
    """The model without values, in the memory that the surrounding contexts say."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments = {**loading(request)}
    del arguments["use_safetensors"]
    config = AutoConfig.from_pretrained(request.checkpoint)
    with without_first_values():
        model = AutoModelForCausalLM.from_config(config, **arguments)
    model.tie_weights()
    return model


def without_first_values() -> AbstractContextManager[None]:
    """A context in which transformers spends no time on values that are written over; it has moved between releases."""
    for module in ("transformers.initialization", "transformers.modeling_utils"):
        with suppress(ImportError):
            found = getattr(import_module(module), "no_init_weights", None)
            if found is not None:
                context: AbstractContextManager[None] = found()
                return context
    return nullcontext()


def prompts_of(request: Request, vocabulary: int) -> Tensor:
    """Prompts (rows, prompt_len), a different text in every row."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    return torch.randint(vocabulary, (request.rows, request.prompt_len), generator=generator)


def generate_greedily(model: Any, request: Request, vocabulary: int) -> Course:
    """Generates with a `model` that is called as those of transformers are, with a cache that grows."""
    if request.steps is not None and request.middle + 1 + request.steps >= request.last:
        raise ValueError(f"{request.steps} steps do not fit in the second half of {request.gen_len} tokens: ask for all (null)")
    loop, prompts = _Loop(model), prompts_of(request, vocabulary).to(request.device)
    with torch.inference_mode():
        if request.device != "cpu":
            _Loop(model).forward(prompts[:1, :WARM_TOKENS])  # what a GPU's libraries do once is not what a run costs
        began = time.perf_counter()
        loop.forward(prompts)
        prefill_seconds = time.perf_counter() - began
        gc.collect()
        if request.steps is None:
            step_seconds, read = loop.timed(request.gen_len - 1)
            return Course(loop.tokens, prefill_seconds, step_seconds, read, None)
        made = loop.tokens
        loop.lengthen(request.middle)
        loop.timed(1)  # what is new at this length, such as memory of another size, is not what the middle of a text costs
        step_seconds, read = loop.timed(request.steps)
        loop.lengthen(request.last - 1)
        (last_step,), _ = loop.timed(1)
        return Course(made, prefill_seconds, step_seconds, read, last_step)


class _Loop:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = empty_cache(model)
        self._made: list[Tensor] = []
        takes = inspect.signature(model.forward).parameters
        self._head = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}  # older ones compute all logits

    @property
    def tokens(self) -> Tensor:
        return torch.cat(self._made, dim=1).cpu()

    def forward(self, tokens: Tensor) -> None:
        output = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True, **self._head)
        self._cache = output.past_key_values
        chosen = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        chosen[0].item()  # of a GPU: waits until it is there
        self._made.append(chosen)

    def timed(self, steps: int) -> tuple[tuple[float, ...], int]:
        """The seconds of each step, and the bytes that all read from the disk."""
        read_before, ends = bytes_read(), [time.perf_counter()]
        for _ in range(steps):
            self.forward(self._made[-1])
            ends.append(time.perf_counter())
        return tuple(end - begin for begin, end in pairwise(ends)), bytes_read() - read_before

    def lengthen(self, tokens: int) -> None:
        lengthen_cache(self._cache, tokens)
        gc.collect()


def empty_cache(model: Any) -> Any:
    """A cache that grows; newer ones learn from the config which layers need only a window."""
    takes_config = "config" in inspect.signature(DynamicCache).parameters
    return DynamicCache(config=model.config) if takes_config else DynamicCache()


def lengthen_cache(cache: Any, tokens: int) -> None:
    """Pretends that so many tokens have been through every layer; positions follow from the length. The last key and value are
    repeated as a view, and the cache copies it. Nothing else grows: what a layer held before is given back before the next one
    grows, as in a step."""
    for layer in range(len(cache.layers) if hasattr(cache, "layers") else len(cache.key_cache)):
        more = tokens - cache.get_seq_length(layer)
        if more > 0:
            cache.update(*(_repeated(states, more) for states in cached(cache, layer)), layer)


def cached(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, (rows, heads, tokens, head size); older caches hold two lists, newer ones layers."""
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def _repeated(states: Tensor, times: int) -> Tensor:
    """A view of the last one. It keeps no other memory than that one's: a view of all would keep all of it."""
    return states[:, :, -1:].clone().expand(-1, -1, times, -1)


def forget_peak() -> None:
    """Restarts the count of peak resident memory, if the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
