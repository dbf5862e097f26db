"""Weights that are made up in memory: a folder that has a config and the shapes of tensors, and no file of weights.

Where a GPU is lent for minutes, there is no time to write 60 GB of random weights and to read them again for every system. All
values are cuts of one random block, so that making them costs a copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = "shapes.json"
BLOCK_VALUES = 4_194_301  # a prime: rows of a matrix are not alike
SPREAD = 0.02
MOST_THREADS = 8


def is_made_up(checkpoint: str) -> bool:
    return (Path(checkpoint) / SHAPES).is_file()


def write_shapes(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Written last, so that a folder which has it is whole."""
    (folder / SHAPES).write_text(json.dumps({name: list(shape) for name, shape in shapes.items()}), encoding="utf-8")


def shapes_in(checkpoint: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads((Path(checkpoint) / SHAPES).read_text(encoding="utf-8"))
    return found


def fill(tensors: Iterable[Tensor]) -> None:
    """Gives every tensor random values; those that lie around one, of norms, are not known here, and lie around zero too."""
    import torch

    wanted = [tensor.data.view(-1) for tensor in tensors]
    blocks: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for flat in wanted:
        key = flat.device, flat.dtype
        if key not in blocks:
            generator = torch.Generator().manual_seed(0)
            blocks[key] = torch.empty(BLOCK_VALUES).normal_(0.0, SPREAD, generator=generator).to(flat.device, flat.dtype)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:  # copies let other threads of Python run
        list(threads.map(lambda flat: _repeat(blocks[flat.device, flat.dtype], flat), wanted))


def _repeat(block: Tensor, flat: Tensor) -> None:
    for start in range(0, len(flat), len(block)):
        piece = flat[start : start + len(block)]
        piece.copy_(block[: len(piece)])
