"""The experts of a layer: what becomes of a token depends neither on what is beside it nor on where slices are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import next_hidden_bytes
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.models import create_model, mixture
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.mixture import MixtureOfExperts, Routed
from tests.helpers.tiny import tiny_config
from tests.kernels.variants import VARIANTS, used

TOKENS, CHOSEN = 40, 3
OVERWRITES = Given(torch.zeros(TOKENS, 1, dtype=torch.long), may_overwrite=True)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[TORCH, VARIANTS[0]], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch treats the last values of a tensor otherwise than others."""
    with used(request.param):
        yield


def model_of(dtype: torch.dtype, sep_layer: bool = True, kind: str = "olmoe") -> MixtureOfExperts:
    model = create_model(tiny_config(kind), str(dtype).removeprefix("torch."), sep_layer, "tiny")
    assert isinstance(model, MixtureOfExperts)
    return model


def layers_of(model: MixtureOfExperts, dtype: torch.dtype) -> list[Weights]:
    draw = torch.Generator().manual_seed(3)
    values = {
        tensor.name: torch.randn(tensor.shape, generator=draw).mul_(0.2).to(dtype)
        for layer in model.spec.layers
        if layer.block == 0
        for _, tensor in layer.tensors
    }
    slices = [layer for layer in model.spec.layers if layer.block == 0 and not layer.has_kv]
    return [{local: values[tensor.name] for local, tensor in layer.tensors} for layer in slices]


def routed(model: MixtureOfExperts, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, 1, model.spec.width, generator=draw).to(dtype)
    likely = torch.rand(TOKENS, 1, model._mixture.experts, generator=draw)
    likely[:, :, 1] += 0.9  # asked by most
    weights, experts = likely.topk(CHOSEN, dim=-1)
    parts = Routed(hidden, hidden.clone(), torch.zeros_like(hidden, dtype=torch.float32), weights, experts.int())
    return torch.cat([one.view(dtype) for one in parts], dim=-1)


def total(model: MixtureOfExperts, joined: Tensor, layers: list[Weights], may_overwrite: bool = False) -> Tensor:
    given = Given(torch.zeros(len(joined), 1, dtype=torch.long), may_overwrite=may_overwrite)
    for weights in layers:
        before = joined.clone()
        made = model.given_to_experts(joined, weights, given)
        is_as_before = torch.equal(joined.view(torch.uint8), before.view(torch.uint8))
        assert made is joined if may_overwrite else is_as_before
        joined = made
    return Routed.of(joined, model.spec.width, CHOSEN).total


@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss"])
def test_company_and_cuts_change_no_token(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(dtype, kind=kind)
    layers, joined = layers_of(model, dtype), routed(model, dtype)
    assert len(layers) > 3
    whole = total(model, joined, layers)
    for most in (0.1, 0.5, 9.0):
        monkeypatch.setattr(mixture, "MOST_TOGETHER", most)
        assert torch.equal(total(model, joined, layers), whole), most
    assert torch.equal(total(model, joined.clone(), layers, may_overwrite=True), whole)
    between = torch.stack((joined, joined), dim=1)[:, 0]  # others' states lie between these
    assert torch.equal(total(model, model.given_to_experts(between, layers[0], OVERWRITES), layers[1:]), whole)
    together = {name: value for weights in layers for name, value in weights.items()}
    assert torch.equal(total(model_of(dtype, False, kind), joined, [together]), whole)
    if dtype == torch.float32:  # kernels are chosen by the number of rows, and those for bfloat16 differ by more
        alone = total(model, joined[7:8], layers)
        assert (alone - whole[7:8]).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss", "glm4-moe", "qwen2-moe"])
def test_layers_that_overwrite_are_those_that_memory_is_saved_for(kind: str, dtype: torch.dtype) -> None:
    model = model_of(dtype, kind=kind)
    spec, wide = model.spec, Routed.width(model.spec.width, model._mixture.chosen, str(dtype).removeprefix("torch."))
    between = [layer for layer in spec.layers if layer.functions == ("given_to_experts",)]
    assert [layer for layer in spec.layers if layer.overwrites] == between and between
    assert spec.widest == wide
    batch, at_once = Batch((0,), (20,)), 20
    beside = next_hidden_bytes(spec, batch, at_once, moves=False, accelerator=False)
    assert beside == 20 * spec.width * spec.itemsize, "the first and the last slice have narrow states beside wide ones"


def test_a_sum_is_that_of_one_expert_after_the_other(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    layers, joined = layers_of(model, dtype), routed(model, dtype)
    state, expected = Routed.of(joined.flatten(0, -2), model.spec.width, CHOSEN), torch.zeros(TOKENS, model.spec.width)
    weights = {name: value for layer in layers for name, value in layer.items()}
    for number in range(9):
        for token in range(TOKENS):
            for place in (state.experts[token] == number).nonzero().flatten().tolist():
                parts = (weights[f"mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
                gate, up, down = (part.float() for part in parts if isinstance(part, Tensor))
                x = state.normed[token].float()
                expected[token] += state.weights[token, place] * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    found = total(model, joined, layers)[:, 0]
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
