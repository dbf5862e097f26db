"""Machine: what the hardware can hold, move and compute, measured once and kept as a YAML file. It is found by its file, by the
name of one that travels with the package, or as this machine, from its profile in the user's cache.

Units are bytes, seconds, bytes per second and flops per second.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from math import inf, isfinite, log
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from h2o_flexgen.core.allowed_values import decimal_number
from h2o_flexgen.core.files import local_path, parse_yaml, read_document, write_text
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.model_spec import ATTENTION_VISIT, DTYPE_BYTES, MLP_VISIT
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.kernel_table import PRODUCT, PRODUCT_OPS, Kernel, choose, measured_as, measured_formats, prices
from h2o_flexgen.formats.table import PLAIN, ROW_FORMATS
from h2o_flexgen.policies.recall import INDEX
from h2o_flexgen.schedule.ops import LOAD, READ, STORE, WRITE

DEVICES = ("cpu", "cuda")
EVICTION = "eviction"
VISITS = (ATTENTION_VISIT, MLP_VISIT, EVICTION)
PLAIN_SCORES, WITH_SCORES = "plain", "scored"  # attention of prompts: without or with the sums that every key received
WHOLE, CHOOSING, CHOSEN = "whole", "choosing", "chosen"  # attention of all slots; choosing some by an index; attention of these
BORROWED = ("small_reads_per_s", "small_writes_per_s")  # figures that a machine takes from another one until it has its own
Curve = tuple[tuple[int, float], ...]  # (rows, or query heads, and flop/s), more each time


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
    host_to_device_per_s: float  # from page-locked memory
    device_to_host_per_s: float
    flops_per_s: Mapping[str, Curve]  # dtype -> flop/s of a matrix product, by its rows
    attention_bytes_per_s: Mapping[str, float]  # tier that holds the KV -> bytes of it that decode attention reads
    task_seconds: float  # a task that moves data costs this beside its data
    # fields from here on cost nothing if they were not measured
    disk_both: float = 2.0  # reads and writes at once: the shares of their separate rates, added up, 1 to 2
    reads_beside_computing: float = 1.0  # the share of disk_read_per_s that is left while a CPU computes
    computing_beside_reads: float = 1.0  # the share of its rates that is left to a CPU while it reads; together 1 at least
    kv_read_per_s: float = inf  # KV from disk to where it is computed with: slots are moved one by one
    kv_write_per_s: float = inf
    small_reads_per_s: float = 92_000.0  # pages that lie anywhere, with many under way; until measured, that of one machine
    small_writes_per_s: float = 50_000.0  # the same of writes, as disk threads make them
    host_read_per_s: float = inf
    unpinned_to_device_per_s: float = inf  # from memory that is not page-locked
    unpinned_to_host_per_s: float = inf
    packed_flops_per_s: Mapping[str, Curve] = field(default_factory=dict)  # kernel price -> rate of rows times packed bytes
    decoded_values_per_s: Mapping[str, float] = field(default_factory=dict)  # format -> packed weights that are decoded
    attention_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # format of KV -> rate of decode attention
    unpacked_values_per_s: Mapping[str, float] = field(default_factory=dict)  # format -> KV that is decoded for attention
    latents_flops_per_s: Mapping[str, Curve] = field(default_factory=dict)  # decode attention of latents, by query heads
    head_seconds: float = 0.0  # decode attention of a row and a KV head, beside its bytes and flops
    prompt_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # attention of prompts: plain, or with scores
    values_per_s: float = inf  # norms, activations and additions: values that pass through one, each time
    visit_seconds: Mapping[str, float] = field(default_factory=dict)  # an attention, a mlp, an eviction: beside its work
    part_seconds: Mapping[str, float] = field(default_factory=dict)  # each further part of a visit; else as the visit
    not_measured: tuple[str, ...] = ()  # what was too slow to be measured in time, and what it is taken for: for people
    disturbed: tuple[str, ...] = ()  # what may have made figures worse while they were measured: for people
    measurements: int = 1  # profiles that the figures were taken from
    borrowed: tuple[str, ...] = field(default=(), compare=False)  # figures that were not measured: those of one machine

    @property
    def has_accelerator(self) -> bool:
        return self.device != "cpu"

    @property
    def multiplies(self) -> tuple[str, ...]:
        """The types of 16 bits for which the rate of products is known."""
        return tuple(dtype for dtype in self.flops_per_s if DTYPE_BYTES.get(dtype) == 2)

    def flop_rate(self, dtype: str, rows: float) -> float:
        """Flop/s of a matrix product with this many rows."""
        if dtype not in self.flops_per_s:
            raise ValueError(
                f"machine {self.name!r} has no flops_per_s for {dtype}; it has {', '.join(self.flops_per_s)}; on that machine, "
                f"`python -m h2o_flexgen.profile --dtype {dtype} -o FILE.yaml` measures it"
            )
        return at_rows(self.flops_per_s[dtype], rows)

    def runs(self, kernel: Kernel) -> bool:
        """Whether this machine has the kernel: it has those for which products were measured, and no others."""
        fits = kernel.device in (None, self.device)
        return fits and (kernel.format == PLAIN or kernel.price in self.packed_flops_per_s)

    def packed_product(self, op: str, format: str, dtype: str, rows: float) -> Kernel | None:
        """The kernel that multiplies matrices in this format as they are; None if they are decoded first, or plain. Products
        that round their factor are never made of decoded values: those that were not measured count as exact ones."""
        if format == PLAIN:
            return None
        return choose(op, format, dtype, self.runs, rows) or choose(PRODUCT, format, dtype, self.runs, rows)

    def product_rate(self, op: str, format: str, dtype: str, rows: float) -> float:
        """Flop/s of a product with matrices in this format, without the seconds in which they may have to be decoded."""
        kernel = self.packed_product(op, format, dtype, rows)
        return self.flop_rate(dtype, rows) if kernel is None else at_rows(self.packed_flops_per_s[kernel.price], rows)

    def decoding_rate(self, format: str, value_bytes: float) -> float:
        """Packed weights decoded per second. One of checkpoints counts as the format that is measured in its place. One
        not measured is as slow as the slowest that was. If none was, a value takes as long as attention takes to read
        `value_bytes`, the bytes read and written per value, in the memory that is computed in."""
        tier, measured = DEVICE if self.has_accelerator else HOST, self.decoded_values_per_s
        in_memory = self.attention_bytes_per_s.get(tier, self.host_copy_per_s) / value_bytes
        return measured.get(measured_as(format)) or min(measured.values(), default=in_memory)

    def attention_rate(self, part: str, format: str, latents_for: int | None = None) -> float:
        """Flop/s of a part of decode attention over KV of this format. `latents_for`: the query heads that attend latents;
        None: keys and values are apart. Packed latents have the rate of plain ones, and are unpacked beside that."""
        if latents_for is not None and part in self.latents_flops_per_s:
            return at_rows(self.latents_flops_per_s[part], latents_for)
        return self.attention_flops_per_s.get(INDEX if part == CHOOSING else format, inf)

    def unpacking_rate(self, format: str, value_bytes: float) -> float:
        """Packed KV decoded per second for attention. If neither this nor its attention was measured, it is as for weights; if
        only its attention was, that includes the decoding."""
        unmeasured = inf if format in self.attention_flops_per_s else self.decoding_rate(format, value_bytes)
        return self.unpacked_values_per_s.get(format, unmeasured)

    def bandwidth(self, lane: str, pinned: bool = True) -> float:
        """Bytes per second of a lane that moves data. Without an accelerator "load" and "store" lead to the disk only."""
        to_device, from_device = self.host_to_device_per_s, self.device_to_host_per_s
        if not pinned:
            to_device = min(to_device, self.unpinned_to_device_per_s)
            from_device = min(from_device, self.unpinned_to_host_per_s)
        if not self.has_accelerator:
            to_device, from_device = self.disk_read_per_s, self.disk_write_per_s
        rates = {READ: self.disk_read_per_s, LOAD: to_device, STORE: from_device, WRITE: self.disk_write_per_s}
        if lane not in rates:
            raise ValueError(f"lane {lane!r} has no bandwidth; the lanes with one are {', '.join(rates)}")
        return rates[lane]

    def at_best(self, again: Machine) -> Machine:
        """The better of two measurements of one machine, figure by figure. What disturbs a measurement makes it slower, so that
        the faster of two is nearer to what the machine can do. Figures that are ratios or differences of measured seconds stay
        as they are here, since a disturbance changes them either way."""
        rates: dict[str, Any] = {name: self._better_rate(name, again) for name in _RATES}
        plain = {dtype: rate for dtype, rate in again.attention_flops_per_s.items() if dtype in DTYPE_BYTES}
        return replace(
            self,
            **rates,
            attention_bytes_per_s=_faster(self.attention_bytes_per_s, again.attention_bytes_per_s),
            decoded_values_per_s=_faster(self.decoded_values_per_s, again.decoded_values_per_s),
            prompt_flops_per_s=_faster(self.prompt_flops_per_s, again.prompt_flops_per_s),
            attention_flops_per_s=_faster(self.attention_flops_per_s, plain),
            flops_per_s=_better(self.flops_per_s, again.flops_per_s),
            packed_flops_per_s=_better(self.packed_flops_per_s, again.packed_flops_per_s),
            latents_flops_per_s=_better(self.latents_flops_per_s, again.latents_flops_per_s),
            task_seconds=min(self.task_seconds, again.task_seconds),
            visit_seconds=_sooner(self.visit_seconds, again.visit_seconds),
            part_seconds=_sooner(self.part_seconds, again.part_seconds),
            measurements=self.measurements + again.measurements,
            borrowed=tuple(name for name in self.borrowed if name in again.borrowed),
        )

    def _better_rate(self, name: str, again: Machine) -> float:
        """The larger of two rates that were measured; of what only one of them has measured, that one's."""
        measured: list[float] = [getattr(one, name) for one in (self, again) if name not in one.borrowed]
        own: float = getattr(self, name)
        return max(measured, default=own)

    def as_it_is(self, now: Machine) -> Machine:
        """This profile with the disk and the products of a later, smaller measurement: machines drift. Rates of products that
        were not measured again change as much as the median of those that were."""
        return replace(
            self,
            disk_read_per_s=now.disk_read_per_s if isfinite(now.disk_read_per_s) else self.disk_read_per_s,
            flops_per_s=_changed(self.flops_per_s, now.flops_per_s),
            packed_flops_per_s=_changed(self.packed_flops_per_s, now.packed_flops_per_s),
        )

    def shared_by(self, processes: int) -> Machine:
        """The machine as each of several equally busy processes has it, with a device and a link of its own. Links are
        as fast as they are, until all together take what the host's memory gives; the disk is divided."""
        if processes == 1:
            return self
        # a copy reads and writes, a transfer does one of them
        memory = (self.host_read_per_s if isfinite(self.host_read_per_s) else 2 * self.host_copy_per_s) / processes
        capped = {name: min(getattr(self, name), memory) for name in _OF_LINKS}
        divided = {name: getattr(self, name) / processes for name in _OF_ALL}
        attended = {tier: min(rate, memory) if tier == HOST else rate for tier, rate in self.attention_bytes_per_s.items()}
        return replace(self, **capped, **divided, attention_bytes_per_s=attended)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        try:
            text = read_document(Path(path)).decode()
            content = parse_yaml(text)
        except OSError as error:
            raise ValueError(f"machine file {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"machine file {path} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"machine file {path} holds no keys; it needs {', '.join(f.name for f in fields(cls))}")
        try:
            return cls.create(content)
        except WrongKey as error:
            line = _lines(text).get(error.key)
            raise ValueError(f"machine file {path}: {error}" + (f" (line {line})" if line else "")) from error

    @classmethod
    def create(cls, content: Mapping[str, Any]) -> Machine:
        """Creates a machine from plain values of a YAML or JSON file. Defaults may be left out; unknown keys are refused."""
        known = [one.name for one in fields(cls)]
        _check_keys("", content, known)
        if missing := [name for name in known if name not in content and name not in _DEFAULTS]:
            format = "`python -m h2o_flexgen.profile -o FILE.yaml` writes such a file"
            raise WrongKey("", f"missing key {', '.join(missing)}; add it, {format}")
        values = {name: _READERS.get(name, _rate)(name, content[name]) for name in known if name in content}
        borrowed = (*values.pop("borrowed", ()), *(name for name in BORROWED if name not in content))
        return cls(**values, borrowed=borrowed)

    def as_plain(self) -> dict[str, Any]:
        """Plain values, from which `create` makes the machine again."""
        left_out = ("borrowed", *self.borrowed)
        given = ((name, value) for name, value in asdict(self).items() if name not in left_out)
        content = {name: value for name, value in given if name in BORROWED or value != _DEFAULTS.get(name)}
        for name in ("flops_per_s", "packed_flops_per_s", "latents_flops_per_s"):
            if name in content:
                content[name] = {kind: [list(point) for point in curve] for kind, curve in getattr(self, name).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}

    def save(self, path: str | Path, comment: str = "") -> None:
        content = self.as_plain()
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        write_text(path, head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


def at_rows(curve: Curve, rows: float) -> float:
    """The rate for this many rows, or query heads: linear in log(rows) between measured points; outside that of the nearest."""
    for (fewer, low), (more, high) in itertools.pairwise(curve):
        if fewer <= rows < more:
            return low + (high - low) * log(rows / fewer) / log(more / fewer)
    return curve[0][1] if rows < curve[0][0] else curve[-1][1]


def _better(curves: Mapping[str, Curve], again: Mapping[str, Curve]) -> dict[str, Curve]:
    """The curves, at rows that were measured in both with the faster of the two."""
    known = {kind: dict(curve) for kind, curve in again.items()}
    return {
        kind: tuple((rows, max(rate, known.get(kind, {}).get(rows, rate))) for rows, rate in curve)
        for kind, curve in curves.items()
    }


def _faster(rates: Mapping[str, float], again: Mapping[str, float]) -> dict[str, float]:
    return {kind: max(rate, again.get(kind, rate)) for kind, rate in rates.items()}


def _changed(curves: Mapping[str, Curve], measured: Mapping[str, Curve]) -> dict[str, Curve]:
    """The curves with what was measured of some of them again."""
    changed = dict(curves)
    for kind, points in measured.items():
        share = median(rate / at_rows(curves[kind], rows) for rows, rate in points)
        changed[kind] = tuple(sorted({**{rows: rate * share for rows, rate in curves[kind]}, **dict(points)}.items()))
    return changed


def _sooner(seconds: Mapping[str, float], again: Mapping[str, float]) -> dict[str, float]:
    return {kind: min(own, again.get(kind, own)) for kind, own in seconds.items()}


# rates that each process has for itself, up to a share of the host's memory; and rates that processes divide
_OF_LINKS = ("host_to_device_per_s", "device_to_host_per_s", "unpinned_to_device_per_s", "unpinned_to_host_per_s")
_OF_ALL = (
    "disk_read_per_s", "disk_write_per_s", "kv_read_per_s", "kv_write_per_s", "small_reads_per_s", "small_writes_per_s",
    "host_copy_per_s", "host_read_per_s"
)  # fmt: skip
_RATES = (*_OF_LINKS, *_OF_ALL, "values_per_s")  # each of them measured by itself
_DEFAULTS: Mapping[str, object] = {
    one.name: one.default if one.default_factory is MISSING else one.default_factory()
    for one in fields(Machine)
    if one.default is not MISSING or one.default_factory is not MISSING
}


# -- reading values ------------------------------------------------------------------------------------------------------


class WrongKey(ValueError):
    """The value of a key is wrong; the key is `key.inner` inside another, and empty if it is missing."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _lines(text: str) -> dict[str, int]:
    """The line, counted from 1, of each key of a YAML file of two levels."""
    root, lines = yaml.compose(text, Loader=yaml.SafeLoader), {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        lines[str(key.value)] = key.start_mark.line + 1
        for inner, _ in value.value if isinstance(value, yaml.MappingNode) else ():
            lines[f"{key.value}.{inner.value}"] = inner.start_mark.line + 1
    return lines


def _check_keys(outer: str, given: Iterable[object], known: Iterable[str]) -> None:
    names, what, before = list(known), f"key in {outer}" if outer else "key", f"{outer}." if outer else ""
    for key in given:
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise WrongKey(f"{before}{key}", f"unknown {what} {shown(key)}; {hint}")


def _number(name: str, value: object, least: float, what: str = "") -> float:
    """Reads a number. YAML reads 1.5e9 as text, since its exponent has no sign: text that is a number counts as one."""
    called = what or name
    try:
        number = decimal_number(value) if isinstance(value, str) else _plain(value)
    except (TypeError, ValueError, OverflowError):
        raise WrongKey(name, f"{called} is {shown(value)}; give a number") from None
    if not isfinite(number) or number < least:
        raise WrongKey(name, f"{called} is {shown(value)}; give a number of at least {least:g}")
    return number


def _plain(value: object) -> float:
    """Refuses true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    return float(value)


def _rate(name: str, value: object) -> float:
    if not (number := _number(name, value, 0.0)):
        raise WrongKey(name, f"{name} is {shown(value)}; give a rate above 0")
    return number


def _count(name: str, value: object) -> int:
    return int(_number(name, value, 0.0))


def _seconds(name: str, value: object) -> float:
    return _number(name, value, 0.0)


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise WrongKey(name, f"{name} is {shown(value)}; give a name")
    return value


def _lines_of_text(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(line, str) for line in value):
        raise WrongKey(name, f"{name} is {shown(value)}; give a list of texts")
    return tuple(value)


def _device(name: str, value: object) -> str:
    if value not in DEVICES:
        raise WrongKey(name, f"{name} is {shown(value)}; give one of {', '.join(DEVICES)}")
    return str(value)


def _mapping(name: str, value: object, known: Iterable[str], may_be_empty: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict) or not (value or may_be_empty):
        raise WrongKey(name, f"{name} is {shown(value)}; give one line or more of the form `name: value`")
    _check_keys(name, value, known)
    return value


def _curves(name: str, value: object) -> dict[str, Curve]:
    return {dtype: _curve(f"{name}.{dtype}", points) for dtype, points in _mapping(name, value, DTYPE_BYTES).items()}


def _curve(name: str, value: object, over: str = "rows") -> Curve:
    """A rate by numbers of rows, or of what else it is `over`."""
    if not isinstance(value, (list, tuple)) or not value:
        raise WrongKey(name, f"{name} is {shown(value)}; give a list of [{over}, flop/s]")
    points, before = [], -inf
    for point in value:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise WrongKey(name, f"{name} has the point {shown(point)}; give [{over}, flop/s]")
        number = int(_number(name, point[0], 1.0, f"{over} in {name}"))
        if number <= before:
            raise WrongKey(name, f"{name} has {number} {over} after {before:g}; sort the points by {over}")
        points.append((number, _rate(name, point[1])))
        before = number
    return tuple(points)


def _curves_of(*kinds: str, over: str = "rows") -> Callable[[str, object], dict[str, Curve]]:
    return lambda name, value: {
        kind: _curve(f"{name}.{kind}", points, over) for kind, points in _mapping(name, value, kinds, True).items()
    }


def _rates_of(*kinds: str) -> Callable[[str, object], dict[str, float]]:
    return lambda name, value: {kind: _rate(f"{name}.{kind}", rate) for kind, rate in _mapping(name, value, kinds).items()}


def _packed_rates(*formats: str) -> Callable[[str, object], dict[str, float]]:
    return lambda name, value: {
        format: _rate(f"{name}.{format}", rate) for format, rate in _mapping(name, value, formats, True).items()
    }


def _visits(name: str, value: object) -> dict[str, float]:
    return {kind: _seconds(f"{name}.{kind}", one) for kind, one in _mapping(name, value, VISITS).items()}


def _both(name: str, value: object) -> float:
    if not 1 <= (number := _number(name, value, 0.0)) <= 2:
        raise WrongKey(name, f"{name} is {shown(value)}; give 1 (reads and writes take turns) to 2 (neither hinders the other)")
    return number


def _share(name: str, value: object) -> float:
    if not 0 < (number := _number(name, value, 0.0)) <= 1:
        raise WrongKey(name, f"{name} is {shown(value)}; give more than 0, and 1 (nothing is hindered) at most")
    return number


_READERS: Mapping[str, Any] = {
    "name": _name,
    "device": _device,
    "device_bytes": _count,
    "host_bytes": _count,
    "disk_bytes": _count,
    "flops_per_s": _curves,
    "attention_bytes_per_s": _rates_of(DEVICE, HOST),
    "task_seconds": _seconds,
    "disk_both": _both,
    "reads_beside_computing": _share,
    "computing_beside_reads": _share,
    "packed_flops_per_s": _curves_of(*prices(*PRODUCT_OPS)),
    "decoded_values_per_s": _packed_rates(*measured_formats()),
    "attention_flops_per_s": _rates_of(*DTYPE_BYTES, *ROW_FORMATS),
    "unpacked_values_per_s": _packed_rates(*ROW_FORMATS),
    "latents_flops_per_s": _curves_of(WHOLE, CHOOSING, CHOSEN, over="query heads"),
    "head_seconds": _seconds,
    "prompt_flops_per_s": _rates_of(PLAIN_SCORES, WITH_SCORES),
    "visit_seconds": _visits,
    "part_seconds": _visits,
    "not_measured": _lines_of_text,
    "disturbed": _lines_of_text,
    "borrowed": _lines_of_text,
    "measurements": _count,
}


# -- machines that have a name or a file ----------------------------------------------------------------------------------

SUFFIXES = (".yaml", ".yml")


def find_machine(name_or_file: str | Path) -> Machine:
    """Loads a machine from a file, or by the name of one of the package."""
    file = local_path(name_or_file)
    if file.suffix.lower() in SUFFIXES or file.is_file():
        return Machine.load(file)
    known, name = _package_files(), str(name_or_file)
    if name not in known:
        raise ValueError(
            f"machine {name!r} is unknown; give a YAML file or one of {', '.join(known_machines())}{did_you_mean(name, known)}"
        )
    return Machine.load(known[name])


def known_machines() -> list[str]:
    return list(_package_files())


def _package_files() -> dict[str, Path]:
    package = Path(__file__).resolve().parents[1]
    places = (package / "configs" / "machines", package.parent / "configs" / "machines")  # installed, or a source checkout
    folder = next((place for place in places if place.is_dir()), places[0])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


# -- profiles that were kept ---------------------------------------------------------------------------------------------


def saved_machine(fingerprint: str) -> Machine | None:
    """The kept profile of this machine; None if there is none. A damaged file is a ValueError that names it."""
    file = machine_file(fingerprint)
    return Machine.load(file) if file.is_file() else None


def save_machine(fingerprint: str, machine: Machine, comment: str = "") -> Path:
    file = machine_file(fingerprint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        machine.save(file, comment)
    except OSError as error:
        raise ValueError(f"the profile cannot be kept in {file} ({error.strerror}); set XDG_CACHE_HOME to a folder") from error
    return file


def machine_file(fingerprint: str) -> Path:
    return kept_folder("machines") / f"{fingerprint}.yaml"


def kept_folder(kind: str, cache: Path | None = None) -> Path:
    """The folder for what was found of machines, in the user's cache or in another one."""
    base = cache or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "h2o_flexgen" / kind
