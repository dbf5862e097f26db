"""Every kernel in Triton under its name in formats/kernel_table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from h2o_flexgen.kernels.gpu.append import append, append_coded, rotate
from h2o_flexgen.kernels.gpu.choose_slots import choose_slots
from h2o_flexgen.kernels.gpu.counted_experts import (
    add_counted,
    counted_plain_products,
    counted_stored_products,
    counted_tile_products,
    gather_counted,
)
from h2o_flexgen.kernels.gpu.decode_attention import decode_attention
from h2o_flexgen.kernels.gpu.evict import bring_slots, evict, gather_slots, take_slots
from h2o_flexgen.kernels.gpu.group_codes import group_decode, group_encode, tile_decode, tile_decode_rows, tile_encode
from h2o_flexgen.kernels.gpu.int8_product import int8_product
from h2o_flexgen.kernels.gpu.norms import gated_norm, rms_norm
from h2o_flexgen.kernels.gpu.prompt_attention import prompt_attention
from h2o_flexgen.kernels.gpu.shared_attention import shared_attention
from h2o_flexgen.kernels.gpu.states import gated_delta, selective_scan, short_convolution
from h2o_flexgen.kernels.gpu.stored_product import stored_product
from h2o_flexgen.kernels.gpu.stored_values import stored_decode
from h2o_flexgen.kernels.gpu.tile_dots import tile_dots
from h2o_flexgen.kernels.gpu.tile_product import tile_product, tile_products

KERNELS: Sequence[Callable[..., Any]] = (
    *(group_encode, group_decode, tile_encode, tile_decode, tile_decode_rows),
    *(stored_decode, stored_product, tile_product, tile_products, tile_dots, int8_product),
    *(append, append_coded, rotate, evict, gather_slots, take_slots, bring_slots),
    *(gather_counted, counted_plain_products, counted_tile_products, counted_stored_products, add_counted),
    *(decode_attention, prompt_attention, shared_attention, choose_slots, rms_norm),
    *(gated_delta, selective_scan, short_convolution, gated_norm),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in KERNELS}
