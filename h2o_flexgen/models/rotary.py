"""Rotary positions: how a model's config says to rotate queries and keys, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from h2o_flexgen.core.hints import shown
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.operations import rotate
from h2o_flexgen.models.config_values import Config

ORIGINAL_LENGTH, QUERY_SHARE = "original_max_position_embeddings", "llama_4_scaling_beta"
WIDTH = "width"  # of what is rotated of a head, beside what a config says of a scaling
STRETCH_OF_ALL = "mscale_all_dim"


class Rotary:
    """Rotates the pairs (j, j + half) of a head's first 2 * half values by position * frequency[j]; the rest stays. `stretch`:
    what is rotated becomes so many times as long."""

    def __init__(self, frequencies: Tensor, stretch: float = 1.0) -> None:
        self._frequencies = {frequencies.device: frequencies}  # one copy per device: nothing is moved in the token loop
        self.frequencies, self.stretch = frequencies, stretch

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        angles = positions[..., None, None].float() * self._on(positions.device)  # (rows, tokens, 1, half)
        cos, sin = (each if self.stretch == 1.0 else each.mul_(self.stretch) for each in (angles.cos(), angles.sin()))
        return RotationAngles(cos.to(dtype), sin.to(dtype))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, self.turn(positions, x.dtype))

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._frequencies:
            self._frequencies[device] = next(iter(self._frequencies.values())).to(device)
        return self._frequencies[device]


class LongerQueries(Rotary):
    """The same rotation for queries, which become longer by a share of the logarithm of how often a length fits into the text
    before them."""

    def __init__(self, frequencies: Tensor, stretch: float, share: float, length: float, first: int = 0) -> None:
        """`first`: what the first position counts as."""
        super().__init__(frequencies, stretch)
        self._share, self._length, self._first = share, length, first

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        turn = super().turn(positions, torch.float32)
        longer = 1.0 + self._share * torch.log1p(torch.floor((positions + self._first).float() / self._length))
        return RotationAngles(*((each * longer[..., None, None]).to(dtype) for each in turn))


@dataclass(frozen=True)
class Rope:
    """The rotary positions that a config asks for."""

    kind: str
    theta: float
    share: float  # of each head's values, which are rotated
    scaling: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, layers: str | None = None, partly: bool = True) -> Rope:
        """Reads configs of transformers 5 (rope_parameters has everything) and of 4 (rope_scaling, and attributes). `layers` is
        the kind of layer that is asked for, where they differ. `partly`: the architecture can rotate a part of each head."""
        scaling = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
        scaling = scaling if layers is None else _of_kind(scaling, layers)
        if nested := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
            raise ValueError(f"rope parameters that differ by layer ({', '.join(nested)}) are not supported")

        def read(*names: str, default: float) -> float:
            found = [scaling.get(name, getattr(config, name, None)) for name in names]
            return next((float(value) for value in found if value is not None), default)

        if "rope_theta" in scaling and scaling["rope_theta"] is None:
            raise ValueError("rope_theta of the rope parameters is None, which is no number; download the model again")
        kind = str(scaling.get("rope_type") or scaling.get("type") or DEFAULT)
        kind = LONGROPE if kind in LONG else kind
        theta = read("rope_theta", "rotary_emb_base", default=10000.0)
        share = read("partial_rotary_factor", *(["rotary_pct"] if partly else []), default=1.0)
        share = 1.0 if kind == PROPORTIONAL else share if partly else _whole(share, kind, config)
        divisors = getattr(config, "rope_divisors", None)  # of a GGUF file: transformers has no such kind
        if divisors is not None:
            return cls(DIVIDED, theta, share, {"rope_divisors": divisors})
        length = getattr(config, ORIGINAL_LENGTH, None)
        if kind in OF_ORIGINAL_LENGTH and layers is None and length is not None:
            scaling[ORIGINAL_LENGTH] = length  # beside them, it outweighs that among the rope parameters
        if kind == LONGROPE:
            scaling = {"factor": config.max_position_embeddings / _positive(scaling, ORIGINAL_LENGTH), **scaling}
        return cls(kind, theta, share, scaling)

    def longest(self, config: Config) -> int:
        """The tokens of the longest text. If a text outgrew the original length of longrope, all of its tokens, also those with
        cached keys, would have to be rotated again by other divisors."""
        most = int(config.max_position_embeddings)
        return min(most, int(_positive(self.scaling, ORIGINAL_LENGTH))) if self.kind == LONGROPE else most

    def with_alpha(self, width: int) -> Rope:
        """The rotation of an architecture where "dynamic" scaling may have an alpha, by which the theta becomes larger."""
        if self.kind != DYNAMIC or not self.scaling.get("alpha"):
            return self
        if width < 4:
            raise ValueError(f"heads have {width} values, which an alpha of the rope scaling does not fit; give another model")
        alpha = _positive(self.scaling, "alpha")
        return replace(self, kind=DEFAULT, theta=self.theta * alpha ** (width / (width - 2)), scaling={})

    def rotary(self, width: int) -> Rotary:
        """The rotation for heads of which the first `width` values are rotated."""
        if self.kind not in SCALINGS:
            raise ValueError(f"rope type {self.kind!r} is not supported; known are {', '.join(SCALINGS)}")
        if width < 1:
            raise ValueError(f"partial_rotary_factor is {self.share:g}, by which no value is rotated; download the model again")
        if width % 2 and self.share == 1.0:
            raise ValueError(f"heads have {width} values, which are not rotated in pairs; download the model again")
        if width == 1:
            raise ValueError(
                f"partial_rotary_factor is {self.share:g}, by which a single value is rotated; download the model again"
            )
        frequencies = 1.0 / (self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        stretch = STRETCHES[self.kind](self.scaling) if self.kind in STRETCHES else 1.0
        return Rotary(SCALINGS[self.kind](frequencies, {"rope_theta": self.theta, WIDTH: width, **self.scaling}), stretch)

    def of_queries(self, rotary: Rotary) -> LongerQueries | None:
        """The rotation of queries, if it is another one than that of keys."""
        share = self.scaling.get(QUERY_SHARE)
        if share is None:
            return None
        if not _is_positive(share) and share != 0:
            raise ValueError(
                f"{QUERY_SHARE} of the rope scaling is {shown(share)}, which is no number; download the model again"
            )
        return LongerQueries(rotary.frequencies, rotary.stretch, float(share), _positive(self.scaling, ORIGINAL_LENGTH))


def _of_kind(scaling: Mapping[str, Any], layers: str) -> dict[str, Any]:
    found = scaling.get(layers)
    if not isinstance(found, Mapping):
        raise ValueError(f"the rope parameters have {shown(found)} for {layers}, and no rotation; download the model again")
    return dict(found)


def _whole(share: float, kind: str, config: Config) -> float:
    """The share of an architecture that rotates whole heads. Without a scaling, what its config says is not read."""
    if share != 1.0 and kind != DEFAULT and kind in SCALINGS:
        raise ValueError(
            f"partial_rotary_factor is {share:g} and the rope type {shown(kind)}, but {config.model_type} rotates whole heads; "
            "give another model"
        )
    return 1.0


def _unscaled(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    return frequencies


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _positive(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if not _is_positive(value):
        raise ValueError(f"{name} of the rope scaling is {shown(value)}, which is no number above 0; download the model again")
    return float(value)


def _positive_or(scaling: Mapping[str, Any], name: str, usual: float) -> float:
    return _positive(scaling, name) if scaling.get(name) else usual


def _linear(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    return frequencies / _positive(scaling, "factor")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Keeps waves that fit often into the original length, stretches those that hardly fit, and blends those between, if there
    are any."""
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if low > high:
        raise ValueError(
            f"low_freq_factor of the rope scaling is {low:g}, which is above high_freq_factor {high:g}; "
            "download the model again"
        )
    turns = frequencies * (_positive(scaling, ORIGINAL_LENGTH) / (2 * math.pi))  # over the original length
    kept = (turns >= low).float() if low == high else ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / _positive(scaling, "factor"))


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Keeps waves that fit often into the original length, stretches those that hardly fit, and blends between them by their
    number."""
    count, length = len(frequencies), _positive(scaling, ORIGINAL_LENGTH)
    if scaling[WIDTH] != 2 * count:
        raise ValueError(f"{scaling[WIDTH]} values of a head are rotated, but YaRN takes pairs; download the model again")
    if scaling["rope_theta"] == 1:
        raise ValueError("rope_theta is 1, by which all values rotate alike, but YaRN tells them apart; download it again")

    def number(turns: float) -> float:
        """The number of the wave that fits so often into the original length."""
        return count * math.log(length / (turns * 2 * math.pi)) / math.log(_positive(scaling, "rope_theta"))

    low, high = (number(_positive_or(scaling, name, usual)) for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    between = high - low or 0.001  # below 0 where all waves fit often, or beta_fast is below beta_slow
    stretched = ((torch.arange(count, dtype=torch.float32) - low) / between).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched) + frequencies / _positive(scaling, "factor") * stretched


def _stretch_of_yarn(scaling: Mapping[str, Any]) -> float:
    factor = _positive(scaling, "factor")
    if scaling.get("attention_factor") is not None:
        return _positive(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get(STRETCH_OF_ALL):
        return _of_yarn(factor, _positive(scaling, "mscale")) / _of_yarn(factor, _positive(scaling, STRETCH_OF_ALL))
    return _of_yarn(factor, 1.0)


def scale_of_scores(rope: Rope) -> float:
    """What the scores of latent attention are multiplied by beside, where a rotation is scaled."""
    if rope.kind == DEFAULT or not rope.scaling.get(STRETCH_OF_ALL):
        return 1.0
    return _of_yarn(_positive(rope.scaling, "factor"), _positive(rope.scaling, STRETCH_OF_ALL)) ** 2


def _of_yarn(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """As it is for texts within the original length. Longer ones have other divisors from their first token on."""
    return _by_divisors(frequencies, scaling, "short_factor")


def _stretch_of_longrope(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return _positive(scaling, "attention_factor")
    factor, length = _positive(scaling, "factor"), _positive(scaling, ORIGINAL_LENGTH)
    if length < 2:
        raise ValueError(
            f"{ORIGINAL_LENGTH} of the rope scaling is {shown(length)}, no length of a text; download the model again"
        )
    return math.sqrt(1.0 + math.log(factor) / math.log(length)) if factor > 1 else 1.0


def _divided(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Each frequency has a divisor of its own."""
    return _by_divisors(frequencies, scaling, "rope_divisors")


