"""Prompts: an instruction, examples and a question, and the file of requests that a job is run from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from h2o_flexgen.apps.data_wrangling.examples import Examples
from h2o_flexgen.apps.data_wrangling.questions import Question

STOP = "\n"  # an answer is one line
BEGINNING = b'{"custom_id": "'  # of every request


@dataclass(frozen=True)
class PromptedQuestion:
    """A question as the model gets it, under the id of its record."""

    id: str
    question: Question
    prompt: str


def asked(questions: Iterable[Question], split: str, examples: Examples, instruction: str | None) -> Iterator[PromptedQuestion]:
    for question in questions:
        text = f"{examples.before(question)}\n{question.text}".strip()
        yield PromptedQuestion(f"{split}-{question.line}", question, text if instruction is None else f"{instruction} {text}")


def requests_of(rows: Sequence[PromptedQuestion], gen_len: int) -> str:
    """The requests of a batch job, a line each, which say all that the answers depend on but the model."""
    how = {"max_tokens": gen_len, "temperature": 0, "stop": [STOP]}
    return "".join(json.dumps({"custom_id": one.id, "prompt": one.prompt, **how}) + "\n" for one in rows)
