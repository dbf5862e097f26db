"""Decoding the forms of checkpoints in C gives the bits that torch gives, whatever the bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.table import STORED, Stored
from h2o_flexgen.kernels.operations import decode
from h2o_flexgen.kernels.stored_values import stored_decode_twin
from tests.helpers.all_of import all_of
from tests.kernels.stored import SOME, inputs_of, random_matrix
from tests.kernels.variants import VARIANTS, used, without

SHAPES = [(1, 32), (37, 300), (5, 1), (130, 700)]  # outputs, and inputs that are filled up to those of a form
UNTOUCHED = 1e30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def twin(format: Stored, data: Tensor, out: Tensor) -> Tensor:
    stored_decode_twin(format, data, out)
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN has many bits."""
    integers = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return bool(((one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"format": SOME})
def test_c_gives_the_bits_of_torch(variant: str, format: Stored) -> None:
    for outputs, least in SHAPES:
        shape = outputs, inputs_of(format, least)
        data = random_matrix(format, *shape)
        for dtype in DTYPES:
            ours = torch.empty(shape, dtype=dtype)
            with used(variant), without("stored_decode_twin"):
                decode(format.name, data, ours)
            assert same_bits(ours, twin(format, data, torch.empty(shape, dtype=dtype))), (shape, dtype)


@all_of({"format": STORED})
def test_all_bytes_mean_the_same_in_c(format: Stored) -> None:
    """Scales that are infinite, no numbers, subnormal or negative too."""
    shape = 9, inputs_of(format, 500)
    data = torch.randint(0, 256, (1, format.nbytes(shape, 0)), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    if getattr(format, "ordered", False):
        data[0, -(-shape[1] * 4 // 64) * -64 :][: shape[1] * 4] = torch.randperm(shape[1]).int().view(torch.uint8)
    data = data.view(9, -1) if isinstance(format, Blocked) else data
    ours = torch.empty(shape)
    decode(format.name, data, ours)
    assert same_bits(ours, twin(format, data, torch.empty(shape)))


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"format": SOME})
def test_nothing_is_written_behind_the_last_value(variant: str, format: Stored) -> None:
    inputs = inputs_of(format, 70)
    room = torch.full((3 * inputs + 64,), UNTOUCHED)
    with used(variant):
        decode(format.name, random_matrix(format, 3, inputs), room[: 3 * inputs].view(3, inputs))
    assert (room[3 * inputs :] == UNTOUCHED).all() and (room[: 3 * inputs] != UNTOUCHED).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_columns_that_name_no_input_are_written_nowhere(variant: str) -> None:
    format = next(format for format in SOME if getattr(format, "ordered", False))
    data, room = random_matrix(format, 2, 128), torch.full((6, 128), UNTOUCHED)
    data[0, -512:].view(torch.int32)[:2] = torch.tensor([-1, 128])
    with used(variant):
        decode(format.name, data, room[2:4])
    assert (room[:2] == UNTOUCHED).all() and (room[4:] == UNTOUCHED).all() and (room[2:4] == UNTOUCHED).sum() == 4
