"""Recording: the record of every request of an index goes to the output of its job, whatever became of the request."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.jobs.index import Index
from h2o_flexgen.jobs.line import BadLine
from h2o_flexgen.jobs.output import JobOutput
from h2o_flexgen.jobs.records import BAD_REQUEST, RecordMaker, as_line, refusal
from h2o_flexgen.sampling.completion import Completion


@dataclass(frozen=True)
class Recording:
    index: Index
    maker: RecordMaker
    output: JobOutput

    def answer(self, place: int, completion: Completion) -> None:
        line = self.index.line(place)
        record = self.maker.answer(self.index.id_of(place, line.custom_id), line, completion)
        self.output.add(place, as_line(record), failed=False)

    def refuse(self, place: int, reason: str, status: int = BAD_REQUEST, code: str | None = None) -> None:
        """Records that a sound request cannot be run, or that its run has failed."""
        self._refuse(place, self.index.line(place).custom_id, reason, status, code)

    def refuse_bad_line(self, place: int) -> None:
        try:
            self.index.line(place)
        except BadLine as bad:
            self._refuse(place, bad.custom_id, str(bad), BAD_REQUEST, None)
        else:
            raise AssertionError(f"the line at place {place} is sound")

    def _refuse(self, place: int, line_id: str | None, reason: str, status: int, code: str | None) -> None:
        said = f"line {self.index.numbers[place]}: {reason}"
        self.output.add(place, as_line(refusal(self.index.id_of(place, line_id), said, status, code)), failed=True)
