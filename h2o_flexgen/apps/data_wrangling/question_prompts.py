"""Prompts: an instruction, examples and a question, and the file of requests that a job is run from. Examples are drawn from
the training rows, the same for every question, or written by hand in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from h2o_flexgen.apps.data_wrangling.data_sets import DataSet
from h2o_flexgen.apps.data_wrangling.questions import NO, YES, Question
from h2o_flexgen.core.files import parse_json, read_text
from h2o_flexgen.core.hints import shown

COUNT, FILE = "--examples", "--examples-file"
JSON = ".json"


@dataclass(frozen=True)
class Examples:
    """A text for all questions, or one for each value of a column."""

    text: str = ""
    by: Mapping[str, str] | None = None
    source: str = ""  # of texts by value, for messages

    def before(self, question: Question) -> str:
        if self.by is None:
            return self.text
        value = question.by
        if value is None or value not in self.by:
            raise ValueError(f"{self.source} has no examples under {shown(value)}, which line {question.line} of the rows has")
        return self.by[value]


# -- drawn -----------------------------------------------------------------------------------------------------------------


def drawn(rows: Sequence[Question], source: Path, count: int, seed: int, balanced: bool) -> Examples:
    """The same for the same seed. `balanced`: from as many rows that are answered Yes as No."""
    random = Random(seed)
    pool = _balanced(rows, random) if balanced else list(rows)
    if count > len(pool):
        left = f"{source} has {len(rows)} rows" + (f", {len(pool)} of them balanced" if balanced else "")
        raise ValueError(f"{COUNT} {count} is more than there are: {left}; give {len(pool)} or fewer")
    texts = (f"{row.text}{row.expected}".strip() for row in random.sample(pool, count))
    return Examples("\n\n".join(texts) + "\n" if count else "")


def _balanced(rows: Sequence[Question], random: Random) -> list[Question]:
    kinds = [[row for row in rows if row.expected == answer] for answer in (YES, NO)]
    least = min(map(len, kinds))
    return [row for kind in kinds for row in random.sample(kind, least)]


# -- by hand ---------------------------------------------------------------------------------------------------------------


def by_hand(file: str, data_set: DataSet) -> Examples:
    """Examples of a file: a text that stands before every question, or in a .json file one text, or an object with a text for
    each value of the column that the data set's examples depend on."""
    path = Path(file).expanduser()
    text = read_text(path, f"{FILE} {file}")
    if path.suffix != JSON:
        return Examples(_some(text, file))
    try:
        given = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{FILE} {file} is not JSON: {error}") from error
    if isinstance(given, str):
        return Examples(_some(given, file))
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        raise ValueError(f"{FILE} {file} has {shown(given)}; it takes a text, or an object with texts as its values")
    if data_set.examples_by is None:
        raise ValueError(f"{FILE} {file} has texts by value, and {data_set.name} has one for all rows; give a text")
    return Examples(by=given, source=f"{FILE} {file}")


def _some(text: str, file: str) -> str:
    if not text.strip():
        raise ValueError(f"{FILE} {file} is empty; for no examples say {COUNT} 0")
    return text


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