def _by_divisors(frequencies: Tensor, scaling: Mapping[str, Any], name: str) -> Tensor:
    divisors, count = scaling.get(name), len(frequencies)
    if not isinstance(divisors, list) or len(divisors) != count or not all(map(_is_positive, divisors)):
        raise ValueError(f"{name} is {shown(divisors)} instead of {count} numbers above 0; download the model again")
    return frequencies / torch.tensor(divisors, dtype=torch.float32)


def _proportional(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Rotates the first pairs of a head alone. All have the frequencies that they have where all are rotated."""
    share, count = scaling.get("partial_rotary_factor"), len(frequencies)
    rotated = int((1.0 if share is None else share) * 2 * count // 2)
    return frequencies.where(torch.arange(count) < rotated, 0.0) / _positive_or(scaling, "factor", 1.0)


DEFAULT, DIVIDED, LLAMA3, YARN, LONGROPE = "default", "divided", "llama3", "yarn", "longrope"
PROPORTIONAL, DYNAMIC = "proportional", "dynamic"
LONG = LONGROPE, "su"  # its first name
OF_ORIGINAL_LENGTH = LLAMA3, YARN, LONGROPE
STRETCHES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {YARN: _stretch_of_yarn, LONGROPE: _stretch_of_longrope}
SCALINGS: Mapping[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    DEFAULT: _unscaled,
    DYNAMIC: _unscaled,  # what it does is done to texts longer than the model has positions
    "linear": _linear,
    LLAMA3: _llama3,
    YARN: _yarn,
    LONGROPE: _longrope,
    DIVIDED: _divided,
    PROPORTIONAL: _proportional,
}
