"""Settings of chat templates: names that some of them look at beside the messages, `enable_thinking` for instance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from h2o_flexgen.core.hints import shown

SETTINGS, EFFORT = "chat_template_kwargs", "reasoning_effort"
THINKS, NO_EFFORT = "enable_thinking", "none"
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class TemplateSettings:
    given: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None  # for thoughts, as OpenAI has it; a template may have a name for that, or none

    def of(self, template: str) -> dict[str, object]:
        """The settings for a template; one that it does not look at is refused."""
        for name in self.given:
            if not _looks_at(template, name):
                raise ValueError(f"{SETTINGS} has {shown(name)}, at which the chat template does not look; leave it out")
        of_effort = {} if self.effort is None else {EFFORT: self.effort, THINKS: self.effort != NO_EFFORT}
        return {**{name: value for name, value in of_effort.items() if _looks_at(template, name)}, **self.given}

    def refuse_without_template(self) -> None:
        if self.given:
            raise ValueError(f"{SETTINGS} is {shown(self.given)}; chats are not written by a template here; leave it out")


NO_SETTINGS = TemplateSettings()


def _looks_at(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def read_settings(given: object, effort: object = None) -> TemplateSettings:
    """Reads what a request says of templates."""
    if effort is not None and not isinstance(effort, str):
        raise ValueError(f"{EFFORT} is {shown(effort)}; allowed is a text")
    if given is None:
        return TemplateSettings({}, effort)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise ValueError(f'{SETTINGS} is {shown(given)}; allowed is an object with names, like {{"{THINKS}": false}}')
    if own := next((name for name in given if name in TAKEN), None):
        raise ValueError(f"{SETTINGS} has {shown(own)}, which is made of the request itself; leave it out")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{SETTINGS} is {shown(given)}; allowed are values of JSON") from None
    return TemplateSettings({**given}, effort)
