"""The manifest of a job, beside its output: what the answers depend on, so that a later run goes on with the same job and no
other, and what was told of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from h2o_flexgen.core.documents import parse_json
from h2o_flexgen.core.files import read_text, write_durably
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.jobs.check import Part
from h2o_flexgen.jobs.input_file import JSON_LINES

FORM = 1  # counted up when older manifests can no longer be read
SUFFIX = ".manifest.json"
Settings = Mapping[str, object]


@dataclass(frozen=True)
class Manifest:
    created: int  # seconds since 1970
    seed: int
    checked: Part  # of the input
    settings: Settings  # all that answers depend on, under the names by which people know it
    noted: Settings  # what may differ in the last bits of numbers, and so seldom in a text
    runs: tuple[Settings, ...] = ()  # of each: when it began, its arguments, versions and plan
    result: Settings | None = None  # of the last run that came to its end

    def with_run(self, run: Settings) -> Manifest:
        return replace(self, runs=(*self.runs, run), result=None)

    def differences(self, settings: Settings) -> Iterator[str]:
        """What of these settings was otherwise when the job began."""
        for name, given in settings.items():
            before, now = self.settings.get(name), _as_read(given)
            if before != now:
                yield f"{name} was {shown(before)} and is {shown(now)}"

    def notes(self, noted: Settings) -> Iterator[str]:
        for name, now in noted.items():
            if self.noted.get(name) != _as_read(now):
                yield f"{name} was {shown(self.noted.get(name))} when the job began, and is {shown(now)}"

    # -- its file ------------------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        text = json.dumps({"form": FORM, **asdict(self)}, indent=1, default=str)
        try:
            write_durably(path, text + "\n")
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({reason(error)}); no job can go on without it: mend that, or give another output"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest; None if there is none."""
        if not path.exists():
            return None
        text = read_text(path, f"manifest {path}")
        try:
            return cls._of(parse_json(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no manifest that is understood; give another output, or remove both") from error

    @classmethod
    def _of(cls, given: dict[str, Any]) -> Manifest:
        if given.pop("form") != FORM:
            raise ValueError("another form")
        runs, checked = tuple(given.pop("runs")), Part(**given.pop("checked"))
        manifest = cls(**given, runs=runs, checked=checked)
        if (
            not isinstance(manifest.settings, dict)
            or not isinstance(manifest.seed, int)
            or not isinstance(manifest.created, int)
        ):
            raise TypeError("not what is written")
        return manifest


def manifest_file(output: Path) -> Path:
    return output.with_name(output.name.removesuffix(JSON_LINES) + SUFFIX)


def _as_read(value: object) -> object:
    """The value as it comes back from a file."""
    return json.loads(json.dumps(value, default=str))
