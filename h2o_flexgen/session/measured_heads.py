"""Head budgets that are measured where a plan wants them and none are known: once for a model, before its first use.

It is done only where it takes little time. What takes longer is left to the calibrate command, which goes on where this ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.calibration.calibration import FEWEST_TOKENS, calibrate
from h2o_flexgen.calibration.kept_reading import KeptReading, Pace, TakesTooLong
from h2o_flexgen.calibration.text_reading import ReadModel
from h2o_flexgen.checkpoints.kept_measurements import CALIBRATE, HEAD_BUDGETS, kept_file
from h2o_flexgen.engine.reports import Stage, Stages
from h2o_flexgen.policies.head_budgets import EQUAL, HeadBudgets, can_be_measured, write_head_budgets
from h2o_flexgen.text.measured_texts import USUAL_TEXTS, USUAL_TOKENS, Text, checksum, described, windows
from h2o_flexgen.text.tokenizer import Tokenizer

MOST_SECONDS = 120.0  # that a run waits for it, once
KNOWN_SECONDS = ".seconds"  # the suffix of a file that says how long it takes, where that is too long
READING = ".reading"


def kept_reading(model: str, ids: Sequence[Sequence[int]], dtype: str) -> KeptReading | None:
    """The place of a reading of these texts until it is over. None: nothing here identifies the model."""
    place = kept_file(model, HEAD_BUDGETS)
    return None if place is None else KeptReading(place.with_suffix(READING), checksum([*map(tuple, ids)], dtype))


@dataclass(frozen=True)
class HeadMeasuring:
    """What one measurement needs of a model that is open."""

    source: str  # as the user names the model
    tokenizer: Tokenizer
    stages: Stages
    say: Callable[[str], None]
    most_seconds: float = MOST_SECONDS

    def budgets(self, model: ReadModel) -> HeadBudgets | None:
        """The head budgets, kept for later runs. None, with a line that says why: all heads are to keep as much."""
        place, tokens = kept_file(self.source, HEAD_BUDGETS), min(USUAL_TOKENS, model.spec.seen_positions // 2)
        if place is None or tokens < FEWEST_TOKENS or not can_be_measured(model.spec) or not self.tokenizer.reads_texts:
            return None
        known = place.with_suffix(KNOWN_SECONDS)
        try:
            _refuse_known(known, self.most_seconds)
            found = self._measured(model, tokens)
            write_head_budgets(found, place)
        except TakesTooLong as given_up:
            place.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(f"{given_up.seconds:.0f}", encoding="utf-8")
            once = f"{_time(given_up.seconds)} to measure, once: {CALIBRATE} --model {self.source}"
            self.say(f"heads     all keep as much: what each needs takes {once}")
            return None
        except (ValueError, OSError) as error:
            self.say(f"heads     all keep as much, since what each needs cannot be measured: {error}")
            return None
        return found

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


def _refuse_known(file: Path, most_seconds: float) -> None:
    """Gives up where an earlier run found that it takes too long."""
    try:
        seconds = float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if seconds > most_seconds:
        raise TakesTooLong(seconds)


def _time(seconds: float) -> str:
    return f"about {max(1.0, seconds):.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
