"""BLOOM and MPT: ALiBi, layer norms and mlps without gates. BLOOM has biases and a norm behind its embedding. One matrix has
queries, keys and values: of BLOOM head by head, and in GGUF files part by part; of MPT part by part.

ALiBi means that the score of a key falls with its distance from the query, by a slope that each head has. Nothing is rotated.
No kernel and no cache knows of it. A key has its position in values of its own before those of its head, and a query its slope.
Their product is slope * (position of the key - position of the query). What puts positions there is a rotation to models and
caches: it has one for a cosine and the position for a sine. So a key says where it stands in whatever slot it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log2, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BIAS_OF_LAST_NORM,
    CLIP,
    LAYER_EPS,
    NORMS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_WIDTH, KVHeads
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Number, Whole, refuse_other_heads
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import LAYER, LAYER_UNBIASED, Traits
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.phi3 import QKV, FusedQkv
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


FIRST_NORM, POSITIONS = "embed_layernorm", 2048  # where a config does not say how long texts are
LENGTHS = "seq_length", "max_seq_len", "max_position_embeddings"
FALL_IN_FILES, USUAL_ATTENTION = "attention.max_alibi_bias", "multihead_attention"
IN_FILES = {"attn_qkv": QKV, "attn_output": "self_attn.o_proj"}


class BloomOrMpt(Alibi):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {
        "intermediate_size": Whole(MOST_WIDTH),
        **dict.fromkeys(LENGTHS, Whole(MOST_POSITIONS)),
        "layer_norm_epsilon": Number(0.0, 1.0),
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_other_heads(config)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def inner_of(config: Config) -> int:
        return 4 * int(config.hidden_size)

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_epsilon
        return eps

    def positions_of(self, config: Config) -> int:
        return next((own for key in LENGTHS if (own := getattr(config, key, None))), POSITIONS)


class Bloom(BloomOrMpt):
    called: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"^(transformer\.)?word_embeddings\.": "model.embed_tokens.",
        r"^(transformer\.)?word_embeddings_layernorm\.": f"model.{FIRST_NORM}.",
        r"^(transformer\.)?ln_f\.": "model.norm.",
        r"^(transformer\.)?h\.": "model.layers.",
        r"\.self_attention\.query_key_value\.": f".{QKV}.",
        r"\.self_attention\.dense\.": ".self_attn.o_proj.",
        r"\.mlp\.dense_h_to_4h\.": ".mlp.up_proj.",
        r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
    }
    gguf = GgufArchitecture(
        "bloom",
        {**weights(IN_FILES, UNGATED_MLP, NORMS), **biases(IN_FILES, UNGATED_MLP, NORMS)},
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "apply_residual_connection_post_layernorm": lambda said: False,
            "qkv_apart": lambda said: True,
        },
        outside={
            **BIAS_OF_LAST_NORM,
            **{f"token_embd_norm.{part}": f"model.{FIRST_NORM}.{part}" for part in ("weight", "bias")},
        },
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if config.apply_residual_connection_post_layernorm:
            raise ValueError("apply_residual_connection_post_layernorm is set, which no layer here does; give another model")
        self._are_apart = bool(getattr(config, "qkv_apart", False))  # of a GGUF file: transformers has no such key
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(True, True, True, gated=False, norm=LAYER, query_scale=Alibi.query_scale_of(config))

    @staticmethod
    def activation_of(config: Config) -> str:
        return "gelu_new"

    def beside_tokens(self, config: Config) -> Parameters:
        return layout.norm(FIRST_NORM, config.hidden_size)

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        return tensor_ops.layer_norm(super().embed(tokens, weights, given), weights, FIRST_NORM, self._eps)

    def parted(self, fused: Tensor) -> Sequence[Tensor]:
        if self._are_apart:
            return super().parted(fused)
        each = fused.view(*fused.shape[:-1], self.spec.heads, 3, -1)
        return [part.contiguous().flatten(-2) for part in each.unbind(-2)]


class Mpt(BloomOrMpt):
    called: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"^(transformer\.)?wte\.": "model.embed_tokens.",
        r"^(transformer\.)?norm_f\.": "model.norm.",
        r"^(transformer\.)?blocks\.": "model.layers.",
        r"\.norm_1\.": ".input_layernorm.",
        r"\.norm_2\.": ".post_attention_layernorm.",
        r"\.attn\.Wqkv\.": f".{QKV}.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.ffn\.": ".mlp.",
    }
    gguf = GgufArchitecture(
        "mpt",
        weights(IN_FILES, UNGATED_MLP, NORMS),
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "attn_config": lambda said: {
                "alibi": said.number(FALL_IN_FILES, 0.0) > 0,
                "alibi_bias_max": said.number(FALL_IN_FILES, FALL),
                "clip_qkv": said.number(CLIP, 0.0) or None,
            },
        },
        heeds=dict.fromkeys((FALL_IN_FILES, CLIP)),
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if unlike := [what for what, is_asked in _unlike(config).items() if is_asked]:
            raise ValueError(f"the model has {', '.join(unlike)}, which no MPT has here; give another model")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        scale, clip = _said(config, "softmax_scale", None), _said(config, "clip_qkv", None)
        own = 1.0 if scale is None else scale * sqrt(Alibi.width_of_head(config))
        return Traits(gated=False, norm=LAYER_UNBIASED, clip=clip or None, query_scale=own * Alibi.query_scale_of(config))

    @staticmethod
    def activation_of(config: Config) -> str:
        return "gelu"


def _unlike(config: Config) -> dict[str, bool]:
    """What a config may ask for, and transformers leaves out."""
    return {
        "learned positions": not _said(config, "alibi", True),
        "slopes that end elsewhere": _said(config, "alibi_bias_max", FALL) != FALL,
        "norms of queries and keys": bool(_said(config, "qk_ln", False)),
        "prefixes that see themselves": bool(_said(config, "prefix_lm", False)),
        "keys that heads share": _said(config, "attn_type", USUAL_ATTENTION) != USUAL_ATTENTION,
        "scaled logits": getattr(config, "logit_scale", None) is not None,
        "biases": not getattr(config, "no_bias", True),
        "mlps of another width": getattr(config, "expansion_ratio", 4) != 4,
    }


def _said(config: Config, key: str, otherwise: Any) -> Any:
    """What the part of a config for attention says."""
    part = getattr(config, "attn_config", None) or {}
    found = part.get(key) if isinstance(part, Mapping) else getattr(part, key, None)
    return otherwise if found is None else found
