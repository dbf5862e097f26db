"""Group codecs: sizes by hand, errors within half a scale, and rows that stand alone."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from h2o_flexgen.formats.grouped import GROUP, Grouped
from h2o_flexgen.kernels.operations import decode, encode

BITS = (4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encoded(format: Grouped, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(format.nbytes(tuple(values.shape), values.itemsize), dtype=torch.uint8)
    encode(format.name, values, out)
    return out


def there_and_back(format: Grouped, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    decode(format.name, encoded(format, values), out)
    return out


@pytest.mark.parametrize(("bits", "shape", "nbytes"), [
    (4, (3, 64), 3 * 36), (4, (3, 65), 3 * 72), (4, (5, 1), 5 * 36), (4, (2, 7, 128), 14 * 72), (8, (3, 64), 3 * 68),
    (4, (12288, 49152), 12288 * 768 * 36),
])  # fmt: skip
def test_sizes_by_hand(bits: int, shape: tuple[int, ...], nbytes: int) -> None:
    assert Grouped(bits).nbytes(shape, 2) == Grouped(bits).nbytes(shape, 4) == nbytes


def test_four_bits_by_hand() -> None:
    """The codes 0 to 15, four times over, with a scale of 2 and a minimum of -8; the layout is written out."""
    values = torch.tensor([-8.0 + 2 * (place % 16) for place in range(GROUP)])
    data = encoded(Grouped(4), values.view(1, -1)).numpy()
    codes = [place % 16 for place in range(GROUP)]
    assert data[:32].tolist() == [codes[place] | codes[place + 32] << 4 for place in range(32)]
    assert data[32:36].view(numpy.uint16).tolist() == [0x4000, 0xC100]  # 2 and -8 as bfloat16
    assert torch.equal(there_and_back(Grouped(4), values), values)


@settings(max_examples=60, deadline=None)
@given(
    bits=draw.sampled_from(BITS),
    dtype=draw.sampled_from(DTYPES),
    shape=draw.sampled_from([(1, 64), (5, 64), (3, 130), (7, 1), (2, 3, 100)]),
    exponent=draw.integers(-6, 3),
    offset=draw.sampled_from([0.0, 1.0, -300.0]),
    seed=draw.integers(0, 1000),
)
def test_no_value_is_off_by_more_than_half_a_scale(
    bits: int, dtype: torch.dtype, shape: tuple[int, ...], exponent: int, offset: float, seed: int
) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent + offset).to(dtype)
    back = there_and_back(Grouped(bits), values)
    for row, own in zip(values.float().view(-1, shape[-1]), back.view(-1, shape[-1])):
        for start in range(0, shape[-1], GROUP):
            group, decoded = row[start : start + GROUP], own[start : start + GROUP]
            span = float(group.max() - group.min())
            # minimum and scale are bfloat16, rounded outwards: 8 bits of each
            scale = (span + abs(float(group.min())) * 2**-7) / (2**bits - 1) * (1 + 2**-7)
            assert float((group - decoded).abs().max()) <= scale / 2 * (1 + 1e-4) + 1e-30


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 0.1, 3e-30, 1e30])
def test_a_constant_group_stays_constant(bits: int, value: float) -> None:
    """And keeps its value where bfloat16 has it; where not, it is off by no more than bfloat16 would be."""
    back = there_and_back(Grouped(bits), torch.full((2, 96), value))
    assert len(back.unique()) == 1
    assert abs(float(back[0, 0]) - value) <= abs(value) * 2**-8
    if torch.tensor(value).bfloat16().float() == value:
        assert float(back[0, 0]) == value


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_encoded_alone(bits: int) -> None:
    """The bytes of some rows are a range of the bytes of all: a slot, or a part of a matrix, can be rewritten."""
    format, values = Grouped(bits), torch.randn(11, 130)
    whole = encoded(format, values)
    row = format.nbytes((1, 130), 4)
    for first, last in ((0, 1), (3, 7), (10, 11)):
        assert torch.equal(encoded(format, values[first:last]), whole[first * row : last * row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 64, 130, 1024])
@pytest.mark.parametrize("bits", BITS)
def test_rows_are_decoded_alone(bits: int, columns: int, dtype: torch.dtype) -> None:
    """Some rows, in any order and again, come out as when all are decoded and these are taken: to the bit."""
    format, values, rows = Grouped(bits), torch.randn(200, columns), torch.tensor([7, 0, 199, 7, 64])
    data, whole = encoded(format, values).view(200, -1), there_and_back(format, values, dtype)
    for chosen in (rows, slice(64, 128), slice(195, 200), slice(3, 4)):
        out = torch.empty_like(whole[chosen])
        decode(format.name, data[chosen], out)
        assert torch.equal(out, whole[chosen])
