"""The slots that a decode step attends where it reads a share of them: chosen by its own query over an index of keys.

A slot is worth the attention that it would get from all query heads of its KV head, as scores over the index say it. The first
and the newest slots of a row are always chosen, then those that are worth most; among equals the older ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.group_codes import group_decode_twin
from h2o_flexgen.kernels.more_keys import More


class Always(NamedTuple):
    """The slots of a row that are chosen whatever they are worth: so many of its first, and of its newest."""

    first: int
    recent: int


def choose_slots_twin(
    q: Tensor,
    index: KVSlots,
    held: Tensor,
    counts: Tensor,
    most: int,
    always: Always,
    more: More | None = None,
    cap: float | None = None,
) -> Tensor:
    """Rows go one after the other: the keys of one are decoded at a time, and what becomes of it depends on no other."""
    (rows, kv_heads, _, _), slots = q.shape, index.data.shape[2]
    out, places = torch.empty(rows, kv_heads, most, dtype=torch.int64, device=q.device), torch.arange(most, device=q.device)
    for row in range(rows):
        keys, beside = KVSlots(index.data[row], index.format), None if more is None else more.scores[row, 0]
        worth = _worth(q[row], keys, held[row], always, beside, cap)
        order = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :most]
        behind = places >= counts[row]
        out[row] = order.masked_fill(behind, slots).sort(-1).values.masked_fill(behind, 0)
    return out


def _worth(q: Tensor, index: KVSlots, held: Tensor, always: Always, more: Tensor | None, cap: float | None) -> Tensor:
    """What each slot of a row is worth, (kv_heads, slots) in fp32: more than any share where it is chosen in any case, less
    than any behind what is held."""
    (kv_heads, group, dim), slots = q.shape, index.data.shape[1]
    keys = torch.empty(kv_heads * slots, dim, dtype=torch.float32, device=q.device)
    group_decode_twin(FORMATS[index.format], index.data.reshape(kv_heads * slots, -1), keys)  # type: ignore[arg-type]
    scores = (q.float() @ keys.view(kv_heads, slots, dim).transpose(1, 2)).mul_(dim**-0.5)
    scores = scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
    numbers = torch.arange(slots, device=q.device)
    is_behind = numbers >= held
    scores.masked_fill_(is_behind, -torch.inf)
    if more is not None:
        scores = torch.cat((scores, more.view(kv_heads, group, 1)), dim=-1)
    worth = scores.softmax(-1)[..., :slots].sum(1)
    is_always = (numbers < always.first) | (numbers >= held - always.recent)
    return worth.masked_fill(is_always, torch.inf).masked_fill(is_behind, -torch.inf)
