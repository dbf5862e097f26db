"""Figures of a run: precision, recall, F1 and accuracy from counts, beside what the original makes of the same answers; rows
and tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from h2o_flexgen.apps.data_wrangling.answers import JudgedAnswer, Verdict


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
