"""What the model has answered, and whether it is right. An answer is the text up to the end of its line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from h2o_flexgen.apps.data_wrangling.data_sets import EXACT
from h2o_flexgen.apps.data_wrangling.question_prompts import PromptedQuestion
from h2o_flexgen.apps.data_wrangling.questions import NO, YES


class Verdict(Enum):
    """What an answer is taken for."""

    RIGHT = "right"
    WRONG = "wrong"
    UNCLEAR = "unclear"  # neither Yes nor No where one of them is asked for, or nothing at all
    NOT_THERE = "not there"  # the request has failed


@dataclass(frozen=True)
class AnswerRecord:
    """The record of a request: what was generated, or why nothing was."""

    text: str | None
    error: str | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True)
class JudgedAnswer:
    asked: PromptedQuestion
    record: AnswerRecord
    said: Verdict

    @property
    def is_yes(self) -> bool:
        """Whether Yes would be right."""
        return self.asked.question.expected == YES


def read_records(path: Path) -> dict[str, AnswerRecord]:
    """The records of a job that has come to its end, by their ids."""
    found = {}
    with path.open("rb") as opened:
        for line in opened:
            record = json.loads(line)
            found[record["custom_id"]] = _record(record)
    return found


def _record(record: Mapping[str, object]) -> AnswerRecord:
    error = record["error"]
    if isinstance(error, dict):
        return AnswerRecord(None, str(error["message"]))
    response = record["response"]
    assert isinstance(response, dict)
    body = response["body"]
    usage = body["usage"]
    return AnswerRecord(body["choices"][0]["text"], None, usage["prompt_tokens"], usage["completion_tokens"])


NO_RECORD = AnswerRecord(None, "it has no record")


def answers_of(
    rows: Iterable[PromptedQuestion], records: Mapping[str, AnswerRecord], match: str, is_yes_or_no: bool
) -> list[JudgedAnswer]:
    found = []
    for one in rows:
        record = records.get(one.id, NO_RECORD)
        said = Verdict.NOT_THERE if record.text is None else judged(record.text, one.question.expected, match, is_yes_or_no)
        found.append(JudgedAnswer(one, record, said))
    return found


def judged(text: str, expected: str, match: str, is_yes_or_no: bool) -> Verdict:
    """Both are compared without space around them and in lower case, as the original does."""
    answer = text.strip().lower()
    if _is(answer, expected, match):
        return Verdict.RIGHT
    if not answer or (is_yes_or_no and not any(_is(answer, word, match) for word in (YES, NO))):
        return Verdict.UNCLEAR
    return Verdict.WRONG


def _is(answer: str, expected: str, match: str) -> bool:
    wanted = expected.strip().lower()
    if match == EXACT:
        return answer == wanted
    return answer.startswith(wanted) and not answer[len(wanted) :][:1].isalnum()
