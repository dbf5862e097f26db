"""Changed slots that were gathered come home to where they belong, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.evict import NUMBER, ChangedSlots, gather_slots_twin


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 5), (torch.bfloat16, 3), (torch.uint8, 36)])
def test_what_was_gathered_comes_home_bit_for_bit(rows: int, dtype: torch.dtype, width: int) -> None:
    all_rows, heads, slots = 3, 2, 7
    numbers_of_values = slots * 2 * all_rows * heads * width
    image, home = (torch.randint(256, (numbers_of_values * dtype.itemsize,), dtype=torch.uint8) for _ in range(2))
    replaced = torch.randint(slots, (rows, heads), dtype=NUMBER)
    changed = ChangedSlots(rows, (all_rows, heads, slots), 2 * all_rows * heads * width * dtype.itemsize)
    gathered, wanted = torch.empty(changed.nbytes, dtype=torch.uint8), home.clone()

    by_slot = image.view(dtype).view(slots, 2, all_rows, heads, width).permute(1, 2, 3, 0, 4)
    gather_slots_twin(by_slot[:, :rows], replaced, gathered)
    home_with_padding = torch.cat((home, torch.zeros(9, dtype=torch.uint8)))
    changed.bring(gathered, home_with_padding)

    parts = (slots, 2, all_rows, heads, width * dtype.itemsize)
    for row in range(rows):
        for head in range(heads):
            slot = int(replaced[row, head])
            wanted.view(parts)[slot, :, row, head] = image.view(parts)[slot, :, row, head]
    assert torch.equal(home_with_padding[: len(wanted)], wanted)
    assert torch.equal(changed.numbers(gathered), replaced)
