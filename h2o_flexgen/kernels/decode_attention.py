"""Attention of one new token per row over the slots it holds, and what each slot got of it: in C on CPUs where the library is,
else in torch. The two differ in the last bits: C sums in another order, and keeps shares in float32."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.group_decode import group_decode
from h2o_flexgen.kernels.native import KINDS, Places, native_library, pointer
from h2o_flexgen.kernels.sizes import shared

PACKED_KINDS = {4: 2, 8: 3}  # by their bits, counted on from plain values


class Kept(NamedTuple):
    """Keys or values, (rows, kv_heads, slots, width): as they are computed with, or in groups of so many bits."""

    data: Tensor
    bits: int | None = None

    @property
    def kind(self) -> int | None:
        """None where C cannot read them."""
        if self.data.device.type != "cpu" or self.data.stride(3) != 1:
            return None
        return KINDS.get(self.data.dtype) if self.bits is None else PACKED_KINDS[self.bits]

    def values(self, dim: int, dtype: torch.dtype) -> Tensor:
        if self.bits is None:
            return self.data
        out = torch.empty(*self.data.shape[:3], dim, dtype=dtype, device=self.data.device)
        group_decode(self.data.contiguous().view(-1, self.data.shape[3]), out.view(-1, dim), self.bits)
        return out


def decode_attention(q: Tensor, keys: Kept, values: Kept, held: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """q (rows, kv_heads, group, dim); held (rows,), slots that count, the newest included, and as a mask to add (rows, 1, 1,
    slots) -> out like q, and sums (rows, kv_heads, slots) in float32."""
    native, dim = native_library(), q.shape[3]
    if native is None or keys.kind is None or values.kind is None or dim > shared().step_head_values:
        return decode_attention_twin(q, keys.values(dim, q.dtype), values.values(dim, q.dtype), mask)
    rows, kv_heads, group, _ = q.shape
    slots = keys.data.shape[2]
    floats, shares = q.float().contiguous(), torch.empty(rows, kv_heads, group, slots, dtype=torch.float32)
    out, sums = torch.empty_like(floats), torch.empty(rows, kv_heads, slots, dtype=torch.float32)
    places = (pointer(held), pointer(out), pointer(sums), pointer(shares))
    sizes = (rows, kv_heads, group, dim, slots)
    given = _Attention(
        pointer(floats), Places.of(keys.data, keys.kind), Places.of(values.data, values.kind), *places, *sizes, dim**-0.5
    )
    native.decode_attention(ctypes.byref(given), ctypes.c_int(torch.get_num_threads()))
    return out.to(q.dtype), sums


def decode_attention_twin(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    # over all slots, empty ones masked: a slice of the slots is not contiguous, and bf16 products of it are 4 times slower
    scores = torch.matmul(q, keys.transpose(2, 3)).float().mul_(q.shape[-1] ** -0.5).add_(mask)
    shares = torch.softmax(scores, dim=-1)  # (rows, kv_heads, group, slots)
    return torch.matmul(shares.to(values.dtype), values), shares.sum(2)


class _Attention(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", Places),
        ("values", Places),
        *((name, ctypes.c_void_p) for name in ("held", "out", "sums", "shares")),
        *((name, ctypes.c_long) for name in ("rows", "kv_heads", "group", "dim", "capacity")),
        ("scale", ctypes.c_float),
    )
