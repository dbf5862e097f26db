"""ALiBi: the score of a key falls with its distance from the query, by a slope that each head has, and nothing is rotated.

No kernel and no cache knows of it. A key has its position in values of its own before those of its head, and a query its slope.
Their product is slope * (position of the key - position of the query). What puts positions there is a rotation to models and
caches: it has one for a cosine and the position for a sine. So a key says where it stands in whatever slot it lies.
"""

from __future__ import annotations

from math import ceil, log2, sqrt

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import KVHeads
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.models import tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.phi3 import FusedQkv
from h2o_flexgen.models.rotary import DEFAULT, Rope, Rotary

BASE = 1 << 8  # 16 bits have whole numbers up to it, so a position is two digits
DIGITS = 2
MOST_POSITIONS = BASE**DIGITS
PARTS = 2  # of a slope: what 16 bits round away of it is the second
PAIRS = DIGITS * PARTS
ROOM = 2 * PAIRS  # values before those of a head
FALL = 8.0  # the slopes of as many heads as a power of two end at 2 ** -8


def slopes_of(heads: int) -> list[float]:
    """Those of each head. Between two powers of two, the heads have those of the lower one, and then some that lie between."""
    count = 1 << ceil(log2(heads))
    every = [2.0 ** (-FALL * number / count) for number in range(1, count + 1)]
    return every if count == heads else (every[1::2] + every[::2])[:heads]


class Distances(Rotary):
    """Turns (a, b) into (a - b * position, b + a * position). Each pair has a digit of the position, and key values are as many
    times as large as digits are small: all of them are whole, and exact in 16 bits."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        places = positions.float() / BASE
        high = places.floor()
        digits = torch.stack((high, places - high), dim=-1)
        sines = digits.repeat(1, 1, PARTS).unsqueeze(2).to(dtype)
        return RotationAngles(torch.ones_like(sines), sines)


class Before:
    """Values (heads, some) that stand before those of heads. One copy for each device."""

    def __init__(self, values: Tensor) -> None:
        self._values = {values.device: values}

    def put(self, x: Tensor) -> Tensor:
        """x (rows, tokens, heads, width) behind these values."""
        if x.device not in self._values:
            self._values[x.device] = next(iter(self._values.values())).to(x.device)
        values = self._values[x.device]
        out = x.new_empty(*x.shape[:-1], values.shape[-1] + x.shape[-1])
        out[..., : values.shape[-1]] = values
        out[..., values.shape[-1] :] = x
        return out


class Alibi(FusedQkv):
    """LLaMA's relatives with such scores, and one matrix for queries, keys and values."""

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, sep_layer, name)
        if self.spec.max_positions > MOST_POSITIONS:
            raise ValueError(
                f"texts have {self.spec.max_positions} positions, and ALiBi counts {MOST_POSITIONS}; give another model"
            )
        kind, nothing = getattr(torch, dtype), torch.zeros(1, PAIRS)
        slopes = torch.tensor(slopes_of(self.spec.heads), dtype=torch.float64)[:, None]
        slopes *= sqrt(self.spec.head_dim)  # by which every attention divides scores
        large = slopes.to(kind)
        rest = (slopes - large.double()).to(kind)
        asked = torch.cat((large, large, rest, rest), dim=-1)
        self._before_queries = Before(torch.cat((torch.zeros_like(asked), asked), dim=-1))
        self._before_keys = Before(torch.cat((nothing + BASE, nothing), dim=-1).to(kind))
        self._before_values = Before(torch.cat((nothing, nothing), dim=-1).to(kind))

    # -- what it reads of a config ---------------------------------------------------------------------------------------

    @staticmethod
    def width_of_head(config: Config) -> int:
        """Values of a head, without what says where a key stands."""
        width: int = config.hidden_size // config.num_attention_heads
        return width

    @classmethod
    def query_scale_of(cls, config: Config) -> float:
        """Scores are divided by the root of what heads have themselves."""
        width = cls.width_of_head(config)
        return sqrt((width + ROOM) / width)

    def usual_kv_heads(self, config: Config) -> KVHeads:
        return KVHeads(config.num_attention_heads, self.width_of_head(config) + ROOM)

    @property
    def position_values(self) -> int:
        return ROOM

    def ropes_of(self, config: Config) -> list[Rope]:
        return [Rope(DEFAULT, 1.0, 1.0, {})]

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        return Distances()

    # -- its layers ------------------------------------------------------------------------------------------------------

    def attention_parameters(self, width: int, q_width: int, kv_width: int, head_dim: int) -> tuple[Parameters, Parameters]:
        own = head_dim - ROOM
        return super().attention_parameters(width, q_width // head_dim * own, kv_width // head_dim * own, own)

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def width_of_heads(self, weights: Weights) -> int:
        return self.spec.head_dim - ROOM

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        made = super().new_tokens(rotary, hidden, weights)
        q, k, v = (
            before.put(each)
            for before, each in zip((self._before_queries, self._before_keys, self._before_values), (made.q, made.k, made.v))
        )
        return NewTokens(q, k, v, rotary, made.x)

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        own = tensor_ops.split_heads(out, self.spec.head_dim)[..., ROOM:]
        return super().with_attended(hidden, own.flatten(2), weights)
