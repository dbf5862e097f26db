"""Codes, zero points and orders as packers of the specifications write them come back as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.checkpoints import importing
from tests.helpers.quantised import AWQ_ORDER, in_words, signed

SIZES = (64, 96)  # outputs and inputs


def drawn(*shape: int) -> Tensor:
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(sum(shape)))


def two_to_a_byte(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def test_codes_of_awq() -> None:
    codes = drawn(*SIZES)
    assert torch.equal(importing.awq_codes(in_words(codes.T, 1, AWQ_ORDER)), two_to_a_byte(codes))


def test_codes_of_gptq() -> None:
    codes = drawn(*SIZES)
    assert torch.equal(importing.gptq_codes(in_words(codes.T, 0)), two_to_a_byte(codes))


def test_codes_of_compressed_tensors_are_bytes_as_they_are() -> None:
    codes = drawn(*SIZES)
    assert torch.equal(in_words(codes, 1).view(torch.uint8), two_to_a_byte(codes))


def test_columns_in_another_order() -> None:
    codes, order = drawn(*SIZES), torch.randperm(SIZES[1])
    assert torch.equal(importing.in_order(two_to_a_byte(codes), order), two_to_a_byte(codes[:, order]))


@pytest.mark.parametrize("outputs", [8, 64])
def test_zero_points(outputs: int) -> None:
    zeros = drawn(outputs, 3)
    assert torch.equal(importing.awq_zeros(in_words(zeros.T, 1, AWQ_ORDER)), zeros.to(torch.uint8))
    words = in_words(zeros.T, 1)
    assert torch.equal(importing.gptq_zeros(words, one_less=False), zeros.to(torch.uint8))
    less = signed(words.long() - 0x11111111)
    assert bool((zeros == 0).any()), "one less than nothing borrows"
    assert torch.equal(importing.gptq_zeros(less, one_less=True), zeros.to(torch.uint8))


@pytest.mark.parametrize("outputs", [1, 13, 64])
def test_zero_points_along_outputs_that_do_not_fill_their_words(outputs: int) -> None:
    zeros = drawn(outputs, 3)
    assert torch.equal(importing.compressed_zeros(in_words(zeros, 0), outputs), zeros.to(torch.uint8))


def test_the_order_of_inputs_puts_groups_one_behind_the_other() -> None:
    groups = torch.tensor([1, 0, 0, 1, 2, 2], dtype=torch.int32)
    order = importing.order_of(groups, 2)
    assert order is not None and order.dtype == torch.int32
    assert order.tolist() == [1, 2, 0, 3, 4, 5]


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 0, 0, 0]], ids=["in order", "never filled in"])
def test_no_order_where_groups_lie_in_order(groups: list[int]) -> None:
    assert importing.order_of(torch.tensor(groups, dtype=torch.int32), 2) is None


@pytest.mark.parametrize(
    ("groups", "problem"), [([0, 0, 1, 2], "not one of 2"), ([0, -1, 1, 1], "not one of 2"), ([0, 0, 0, 1], "2 inputs")]
)
def test_orders_that_cannot_be(groups: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        importing.order_of(torch.tensor(groups, dtype=torch.int32), 2)
