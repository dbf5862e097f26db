"""KV in host memory of which a device fetches what steps choose: rows in their places, and what a text that goes on finds."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.engine.stores.kv_rows import KVRows, PlacesOnDevice
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.memory.device import Device

ROWS, HEADS, SLOTS, WIDTH = 3, 2, 5, 4
LAYOUT = KVLayout(ROWS, HEADS, SLOTS, 0, 2 * HEADS * WIDTH * 4, by_row=True)
CODING = Coding(PLAIN, torch.float32, WIDTH)


class Counted(Device):
    def __init__(self) -> None:
        super().__init__()
        self.uploaded = list[list[int]]()

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        self.uploaded.append(values.tolist())
        return values


def bytes_of(value: float) -> Tensor:
    return torch.full((LAYOUT.image_bytes // 4,), value).view(torch.uint8)


def rows_over(home: Tensor, device: Device | None = None, on_device: PlacesOnDevice | None = None) -> KVRows:
    device = device or Device()
    return KVRows(home, LAYOUT, CODING, device, on_device or PlacesOnDevice(device))


def test_a_text_that_goes_on_has_zeros_behind_its_shorter_rows() -> None:
    """Whatever was there: a home may be memory that others have used."""
    home, buffer, counts = bytes_of(torch.nan), bytes_of(7.0), (4, 2, 3)
    kept = rows_over(home)
    for row, count in enumerate(counts):
        kept.image(home)[:, row, :, :count] = row + 1.0
    assert kept.load(buffer, counts, max(counts)) == ROWS * max(counts) * LAYOUT.row_bytes
    image = kept.image(buffer)
    for row, count in enumerate(counts):
        assert (image[:, row, :, :count] == row + 1).all() and (image[:, row, :, count : max(counts)] == 0).all()
        assert (image[:, row, :, max(counts) :] == 7).all()


def test_rows_that_move_up_are_stored_and_found_at_their_places() -> None:
    home, buffer = bytes_of(0.0), bytes_of(0.0)
    kept = rows_over(home)
    kept.keep_rows([2, 1])  # the first has left
    image = kept.image(buffer)
    image[:, 0], image[:, 1], image[:, 2] = 1.0, 2.0, 3.0
    changed = torch.tensor([[4, 0]])  # of one row; prompts are read for the others
    moved = kept.store(buffer, [RowRange(0, 4, 5), RowRange(1, 0, 2), RowRange(2, 0, 5)], changed)
    assert moved == (1 + 2 + 5) * LAYOUT.row_bytes
    wanted = torch.zeros(2, ROWS, HEADS, SLOTS, WIDTH)
    wanted[:, 2, 0, 4], wanted[:, 2, 1, 0], wanted[:, 1, :, :2], wanted[:, 0] = 1.0, 1.0, 2.0, 3.0
    assert torch.equal(kept.image(home), wanted)


def test_layers_of_a_batch_have_the_numbers_of_places_once() -> None:
    device = Counted()
    on_device = PlacesOnDevice(device)
    layers = [rows_over(bytes_of(0.0), device, on_device) for _ in range(3)]
    for kept in ([2, 1], [1], [0]):
        for layer in layers:
            layer.keep_rows(kept)
    assert device.uploaded == [[2, 1, 0], [1, 2, 0]]
