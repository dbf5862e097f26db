"""LoRARequest: the adapter that prompts are answered with, as vLLM names it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from h2o_flexgen.core.hints import shown
from h2o_flexgen.sampling.params import SamplingParams

FORM = "write LoRARequest(NAME, 1, PATH)"


def is_adapter_name(name: object) -> bool:
    """Whether an adapter may have this name: it stands before a = among flags, and behind a : in the names of models."""
    return isinstance(name, str) and bool(name) and not {*name} & {"=", ":"}


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, by which it is known from then on, and its folder or GGUF file. The number is vLLM's, and means
    nothing here."""

    lora_name: str
    lora_int_id: int = field(default=0, compare=False)
    lora_path: str | Path = ""

    def __post_init__(self) -> None:
        if not is_adapter_name(self.lora_name):
            raise ValueError(f"lora_name is {shown(self.lora_name)}; {FORM}, where NAME has no = and no :")
        if not isinstance(self.lora_path, (str, os.PathLike)) or not str(self.lora_path):
            raise ValueError(f"lora_path is {shown(self.lora_path)}; {FORM}")


Adapted: TypeAlias = "LoRARequest | Iterable[LoRARequest | None] | None"  # one for all prompts, or one for each


def adapters_of_prompts(asked: Adapted, count: int) -> Sequence[LoRARequest | None]:
    """The adapter of each of so many prompts."""
    is_several = isinstance(asked, Iterable) and not isinstance(asked, (str, bytes))
    each: list[Any] = [*asked] if is_several else [asked] * count  # type: ignore[misc]
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError(f"lora_request is {shown(one)}; {FORM}, or a list with one for each")
    if len(each) != count:
        raise ValueError(f"{count} prompts came with {len(each)} adapters in lora_request; give one for all or one for each")
    return each


def params_with_adapters(params: Sequence[SamplingParams], each: Sequence[LoRARequest | None]) -> list[SamplingParams]:
    """Sampling parameters of prompts that name the adapters of these."""
    both = zip(params, each, strict=True)
    return [own if one is None else replace(own, lora_name=one.lora_name) for own, one in both]
