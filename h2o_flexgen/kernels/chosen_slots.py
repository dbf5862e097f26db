"""The slots that a decode step attends where it reads a share of them: chosen by its own query over an index of keys.

A slot is worth the attention that it would get from all query heads of its KV head, as scores over the index say it. The first
and the newest slots of a row are always chosen, then those that are worth most; among equals the older ones. What is NaN is
worth nothing. KV heads of a row may choose together, by what a slot is worth to all of them.

C and torch differ in the last bits of a worth, so that they may choose otherwise between slots that are worth nearly the same.
With queries of 16 bits C works in fixed point, as its attention over packed slots does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import ManyQueries, choosing_room
from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.decode_attention import KVSlots, StepAttention, decode_attention, kind_of
from h2o_flexgen.kernels.evict import take_slots
from h2o_flexgen.kernels.group_codes import group_decode_twin
from h2o_flexgen.kernels.more_keys import More, MoreKeys
from h2o_flexgen.kernels.native import KINDS, RECORDER, ValuePlaces, pointer, run


class Always(NamedTuple):
    """The slots of a row that are chosen whatever they are worth: so many of its first, and of its newest."""

    first: int
    recent: int


def choose_slots(
    q: Tensor,
    index: KVSlots,
    held: Tensor,
    counts: Tensor,
    most: int,
    always: Always,
    more: More | None = None,
    cap: float | None = None,
    together: bool = False,
) -> Tensor:
    (rows, kv_heads, group, dim), slots, threads = q.shape, index.data.shape[2], torch.get_num_threads()
    q, out = q.contiguous(), torch.empty(rows, kv_heads, most, dtype=torch.int64)
    room = torch.empty(choosing_room(rows * kv_heads, group, slots, threads, together), dtype=torch.float32)
    given = _SlotChoice(
        pointer(q),
        ValuePlaces.of(index.data, kind_of(index)),
        MoreKeys.of(more),
        *map(pointer, (held, counts, room, out)),
        *(rows, kv_heads, group, dim, slots, most),
        *always,
        dim**-0.5,
        KINDS[q.dtype],
        cap or 0.0,
        together,
    )
    run("choose_slots", given, threads)
    return out


def choose_slots_twin(
    q: Tensor,
    index: KVSlots,
    held: Tensor,
    counts: Tensor,
    most: int,
    always: Always,
    more: More | None = None,
    cap: float | None = None,
    together: bool = False,
) -> Tensor:
    """Rows go one after the other: the keys of one are decoded at a time, and what becomes of it depends on no other."""
    rows, kv_heads, _, _ = q.shape
    out = torch.empty(rows, kv_heads, most, dtype=torch.int64, device=q.device)
    for row in range(rows):
        keys, beside = KVSlots(index.data[row], index.format), None if more is None else more.scores[row, 0]
        one, worth = slice(row, row + 1), _worth(q[row], keys, held[row], beside, cap)
        out[one] = best_of(worth[None], held[one], counts[one], most, always, together)
    return out


def best_of(worth: Tensor, held: Tensor, counts: Tensor, most: int, always: Always, together: bool) -> Tensor:
    """The slots of most worth, which is (rows, kv_heads, slots) in fp32, as `choose_slots` gives them."""
    slots, held = worth.shape[-1], held[:, None, None]
    numbers, places = (torch.arange(count, device=worth.device) for count in (slots, most))
    is_always = (numbers < always.first) | (numbers >= held - always.recent)
    ranked = worth.nan_to_num(0.0)  # NaN would rank above what is always chosen
    ranked = ranked.masked_fill_(is_always, torch.inf).masked_fill_(numbers >= held, -torch.inf)
    ranked = ranked.sum(1, keepdim=True).expand_as(ranked) if together else ranked
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :most]
    behind = places >= counts[:, None, None]
    return order.masked_fill(behind, slots).sort(-1).values.masked_fill(behind, 0)


def _worth(q: Tensor, index: KVSlots, held: Tensor, more: Tensor | None, cap: float | None) -> Tensor:
    """What each slot of a row is worth, (kv_heads, slots) in fp32."""
    (kv_heads, group, dim), slots = q.shape, index.data.shape[1]
    keys = torch.empty(kv_heads * slots, dim, dtype=torch.float32, device=q.device)
    group_decode_twin(FORMATS[index.format], index.data.reshape(kv_heads * slots, -1), keys)  # type: ignore[arg-type]
    scores = (q.float() @ keys.view(kv_heads, slots, dim).transpose(1, 2)).mul_(dim**-0.5)
    scores = scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
    scores.masked_fill_(torch.arange(slots, device=q.device) >= held, -torch.inf)
    if more is not None:
        scores = torch.cat((scores, more.view(kv_heads, group, 1)), dim=-1)
    return scores.softmax(-1)[..., :slots].sum(1)


def chosen_attention(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    chosen: Tensor,
    counts: Tensor,
    more: More | None = None,
    gathers: str | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attends the chosen slots where they lie: the bits of `decode_attention` in C over copies of them. Where many query heads
    attend a KV head, it is that: tiles want their slots side by side."""
    (rows, kv_heads, group, dim), most = q.shape, chosen.shape[-1]
    if ManyQueries.of(group, most, dim) is not None:
        own = side_by_side(keys, chosen)
        copies = own, own if values is keys else side_by_side(values, chosen)
        return decode_attention(q, *copies, counts, q.new_empty(0), more, gathers, cap)
    q, is_wide = q.contiguous(), q.dtype == torch.float32
    out, shares = torch.empty_like(q), torch.empty(rows, kv_heads, group, most, dtype=torch.float32)
    as_wide = (q, out) if is_wide else tuple(torch.empty(q.shape, dtype=torch.float32) for _ in range(2))
    given = StepAttention(
        pointer(q),
        *(ValuePlaces.of(kept.data, kind_of(kept)) for kept in (keys, values)),
        MoreKeys.of(more),
        *map(pointer, (counts, out, *as_wide)),
        None,
        pointer(shares),
        *(rows, kv_heads, group, dim, most),
        dim**-0.5,
        KINDS[q.dtype],
        False,
        cap or 0.0,
        pointer(chosen),
    )
    run("chosen_attention", given, torch.get_num_threads())
    if gathers is None:
        return out, None
    got = torch.empty(rows, kv_heads, most, dtype=torch.float32)
    _by_torch(_highest_shares if gathers == MAX else _sums_of_shares, got, shares, counts)
    return out, got


