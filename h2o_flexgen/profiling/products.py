"""What layers compute besides attention: products with plain and with packed weights, decoding, and work over values such as
norms, activations and additions. They are measured on models of two kinds in any size, which are made without transformers: its
import would take longer than all that is measured with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isfinite
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import LARGE
from h2o_flexgen.formats.kernel_table import PRODUCT, PRODUCT_OPS, Kernel, choose, kernels_of, measured_formats, rounds
from h2o_flexgen.formats.table import FORMATS, PLAIN, STORED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.operations import decode, packed_product, plain_product
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.models import create_model
from h2o_flexgen.models.base import Given, Model, computed
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.profiling.bench import Bench, Figures, ProfileSizes, Subject

HEAD_DIM, VOCAB, POSITIONS = 64, 512, 2048
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "tie_word_embeddings": True}


def small_opt(dtype: str, width: int, blocks: int = 1) -> Model:
    """Layer norms, biases, and ReLU."""
    own = {"word_embed_proj_dim": width, "ffn_dim": 4 * width, "activation_function": "relu", "do_layer_norm_before": True}
    parts = {"layer_norm_elementwise_affine": True, "enable_bias": True}
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": max(1, width // HEAD_DIM)}
    return create_model(_config(model_type="opt", **own, **parts, **sizes), dtype)


def small_llama(dtype: str, width: int, heads: int | None = None, blocks: int = 1) -> Model:
    """RMS norms, rotations, and a gated SiLU. Its heads may be more than its width has room for."""
    number = heads or max(1, width // HEAD_DIM)
    own = {"intermediate_size": 11 * width // 4, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    parts = {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": number, "head_dim": HEAD_DIM}
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": number}
    return create_model(_config(model_type="llama", **own, **parts, **sizes), dtype)


def _config(**values: object) -> Config:
    return cast("Config", SimpleNamespace(**COMMON, **values))


def multiplied(op: str, format: str, x: Tensor, data: Tensor, outputs: int) -> Tensor:
    """One product as a run makes it, by the kernel that is chosen: x (..., inputs), the bytes of a matrix (outputs, inputs) ->
    (..., outputs). There must be a kernel for so many rows."""
    if format == PLAIN:
        return plain_product(Factor(x), data.view(x.dtype).view(outputs, -1), None)
    out = packed_product(op, format, Factor(x), in_units(format, data, outputs), outputs, None)
    assert out is not None, f"no kernel does {op} of {format} with {x.shape[:-1].numel()} rows"
    return out


def in_units(format: str, data: Tensor, outputs: int) -> Tensor:
    """(units of rows, bytes of a unit)"""
    return data.view(-(-outputs // FORMATS[format].rows_together), -1)


PRODUCTS, PACKED_PRODUCTS, DECODING, VALUES = "products", "packed products", "decoding", "values"
VALUES_AT_FIRST = 16  # how many times fewer rows of values are tried first


def point(kind: str, of: str, rows: int) -> str:
    """The name of a figure that is a point of a curve."""
    return f"{kind} {of} {rows}"


# -- products ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The products of matrices in some format with rows of some type, by the number of rows. A kernel with a price of its own
    begins a curve of its own."""

    op: str
    format: str
    dtype: str

    def kernel(self, bench: Bench, rows: int) -> Kernel | None:
        return choose(self.op, self.format, self.dtype, processor(bench.device.torch_device.type).runs, rows)

    def points(self, bench: Bench, sizes: ProfileSizes) -> list[Subject]:
        """The subjects in order, each after the one before it if that has the same price."""
        found, last = list[Subject](), dict[str, str]()
        for rows in self.rows(bench, wanted_rows(self.format, sizes)):
            if (kernel := self.kernel(bench, rows)) is not None:
                price = self._price(kernel)
                found.append(self._point(bench, price, rows, side_of(self.format, sizes), last.get(price, "")))
                last[price] = found[-1].title
        return found

    def rows(self, bench: Bench, wanted: Iterable[int]) -> list[int]:
        """The rows that are asked for, and both sides of every limit at which another kernel takes over."""
        limits = {kernel.most_rows for kernel in kernels_of(self.op, self.format)}
        ends = [int(rows) for rows in limits if isfinite(rows) and rows < max(wanted)]
        sides = [(rows, rows + 1) for rows in ends if self.kernel(bench, rows) != self.kernel(bench, rows + 1)]
        return sorted({*wanted, *(rows for side in sides for rows in side)})

    def _price(self, kernel: Kernel) -> str:
        """The name of its curve."""
        return self.dtype if self.format == PLAIN else kernel.price

    def _point(self, bench: Bench, price: str, rows: int, side: int, behind: str) -> Subject:
        figure = point(PRODUCTS if self.format == PLAIN else PACKED_PRODUCTS, price, rows)
        title, multiply = f"products, {price}, {rows} row{'s' * (rows > 1)}", partial(self._measured, bench, side, figure)
        return Subject(title, multiply, (rows,), figure=figure, behind=behind, of_rounds=max)

    def _measured(self, bench: Bench, side: int, figure: str, rows: int) -> Figures:
        """Each call takes another matrix, which no cache holds."""
        x = torch.full((rows, side), 0.5, dtype=TORCH_DTYPES[self.dtype], device=bench.device.torch_device)
        matrices = bench.pool.in_turn(FORMATS[self.format].nbytes((side, side), x.itemsize))
        seconds = bench.clock.of(lambda: multiplied(self.op, self.format, x, next(matrices), side))
        return {figure: 2.0 * rows * side * side / seconds}


