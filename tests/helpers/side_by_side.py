"""An architecture for tests: LLaMA with two mlps side by side in each block, of which a router chooses one for each token.
Everything new about it is here: nothing else knows such a layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.models import MODELS, create_model, layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import Llama
from tests.helpers.contract import Checkpoints
from tests.helpers.tiny import tiny_config

KIND, MLPS = "llama-mha", 2


class SideBySide(Llama):
    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, True, name)
        self._activation = tensor_ops.gating(config.hidden_act)
        embed, *middle, head = self.spec.layers

        def parts(index: int) -> tuple[LayerSpec, LayerSpec]:
            return middle[2 * index], chosen(self.spec.width, self.spec.ffn, Origin(dtype, f"model.layers.{index}.", index))

        layers = layout.in_order(embed, config.num_hidden_layers, parts, head, sep_layer)
        self.spec = replace(self.spec, layers=layers)

    def chosen(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x = tensor_ops.rms_norm(hidden, weights, "post_attention_layernorm", self._eps)
        choice, out = tensor_ops.linear(x, weights, "router").argmax(-1), hidden.clone()
        for number in range(MLPS):
            if len(own := x[choice == number]):
                inner = self._activation(tensor_ops.linear(own, weights, f"mlps.{number}.up"))
                out[choice == number] += tensor_ops.linear(inner, weights, f"mlps.{number}.down")
        return out


def chosen(width: int, ffn: int, origin: Origin) -> LayerSpec:
    """A layer of mlps, each of which half of the tokens passes through."""
    mlps = [
        layout.linear(f"mlps.{number}.{name}", *sizes, bias=False, share=1 / MLPS)
        for number in range(MLPS)
        for name, sizes in (("up", (ffn, width)), ("down", (width, ffn)))
    ]
    norm, router = layout.norm("post_attention_layernorm", width, bias=False), layout.linear("router", MLPS, width, bias=False)
    return replace(layout.layer(SideBySide.chosen, layout.joined(norm, router, *mlps), width, origin), passing_width=2 * ffn)


@contextmanager
def registered() -> Iterator[None]:
    """A context in which configs of LLaMA mean this architecture."""
    modules = {"h2o_flexgen.models.side_by_side": sys.modules[__name__]}
    with patch.dict(sys.modules, modules), patch.dict(MODELS, {"llama": ("side_by_side", "SideBySide")}):
        yield


class SideBySideCheckpoints(Checkpoints):
    """Checkpoints of one model, which is made when it is first asked for."""

    def folder(self, kind: str, stored: str = "float32") -> Path:
        folder, config = self.root / "side-by-side", tiny_config(KIND)
        if not folder.exists():
            generator = torch.Generator().manual_seed(1)
            config.save_pretrained(folder)
            tensors = create_model(config, "float32").spec.tensors
            values = {name: 0.25 * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
            save_file(values, folder / "model.safetensors")
        return folder
