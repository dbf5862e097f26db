"""Falcon-H1: attention and a scan of Mamba-2 stand side by side in each block. What goes in and comes out of both, and of the
mlp, is multiplied by numbers of the config. GGUF files have these in their matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import OF_LLAMA, GgufArchitecture
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_WIDTH, LayerSpec
from h2o_flexgen.kernels.operations import add_scaled, gated_norm
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Flag, Number, Whole
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import Decoder, MlpNames, Traits
from h2o_flexgen.models.mamba import IN_FILES, KERNEL, KEYS, NAME, SIZES, VECTORS, AskedOfScan, Mamba, ScanBiases, ScanHeads

FACTOR = Number(-1e6, 1e6)
FACTORS = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
OF_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _factor(config: Config, key: str) -> float:
    """A factor; one where there is none."""
    said = getattr(config, key, None)
    return 1.0 if said is None else float(said)


def _listed(config: Config, key: str) -> list[float]:
    """A list of factors; all are one where there is none."""
    said = getattr(config, key, None)
    if said is None:
        return [1.0] * OF_LISTS[key]
    if len(said) != OF_LISTS[key] or not all(type(one) in (int, float) and isfinite(one) for one in said):
        raise ValueError(f"{key} is {shown(said)}, and {OF_LISTS[key]} numbers are needed; download the model again")
    return [float(one) for one in said]


def _scaled(x: Tensor, factor: float) -> Tensor:
    """Values that are not used elsewhere, times a factor."""
    return x if factor == 1.0 else add_scaled(x, scale=factor)


def _copied(x: Tensor, factor: float) -> Tensor:
    """The same of values that are used elsewhere."""
    return x if factor == 1.0 else add_scaled(x.clone(), scale=factor)


class FalconH1(Mamba):
    bounds: ClassVar[Bounds] = {
        **SIZES,
        "mamba_d_ssm": Whole(MOST_WIDTH),
        **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"), Flag()),
        **dict.fromkeys((*FACTORS, "embedding_multiplier", "lm_head_multiplier"), FACTOR),
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.feed_forward\.": ".mlp.",
        r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
        r"^model\.final_layernorm\.": "model.norm.",
    }
    gguf = GgufArchitecture(
        "falcon-h1",
        {**OF_LLAMA, **IN_FILES},
        keys={
            **KEYS,
            "mamba_d_ssm": lambda said: said.whole("ssm.inner_size"),
            "mamba_rms_norm": lambda said: "blk.0.ssm_norm.weight" in said.tensors,
            "mamba_norm_before_gate": lambda said: False,
            "projectors_bias": lambda said: False,
        },
        convolutions=(KERNEL,),
        vectors=VECTORS,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        attention_in, attention_out, key, scan_in, scan_out = (_factor(config, one) for one in FACTORS)
        self._attention_in, self._attention_out, self._of_keys = attention_in, attention_out, key
        self._scan_in, self._scan_out = scan_in, scan_out
        self._of_gate, self._of_mlp = _listed(config, "mlp_multipliers")
        self._of_parts = _listed(config, "ssm_multipliers")
        self.normalises, self._is_normed_first = bool(config.mamba_rms_norm), bool(config.mamba_norm_before_gate)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(
            config.attention_bias,
            config.attention_bias,
            config.mlp_bias,
            embedding_scale=_factor(config, "embedding_multiplier"),
            logit_scale=_factor(config, "lm_head_multiplier"),
        )

    @staticmethod
    def scan_of(config: Config) -> ScanHeads:
        return ScanHeads.of(config) if config.mamba_d_ssm is None else ScanHeads.within(config.mamba_d_ssm, config)

    @staticmethod
    def biases_of(config: Config) -> ScanBiases:
        return ScanBiases.of(config)._replace(behind=bool(config.projectors_bias))

    def mixing_layer(self, config: Config, block: int, origin: Origin) -> LayerSpec:
        own, width = self._scan, config.hidden_size
        attending = Decoder.mixing_layer(self, config, block, origin)
        scanning = layout.stateful(Mamba.scanned, self.scan_parameters(width), own.states, width, own.passing, origin)
        return layout.beside(FalconH1.attention, attending, scanning)

    def attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = self.normed(hidden, weights, self._traits.norms.before_attention)
        behind = add_scaled(self.scan(x, weights, given), hidden, self._scan_out)
        return self.with_attended(behind, self.attended(hidden, weights, given), weights)

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        q, k, v = super().projected(_copied(x, self._attention_in), weights)
        return q, _scaled(k, self._of_keys), v

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        return add_scaled(tensor_ops.linear(out, weights, "self_attn.o_proj"), hidden, self._attention_out)

    def gated(self, x: Tensor, weights: Weights, names: MlpNames) -> Tensor:
        gate, up = tensor_ops.linears(x, weights, *names.ways_in)
        made = self._gating(_scaled(gate, self._of_gate), up)
        return _scaled(tensor_ops.linear(made, weights, names.down), self._of_mlp)

    # -- the scan --------------------------------------------------------------------------------------------------------

    def asked_of_scan(self, x: Tensor, weights: Weights) -> AskedOfScan:
        own, factors = self._scan, self._of_parts
        if {*factors} == {1.0}:
            return super().asked_of_scan(_copied(x, self._scan_in), weights)
        made = tensor_ops.linear(_copied(x, self._scan_in), weights, f"{NAME}.in_proj")
        widths = own.inner, own.inner, own.shared, own.shared, own.heads
        gate, *each, step = (_scaled(part.contiguous(), by) for part, by in zip(made.split(widths, dim=-1), factors))
        convolved = made.new_empty(*made.shape[:-1], own.convolved)
        for there, part in zip(convolved.split(widths[1:-1], dim=-1), each):
            there.copy_(part)
        return AskedOfScan(gate, convolved, step)

    def gated_outcome(self, out: Tensor, gate: Tensor, weights: Weights) -> Tensor:
        if not self.normalises:
            return self._gating(gate.contiguous(), out)
        weight = tensor_ops.needed(weights, f"{NAME}.norm.weight")
        return gated_norm(out, gate, weight, self._eps, self._scan.groups, gate_first=not self._is_normed_first)
