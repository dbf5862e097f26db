"""Matrices in forms of checkpoints on a GPU: decoded to the bits that torch gives, and multiplied as their values."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.fp8 import Fp8
from h2o_flexgen.formats.int4 import Int4
from h2o_flexgen.formats.kernel_table import CUDA, DECODE, PRODUCT, TRITON, Processor
from h2o_flexgen.formats.table import BLOCKED, FORMATS, STORED, Stored
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.stored_product import product_of, stored_product
from h2o_flexgen.kernels.gpu.stored_values import stored_decode
from h2o_flexgen.kernels.stored_values import stored_decode_twin
from tests.helpers.samples import every_nth
from tests.kernels.stored import SOME, inputs_of, random_matrix

ODD = Fp8(1, 32, "e8m0")  # rows of any number of inputs, which begin in the middle of a word
ORDERED = Int4(128, "bfloat16", False, True)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the sum of what is added up: one rounding


def name_of(format: Stored) -> str:
    return format.name


def twin(format: Stored, data: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=data.device)
    stored_decode_twin(format, data, out)
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN has many bits."""
    integers = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return bool(((one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())).all())


def x_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs)).to(dtype)


def test_a_launch_is_kept_for_one_type_of_a_bias(gpu: torch.device) -> None:
    format, inputs = SOME[0], inputs_of(SOME[0], 64)
    data, x, bias = random_matrix(format, 5, inputs).to(gpu), x_of(1, inputs).to(gpu), x_of(1, 5)[0].to(gpu)
    plain = stored_product(format, Factor(x), data, 5, None)
    product_of.cache_clear()
    for added in (bias, bias.half(), bias.bfloat16()):
        assert torch.equal(stored_product(format, Factor(x), data, 5, added), plain + added.float())
    assert product_of.cache_info().currsize == 3


# -- decoding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", every_nth(SOME, 2), ids=name_of)
def test_decoding_gives_the_bits_of_torch(gpu: torch.device, format: Stored) -> None:
    for outputs, least, dtype in ((1, 1, torch.bfloat16), (5, 1100, torch.float32), (37, 300, torch.float16)):
        shape = outputs, inputs_of(format, least)
        data, room = random_matrix(format, *shape).to(gpu), torch.full((outputs + 1, shape[1]), 7.0, dtype=dtype, device=gpu)
        stored_decode(format, data, room[:outputs])
        assert same_bits(room[:outputs], twin(format, data, shape, dtype)) and (room[outputs] == 7.0).all(), shape


@pytest.mark.parametrize("format", STORED, ids=name_of)
def test_all_bytes_mean_what_they_mean_in_torch(gpu: torch.device, format: Stored) -> None:
    """Scales that are infinite, no numbers, subnormal or negative too."""
    shape = 3, inputs_of(format, 200)
    data = torch.randint(0, 256, (format.nbytes(shape, 0),), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    if isinstance(format, Int4) and format.ordered:
        data[-4 * shape[1] :] = torch.randperm(shape[1]).int().view(torch.uint8)
    data, found = data.view(3 if format in BLOCKED else 1, -1).to(gpu), torch.empty(shape, device=gpu)
    stored_decode(format, data, found)
    assert same_bits(found, twin(format, data, shape))


def test_columns_that_name_no_input_are_written_nowhere(gpu: torch.device) -> None:
    data, room = random_matrix(ORDERED, 2, 128), torch.full((6, 128), 7.0, device=gpu)
    data[0, -512:].view(torch.int32)[:2] = torch.tensor([-1, 128])
    stored_decode(ORDERED, data.to(gpu), room[2:4])
    assert (room[:2] == 7.0).all() and (room[4:] == 7.0).all() and (room[2:4] == 7.0).sum() == 4


# -- products --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", every_nth(SOME, 2), ids=name_of)
def test_products_are_those_of_the_values(gpu: torch.device, format: Stored) -> None:
    for outputs, least, rows, dtype in ((1, 1, 2, torch.float16), (13, 600, 1, torch.float32), (9, 1500, 7, torch.bfloat16)):
        shape = outputs, inputs_of(format, least)
        data, x = random_matrix(format, *shape).to(gpu), x_of(rows, shape[1], dtype).to(gpu)
        added = x_of(1, outputs, dtype)[0].to(gpu) if rows == 7 else None
        found = stored_product(format, Factor(x.view(rows, 1, -1)), data, outputs, added)
        values, wide = twin(format, data, shape).double(), x.double()
        expected = wide @ values.T + (0 if added is None else added.double())
        most = expected.abs() + wide.abs() @ values.abs().T + wide.abs().sum(1, keepdim=True) * values.abs().amax()
        assert found.shape == (rows, 1, outputs) and found.dtype == dtype
        assert ((found[:, 0].double() - expected).abs() <= TOLERANCES[dtype] * most).all(), (shape, rows)


@pytest.mark.parametrize("name", ["q4_K", "q8_0", "fp4-32"])
def test_a_row_comes_out_the_same_in_any_company(gpu: torch.device, name: str) -> None:
    data, x = random_matrix(FORMATS[name], 5, 512).to(gpu), x_of(7, 512).to(gpu)
    alone = [stored_product(FORMATS[name], Factor(row[None]), data, 5, None) for row in x]
    for rows in (2, 3, 7):
        assert torch.equal(stored_product(FORMATS[name], Factor(x[:rows]), data, 5, None), torch.cat(alone[:rows])), rows


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_stays_none(gpu: torch.device, value: float) -> None:
    for format in (FORMATS["q6_K"], FORMATS["q4_1"], FORMATS["int4-32-float16-zeros"]):
        x = x_of(3, 256).to(gpu)
        x[1, 255] = value
        found = stored_product(format, Factor(x), random_matrix(format, 9, 256).to(gpu), 9, None)
        assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2].isfinite().all()


def test_codes_behind_a_row_are_not_multiplied(gpu: torch.device) -> None:
    data, x = random_matrix(ODD, 3, 37), x_of(2, 37)
    data[0, [37, 74]] = 0x7F  # no number begins the second and the third row
    found = stored_product(ODD, Factor(x.to(gpu)), data.to(gpu), 3, None)
    assert found[:, 0].isfinite().all() and found[:, 1:].isnan().all()


def test_a_gpu_is_given_these_kernels(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON))
    for format in STORED:
        chosen = [
            operations.chosen(op, format.name, torch.empty(0), rows) for op, rows in ((DECODE, 1), (PRODUCT, 8), (PRODUCT, 9))
        ]
        assert chosen == [stored_decode, stored_product, None], format.name
    data, numbers, found = (
        random_matrix(BLOCKED[0], 9, 64).to(gpu),
        torch.tensor([8, 0, 8], device=gpu),
        torch.empty(3, 64, device=gpu),
    )
    operations.decode_rows(BLOCKED[0].name, data, numbers, found)
    assert same_bits(found, twin(BLOCKED[0], data, (9, 64))[numbers])


def test_nothing_comes_to_nothing(gpu: torch.device) -> None:
    format = FORMATS["q4_0"]
    data = random_matrix(format, 2, 64).to(gpu)
    stored_decode(format, data[:0], torch.empty(0, 64, device=gpu))
    assert stored_product(format, Factor(torch.empty(0, 64, device=gpu)), data, 2, None).shape == (0, 2)
