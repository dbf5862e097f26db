"""The work of data wrangling: a batch job answers the prompts, its records are judged, and the report of the run says how good
the answers are and how fast they came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from h2o_flexgen.apps.data_wrangling.answers import (
    AnswerCounts,
    JudgedAnswer,
    Speed,
    Verdict,
    accuracy,
    answers_of,
    number_of,
    read_records,
)
from h2o_flexgen.apps.data_wrangling.request import WranglingRequest
from h2o_flexgen.cli import batch_work
from h2o_flexgen.cli.batch_work import FinishedJob
from h2o_flexgen.cli.terminal import printable, say, say_document
from h2o_flexgen.core.files import write_text

UNDEFINED = "undefined"  # 0 / 0
SHOWN = 60  # characters of an answer


@dataclass(frozen=True)
class WranglingReport:
    request: WranglingRequest
    ended: FinishedJob
    answers: Sequence[JudgedAnswer]

    @cached_property
    def counts(self) -> AnswerCounts:
        return AnswerCounts.of(self.answers)

    @property
    def speed(self) -> Speed | None:
        """The speed of the last run; None where nothing was left for it."""
        figures = self.ended.figures
        if figures is None:
            return None
        sizes = self.ended.ran
        return Speed(
            rows=len(sizes),
            prompt_tokens=sum(sizes.prompt_lens),
            longest_prompt=max(sizes.prompt_lens),
            gen_len=self.request.gen_len,
            generated_tokens=figures.tick.generated_tokens,
            computed_tokens=figures.tick.computed_tokens,
            seconds=figures.seconds,
        )

    # -- for people --------------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        asked, there = len(self.answers), self.request.rows_there
        some = "" if asked == there else f" of {there}"
        yield f"data      {self.request.data_set.name} ({self.request.task.name}): {asked}{some} rows of {self.request.split}"
        yield f"answers   {', '.join(f'{name} {_shown(value)}' for name, value in self._quality.items())}"
        yield from self._number_lines()
        if self.speed is not None:
            yield from self.speed.lines()
        yield f"result    {self.request.result_file}"

    def _number_lines(self) -> Iterator[str]:
        if self.request.task.is_yes_or_no:
            counts = self.counts
            said = f"Yes {counts.true_yes} times rightly and {counts.false_yes} times wrongly"
            yield f"          {said}, No {counts.true_no} times rightly and {counts.false_no} times wrongly"
        unclear = [one for one in self.answers if one.said is Verdict.UNCLEAR]
        if unclear:
            what = "neither Yes nor No" if self.request.task.is_yes_or_no else "empty"
            first = repr(printable((unclear[0].record.text or "")[:SHOWN]))
            yield f"unclear   {len(unclear)} answers are {what}, and count as wrong; the first is {first}"
        lacking = [one for one in self.answers if one.said is Verdict.NOT_THERE]
        if lacking:
            yield f"failed    {len(lacking)} rows have no answer, and count as wrong; the first: {lacking[0].record.error}"

    @property
    def _quality(self) -> dict[str, float | None]:
        right = {"accuracy": accuracy(self.answers)}
        if not self.request.task.is_yes_or_no:
            return right
        return {"precision": self.counts.precision, "recall": self.counts.recall, "f1": self.counts.f1, **right}

    # -- JSON --------------------------------------------------------------------------------------------------------------

    def as_json(self, everything: bool = False) -> dict[str, object]:
        """The result; with `everything` also each answer."""
        is_yes_or_no = self.request.task.is_yes_or_no
        found: dict[str, object] = {
            "task": self.request.task.name,
            "model": self.request.job.model.name,
            "rows": len(self.answers),
            "rows_there": self.request.rows_there,
            **self._quality,
            "counts": asdict(self.counts) if is_yes_or_no else {"right": number_of(self.answers, Verdict.RIGHT)},
            "unclear": number_of(self.answers, Verdict.UNCLEAR),
            "as_published": self.counts.as_published() if is_yes_or_no else None,
            "match": self.request.match,
            "made_of": dict(self.request.made_of),
            "speed": None if self.speed is None else self.speed.as_json(),
            "machine": dict(self.ended.machine),
            "job": self.ended.as_json(),
        }
        return {**found, "answers": [_answer(one) for one in self.answers]} if everything else found


def _answer(one: JudgedAnswer) -> dict[str, object]:
    found: dict[str, object] = {"id": one.asked.id, "expected": one.asked.question.expected, "said": one.said.value}
    return {**found, "text": one.record.text, **({} if one.record.error is None else {"error": one.record.error})}


def _shown(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.3f}"


def work(request: WranglingRequest) -> None:
    ended = batch_work.run(request.job)
    if ended is None:  # only the plan was asked for
        return
    records = read_records(ended.output)
    answers = answers_of(request.rows, records, request.match, request.task.is_yes_or_no)
    report = WranglingReport(request, ended, answers)
    write_text(request.result_file, json.dumps(report.as_json(everything=True), indent=1) + "\n")
    if request.verbose:
        say(report.lines())
    say_document(report.as_json())
    ended.exit_if_failed()
