"""Mamba-2 in the place of attention, as some blocks of Bamba and of Granite 4 have it. A row keeps a matrix for each head
there, and the last inputs of a short convolution."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import ClassVar, NamedTuple

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import Said, weights
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, LayerSpec, OfToken, StateTensor
from h2o_flexgen.kernels.operations import gated_norm, step_sizes
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import CONVOLVED_TOKENS, FULL, HEADS, LINEAR, Bounds, Config, Flag, Whole
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import Decoder, Traits

SCAN = LINEAR  # what configs call a block with a scan
ATTENTION = (FULL, "attention")
INPUTS, MATRIX = "inputs", "matrix"  # the states of a row
NO_LIMITS = (0.0, inf)
NAME = "mamba"
KERNEL = f"{NAME}.conv1d.weight"
SIZES: Bounds = {
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), Whole(HEADS)),
    "mamba_d_state": Whole(MOST_HEAD_DIM),
    "mamba_d_conv": CONVOLVED_TOKENS,
    "mamba_expand": Whole(1 << 10),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), Flag()),
}


IN_FILES = {
    **weights({f"ssm_{part}": f"{NAME}.{own}" for part, own in (("in", "in_proj"), ("out", "out_proj"), ("norm", "norm"))}),
    **{f"ssm_conv1d.{part}": f"{NAME}.conv1d.{part}" for part in ("weight", "bias")},
    **{f"ssm_{part}": f"{NAME}.{own}" for part, own in (("dt.bias", "dt_bias"), ("a", "A_log"), ("d", "D"))},
}
VECTORS = (f"{NAME}.A_log", f"{NAME}.D", f"{NAME}.norm.weight")
KEYS: Mapping[str, Said] = {
    "mamba_n_heads": lambda said: said.whole("ssm.time_step_rank"),
    "mamba_n_groups": lambda said: said.whole("ssm.group_count"),
    "mamba_d_state": lambda said: said.whole("ssm.state_size"),
    "mamba_d_conv": lambda said: said.whole("ssm.conv_kernel"),
    "mamba_conv_bias": lambda said: any(name.endswith("ssm_conv1d.bias") for name in said.tensors),
    "mamba_proj_bias": lambda said: False,
    "rates_are_whole": lambda said: True,
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
        return cls.within(int(config.mamba_expand * config.hidden_size), config)

    @classmethod
    def within(cls, inner: int, config: Config) -> ScanHeads:
        """Those that have so many values together."""
        heads, groups = config.mamba_n_heads, config.mamba_n_groups
        if inner % heads:
            raise ValueError(f"mamba_n_heads is {heads}, which does not divide {inner} values; download the model again")
        return cls.checked(heads, groups, inner // heads, config.mamba_d_state, config.mamba_d_conv)

    @classmethod
    def checked(cls, heads: int, groups: int, width: int, state_width: int, mixed: int) -> ScanHeads:
        if heads % groups or heads * width > MOST_WIDTH:
            raise ValueError(
                f"{heads} heads of Mamba-2 in {groups} groups have {heads * width} values, which cannot be; "
                "download the model again"
            )
        return cls(heads, groups, width, state_width, mixed)

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
        inputs = StateTensor(INPUTS, (self.mixed - 1, self.convolved), brings=(OfToken((self.convolved,)),))
        x, shared = OfToken((self.heads, self.width)), OfToken((self.groups, self.state_width))
        brings = x, OfToken((self.heads,), is_float32=True), shared, shared
        return inputs, StateTensor(MATRIX, (self.heads, self.state_width, self.width), brings=brings)

    @property
    def passing(self) -> int:
        """Values of a token that are held at once."""
        return 4 * self.inner + 2 * self.convolved + 3 * self.heads


def refuse_limits(config: Config) -> None:
    """Refuses bounds of the sizes of steps: transformers holds prompts to them, but no token that is made."""
    limits = getattr(config, "time_step_limit", None)
    if limits is not None and tuple(limits) != NO_LIMITS:
        raise ValueError(f"time_step_limit is {shown(limits)}, and steps with bounds are not computed; take another model")


class AskedOfScan(NamedTuple):
    """What a scan gets of tokens: (rows, tokens, ...)."""

    gate: Tensor  # of what comes out
    convolved: Tensor  # values, and what is written and read by them, before the convolution
    step: Tensor


class ScanBiases(NamedTuple):
    """Says which matrices around a scan have a bias."""

    before: bool
    convolution: bool
    behind: bool

    @classmethod
    def of(cls, config: Config) -> ScanBiases:
        return cls(bool(config.mamba_proj_bias), bool(config.mamba_conv_bias), bool(config.mamba_proj_bias))


class Mamba(Decoder):
    """What its models have in common."""

    normalises = True  # what a scan makes

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_limits(config)
        tensor_ops.refuse_other_than_silu(self.activation_of_scan(config))
        self._scan, self._biases = self.scan_of(config), self.biases_of(config)
        self._rates_are_logs = not getattr(config, "rates_are_whole", False)
        super().__init__(config, dtype, sep_layer, name)

    # -- what models say otherwise ---------------------------------------------------------------------------------------

    @classmethod
    def activation_of_scan(cls, config: Config) -> str:
        return cls.activation_of(config)

    @staticmethod
    def scan_of(config: Config) -> ScanHeads:
        return ScanHeads.of(config)

    @staticmethod
    def biases_of(config: Config) -> ScanBiases:
        return ScanBiases.of(config)

    @staticmethod
    def attends_in(config: Config, block: int) -> bool:
        """Whether a block has attention."""
        return config.layer_types[block] in ATTENTION

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        if self.attends_in(config, block):
            return super().mixing_layer(config, block, origin)
        width = config.hidden_size
        norm = self.norm_parameters(width, self._traits.norms.before_attention)
        parameters = layout.joined(norm, self.scan_parameters(width))
        return layout.stateful(Mamba.scanned, parameters, self._scan.states, width, self._scan.passing, origin)

    def scan_parameters(self, width: int) -> Parameters:
        own, biases = self._scan, self._biases
        return layout.joined(
            layout.linear(f"{NAME}.in_proj", own.inner + own.convolved + own.heads, width, biases.before),
            layout.wide(KERNEL, own.convolved, 1, own.mixed),
            layout.wide(f"{NAME}.conv1d.bias", own.convolved) if biases.convolution else {},
            *(layout.wide(f"{NAME}.{part}", own.heads) for part in ("dt_bias", "A_log", "D")),
            layout.norm(f"{NAME}.norm", own.inner, bias=False) if self.normalises else {},
            layout.linear(f"{NAME}.out_proj", width, own.inner, biases.behind),
        )

    def scanned(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.added(self.scan(self.normed(hidden, weights, self._traits.norms.before_attention), weights, given), hidden)

    def scan(self, x: Tensor, weights: Weights, given: Given) -> Tensor:
        """What a block adds to its hidden states, of their norm."""
        own, needed = self._scan, tensor_ops.needed
        gate, convolved, step = self.asked_of_scan(x, weights)
        kernel, bias = needed(weights, KERNEL), tensor_ops.plain(weights, f"{NAME}.conv1d.bias")
        mixed = given.states.convolve(INPUTS, convolved, kernel, bias)
        x, b, c = mixed.split((own.inner, own.shared, own.shared), dim=-1)
        b, c = b.unflatten(-1, (own.groups, -1)), c.unflatten(-1, (own.groups, -1))
        steps = step_sizes(step.contiguous(), needed(weights, f"{NAME}.dt_bias"))
        rates, skip = needed(weights, f"{NAME}.A_log"), needed(weights, f"{NAME}.D")
        x = x.unflatten(-1, (own.heads, -1))
        out = given.states.scan(MATRIX, x, steps, rates, b, c, skip, self._rates_are_logs).flatten(-2)
        return tensor_ops.linear(self.gated_outcome(out, gate, weights), weights, f"{NAME}.out_proj")

    def asked_of_scan(self, x: Tensor, weights: Weights) -> AskedOfScan:
        own = self._scan
        made = tensor_ops.linear(x, weights, f"{NAME}.in_proj")
        return AskedOfScan(*made.split((own.inner, own.convolved, own.heads), dim=-1))

    def gated_outcome(self, out: Tensor, gate: Tensor, weights: Weights) -> Tensor:
        weight = tensor_ops.needed(weights, f"{NAME}.norm.weight")
        return gated_norm(out, gate, weight, self._eps, self._scan.groups, gate_first=True)


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
