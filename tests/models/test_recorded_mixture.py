"""A visit of a mixture is recorded once, and replayed for any choice of experts with the bits of one that is not recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import INT8_PRODUCT, PRODUCT
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.matrix import Matrix, PackedMatrix, SteadyMatrix
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.kernels.recording import CallRecording, WorkingRoom
from h2o_flexgen.models import create_model
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.mixture import MixtureOfExperts
from tests.helpers.samples import first_of
from tests.helpers.tiny import tiny_config
from tests.kernels.variants import VARIANTS, used

KINDS = (
    "olmoe",
    "mixtral",
    "gpt-oss",
    "glm4-moe",
    "glm4-moe-air",
    "qwen2-moe",
    "qwen3-moe",
    "granite-moe",
    "minimax",
    "deepseek-v3",
)
FORMS = (PLAIN, PRODUCT), (PLAIN, INT8_PRODUCT), ("tiles4", PRODUCT), ("tiles4", INT8_PRODUCT), ("tiles8", INT8_PRODUCT)


def layers_of(model: MixtureOfExperts, dtype: torch.dtype, form: str, product: str) -> list[tuple[tuple[str, ...], Weights]]:
    """The functions and the weights of the layers behind an attention that have experts."""
    draw = torch.Generator().manual_seed(3)
    block = next(layer.block for layer in model.spec.layers if layer.experts)
    found = []
    for layer in model.spec.layers:
        if layer.block != block or layer.has_kv:
            continue
        own: dict[str, Matrix] = {}
        for local, tensor in layer.tensors:
            values = torch.randn(tensor.shape, generator=draw).mul_(0.2).to(torch.float32 if tensor.itemsize == 4 else dtype)
            is_factor, its_form = local in dict(layer.products), PLAIN if tensor.is_never_packed else form
            own[local] = as_stored(values, its_form, product) if is_factor else values
        found.append((layer.functions, own))
    return found


def as_stored(values: Tensor, form: str, product: str) -> Matrix:
    if form == PLAIN:
        return values if product == PRODUCT else SteadyMatrix(values)
    format = FORMATS[form]
    data = torch.empty(format.nbytes(tuple(values.shape), 0), dtype=torch.uint8)
    data = data.view(-(-len(values) // format.rows_together), -1)
    encode(form, values, data)
    return PackedMatrix(data, form, len(values), None, product)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", first_of([torch.bfloat16, torch.float32], 1))
@pytest.mark.parametrize(("form", "product"), FORMS)
def test_replays_have_the_bits_of_what_is_not_recorded(kind: str, dtype: torch.dtype, form: str, product: str) -> None:
    model = create_model(tiny_config(kind), str(dtype).removeprefix("torch."), True, "tiny")
    assert isinstance(model, MixtureOfExperts)
    draw = torch.Generator().manual_seed(5)
    with used(VARIANTS[0]):
        layers = layers_of(model, dtype, form, product)
        for rows in (1, 7, 40):
            given = Given(torch.zeros(rows, 1, dtype=torch.long), may_overwrite=True)
            hidden, out = (torch.empty(rows, 1, model.spec.width, dtype=dtype) for _ in range(2))

            def computed(x: Tensor, given: Given = given) -> Tensor:
                for functions, weights in layers:
                    for function in functions:
                        x = getattr(model, function)(x, weights, given)
                return x

            program = CallRecording.of(lambda out=out, hidden=hidden: out.copy_(computed(hidden)), WorkingRoom())  # type: ignore[misc]
            for _ in range(3):
                hidden.copy_(torch.randn(hidden.shape, generator=draw) + torch.randn(1, 1, model.spec.width, generator=draw))
                program()
                assert torch.equal(out, computed(hidden.clone())), rows
