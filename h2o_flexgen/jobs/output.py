"""The output of a job: records in the order in which requests finish, or in that of the input. Beside it lies its manifest:
what the answers depend on, so that a later run goes on with the same."""

from __future__ import annotations

import json
import platform
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from h2o_flexgen.core.files import JSON_LINES, parse_json, read_document_text, write_durably
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.jobs.index import Index, InputPart
from h2o_flexgen.jobs.line import BadLine
from h2o_flexgen.jobs.openai_answers import BAD_REQUEST, RecordMaker, as_line, refusal
from h2o_flexgen.jobs.recovery import OPEN, AppendFile, Finished, OutputReader, cleaned
from h2o_flexgen.sampling.completion import Completion

OF_WEIGHTS = "the model's weights"  # a setting that is a digest, which says nothing to a person
WAITING = ".waiting"  # ends the name of the file of records that others must come before


class JobOutput:
    """Records as requests finish. Used in a `with`; what was begun before is taken up."""

    def __init__(self, path: Path, reader: OutputReader) -> None:
        self.path = path
        self._reader = reader
        self.finished = Finished.nothing(reader.index)
        self._file = AppendFile(path)
        try:
            self._take_up()
        except BaseException:
            self.close()
            raise

    def _take_up(self) -> None:
        self._file = cleaned(self._file, self._reader, self.finished)

    def add(self, place: int, line: bytes, failed: bool) -> None:
        """Appends the record of a request."""
        assert self.finished.is_open(place), f"the request at place {place} is finished"
        self._write(place, line)
        self.finished.note(place, failed)

    def _write(self, place: int, line: bytes) -> None:
        self._file.append(line)

    def sync(self) -> bool:
        """Returns when what was added is on the disk; true if the file was removed meanwhile and is written again."""
        return self._file.sync()

    def close(self) -> None:
        self._file.remove_if_empty()
        self._file.close()

    def __enter__(self) -> JobOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.sync()
        finally:
            self.close()


class OrderedOutput(JobOutput):
    """Records in the order of the input. One that waits for others lies in a file beside the output, as durable as that."""

    def __init__(self, path: Path, reader: OutputReader) -> None:
        self._next = 0  # the place of the next record
        self._begins = array("q", [-1]) * len(reader.index)  # where records begin in the file of those that wait
        self._sizes = array("q", [0]) * len(reader.index)
        self._num_waiting = 0
        self._waiting = AppendFile(waiting_file(path))
        try:
            super().__init__(path, reader)
        except BaseException:
            self._waiting.close()
            raise

    def _take_up(self) -> None:
        """Reads both files. Where a record is missing in the output, those behind it have to wait again: they are there before
        they are cut off here."""
        waiting = Finished.nothing(self._reader.index)
        self._waiting = cleaned(self._waiting, self._reader, waiting)  # what is moved goes behind whole lines
        self.finished.dropped = waiting.dropped
        whole, is_broken = 0, False
        for entry in self._reader.entries(self.path):
            stays = self._reader.keeps(entry, self.finished)
            is_broken |= not stays or entry.place != self._next
            if not is_broken:
                self._next, whole = self._next + 1, entry.end
            elif stays:
                self._waiting.append(self._file.read(entry.start, entry.end - entry.start))
        if is_broken:
            self._waiting.sync()
            self._file.cut(whole)
        self._read_waiting()
        self._write_those_that_waited()

    def _read_waiting(self) -> None:
        """Reads the records that wait, those that were moved among them: of two of a request the first one counts."""
        states = self.finished.states[: self._next].ljust(len(self.finished.states), bytes([OPEN]))
        self.finished = Finished(states, self.finished.dropped)
        self._waiting = cleaned(self._waiting, self._reader, self.finished)
        for entry in self._reader.entries(self._waiting.path):
            assert entry.place is not None, "only whole records are left"
            self._begins[entry.place], self._sizes[entry.place] = entry.start, entry.end - entry.start
            self._num_waiting += 1

    def _write(self, place: int, line: bytes) -> None:
        if place != self._next:
            self._begins[place], self._sizes[place] = self._waiting.append(line), len(line)
            self._num_waiting += 1
            return
        self._file.append(line)
        self._next += 1
        self._write_those_that_waited()

    def _write_those_that_waited(self) -> None:
        while self._next < len(self._begins) and self._begins[self._next] >= 0:
            self._file.append(self._waiting.read(self._begins[self._next], self._sizes[self._next]))
            self._next += 1
            self._num_waiting -= 1

    def sync(self) -> bool:
        was_removed = [file.sync() for file in (self._waiting, self._file)]
        if not self._num_waiting and self._waiting.size:  # all of them are in the output now
            self._waiting.cut(0)
        return any(was_removed)

    def close(self) -> None:
        super().close()
        self._waiting.remove_if_empty()
        self._waiting.close()


def waiting_file(path: Path) -> Path:
    return path.with_name(path.name + WAITING)


@dataclass(frozen=True)
class Recording:
    """The record of every request of an index goes to the output of its job, whatever became of the request."""

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

    def differences(self, settings: Settings, model: str = "") -> Iterator[str]:
        """What of these settings was otherwise when the job began. `model`: the name of the one that is used now."""
        for name, given in settings.items():
            before, now = self.settings.get(name), _as_read(given)
            if before != now:
                yield self._other_weights(model) if name == OF_WEIGHTS else f"{name} was {shown(before)} and is {shown(now)}"

    def _other_weights(self, model: str) -> str:
        before = self.runs[0].get("model") if self.runs else None
        if model and isinstance(before, str) and before != model:
            return f"the model was {shown(before)} and is {shown(model)}"
        return f"{OF_WEIGHTS} were other ones"

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
