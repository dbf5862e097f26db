"""Random matrices in the forms of checkpoints: bytes of all kinds, with scales that are finite and not too far apart."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import EXPONENT, SCALE_AND_MINIMUM, SIX_BITS, SIXTEENS, section_starts
from h2o_flexgen.formats.fp8 import Fp8
from h2o_flexgen.formats.int4 import Int4
from h2o_flexgen.formats.mxfp4 import MXFP4_SECTIONS
from h2o_flexgen.formats.table import BLOCKED, Stored

SOME = (
    *BLOCKED,
    MXFP4_SECTIONS,
    *(Fp8(128, 128, "float32"), Fp8(1, 32, "e8m0"), Fp8(1, 0, "bfloat16"), Fp8(0, 0, "float16")),
    *(Int4(32, "float16", True, False), Int4(128, "bfloat16", False, True), Int4(64, "float16", False, False)),
)  # every layout once, and every type of scales
FLOATS = {SCALE_AND_MINIMUM: (0, 2), SIX_BITS: (0, 2), SIXTEENS: (16,)}  # bytes at which those of a block lie
NAN_CODE = 0x7F  # of float8, but for its sign


def inputs_of(format: Stored, least: int) -> int:
    """So many inputs or a few more, as the form can have them."""
    unit = format.values if isinstance(format, Blocked) else 1 if isinstance(format, Fp8) else format.layout.shared_inputs
    return -(-least // unit) * unit


def random_matrix(format: Stored, outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """(rows, bytes of a row), or (1, bytes) of a form in sections"""
    draw = torch.Generator().manual_seed(seed + outputs + inputs)
    data = torch.randint(0, 256, (format.nbytes((outputs, inputs), 0),), generator=draw, dtype=torch.uint8)
    if isinstance(format, Blocked):
        return _blocks(format, data.view(-1, format.block_bytes), draw).view(outputs, -1)
    starts, sizes = section_starts(format, (outputs, inputs)), format.sections((outputs, inputs))
    parts = [data[start : start + size] for start, size in zip(starts, sizes)]
    parts[1].copy_(_scales(format.scale, parts[1].numel(), draw))
    if isinstance(format, Fp8):
        parts[0][parts[0] & NAN_CODE == NAN_CODE] = 0
    if isinstance(format, Int4) and format.ordered:
        parts[-1].copy_(torch.randperm(inputs, generator=draw).int().view(torch.uint8))
    return data.view(1, -1)


def _blocks(format: Blocked, blocks: Tensor, draw: torch.Generator) -> Tensor:
    shared, start = format.layout.shared, format.layout.shared_at
    if shared == EXPONENT:
        blocks[:, 0] = _scales("e8m0", len(blocks), draw)
    else:
        for at in FLOATS.get(shared, (0,)):
            blocks[:, start + at : start + at + 2] = _scales("float16", 2 * len(blocks), draw).view(-1, 2)
    return blocks


def _scales(kind: str, nbytes: int, draw: torch.Generator) -> Tensor:
    """Around 1/100, of either sign where the type has one."""
    if kind == "e8m0":
        return torch.randint(116, 124, (nbytes,), generator=draw, dtype=torch.uint8)
    dtype: torch.dtype = getattr(torch, kind)
    return torch.randn(nbytes // dtype.itemsize, generator=draw).mul_(0.01).to(dtype).view(torch.uint8)
