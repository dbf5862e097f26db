"""Machine: what the hardware can hold, move and compute, measured once and kept as a YAML file.

Units are bytes, seconds, bytes per second and flops per second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from math import inf, isfinite, log
from pathlib import Path
from typing import Any

import yaml

from h2o_flexgen.planning.files import write_text
from h2o_flexgen.planning.model_spec import DTYPE_BYTES
from h2o_flexgen.planning.plan import DEVICE, HOST

DEVICES = ("cpu", "cuda")
Curve = tuple[tuple[int, float], ...]  # (rows, flop/s), more rows each time


@dataclass(frozen=True)
class Machine:
    name: str
    device: str  # what computes: "cuda" has memory of its own, "cpu" shares the host's
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    disk_read_per_s: float
    disk_write_per_s: float
    host_copy_per_s: float
    host_to_device_per_s: float
    device_to_host_per_s: float
    flops_per_s: Mapping[str, Curve]  # dtype -> flop/s of a matrix product, by its rows
    attention_bytes_per_s: Mapping[str, float]  # tier in whose memory it is done -> bytes of KV that decode attention reads
    task_seconds: float  # what a task costs beside its data

    @property
    def has_accelerator(self) -> bool:
        return self.device != "cpu"

    def flop_rate(self, dtype: str, rows: float) -> float:
        """Between the measured points linear in the logarithm of the rows; outside, the nearest point."""
        if dtype not in self.flops_per_s:
            raise ValueError(f"machine {self.name!r} has no flops_per_s for {dtype}; it has {', '.join(self.flops_per_s)}")
        curve = self.flops_per_s[dtype]
        for (fewer, low), (more, high) in itertools.pairwise(curve):
            if fewer <= rows < more:
                return low + (high - low) * log(rows / fewer) / log(more / fewer)
        return curve[0][1] if rows < curve[0][0] else curve[-1][1]

    def bandwidth(self, lane: str) -> float:
        """Bytes per second of a lane that moves data. Without an accelerator "load" and "store" lead to the disk only."""
        to_device, from_device = self.host_to_device_per_s, self.device_to_host_per_s
        if not self.has_accelerator:
            to_device, from_device = self.disk_read_per_s, self.disk_write_per_s
        rates = {"read": self.disk_read_per_s, "load": to_device, "store": from_device, "write": self.disk_write_per_s}
        if lane not in rates:
            raise ValueError(f"lane {lane!r} has no bandwidth; those that have one are {', '.join(rates)}")
        return rates[lane]

    def at_best(self, again: Machine) -> Machine:
        """The same machine, measured twice: its disk and its products at the faster of the two."""
        curves = {
            dtype: tuple((rows, max(rate, other)) for (rows, rate), (_, other) in zip(curve, again.flops_per_s[dtype]))
            for dtype, curve in self.flops_per_s.items()
        }
        return replace(self, disk_read_per_s=max(self.disk_read_per_s, again.disk_read_per_s), flops_per_s=curves)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"machine file {path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"machine file {path} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ValueError(f"machine file {path} holds no keys; it needs {', '.join(f.name for f in fields(cls))}")
        try:
            return cls.create(content)
        except ValueError as error:
            raise ValueError(f"machine file {path}: {error}") from error

    @classmethod
    def create(cls, content: Mapping[str, Any]) -> Machine:
        """From plain values, as a YAML or JSON file has them: every key must be there, and no other."""
        known = [field.name for field in fields(cls)]
        _check_keys("key", content, known)
        if missing := [name for name in known if name not in content]:
            raise ValueError(f"missing key {', '.join(missing)}; add it, `save` of another machine shows the form")
        values = {name: _READERS.get(name, _rate)(name, content[name]) for name in known}
        return cls(**values)

    def save(self, path: str | Path, comment: str = "") -> None:
        content = asdict(self)
        content["flops_per_s"] = {dtype: [list(point) for point in curve] for dtype, curve in self.flops_per_s.items()}
        content["attention_bytes_per_s"] = dict(self.attention_bytes_per_s)
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


# -- reading values ------------------------------------------------------------------------------------------------------


def _check_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            raise ValueError(f"unknown {what} {key!r}; " + (f"did you mean {near[0]!r}?" if near else "remove it"))


def _number(name: str, value: object, least: float) -> float:
    """YAML reads 1.5e9 as text, for want of a sign in the exponent: text that is a number is taken for one."""
    try:
        number = float("" if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; give a number") from None
    if not isfinite(number) or number < least:
        raise ValueError(f"{name} is {value!r}; give a number of at least {least:g}")
    return number


def _rate(name: str, value: object) -> float:
    if not (number := _number(name, value, 0.0)):
        raise ValueError(f"{name} is {value!r}; give a rate above 0")
    return number


def _count(name: str, value: object) -> int:
    return int(_number(name, value, 0.0))


def _seconds(name: str, value: object) -> float:
    return _number(name, value, 0.0)


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; give a name")
    return value


def _device(name: str, value: object) -> str:
    if value not in DEVICES:
        raise ValueError(f"{name} is {value!r}; give one of {', '.join(DEVICES)}")
    return str(value)


def _mapping(name: str, value: object, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} is {value!r}; give one line or more of the form `name: value`")
    _check_keys(f"key in {name}", value, known)
    return value


def _curves(name: str, value: object) -> dict[str, Curve]:
    return {dtype: _curve(f"{name}.{dtype}", points) for dtype, points in _mapping(name, value, DTYPE_BYTES).items()}


def _curve(name: str, value: object) -> Curve:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} is {value!r}; give a list of [rows, flop/s]")
    points, before = [], -inf
    for point in value:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise ValueError(f"{name} has the point {point!r}; give [rows, flop/s]")
        rows = int(_number(f"rows in {name}", point[0], 1.0))
        if rows <= before:
            raise ValueError(f"{name} has {rows} rows after {before:g}; sort the points by rows")
        points.append((rows, _rate(name, point[1])))
        before = rows
    return tuple(points)


def _rates(name: str, value: object) -> dict[str, float]:
    return {tier: _rate(f"{name}.{tier}", rate) for tier, rate in _mapping(name, value, (DEVICE, HOST)).items()}


_READERS: Mapping[str, Any] = {
    "name": _name,
    "device": _device,
    "device_bytes": _count,
    "host_bytes": _count,
    "disk_bytes": _count,
    "flops_per_s": _curves,
    "attention_bytes_per_s": _rates,
    "task_seconds": _seconds,
}
