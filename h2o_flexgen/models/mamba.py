"""Mamba-2 in the place of attention, as some blocks of Bamba and of Granite 4 have it. A row keeps a matrix for each head
there, and the last inputs of a short convolution."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import ClassVar, NamedTuple

from torch import Tensor

from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, LayerSpec, StateTensor
from h2o_flexgen.kernels.operations import gated_norm, selective_scan, short_convolution, step_sizes
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import CONVOLVED_TOKENS, HEADS, Bounds, Config, Flag, Whole
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import Decoder, Traits

ATTENTION = ("full_attention", "attention")  # what configs call blocks with attention
INPUTS, MATRIX = "inputs", "matrix"  # the states of a row
NO_LIMITS = (0.0, inf)
NAME = "mamba"
SIZES: Bounds = {
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), Whole(HEADS)),
    "mamba_d_state": Whole(MOST_HEAD_DIM),
    "mamba_d_conv": CONVOLVED_TOKENS,
    "mamba_expand": Whole(1 << 10),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), Flag()),
}


class ScanHeads(NamedTuple):
    """The heads of a scan. Each group serves some of them, which follow one another."""

    heads: int
    groups: int
    width: int  # values of a head
    state_width: int
    mixed: int  # tokens that the convolution mixes

    @classmethod
    def of(cls, config: Config) -> ScanHeads:
        heads, groups, inner = config.mamba_n_heads, config.mamba_n_groups, int(config.mamba_expand * config.hidden_size)
        if inner % heads or heads % groups or inner > MOST_WIDTH:
            raise ValueError(
                f"mamba_n_heads is {heads} and mamba_n_groups {groups}, which do not divide {inner} values; "
                "download the model again"
            )
        return cls(heads, groups, inner // heads, config.mamba_d_state, config.mamba_d_conv)

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.width

    @property
    def shared(self) -> int:
        """Values of what all groups write, or read."""
        return self.groups * self.state_width

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.shared

    @property
    def states(self) -> tuple[StateTensor, ...]:
        inputs = StateTensor(INPUTS, (self.mixed - 1, self.convolved))
        return inputs, StateTensor(MATRIX, (self.heads, self.state_width, self.width))


def refuse_limits(config: Config) -> None:
    """Refuses bounds of the sizes of steps: transformers holds prompts to them, but no token that is made."""
    limits = getattr(config, "time_step_limit", None)
    if limits is not None and tuple(limits) != NO_LIMITS:
        raise ValueError(f"time_step_limit is {shown(limits)}, and steps with bounds are not computed; take another model")


class Mamba(Decoder):
    """What its models have in common."""

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_limits(config)
        tensor_ops.refuse_other_than_silu(self.activation_of(config))
        self._scan = ScanHeads.of(config)
        self._has_conv_bias, self._has_bias = bool(config.mamba_conv_bias), bool(config.mamba_proj_bias)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def attends_in(config: Config, block: int) -> bool:
        """Whether a block has attention."""
        return config.layer_types[block] in ATTENTION

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        if self.attends_in(config, block):
            return super().mixing_layer(config, block, origin)
        width, own = config.hidden_size, self._scan
        parameters = layout.joined(
            self.norm_parameters(width, self._traits.norms.before_attention),
            layout.linear(f"{NAME}.in_proj", own.inner + own.convolved + own.heads, width, self._has_bias),
            layout.wide(f"{NAME}.conv1d.weight", own.convolved, 1, own.mixed),
            layout.wide(f"{NAME}.conv1d.bias", own.convolved) if self._has_conv_bias else {},
            *(layout.wide(f"{NAME}.{part}", own.heads) for part in ("dt_bias", "A_log", "D")),
            layout.norm(f"{NAME}.norm", own.inner, bias=False),
            layout.linear(f"{NAME}.out_proj", width, own.inner, self._has_bias),
        )
        passing = 4 * own.inner + 2 * own.convolved + 3 * own.heads
        return layout.stateful(Mamba.scanned, parameters, own.states, width, passing, origin)

    def scanned(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        own, needed = self._scan, tensor_ops.needed
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        made = tensor_ops.linear(x, weights, f"{NAME}.in_proj")
        gate, convolved, step = made.split((own.inner, own.convolved, own.heads), dim=-1)
        kernel, bias = needed(weights, f"{NAME}.conv1d.weight"), tensor_ops.plain(weights, f"{NAME}.conv1d.bias")
        mixed = short_convolution(convolved, kernel, bias, given.states[INPUTS], given.lengths)
        x, b, c = mixed.split((own.inner, own.shared, own.shared), dim=-1)
        b, c = b.unflatten(-1, (own.groups, -1)), c.unflatten(-1, (own.groups, -1))
        steps = step_sizes(step.contiguous(), needed(weights, f"{NAME}.dt_bias"))
        rates, skip = needed(weights, f"{NAME}.A_log"), needed(weights, f"{NAME}.D")
        x = x.unflatten(-1, (own.heads, -1))
        out = selective_scan(x, steps, rates, b, c, skip, given.states[MATRIX], given.lengths, are_logs=True).flatten(-2)
        weight = needed(weights, f"{NAME}.norm.weight")
        out = gated_norm(out, gate, weight, self._eps, own.groups, gate_first=True)
        return self.added(tensor_ops.linear(out, weights, f"{NAME}.out_proj"), hidden)


class Bamba(Mamba):
    bounds: ClassVar[Bounds] = SIZES
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.feed_forward\.": ".mlp.",
        r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
        r"^model\.final_layernorm\.": "model.norm.",
    }
    rotates_parts = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, config.mlp_bias)

    @staticmethod
    def attends_in(config: Config, block: int) -> bool:
        return block in (config.attn_layer_indices or ())
