"""LoRARequest: the adapter that prompts are answered with, as vLLM names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from h2o_flexgen.core.hints import shown
from h2o_flexgen.sampling.params import SamplingParams, one_params


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, by which it is known from then on, and its folder. The number is vLLM's, and means nothing here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | Path = ""

    def __post_init__(self) -> None:
        if not self.lora_name or not str(self.lora_path):
            raise ValueError(f"{shown(self)} lacks a name or a path; write LoRARequest(NAME, 1, FOLDER)")


Adapted: TypeAlias = "LoRARequest | Sequence[LoRARequest | None] | None"  # one for all prompts, or one for each


def adapters_asked(asked: Adapted) -> list[LoRARequest]:
    """The adapters that are asked for, each once."""
    each = asked if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError(f"lora_request is {shown(one)}; write LoRARequest(NAME, 1, FOLDER), or a list with one for each")
    return [*dict.fromkeys(one for one in each if one is not None)]


def params_with_adapters(
    params: SamplingParams | Sequence[SamplingParams] | None, asked: Adapted
) -> SamplingParams | Sequence[SamplingParams] | None:
    """Sampling parameters that name the adapters."""
    if asked is None:
        return params
    if isinstance(asked, LoRARequest):
        if params is None or isinstance(params, SamplingParams):
            return replace(one_params(params), lora_name=asked.lora_name)
        return [replace(one_params(one), lora_name=asked.lora_name) for one in params]
    given = [params] * len(asked) if params is None or isinstance(params, SamplingParams) else [*params]
    if len(given) != len(asked):
        raise ValueError(f"lora_request has {len(asked)} adapters for {len(given)} sampling params; give one for each")
    names = [None if one is None else one.lora_name for one in asked]
    return [one if name is None else replace(one, lora_name=name) for one, name in zip(map(one_params, given), names)]