def wanted_rows(format: str, sizes: ProfileSizes) -> tuple[int, ...]:
    """The numbers of rows that a format is measured with: fewer of formats of checkpoints, of which there are more."""
    return sizes.rows[::2] if FORMATS[format] in STORED else sizes.rows


def side_of(format: str, sizes: ProfileSizes) -> int:
    """The side of a matrix: a whole block of a checkpoint's format at least."""
    return max(sizes.side, LARGE) if FORMATS[format] in STORED else sizes.side


def curves(bench: Bench, dtypes: Iterable[str], dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """Products with plain weights of these types, and with packed ones if a kernel takes them as they are. Few rows come first,
    so that what is left of the time is for the many."""
    plain = [Curve(PRODUCT, PLAIN, each) for each in dtypes]
    pairs = product(measured_formats(), PRODUCT_OPS)
    packed = [Curve(op, format, dtype) for format, op in pairs if op == PRODUCT or rounds(format)]
    subjects = [subject for curve in (*plain, *packed) for subject in curve.points(bench, sizes)]
    return sorted(subjects, key=lambda subject: subject.sizes)


def decoding(bench: Bench, dtype: str, sizes: ProfileSizes) -> list[Subject]:
    """Decoding of every format of matrices."""
    formats = measured_formats()
    return [
        Subject(f"decoding {format}", partial(_decoding, bench, dtype, format), _sides(format, sizes), of_rounds=max)
        for format in formats
    ]


def _sides(format: str, sizes: ProfileSizes) -> tuple[int, ...]:
    """The side that is tried first, and the whole one."""
    whole = side_of(format, sizes)
    first = max(LARGE if FORMATS[format] in STORED else 1, whole // 8)
    return tuple(dict.fromkeys((first, whole)))


def _decoding(bench: Bench, dtype: str, format: str, side: int) -> Figures:
    values = torch.empty(side, side, dtype=TORCH_DTYPES[dtype], device=bench.device.torch_device)
    packed = bench.pool.in_turn(FORMATS[format].nbytes((side, side), values.itemsize))
    seconds = bench.clock.of(lambda: decode(format, in_units(format, next(packed), side), values))
    return {f"{DECODING} {format}": values.numel() / seconds}


# -- values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Done:
    """A matrix with a product that exists already: what remains of a layer's time is everything besides its products."""

    out: Tensor  # (rows, outputs)

    def linear(self, x: Factor, bias: Tensor | None) -> Tensor:
        return self.out.view(*x.values.shape[:-1], -1)


def values(bench: Bench, dtype: str, sizes: ProfileSizes) -> Subject:
    """Layers of each kind: the values in and out of their products, divided by the seconds of everything else."""

    def measure(rows: int) -> Figures:
        layers = [one for model in _models(dtype, sizes) for one in _layers(bench, model, dtype, rows)]
        return {VALUES: sum(count for count, _ in layers) / sum(bench.clock.of(action) for _, action in layers)}

    tokens = max(1, sizes.prompt_tokens // VALUES_AT_FIRST), sizes.prompt_tokens
    return Subject("norms and activations", measure, tokens, of_rounds=max)


def _models(dtype: str, sizes: ProfileSizes) -> tuple[Model, Model]:
    return small_opt(dtype, sizes.width), small_llama(dtype, sizes.width)


def _layers(bench: Bench, model: Model, dtype: str, rows: int) -> Iterator[tuple[float, Callable[[], object]]]:
    """Attention, without attending, and mlp: how many values each has, and a call of it."""
    device = bench.device.torch_device
    hidden = torch.full((1, rows, model.spec.width), 0.5, dtype=TORCH_DTYPES[dtype], device=device)
    given = Given(torch.arange(rows, device=device)[None], _attend_nothing)
    for layer in model.spec.layers:
        if layer.block is None:
            continue
        weights: dict[str, Tensor | Done] = {}
        for tensor_name, tensor in layer.tensors:
            is_matrix = tensor in layer.matrices
            shape = (rows, tensor.shape[0]) if is_matrix else tensor.shape
            place = torch.full(shape, 0.5, dtype=TORCH_DTYPES[dtype], device=device)
            weights[tensor_name] = Done(place) if is_matrix else place
        yield rows * layer.values_around_products, partial(computed, model, layer, hidden, weights, given)


def _attend_nothing(tokens: NewTokens) -> Tensor:
    q, rotation = tokens.q, tokens.rotation
    if rotation is not None:
        positions = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
        q, _ = rotation(q, positions), rotation(tokens.k, positions)
    return q.flatten(2)