def _sums_of_shares(got: Tensor, shares: Tensor, counts: Tensor) -> None:
    """What chosen slots got of the query heads of their KV head, one after the other as in C."""
    got.copy_(shares[:, :, 0])
    for head in range(1, shares.shape[2]):
        got.add_(shares[:, :, head])
    _clear_behind(got, counts)


def _highest_shares(got: Tensor, shares: Tensor, counts: Tensor) -> None:
    torch.amax(shares, 2, out=got)
    _clear_behind(got, counts)


def _clear_behind(got: Tensor, counts: Tensor) -> None:
    got.masked_fill_(torch.arange(got.shape[-1], device=got.device) >= counts[:, None, None], 0.0)


def by_slot(got: Tensor, chosen: Tensor, slots: int) -> Tensor:
    """What all slots got, (rows, kv_heads, slots), of what the chosen ones did: the others nothing."""
    out = torch.empty(*got.shape[:2], slots, dtype=torch.float32, device=got.device)
    _by_torch(_spread, out, chosen, got)
    return out


def _spread(out: Tensor, chosen: Tensor, got: Tensor) -> None:
    out.zero_().scatter_add_(-1, chosen, got)  # behind the chosen ones are slots 0 with nothing


def put_newest(codes: Tensor, counts: Tensor, new: Tensor) -> None:
    """Writes what is noted of the newest tokens, (rows, kv_heads, 1, bytes), behind so many slots of each row, in place."""
    _by_torch(_put_behind, codes, counts, new)


def _put_behind(codes: Tensor, counts: Tensor, new: Tensor) -> None:
    codes.scatter_(2, counts.view(-1, 1, 1, 1).expand(new.shape), new)


def move_newest(codes: Tensor, counts: Tensor, taken: Tensor) -> None:
    """Moves what is noted of the newest tokens, behind so many slots of each row, to a slot of each head (rows, kv_heads)."""
    _by_torch(_take_over, codes, counts, taken)


def _take_over(codes: Tensor, counts: Tensor, taken: Tensor) -> None:
    of_one = (*taken.shape, 1, codes.shape[-1])
    newest = codes.gather(2, counts.view(-1, 1, 1, 1).expand(of_one))
    codes.scatter_(2, taken[:, :, None, None].expand(of_one), newest)


def _by_torch(work: Callable[..., None], out: Tensor, *given: Tensor) -> None:
    """Torch does it, now or whenever the step that is recorded is repeated."""
    if (recorder := RECORDER.get()) is None:
        work(out, *given)
    else:
        recorder.by_torch(work, given, out)


def side_by_side(kept: KVSlots, chosen: Tensor) -> KVSlots:
    """Copies of chosen slots."""
    copies = kept.data.new_empty(*chosen.shape, kept.data.shape[-1])
    take_slots(kept.data, chosen, copies)
    return KVSlots(copies, kept.format)


class _SlotChoice(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("index", ValuePlaces),
        ("more", MoreKeys),
        *((name, ctypes.c_void_p) for name in ("held", "counts", "room", "out")),
        *((name, ctypes.c_long) for name in ("rows", "kv_heads", "group", "dim", "capacity", "most", "first", "recent")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int),
        ("cap", ctypes.c_float),
        ("together", ctypes.c_int),
    )
