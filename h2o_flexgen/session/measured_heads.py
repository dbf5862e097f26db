"""Head budgets that are measured where a plan wants them and none are known: once for a model, before its first use.

It is done only where it takes little time. What takes longer is left to the calibrate command.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.calibration.calibration import calibrate
from h2o_flexgen.calibration.text_reading import KeptReading, Pace, ReadModel, TakesTooLong
from h2o_flexgen.checkpoints.derived import CALIBRATE, HEAD_BUDGETS, kept_file
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.engine.reports import Stage, Stages
from h2o_flexgen.memory.host import shortage_of
from h2o_flexgen.policies.head_budgets import EQUAL, HeadBudgets, why_unmeasured, write_head_budgets
from h2o_flexgen.text.given_texts import USUAL_TEXTS, USUAL_TOKENS, Text, checksum, described, windows
from h2o_flexgen.text.tokenizer import Tokenizer

MOST_SECONDS = 120.0  # that a run waits for it, once
FEWEST_TOKENS = 256  # of a text: shorter ones say little of what long texts need
READING = ".reading"


def kept_reading(model: str, ids: Sequence[Sequence[int]], dtype: str) -> KeptReading | None:
    """The place of a reading of these texts until it is over. None: nothing here identifies the model."""
    place = kept_file(model, HEAD_BUDGETS)
    return None if place is None else KeptReading(place.with_suffix(READING), checksum([*map(tuple, ids)], dtype))


def tokens_read(spec: ModelSpec) -> int:
    """Tokens of each text that a run measures heads with; none where a model's texts are too short for that."""
    tokens = min(USUAL_TOKENS, spec.seen_positions // 2)
    return 0 if tokens < FEWEST_TOKENS else tokens


@dataclass(frozen=True)
class HeadMeasuring:
    """What one measurement needs of a model that is open."""

    source: str  # as the user names the model
    tokenizer: Tokenizer
    stages: Stages
    say: Callable[[str], None]
    most_seconds: float = MOST_SECONDS

    def budgets(self, model: ReadModel) -> HeadBudgets | None:
        """The head budgets, kept for later runs. None: all heads are to have equal budgets. A line says why, but for models
        and tokenizers that cannot read the texts."""
        place, tokens = kept_file(self.source, HEAD_BUDGETS), tokens_read(model.spec)
        if place is None or not tokens or why_unmeasured(model.spec) or not self.tokenizer.reads_texts:
            return None
        try:
            _refuse_unwritable(place.parent)
            found = self._measured(model, tokens)
        except TakesTooLong as given_up:
            once = f"{_time(given_up.seconds)} to measure, once: {CALIBRATE} --model {self.source}"
            self.say(f"heads     equal budgets: what each needs takes {once}")
            return None
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and shortage_of(error) is None:
                raise
            self.say(f"heads     equal budgets, since what each needs cannot be measured: {_line(error)}")
            return None
        self._keep(found, place)
        return found

    def _keep(self, found: HeadBudgets, place: Path) -> None:
        try:
            write_head_budgets(found, place)
        except OSError as error:
            self.say(f"heads     what each needs is measured, but cannot be kept for later runs: {_line(error)}")

    def _measured(self, model: ReadModel, tokens: int) -> HeadBudgets:
        text = Text.held_out()
        ids = windows([text], self.tokenizer, tokens, USUAL_TEXTS, "tokens").ids
        kept, total = kept_reading(self.source, ids, model.spec.dtype), sum(layer.nbytes for layer in model.layers)
        pace = Pace(self.most_seconds, self._tell)

        def on_layer(done: int, layers: int) -> None:
            self.stages(Stage.CALIBRATING, sum(layer.nbytes for layer in model.layers[:done]), total)

        self.stages(Stage.CALIBRATING, 0, total)
        found = calibrate(model, ids, described([text], len(ids), tokens), on_layer, kept=kept, pace=pace)
        if kept is not None:
            kept.remove()
        return found.head_budgets

    def _tell(self, seconds: float) -> None:
        without = f"--head-budgets {EQUAL} does without"
        self.say(f"heads     what each needs is measured now, once for this model, in {_time(seconds)}; {without}")


def _refuse_unwritable(folder: Path) -> None:
    """Refuses a cache that cannot be written: each run would measure anew."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _line(error: BaseException) -> str:
    shortage = shortage_of(error)
    return str(error) if shortage is None else shortage.reason


def _time(seconds: float) -> str:
    return f"about {max(1.0, seconds):.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
