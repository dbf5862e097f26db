"""Counts: what the server has done, and what it does now, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from threading import Lock
from time import monotonic

from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.stores.prefix_files import PrefixFileCounts
from h2o_flexgen.server.stored_batches import Batches

PREFIX = "h2o_flexgen"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Now:
    """The state of the desk at a moment."""

    running: int  # requests
    waiting: int
    rows_waiting: int  # not in the background
    rows_seated: int
    seats: int
    kv_bytes: int  # held by the rows that have a seat
    kv_bytes_of_seats: int  # that they can hold at most
    rows_in_background: int  # of batches, that wait


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    text: str
    values: Mapping[str, float]  # by labels as they are written

    def lines(self) -> Iterator[str]:
        name = f"{PREFIX}_{self.name}"
        yield f"# HELP {name} {self.text}"
        yield f"# TYPE {name} {self.kind}"
        yield from (f"{name}{labels} {value:.17g}" for labels, value in self.values.items())


class ServerCounts:
    """Everything since the server began. The thread that computes and the one that answers both count here."""

    def __init__(self, of_prefixes: Callable[[], PrefixFileCounts | None] = lambda: None) -> None:
        """`of_prefixes`: what was read from a folder of prefixes, and written to it; None if there is none."""
        self._of_prefixes = of_prefixes
        self._lock = Lock()
        self._answers: Counter[int] = Counter()  # by status
        self._ended: Counter[str] = Counter()  # completions, by why they ended
        self._tokens: Counter[str] = Counter()
        self._seconds = defaultdict[str, float](float)  # by lane
        self._passes = 0
        self._began = self._counted_at = monotonic()
        self._before: Tick | None = None  # the last one of the block that runs

    def answered(self, status: int) -> None:
        with self._lock:
            self._answers[status] += 1

    def ended(self, reasons: Iterable[str]) -> None:
        with self._lock:
            self._ended.update(reasons)

    def tick(self, tick: Tick) -> None:
        """Counts a pass over the weights. Ticks count from the beginning of a run."""
        with self._lock:
            before, self._before = self._before, tick
            self._counted_at = monotonic()
            self._passes += 1
            self._tokens["prompt"] += tick.prompt_tokens - (before.prompt_tokens if before else 0)
            self._tokens["spared"] += tick.spared_tokens - (before.spared_tokens if before else 0)
            self._tokens["generated"] += tick.generated_tokens - (before.generated_tokens if before else 0)
            for lane, seconds in tick.busy_seconds.items():
                self._seconds[lane] += seconds - (before.busy_seconds.get(lane, 0.0) if before else 0.0)

    def run_over(self) -> None:
        """The next tick counts anew."""
        self._before = None

    def totals(self) -> dict[str, object]:
        of_prefixes = self._of_prefixes()
        with self._lock:
            return {
                **({} if of_prefixes is None else {"prefix_files": asdict(of_prefixes)}),
                "answers": {str(status): count for status, count in sorted(self._answers.items())},
                "completions": dict(sorted(self._ended.items())),
                "prompt_tokens": self._tokens["prompt"],
                "shared_prompt_tokens": self._tokens["spared"],
                "generated_tokens": self._tokens["generated"],
                "passes": self._passes,
                "lane_busy_seconds": {lane: round(seconds, 3) for lane, seconds in sorted(self._seconds.items())},
            }

    def seconds(self) -> dict[str, float]:
        """How long it is since the server began, and how long it was then to the last pass that is counted."""
        with self._lock:
            return {"now": round(monotonic() - self._began, 3), "counted": round(self._counted_at - self._began, 3)}

    def text(self, now: Now) -> str:
        return _text((*_gauges(now), *self._counters(), *_prefix_counters(self._of_prefixes())))

    def _counters(self) -> list[Metric]:
        with self._lock:
            tokens, answers, ended = dict(self._tokens), dict(self._answers), dict(self._ended)
            seconds, passes = dict(self._seconds), self._passes
        return [
            _counter("prompt_tokens_total", "tokens of prompts that were read", {"": tokens.get("prompt", 0)}),
            _counter(
                "shared_prompt_tokens_total",
                "tokens of prompts that were not read, as they had been for others",
                {"": tokens.get("spared", 0)},
            ),
            _counter("generation_tokens_total", "tokens that were generated", {"": tokens.get("generated", 0)}),
            _counter("passes_total", "passes over the weights", {"": passes}),
            _counter("answers_total", "answers to requests", _labelled("status", answers)),
            _counter("completions_total", "completions that have ended", _labelled("finish_reason", ended)),
            _counter("lane_busy_seconds_total", "seconds in which a lane was busy", _labelled("lane", seconds)),
        ]


def _prefix_counters(counts: PrefixFileCounts | None) -> Iterator[Metric]:
    if counts is None:
        return
    yield _counter("prefix_files_found_total", "prefixes that were read from their folder", {"": counts.found})
    yield _counter("prefix_files_found_tokens_total", "tokens of these", {"": counts.found_tokens})
    yield _counter("prefix_files_read_bytes_total", "bytes of these", {"": counts.read_bytes})
    yield _counter("prefix_files_written_total", "prefixes that were written to their folder", {"": counts.written})
    yield _counter("prefix_files_written_bytes_total", "bytes of these", {"": counts.written_bytes})
    yield _counter("prefix_files_damaged_total", "files that were damaged, and removed", {"": counts.damaged})


def batches_text(batches: Batches) -> str:
    """What is told of batches, where there are any."""
    by_state = Metric("batches", "gauge", "batches in each state", _labelled("status", batches.states))
    return _text(
        [
            by_state,
            _counter("batch_requests_total", "requests of batches that have a record", _labelled("outcome", batches.requests)),
        ]
    )


def _text(metrics: Iterable[Metric]) -> str:
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _gauges(now: Now) -> list[Metric]:
    return [
        _gauge("requests_running", "requests of which a completion has a seat", now.running),
        _gauge("requests_waiting", "requests that wait for their first seat", now.waiting),
        _gauge("rows_seated", "completions that have a seat", now.rows_seated),
        _gauge("rows_waiting", "completions that wait for a seat", now.rows_waiting),
        _gauge("rows_waiting_in_background", "completions of batches that wait for a seat", now.rows_in_background),
        _gauge("seats", "completions that are computed at once, at most", now.seats),
        _gauge("kv_held_bytes", "bytes of keys and values that completions with a seat have of their own", now.kv_bytes),
        _gauge("kv_seats_bytes", "bytes of keys and values that all seats can hold", now.kv_bytes_of_seats),
    ]


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, "gauge", text, {"": value})


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    return Metric(name, "counter", text, values)


def _labelled(label: str, values: Mapping[str, float] | Mapping[int, float]) -> dict[str, float]:
    return {f'{{{label}="{value}"}}': count for value, count in sorted(values.items())}
