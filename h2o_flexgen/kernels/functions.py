"""Every kernel under its name in formats/kernel_table.py: those in C, those in Triton, and their twins in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from h2o_flexgen.formats.kernel_table import TRITON, Kernel
from h2o_flexgen.kernels.append import append, append_twin, rotate, rotate_twin
from h2o_flexgen.kernels.chosen_slots import choose_slots, choose_slots_twin, chosen_attention
from h2o_flexgen.kernels.copies import put_rows, put_rows_twin, take_rows, take_rows_twin
from h2o_flexgen.kernels.decode_attention import (
    decode_attention,
    decode_attention_twin,
    shared_attention,
    shared_attention_twin,
)
from h2o_flexgen.kernels.evict import (
    bring_slots_twin,
    evict,
    evict_twin,
    gather_slots_twin,
    note,
    note_twin,
    take_slots,
    take_slots_twin,
)
from h2o_flexgen.kernels.group_codes import (
    group_decode,
    group_decode_twin,
    group_encode,
    group_encode_twin,
    tile_decode,
    tile_decode_rows,
    tile_decode_rows_twin,
    tile_decode_twin,
    tile_encode,
    tile_encode_twin,
)
from h2o_flexgen.kernels.int8_product import int8_product, int8_product_twin, int8_products
from h2o_flexgen.kernels.pick_tokens import likeliest, likeliest_twin, pick_tokens, pick_tokens_twin
from h2o_flexgen.kernels.products import (
    counted_plain_products,
    pair_product,
    pair_products,
    plain_decode,
    plain_dot_products,
    plain_dots,
    plain_encode,
    plain_product,
    tile_product,
    tile_products,
    wide_product,
    wide_product_twin,
    wide_products,
)
from h2o_flexgen.kernels.prompt_attention import prompt_attention, prompt_attention_twin
from h2o_flexgen.kernels.read_tokens import read_tokens, read_tokens_twin
from h2o_flexgen.kernels.routing import gather_chosen, gather_chosen_twin, route, route_twin
from h2o_flexgen.kernels.row_functions import (
    add_scaled,
    add_scaled_twin,
    add_weighted,
    add_weighted_twin,
    clamped_silu,
    clamped_silu_twin,
    gated_gelu,
    gated_gelu_tanh,
    gated_gelu_tanh_twin,
    gated_gelu_twin,
    gated_identity,
    gated_identity_twin,
    gated_quick_gelu,
    gated_quick_gelu_twin,
    gated_relu,
    gated_relu_squared,
    gated_relu_squared_twin,
    gated_relu_twin,
    gated_sigmoid,
    gated_sigmoid_twin,
    gated_silu,
    gated_silu_twin,
    halves_apart,
    halves_apart_twin,
    layer_norm,
    layer_norm_twin,
    lengths,
    lengths_twin,
    rms_norm,
    rms_norm_twin,
    xielu,
    xielu_twin,
)
from h2o_flexgen.kernels.states import (
    gated_delta,
    gated_delta_twin,
    gated_norm,
    gated_norm_twin,
    selective_scan,
    selective_scan_twin,
    short_convolution,
    short_convolution_twin,
    step_sizes,
    step_sizes_twin,
)
from h2o_flexgen.kernels.stored_product import (
    stored_dot_products,
    stored_dots,
    stored_int8_product,
    stored_int8_product_twin,
    stored_int8_products,
    stored_pair_products,
    stored_pairs,
    stored_product,
    stored_products,
)
from h2o_flexgen.kernels.stored_values import stored_decode, stored_decode_twin

Function = Callable[..., Any]  # kernels of one operation take the same arguments

FUNCTIONS: Mapping[str, Function] = {
    function.__name__: function
    for function in (
        *(plain_encode, plain_decode, plain_product, plain_dots),
        *(group_encode, group_encode_twin, group_decode, group_decode_twin),
        *(int8_product, int8_product_twin, tile_product, wide_product, wide_product_twin, pair_product),
        *(tile_encode, tile_encode_twin, tile_decode, tile_decode_twin, tile_decode_rows, tile_decode_rows_twin),
        *(stored_decode, stored_decode_twin, stored_dots, stored_pairs, stored_product),
        *(stored_int8_product, stored_int8_product_twin),
        *(decode_attention, decode_attention_twin, prompt_attention, prompt_attention_twin),
        *(shared_attention, shared_attention_twin),
        *(rotate, rotate_twin, append, append_twin, evict, evict_twin, note, note_twin),
        *(rms_norm, rms_norm_twin, layer_norm, layer_norm_twin, lengths, lengths_twin, halves_apart, halves_apart_twin),
        *(gated_silu, gated_silu_twin, gated_gelu_tanh, gated_gelu_tanh_twin, gated_gelu, gated_gelu_twin),
        *(gated_quick_gelu, gated_quick_gelu_twin, gated_relu, gated_relu_twin),
        *(gated_relu_squared, gated_relu_squared_twin, xielu, xielu_twin),
        *(gated_sigmoid, gated_sigmoid_twin, gated_identity, gated_identity_twin),
        *(choose_slots, choose_slots_twin, chosen_attention),
        *(bring_slots_twin, take_slots, take_slots_twin, gather_slots_twin, take_rows, take_rows_twin, put_rows, put_rows_twin),
        *(read_tokens, read_tokens_twin),
        *(clamped_silu, clamped_silu_twin, route, route_twin, gather_chosen, gather_chosen_twin),
        *(add_scaled, add_scaled_twin, add_weighted, add_weighted_twin),
        *(pick_tokens, pick_tokens_twin, likeliest, likeliest_twin),
        *(gated_delta, gated_delta_twin, selective_scan, selective_scan_twin),
        *(short_convolution, short_convolution_twin, step_sizes, step_sizes_twin, gated_norm, gated_norm_twin),
    )
}

# What does the products of several matrices at once, each with rows of its own, with the bits of one after the other.
SEVERAL: Mapping[Function, Function] = {
    pair_product: pair_products,
    plain_dots: plain_dot_products,
    tile_product: tile_products,
    wide_product: wide_products,
    stored_dots: stored_dot_products,
    stored_pairs: stored_pair_products,
    stored_product: stored_products,
    int8_product: int8_products,
    stored_int8_product: stored_int8_products,
}

# The same where memory alone says which rows meet which matrix. Between programs torch does what it does faster.
COUNTED: Mapping[Function, Function] = {**SEVERAL, plain_product: counted_plain_products}


def function_of(kernel: Kernel) -> Function:
    return (_for_gpus() if TRITON in kernel.libraries else FUNCTIONS)[kernel.function]


@cache
def _for_gpus() -> Mapping[str, Function]:
    """Imported when the first of them is wanted: Triton is missing where torch was built for CPUs."""
    functions: Mapping[str, Function] = import_module("h2o_flexgen.kernels.gpu.functions").FUNCTIONS
    return functions


def why_launches_are_slow() -> str | None:
    """Why kernels for GPUs are launched through Triton's own door alone; None where they are not."""
    why: str | None = import_module("h2o_flexgen.kernels.gpu.launching").why_not()
    return why
