"""The manifest of a job, beside its output: what the answers depend on, so that a later run goes on with the same job and no
other, and what was told of its runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from h2o_flexgen.core.files import parse_json, read_document_text, write_durably
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.jobs.index import InputPart
from h2o_flexgen.jobs.input_file import JSON_LINES
from h2o_flexgen.jobs.output import waiting_file

FORM = 1  # counted up when older manifests can no longer be read
SUFFIX = ".manifest.json"
OTHER_SUFFIX = ".job-manifest.json"  # of an output that is not called .jsonl, so that no two outputs share a manifest
PACKAGES = ("h2o_flexgen", "torch", "transformers", "numpy")
Settings = Mapping[str, object]


@dataclass(frozen=True)
class Manifest:
    created: int  # seconds since 1970
    seed: int
    checked: InputPart  # of the input
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
                f"{path} cannot be written ({reason(error)}); no job can go on without it: fix this, or give another output"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest; None if there is none."""
        if not path.exists():
            return None
        text = read_document_text(path, f"manifest {path}")
        try:
            return cls._of(parse_json(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no manifest that is understood; give another output, or remove both") from error

    @classmethod
    def _of(cls, given: dict[str, Any]) -> Manifest:
        if given.pop("form") != FORM:
            raise ValueError("another form")
        fields: dict[str, type | tuple[type, ...]] = {
            "created": int,
            "seed": int,
            "checked": dict,
            "settings": dict,
            "noted": dict,
            "runs": list,
            "result": (dict, type(None)),
        }
        given = {"result": None, **given}
        _require(given, fields)
        _require(given["checked"], {"nbytes": int, "digest": str})
        if not all(isinstance(run, dict) for run in given["runs"]):
            raise TypeError("a run is no object")
        return cls(**{**given, "runs": tuple(given["runs"]), "checked": InputPart(**given["checked"])})


def _require(given: Mapping[str, object], fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuses what has another field, lacks one, or has one of another type."""
    if given.keys() != fields.keys():
        raise TypeError("other fields")
    for name, kind in fields.items():
        if not isinstance(given[name], kind) or isinstance(given[name], bool):
            raise TypeError(f"{name} is of another type")


def manifest_file(output: Path) -> Path:
    """The manifest of an output, which no other output has. A job that was begun with an older name of it goes on with that."""
    if output.name.endswith(JSON_LINES):
        return output.with_name(output.name.removesuffix(JSON_LINES) + SUFFIX)
    own, older = (output.with_name(output.name + suffix) for suffix in (OTHER_SUFFIX, SUFFIX))
    is_begun = any(file.exists() for file in (output, waiting_file(output)))
    is_of_another = output.with_name(output.name + JSON_LINES).exists()
    return older if is_begun and older.exists() and not own.exists() and not is_of_another else own


def _as_read(value: object) -> object:
    """The value as it comes back from a file."""
    return json.loads(json.dumps(value, default=str))


def versions() -> Settings:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
