"""Trace: what each lane did and when. A run and a simulation give the same kind, so both are read, drawn and compared alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.schedule.ops import Data, Key, Op, place_of

OF_EXPERTS = "x"  # marks a COMPUTE of experts


class Span(NamedTuple):
    """One task as it was done; seconds count from the start of the trace."""

    key: Key
    lane: str
    start: float
    end: float
    bytes: int = 0

    def labels(self, names: Sequence[LayerName] = ()) -> tuple[str, ...]:
        """What is written where it fits, the longest first. `7.2` is a COMPUTE of layer 7 on batch 2; weights, KV and hidden
        states carry a letter in front."""
        layer, batch, letter = self.key.layer, self.key.batch, self.key.op.data.letter
        named = (f"{letter} {names[layer].title}".strip(),) if names else ()
        return (*named, f"{letter}{layer}.{batch}")

    def mark(self, names: Sequence[LayerName] = ()) -> str:
        """One character, used when no label fits."""
        of_experts = bool(names) and names[self.key.layer].is_of_experts
        return self.key.op.data.letter or (OF_EXPERTS if of_experts else str(self.key.layer % 10))


@dataclass(frozen=True)
class Trace:
    spans: Sequence[Span]
    earlier: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # lane -> busy seconds and bytes of dropped spans

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that did something, in the order in which data passes through them."""
        used = {span.lane for span in self.spans} | set(self.earlier)
        return tuple(sorted(used, key=place_of))

    def busy_seconds(self, lane: str) -> float:
        """Seconds in which the lane did at least one task: two at once count once."""
        total, reached = self.earlier.get(lane, (0.0, 0))[0], 0.0
        for start, end in sorted((span.start, span.end) for span in self.spans if span.lane == lane):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    def busy_shares(self) -> dict[str, float]:
        makespan = self.makespan
        return {lane: self.busy_seconds(lane) / makespan if makespan else 0.0 for lane in self.lanes}

    def moved_bytes(self, lane: str) -> int:
        return self.earlier.get(lane, (0.0, 0))[1] + sum(span.bytes for span in self.spans if span.lane == lane)

    def step_ends(self) -> list[float]:
        """When the last COMPUTE of each step ended: the differences are the times of the decode steps."""
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.key.op is Op.COMPUTE:
                ends[span.key.step] = max(span.end, ends.get(span.key.step, 0.0))
        return [ends[step] for step in sorted(ends)]

    def between(self, start: float, end: float) -> Trace:
        """The part of the trace in this window, counted from its start. A span that is cut keeps its share of the bytes."""
        return Trace(tuple(_clip(span, start, end) for span in self.spans if span.start < end and span.end > start))

    # -- to be looked at ---------------------------------------------------------------------------------------------

    def text_timeline(self, width: int = 100, names: Sequence[LayerName] = ()) -> str:
        """A line per lane, a character per moment: labels where they fit, else the layer's last digit (compute) or the kind.
        `names` say what each layer is; then experts have a mark of their own, and a line below says what marks mean."""
        title = max(map(len, self.lanes), default=0)
        lines = [" " * title + " |" + _scale(self.makespan, width) + "|"]
        for lane, share in self.busy_shares().items():
            drawn = _draw([span for span in self.spans if span.lane == lane], self.makespan, width, names)
            lines.append(f"{lane:{title}} |{drawn}| {share:4.0%} busy")
        return "\n".join([*lines, *self._legend(names)])

    def _legend(self, names: Sequence[LayerName]) -> Iterator[str]:
        """What the marks mean, where some of the layers are slices of experts."""
        if names and any(names[span.key.layer].is_of_experts for span in self.spans):
            used = {span.key.op.data for span in self.spans}
            kinds = [f"{data.letter} {data.words}" for data in Data if data in used and data.letter]
            computes = [f"{OF_EXPERTS} experts compute", "a digit: any other layer computes, the last digit of its number"]
            yield "; ".join([*kinds, *computes])

    def to_chrome(self, names: Sequence[LayerName] = ()) -> dict[str, object]:
        """A trace for chrome://tracing or ui.perfetto.dev. Tasks of one lane that overlap get rows of their own. `names` say
        what each layer is."""
        events: list[dict[str, object]] = [_metadata("process_name", 0, "h2o_flexgen")]
        row = 0
        for lane in self.lanes:
            for track, spans in enumerate(_tracks(span for span in self.spans if span.lane == lane)):
                events.append(_metadata("thread_name", row, lane if track == 0 else f"{lane} {track + 1}"))
                events += [_event(span, row, names) for span in spans]
                row += 1
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def write_chrome(self, path: str | Path, names: Sequence[LayerName] = ()) -> None:
        write_text(path, json.dumps(self.to_chrome(names)))


def _clip(span: Span, start: float, end: float) -> Span:
    inside = min(span.end, end) - max(span.start, start)
    share = inside / (span.end - span.start) if span.end > span.start else 1.0
    return span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start, bytes=round(share * span.bytes))


def _scale(seconds: float, width: int, every: int = 20) -> str:
    """Times, each written at its place, and the last at the end. A time that would run into that is left out."""
    line, end = "", f"{seconds:.4g}s"
    for column in range(0, width, every):
        time = f"{seconds * column / width:.3g}s"
        line = line.ljust(column) + time if column + len(time) + len(end) < width else line
    return (line.ljust(width - len(end)) + end)[-width:]


def _draw(spans: Sequence[Span], seconds: float, width: int, names: Sequence[LayerName]) -> str:
    """Each column shows the span that has most of its time."""
    seconds = seconds or 1.0
    owners: list[Span | None] = [None] * width
    most = [0.0] * width
    for span in spans:
        first, last = span.start / seconds * width, span.end / seconds * width
        for column in range(int(first), min(width, int(last) + 1)):
            covered = min(last, column + 1) - max(first, column)
            if covered > most[column]:
                owners[column], most[column] = span, covered
    line, column = "", 0
    while column < width:
        owner = owners[column]
        end = next((other for other in range(column, width) if owners[other] is not owner), width)
        line += _fill(owner, end - column, names)
        column = end
    return line


def _fill(span: Span | None, width: int, names: Sequence[LayerName]) -> str:
    if span is None:
        return " " * width
    fitting = next((label for label in span.labels(names) if len(label) < width), None)
    return span.mark(names) * width if fitting is None else fitting.ljust(width, "-")


def _tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Tracks without overlapping spans: each span goes to the first track that is free."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free = next((track for track in tracks if track[-1].end <= span.start), None)
        if free is None:
            tracks.append(free := [])
        free.append(span)
    return tracks


def _metadata(name: str, row: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": 0, "tid": row, "args": {"name": value}}


def _event(span: Span, row: int, names: Sequence[LayerName]) -> dict[str, object]:
    key = span.key
    what = {"what": names[key.layer].title} if names else {}
    return {
        "ph": "X",
        "name": str(key),
        "cat": str(key.op),
        "pid": 0,
        "tid": row,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"step": key.step, "layer": key.layer, **what, "batch": key.batch, "bytes": span.bytes},
    }
