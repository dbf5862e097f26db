"""The slots that a decode step attends where it reads a share of them, for GPUs.

A slot is worth what it would get of attention over the index. So the kernel of that reads the index as it is packed, as keys
and as values, and gathers what slots got. Torch ranks them, as the twin does, for as many rows at once as it has room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import ranked_rows
from h2o_flexgen.formats.kernel_table import SUM
from h2o_flexgen.kernels.chosen_slots import Always, best_of
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.decode_attention import decode_attention
from h2o_flexgen.kernels.more_keys import More


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
    (rows, kv_heads, _, _), slots = q.shape, index.data.shape[2]
    beside = None if more is None else More(more.scores, None)
    _, worth = decode_attention(q, index, index, held, held, beside, SUM, cap)
    assert worth is not None, "sums were asked for"
    out, at_once = torch.empty(rows, kv_heads, most, dtype=torch.int64, device=q.device), ranked_rows(kv_heads, slots)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        out[part] = best_of(worth[part], held[part], counts[part], most, always, together)
    return out
