"""What layers compute besides attention: products with plain and with packed weights, decoding, and work over values such as
norms, activations and additions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.operations import decode, encode, packed_product, plain_product
from h2o_flexgen.kernels.table import PRODUCT_OPS, choose
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.pack import DTYPES
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.models.base import Given, Model, Rotate, computed
from h2o_flexgen.profiling.sizes import Sizes
from h2o_flexgen.profiling.subject import Clock, Subject
from h2o_flexgen.quant.codec import CODECS, MATRIX_FORMS

PRODUCTS, PACKED_PRODUCTS, DECODING, VALUES = "products", "packed products", "decoding", "values"
OPT = "facebook/opt-125m"
LAYERS_OF = (OPT, "meta-llama/Llama-2-7b-hf")  # norms and activations of the two kinds
HEAD_DIM, VOCAB = 64, 512


def point(kind: str, of: str, rows: int) -> str:
    """The name of a figure that is a point of a curve."""
    return f"{kind} {of} {rows}"


# -- products ------------------------------------------------------------------------------------------------------------


def plain_products(clock: Clock, dtype: str, rows: tuple[int, ...], sizes: Sizes) -> list[Subject]:
    """Products with weights that no cache holds, since each call takes another."""
    weights = itertools.cycle(_weights(clock, DTYPES[dtype], sizes))

    def multiply(x: Tensor) -> object:
        return plain_product(Factor(x), next(weights), None)

    return [_product(clock, dtype, PRODUCTS, dtype, each, sizes.side, multiply) for each in rows]


def _product(
    clock: Clock, dtype: str, kind: str, of: str, rows: int, side: int, multiply: Callable[[Tensor], object]
) -> Subject:
    x = torch.full((rows, side), 0.5, dtype=DTYPES[dtype], device=clock.device.torch_device)
    flops, title = 2.0 * rows * side * side, f"products, {of}, {rows} row{'s' * (rows > 1)}"
    return clock.rate(title, point(kind, of, rows), flops, lambda: multiply(x))


def packed_products(clock: Clock, dtype: str, sizes: Sizes) -> list[Subject]:
    """Products with weights as they lie packed, if a kernel takes them so, and the decoding rate of every codec."""
    here, subjects = processor(clock.device.torch_device.type), list[Subject]()
    for codec in MATRIX_FORMS:
        packed = itertools.cycle(_packed(clock, codec, sizes))
        for op, rows in itertools.product(PRODUCT_OPS, sizes.rows):
            if kernel := choose(op, codec, dtype, here.runs, rows):
                multiply = partial(_multiplied, op, kernel.form, packed, sizes.side)
                subjects.append(_product(clock, dtype, PACKED_PRODUCTS, kernel.price, rows, sizes.side, multiply))
        subjects.append(_decoding(clock, dtype, codec, packed, sizes.side))
    return subjects


def _multiplied(op: str, form: str, packed: Iterator[Tensor], outputs: int, x: Tensor) -> object:
    return packed_product(op, form, Factor(x), next(packed), outputs, None)


def _decoding(clock: Clock, dtype: str, codec: str, packed: Iterator[Tensor], side: int) -> Subject:
    values = torch.empty(side, side, dtype=DTYPES[dtype], device=clock.device.torch_device)
    figure = f"{DECODING} {codec}"
    return clock.rate(f"decoding {codec}", figure, values.numel(), lambda: decode(codec, next(packed), values))


def _weights(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> list[Tensor]:
    one = torch.rand(sizes.side, sizes.side, device=clock.device.torch_device).sub_(0.5).to(dtype)
    return _copies(clock.device, one, sizes.cold_bytes)


def _packed(clock: Clock, codec: str, sizes: Sizes) -> list[Tensor]:
    """(units of rows, bytes of a unit) each"""
    side, device = sizes.side, clock.device.torch_device
    one = torch.empty(CODECS[codec].nbytes((side, side), 4), dtype=torch.uint8, device=device)
    encode(codec, torch.rand(side, side, device=device).sub_(0.5), one)
    units = -(-side // CODECS[codec].rows_together)
    return _copies(clock.device, one.view(units, -1), sizes.cold_bytes // 2)


def _copies(device: Device, one: Tensor, nbytes: int) -> list[Tensor]:
    """As many copies of a weight as these bytes hold, two at least, in memory as a run allocates it."""
    memory = device.memory(HostTier())
    places = [memory.alloc(one.nbytes)[: one.nbytes] for _ in range(max(2, nbytes // one.nbytes))]
    return [place.view(one.dtype).view(one.shape).copy_(one) for place in places]


# -- values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Done:
    """A matrix whose product exists already: what remains of a layer's time is everything besides its products."""

    out: Tensor  # (rows, outputs)

    def linear(self, x: Factor, bias: Tensor | None) -> Tensor:
        return self.out.view(*x.values.shape[:-1], -1)


def values(clock: Clock, dtype: str, sizes: Sizes) -> Subject:
    """Layers of each kind: the values in and out of their products, divided by the seconds of everything else."""
    layers = [one for name in LAYERS_OF for one in _layers(clock, name, dtype, sizes)]
    counted = sum(count for count, _ in layers)
    return Subject("norms and activations", lambda: {VALUES: counted / sum(clock.of(action) for _, action in layers)})


def _layers(clock: Clock, name: str, dtype: str, sizes: Sizes) -> Iterator[tuple[float, Callable[[], object]]]:
    """Attention, without attending, and mlp: how many values each has, and a call of it."""
    model = small_model(name, dtype, sizes.width)
    rows, device = sizes.prompt_tokens, clock.device.torch_device
    hidden = torch.full((1, rows, sizes.width), 0.5, dtype=DTYPES[dtype], device=device)
    given = Given(torch.arange(rows, device=device)[None], _attend_nothing)
    for layer in model.spec.layers:
        if layer.block is None:
            continue
        weights: dict[str, Tensor | Done] = {}
        for tensor_name, tensor in layer.tensors:
            is_matrix = tensor in layer.matrices
            shape = (rows, tensor.shape[0]) if is_matrix else tensor.shape
            place = torch.full(shape, 0.5, dtype=DTYPES[dtype], device=device)
            weights[tensor_name] = Done(place) if is_matrix else place
        yield rows * layer.values_around_products, partial(computed, model, layer, hidden, weights, given)


def _attend_nothing(q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> Tensor:
    if rotate is not None:
        positions = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
        q, k = rotate(q, positions), rotate(k, positions)
    return q.flatten(2)


def small_model(name: str, dtype: str, width: int, blocks: int = 1) -> Model:
    """A known architecture with heads of 64 values and a vocabulary of bytes."""
    heads = max(1, width // HEAD_DIM)
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": heads, "vocab_size": VOCAB}
    of_opt = {"word_embed_proj_dim": width, "ffn_dim": 4 * width}
    of_llama = {"num_key_value_heads": heads, "intermediate_size": 11 * width // 4}
    config = known_config(name, **sizes, **(of_opt if name == OPT else of_llama))
    assert config is not None
    return create_model(config, dtype)
