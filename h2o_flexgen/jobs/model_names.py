"""The names that requests have for a model, and for the model with one of its adapters: NAME, NAME:ADAPTER, or ADAPTER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.core.hints import did_you_mean, shown

MODEL, LORA = "model", "lora_name"


class UnknownModel(ValueError):
    """An error: a request is for a model that is not here."""


@dataclass(frozen=True)
class ModelNames:
    model: str
    adapters: Sequence[str] = ()

    @property
    def every(self) -> list[str]:
        """The names as they are listed."""
        return [self.model, *(f"{self.model}:{adapter}" for adapter in self.adapters)]

    def of(self, adapter: str | None) -> str:
        """The name of the model with an adapter, or without one."""
        return self.model if adapter is None else f"{self.model}:{adapter}"

    def adapter(self, asked: object) -> str | None:
        """The adapter that a name stands for. A name that stands for nothing is refused."""
        if asked in (None, self.model):
            return None
        found = asked.removeprefix(f"{self.model}:") if isinstance(asked, str) else None
        if found not in self.adapters:
            hint = did_you_mean(asked, [*self.every, *self.adapters]) if isinstance(asked, str) else ""
            known = " or ".join(map(shown, self.every))
            raise UnknownModel(f"the model {shown(asked)} is not here; ask for {known}{hint}")
        return found

    def read(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """The body with its adapter as a field, and not as a part of the model's name."""
        adapter = self.adapter(body.get(MODEL))
        if adapter is None:
            return body
        if body.get(LORA) not in (None, adapter):
            raise ValueError(f"{LORA} is {shown(body[LORA])}, and {MODEL} names {shown(adapter)}; give one of them")
        return {**body, LORA: adapter}
