"""Settings of chat templates: names that some of them look at beside the messages, `enable_thinking` for instance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from h2o_flexgen.core.allowed_values import Choice
from h2o_flexgen.core.hints import shown

SETTINGS, EFFORT, VERBOSITY = "chat_template_kwargs", "reasoning_effort", "verbosity"
USUAL_VERBOSITY = "medium"
VERBOSITIES = Choice(("low", USUAL_VERBOSITY, "high"))
THINKS, NO_EFFORT = "enable_thinking", "none"
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class TemplateSettings:
    given: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None  # for thoughts, as OpenAI has it; a template may have a name for that, or none
    verbosity: str | None = None  # as OpenAI has it

    def of(self, template: str) -> dict[str, object]:
        """The settings for a template; one that it does not look at is refused."""
        for name in self.given:
            if not _looks_at(template, name):
                raise ValueError(f"{SETTINGS} has {shown(name)}, at which the chat template does not look; leave it out")
        if not _looks_at(template, VERBOSITY):
            self._refuse_verbosity("at which the chat template does not look")
        said = {} if self.effort is None else {EFFORT: self.effort, THINKS: self.effort != NO_EFFORT}
        if self.verbosity is not None:
            said[VERBOSITY] = self.verbosity
        return {**{name: value for name, value in said.items() if _looks_at(template, name)}, **self.given}

    def refuse_without_template(self) -> None:
        if self.given:
            raise ValueError(f"{SETTINGS} is {shown(self.given)}; chats are not written by a template here; leave it out")
        self._refuse_verbosity("and chats are not written by a template here")

    def _refuse_verbosity(self, why: str) -> None:
        if self.verbosity not in (None, USUAL_VERBOSITY):
            raise ValueError(f"{VERBOSITY} is {shown(self.verbosity)}, {why}; say it in a message")


NO_SETTINGS = TemplateSettings()


def _looks_at(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def read_settings(given: object, effort: object = None, verbosity: object = None) -> TemplateSettings:
    """Reads what a request says of templates."""
    if effort is not None and not isinstance(effort, str):
        raise ValueError(f"{EFFORT} is {shown(effort)}; allowed is a text")
    asked = None if verbosity is None else VERBOSITIES.value(VERBOSITY, verbosity)
    if given is None:
        return TemplateSettings({}, effort, asked)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise ValueError(f'{SETTINGS} is {shown(given)}; allowed is an object with names, like {{"{THINKS}": false}}')
    if own := next((name for name in given if name in TAKEN), None):
        raise ValueError(f"{SETTINGS} has {shown(own)}, which is made of the request itself; leave it out")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{SETTINGS} is {shown(given)}; allowed are values of JSON") from None
    return TemplateSettings({**given}, effort, asked)
