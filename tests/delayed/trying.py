"""A plan tried in one way: what it gives beside the resident loop, in a line."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.sampling.completion import Completion
from tests.delayed.plans import Planned
from tests.delayed.stand import Stand
from tests.delayed.ways import ALARM, BAD, ERROR, OK, WORDS, Result, Way
from tests.helpers.contract import Case, Checkpoints, Logits, recorded_logits

Expected = list[list[Tensor]]  # of each batch, or of each row alone: the logits (rows, vocab) of every step
Made = tuple[Sequence[Completion], Logits]


class Difference(NamedTuple):
    step: int
    row: int
    largest: float
    tokens_equal: bool


@dataclass(frozen=True)
class Bench:
    """What a process tries plans with. `references`: where processes leave each other what the resident loop gives."""

    stand: Stand
    checkpoints: Checkpoints
    references: Path

    @classmethod
    def of(cls, stand: Stand, checkpoints: Path, references: Path) -> Bench:
        """`checkpoints`: the folder for those of this process."""
        torch.set_num_threads(1)
        references.mkdir(exist_ok=True)
        return cls(stand, Checkpoints(checkpoints), references)

    def prepare(self) -> None:
        """Makes what all tries need, for processes that are forks of this one."""
        with self.stand.kernels():
            for number, planned in enumerate(self.stand.plans()):
                self._expected(number, self._here(planned))

    def _here(self, planned: Planned) -> Planned:
        return replace(planned, case=replace(planned.case, device=self.stand.device))

    def tried(self, number: int, planned: Planned, way: Way) -> Result:
        began, here = time.monotonic(), self._here(planned)
        result = Result(number, way.name, OK)
        try:
            with self.stand.kernels():
                expected = self._expected(number, here)
                with self.stand.opened(way, number) as watch:
                    completions, made = self._made(here, way)
                    logits = {key: value.cpu() for key, value in made.items()}
            found = differences(here.case, here.limits, expected, completions, logits)
            result = replace(result, bits=digest_of(logits), **_told(found))
            if watch is not None and watch.alarms:
                pairs = tuple(f"{pair} ({count})"[:WORDS] for pair, count in watch.alarms.most_common(4))
                result = replace(result, pairs=pairs, verdict=ALARM if result.verdict == OK else result.verdict)
        except Exception as error:
            cause = error.cause if isinstance(error, TaskFailed) else error
            words = " ".join(str(error).split())[:WORDS]
            result = replace(result, verdict=ERROR, error=type(cause).__name__, words=words)
        return replace(result, seconds=round(time.monotonic() - began, 2))

    def _made(self, planned: Planned, way: Way) -> Made:
        case = planned.case
        graphs = planned.graphs if way.graphs else "off"
        with tempfile.TemporaryDirectory() as place:
            offload = Path(place) / "offload"
            with case.open(self.checkpoints, offload, graphs=graphs) as llm, recorded_logits() as logits:
                limits = planned.limits or (case.gen_len,) * len(case.prompts)
                params = [own.up_to(limit) for own, limit in zip(case.params, limits, strict=True)]
                if planned.streams:
                    requests = [Request(*each) for each in zip(case.prompts, params)]
                    return sorted(llm.generate_stream(requests), key=lambda each: each.index), logits
                return llm.generate(case.prompts, params), logits

    def _expected(self, number: int, planned: Planned) -> Expected:
        file = self.references / f"{number}-{os.environ.get('H2O_FLEXGEN_KERNELS', 'own')}.pt"
        if file.exists():
            kept: Expected = torch.load(file)
            return kept
        found = expected_of(planned, self.checkpoints)
        own = file.with_suffix(f".{os.getpid()}")
        torch.save(found, own)
        own.replace(file)
        return found


def expected_of(planned: Planned, checkpoints: Checkpoints) -> Expected:
    case = planned.case
    if planned.limits:
        each = enumerate(planned.limits)
        return [checkpoints.resident_logits(replace(case, gen_len=limit), (row,)) for row, limit in each]
    together = zip(case.batches(), case.beside(checkpoints.spec(case)), strict=True)
    return [checkpoints.resident_logits(case, rows, beside) for rows, beside in together]


def differences(
    case: Case, limits: Sequence[int], expected: Expected, completions: Sequence[Completion], logits: Logits
) -> Difference | None:
    """None if tokens and logits are those of the resident loop; where rows leave, tokens alone are promised."""
    batches = [(row,) for row in range(len(limits))] if limits else case.batches()
    first, largest, tokens_equal = None, 0.0, True
    for rows, steps in zip(batches, expected, strict=True):
        for step, resident in enumerate(steps):
            picked = case.picked(rows, steps[: step + 1])
            for place, row in enumerate(rows):
                own = list(completions[row].token_ids)
                is_token = step < len(own) and own[step] == int(picked[place])
                tokens_equal &= is_token
                gone = 0.0 if limits else _distance(logits.get((step, row)), resident[place])
                largest = max(largest, gone)
                if (gone or not is_token) and (first is None or (step, row) < first):
                    first = step, row
    return None if first is None else Difference(*first, largest, tokens_equal)


def _distance(made: Tensor | None, resident: Tensor) -> float:
    if made is None or made.shape != resident.shape:
        return float("inf")
    if torch.equal(made, resident):
        return 0.0
    distance = float((made.double() - resident.double()).abs().max())
    return distance if distance == distance and distance > 0 else float("inf")  # NaN is as far as can be


def _told(found: Difference | None) -> dict[str, object]:
    if found is None:
        return {"verdict": OK}
    own = {"step": found.step, "row": found.row, "tokens_equal": found.tokens_equal}
    return {"verdict": BAD, "difference": min(found.largest, 1e30), **own}


def digest_of(logits: Logits) -> str:
    digest = blake2b(digest_size=8)
    for key in sorted(logits):
        digest.update(logits[key].float().numpy().tobytes())
    return digest.hexdigest()
