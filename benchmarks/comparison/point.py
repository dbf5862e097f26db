"""What was measured of one system with one number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from benchmarks.baselines.request import Answer
from benchmarks.comparison.suites import Load


@dataclass(frozen=True)
class Point:
    rows: int
    load: Load
    answers: tuple[Answer, ...]  # of one run or more

    def __str__(self) -> str:
        return f"prompts {self.prompt_tokens_per_s:.1f}, steps {self.step_tokens_per_s:.1f} tokens/s"

    def with_answer(self, answer: Answer) -> Point:
        return replace(self, answers=(*self.answers, answer))

    @property
    def prefill_seconds(self) -> float:
        return median(answer.prefill_seconds for answer in self.answers)

    @property
    def step_seconds(self) -> float:
        return median(median(answer.step_seconds) for answer in self.answers)

    @property
    def decode_seconds(self) -> float:
        """Of all steps; where only some were timed, the others count as their median."""
        return median(self._decode_seconds(answer) for answer in self.answers)

    def _decode_seconds(self, answer: Answer) -> float:
        steps, timed = self.load.gen_len - 1, answer.step_seconds
        return sum(timed) + (steps - len(timed)) * median(timed)

    @property
    def is_whole(self) -> bool:
        return all(len(answer.step_seconds) == self.load.gen_len - 1 for answer in self.answers)

    @property
    def seconds(self) -> float:
        """Until the last token of every row: the latency of the batch."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_s(self) -> float:
        return self.rows * self.load.gen_len / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.rows * self.load.prompt_len / self.prefill_seconds

    @property
    def step_tokens_per_s(self) -> float:
        return self.rows * (self.load.gen_len - 1) / self.decode_seconds

    @property
    def peak_bytes(self) -> int:
        return max(answer.peak_host_bytes for answer in self.answers)

    @property
    def peak_device_bytes(self) -> int:
        return max(answer.peak_device_bytes for answer in self.answers)

    @property
    def link_bytes_per_step(self) -> float:
        return median(answer.link_bytes_per_step for answer in self.answers)
