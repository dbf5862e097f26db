"""What the model has answered, whether it is right, and the figures of all answers: precision, recall, F1 and accuracy, beside
what the original makes of the same answers; rows and tokens per second. An answer is the text up to the end of its line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from h2o_flexgen.apps.data_wrangling.data_sets import EXACT
from h2o_flexgen.apps.data_wrangling.questions import NO, YES, PromptedQuestion


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


@dataclass(frozen=True)
class AnswerCounts:
    """Answers by what they say and what is right: a "true No" says No where No is right."""

    true_yes: int = 0
    false_yes: int = 0
    true_no: int = 0
    false_no: int = 0
    unclear_yes: int = 0  # no Yes and no No, or no answer, where Yes would be right
    unclear_no: int = 0

    @classmethod
    def of(cls, answers: Sequence[JudgedAnswer]) -> AnswerCounts:
        names = {
            Verdict.RIGHT: ("true_yes", "true_no"),
            Verdict.WRONG: ("false_no", "false_yes"),
            Verdict.UNCLEAR: ("unclear_yes", "unclear_no"),
            Verdict.NOT_THERE: ("unclear_yes", "unclear_no"),
        }
        return cls(**Counter(names[one.said][0 if one.is_yes else 1] for one in answers))

    @property
    def missed(self) -> int:
        """Rows where Yes would be right and was not said."""
        return self.false_no + self.unclear_yes

    @property
    def precision(self) -> float | None:
        return _share(self.true_yes, self.true_yes + self.false_yes)

    @property
    def recall(self) -> float | None:
        return _share(self.true_yes, self.true_yes + self.missed)

    @property
    def f1(self) -> float | None:
        return _share(2 * self.true_yes, 2 * self.true_yes + self.false_yes + self.missed)

    def as_published(self) -> dict[str, float]:
        """The figures as the original computes them."""
        precision = self.true_yes / max(1, self.true_yes + self.false_yes + self.unclear_no)
        recall = self.true_yes / max(1, self.true_yes + self.missed)
        return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(1, precision + recall)}


def accuracy(answers: Sequence[JudgedAnswer]) -> float | None:
    return _share(sum(one.said is Verdict.RIGHT for one in answers), len(answers))


def number_of(answers: Sequence[JudgedAnswer], said: Verdict) -> int:
    return sum(one.said is said for one in answers)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True)
class Speed:
    rows: int
    prompt_tokens: int
    longest_prompt: int
    gen_len: int
    generated_tokens: int
    computed_tokens: int  # what layers were run for: less than there is, where beginnings are shared
    seconds: float  # since weights were loaded

    @property
    def rows_per_second(self) -> float:
        return self.rows / max(self.seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.generated_tokens) / max(self.seconds, 1e-9)

    @property
    def flexgen_tokens_per_second(self) -> float:
        return self.rows * (self.longest_prompt + self.gen_len) / max(self.seconds, 1e-9)

    @property
    def generated_tokens_per_second(self) -> float:
        return self.generated_tokens / max(self.seconds, 1e-9)

    def lines(self) -> Iterator[str]:
        whole = self.prompt_tokens + self.generated_tokens
        yield f"speed     {self.rows_per_second:.2f} rows/s: {self.rows} in {self.seconds:.1f} s"
        computed = f"{self.computed_tokens} of {whole} computed"
        generated = f"{self.generated_tokens_per_second:.1f} of them generated"
        yield f"          {self.tokens_per_second:.1f} tokens/s of input and output ({computed}), {generated}"
        padded = f"every row counts as {self.longest_prompt} + {self.gen_len} tokens"
        yield f"          {self.flexgen_tokens_per_second:.1f} tokens/s as FlexGen's table has it: {padded}"

    def as_json(self) -> dict[str, object]:
        names = ("rows_per_second", "tokens_per_second", "generated_tokens_per_second", "flexgen_tokens_per_second")
        return {**asdict(self), **{name: round(getattr(self, name), 3) for name in names}}
