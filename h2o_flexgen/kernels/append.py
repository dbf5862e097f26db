"""The rotation of heads, and the newest token of each row in the cache. In C and in torch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.evict import Newest, Notes, NotesInC
from h2o_flexgen.kernels.native import KINDS, ValuePlaces, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of

# -- rotate ----------------------------------------------------------------------------------------------------------------
# The rotation of heads: pairs (j, j + half) of a head's first 2 * half values are turned, the rest stays. How far a
# position is turned is the same in all layers, so sines and cosines are made once for a step. Each product is rounded to
# the type of the values, as torch does it, so kernels give the same bits.


class RotationAngles(NamedTuple):
    """Cosines and sines of the pairs of each token's heads, in the type of the values. (rows, tokens, 1, half)"""

    cos: Tensor
    sin: Tensor

    def of(self, tokens: slice) -> RotationAngles:
        """Those of some of the tokens."""
        return RotationAngles(self.cos[:, tokens], self.sin[:, tokens])

    def of_pairs(self, count: int) -> RotationAngles:
        """Those of the first pairs."""
        return RotationAngles(self.cos[..., :count], self.sin[..., :count])


def rotate(x: Tensor, turn: RotationAngles) -> Tensor:
    (rows, tokens, heads, dim), half = x.shape, turn.cos.shape[-1]
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = (each.contiguous() for each in turn)
    assert cos.dtype == sin.dtype == x.dtype and cos.shape == sin.shape == (rows, tokens, 1, half) and 2 * half <= dim
    out = torch.empty(x.shape, dtype=x.dtype)
    places = ValuePlaces.of(x.transpose(1, 2), KINDS[x.dtype])
    given = _Rotation(places, *map(pointer, (cos, sin, out)), *(rows, heads, tokens, dim, half))
    run("rotate", given, threads_for(x.numel()))
    return out


def rotate_twin(x: Tensor, turn: RotationAngles) -> Tensor:
    cos, sin = turn
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=turned[..., :half])
    torch.add(second * cos, first * sin, out=turned[..., half : 2 * half])
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("x", ValuePlaces),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "out")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "tokens", "dim", "half")),
    )


# -- append ----------------------------------------------------------------------------------------------------------------
# The newest token of each row in the cache: query and key are rotated, key and value go behind what the row holds, and its
# position is noted with a score of 0, and with what it is worth. Where keys have the values in them, there are none apart. C
# and torch give the same bits.


def append(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    (rows, _, query_heads, dim), keys = q.shape, image[0]
    q, *kept = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v) if x is not None)
    assert all(x.shape == (rows, 1, keys.shape[1], keys.shape[3]) and x.dtype == keys.dtype for x in kept)
    assert len(kept) == len(image)
    cos, sin = (None, None) if turn is None else (each.contiguous() for each in turn)
    half = 0 if cos is None else cos.shape[-1]
    if cos is not None:
        assert q.dtype == keys.dtype == cos.dtype and cos.shape == (rows, 1, 1, half) and keys.shape[3] == dim >= 2 * half
    assert notes is None or notes.worth is None or (worth is not None and worth.dtype == torch.float32)
    out = q if cos is None else torch.empty(q.shape, dtype=q.dtype)
    given = _Appending(
        *(ValuePlaces.of(x, writes=True) for x in (image[0], image[-1])),
        *(ValuePlaces.of(x.transpose(1, 2), KINDS[q.dtype]) for x in (q, kept[0])),
        ValuePlaces.of(kept[1].transpose(1, 2), KINDS[q.dtype]) if len(kept) > 1 else ValuePlaces(),
        *(None if x is None else pointer(x) for x in (cos, sin, out if turn is not None else None)),
        *(pointer(x) for x in (newest.slots, newest.positions)),
        NotesInC.of(notes),
        None if worth is None else address_of(worth),
        *((0, 0) if worth is None else worth.stride()),
        *(rows, keys.shape[1], query_heads, dim, half, keys.shape[3] * keys.itemsize),
    )
    run("append", given, threads_for(q.numel() + sum(x.numel() for x in kept)))
    return out


def append_twin(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    if turn is not None:
        q, k = rotate_twin(q, turn), rotate_twin(k, turn)
    for kept, new in zip(image, (k,) if v is None else (k, v), strict=True):
        is_one = kept.stride(0) == 0  # one row, several times
        kept[: 1 if is_one else None][0 * newest.rows if is_one else newest.rows, :, newest.slots] = new[:, 0]
    if notes is not None:
        notes.positions[newest.rows, :, newest.slots] = newest.positions.int()
        if notes.scores is not None:
            nothing = notes.scores.new_zeros(())  # a number of Python would come from the host, and wait for the device
            notes.scores[newest.rows, :, newest.slots] = nothing
        if notes.worth is not None:
            assert worth is not None
            notes.worth[newest.rows, :, newest.slots] = worth
    return q


class _Appending(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("keys", "values", "q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "out", "slot", "position")),
        ("notes", NotesInC),
        ("worth", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("worth_row", "worth_head")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "query_heads", "dim", "half", "nbytes")),
    )
