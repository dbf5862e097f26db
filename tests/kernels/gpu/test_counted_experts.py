"""Rows of experts that memory alone counts come out with the bits that they have where Python counts them, and nothing waits
for the router's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.formats.grouped import Tiled
from h2o_flexgen.formats.kernel_table import CUDA, HALVES, ROWS_OF_COUNTED, TRITON, Processor
from h2o_flexgen.formats.table import FORMATS, PLAIN, PlainFormat, Stored
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.gpu.counted_experts import (
    add_counted,
    counted_plain_products,
    counted_stored_products,
    counted_tile_products,
    gather_counted,
)
from h2o_flexgen.kernels.gpu.launching import Launch, Launcher
from h2o_flexgen.kernels.gpu.stored_product import stored_product
from h2o_flexgen.kernels.gpu.tile_product import tile_product
from h2o_flexgen.kernels.matrix import PackedMatrix, can_be_counted
from h2o_flexgen.kernels.routing import Chosen, gather_chosen_twin
from h2o_flexgen.kernels.row_functions import add_weighted_twin
from h2o_flexgen.models import mixture
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts, Routed
from h2o_flexgen.models.tensor_ops import gating
from tests.helpers.samples import first_of, spread
from tests.kernels.stored import inputs_of, random_matrix
from tests.kernels.test_tile_product import packed, x_of

EXPERTS, OWN, WIDTH, INNER = 7, range(2, 6), 96, 128


def a_choice(tokens: int, each: int, never: int = 4) -> Chosen:
    """Of each token other experts, of all but one; beside each other in wider rows, as in states between slices."""
    draw = torch.Generator().manual_seed(10 * tokens + each)
    those = torch.tensor([expert for expert in range(EXPERTS) if expert != never])
    numbers = torch.stack([those[torch.randperm(EXPERTS - 1, generator=draw)[:each]] for _ in range(tokens)]).int()
    wide = torch.zeros(tokens, 3 * each)
    wide[:, each : 2 * each], wide.view(torch.int32)[:, 2 * each :] = torch.rand(tokens, each, generator=draw), numbers
    return Chosen(wide[:, each : 2 * each], wide.view(torch.int32)[:, 2 * each :])


@pytest.mark.parametrize(("tokens", "each"), [(1, 1), (1, 3), (5, 2), (16, 3)])
def test_rows_are_gathered_as_torch_gathers_them(tokens: int, each: int, gpu: torch.device) -> None:
    chosen, rows = a_choice(tokens, each), x_of(tokens, WIDTH, torch.float16)
    expected = gather_chosen_twin(chosen, rows, OWN, 1000, 0)
    found = gather_counted(Chosen(*(part.to(gpu) for part in chosen)), rows.to(gpu), OWN)
    assert torch.equal(found.begins.cpu(), expected.begins[:-1])
    count = int(expected.begins[-2])
    for one, other in zip(found[:3], expected[:3]):
        assert len(one) == tokens * each and torch.equal(one.cpu()[:count], other[:count])


@pytest.mark.parametrize("bits", first_of([4, 8], 1))
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_of_each_expert_come_out_as_they_do_alone(bits: int, has_bias: bool, gpu: torch.device) -> None:
    x, begins = x_of(9, 130, torch.float16).to(gpu), torch.tensor([0, 1, 1, 7, 8])  # and one row that belongs to none of them
    matrices = [packed(40, 130, bits).roll(number, 0).to(gpu) for number in range(4)]
    biases = [x_of(number + 1, 40, x.dtype)[0].to(gpu) if has_bias else None for number in range(4)]
    out = torch.full((9, 40), 7.0, dtype=x.dtype, device=gpu)
    meetings = [Meeting(0, 0, *each) for each in zip(matrices, biases)]
    counted_tile_products(Tiled(bits), Factor(x, CountedRows(begins.to(gpu), 4, 6)), meetings, out)
    for data, bias, first, end in zip(matrices, biases, begins, begins[1:]):
        assert torch.equal(out[first:end], tile_product(Tiled(bits), Factor(x[first:end]), data, 40, bias))
    assert (out[8] == 7.0).all()


@pytest.mark.parametrize(
    ("dtype", "inputs", "has_bias"), [(torch.float16, 300, True), (torch.bfloat16, 130, False), (torch.float32, 130, True)]
)
def test_rows_of_plain_experts_come_out_the_same_in_any_company(
    dtype: torch.dtype, inputs: int, has_bias: bool, gpu: torch.device
) -> None:
    format = FORMATS[PLAIN]
    assert isinstance(format, PlainFormat)
    x, begins = x_of(9, inputs, dtype).to(gpu), torch.tensor([0, 1, 1, 7, 8])  # and one row that belongs to none of them
    matrices = [x_of(41, inputs, dtype)[number : number + 37].contiguous().to(gpu) for number in range(4)]
    biases = [x_of(number + 1, 37, dtype)[0].to(gpu) if has_bias else None for number in range(4)]
    meetings = [Meeting(0, 0, *each) for each in zip(matrices, biases)]

    def multiplied(rows: Tensor, begins: Tensor, most: int, meetings: list[Meeting]) -> Tensor:
        out = torch.full((len(rows), 37), 7.0, dtype=dtype, device=gpu)
        counted_plain_products(format, Factor(rows, CountedRows(begins.to(gpu), len(meetings), most)), meetings, out)
        return out

    out, near = multiplied(x, begins, 6, meetings), {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    assert (out[8] == 7.0).all()
    for meeting, first, end in zip(meetings, begins, begins[1:]):
        bias = 0.0 if meeting.bias is None else meeting.bias.double()
        exact = x[first:end].double() @ meeting.data.double().T + bias
        torch.testing.assert_close(out[first:end].double(), exact, rtol=near, atol=near)
        for row in range(first, end):
            assert torch.equal(out[row], multiplied(x[row : row + 1], torch.tensor([0, 1]), 1, [meeting])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_are_those_of_torch(dtype: torch.dtype, gpu: torch.device) -> None:
    chosen = a_choice(6, 3)
    gathered = gather_chosen_twin(chosen, x_of(6, WIDTH, dtype), OWN, 1000, 0)
    *begins, end, _ = gathered.begins.tolist()
    made, sums = x_of(6 * 3, WIDTH, dtype), torch.randn(6, 2 * WIDTH, generator=torch.Generator().manual_seed(3))[:, :WIDTH]
    made[end:] = torch.nan  # behind the last row is nothing
    weights, to = (torch.nn.functional.pad(each, (0, len(made) - len(each))) for each in (gathered.weights, gathered.to))
    found = sums.to(gpu, copy=True)
    counted = CountedRows(gathered.begins[:-1].to(gpu), len(OWN), 6)
    add_counted(found, made.to(gpu), weights.to(gpu), to.to(gpu), counted)
    counts = [behind - begin for begin, behind in zip(begins, (*begins[1:], end))]
    add_weighted_twin(sums, made[:end], weights[:end], to[:end], counts)
    assert torch.equal(found.cpu(), sums)


# -- a slice of a layer ----------------------------------------------------------------------------------------------------


class ASlice(MixtureOfExperts):
    """A model that has nothing but some experts."""

    def __init__(self) -> None:
        self._mixture, self._traits = Mixture(EXPERTS, 3, INNER, sums_to_one=True), Traits()
        self._slices, self._gating = [range(2), OWN, range(6, 7)], gating("silu")
        self._names = [mixture.MlpNames.of(f"mlp.experts.{number}") for number in range(EXPERTS)]
        self.spec = type("", (), {"width": WIDTH})()

    @staticmethod
    def mixture_of(config: object) -> Mixture:
        raise NotImplementedError

    @staticmethod
    def traits_of(config: object) -> Traits:
        raise NotImplementedError


@contextmanager
def without_waits() -> Iterator[None]:
    """A context in which nothing is read back that a device has computed."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            assert not {"nonzero", "_local_scalar_dense", "bincount", "unique", "_to_cpu"} & set(str(func).split(".")), func
            return func(*args, **(kwargs or {}))  # type: ignore[operator,misc]

    def refused(values: Tensor) -> list[object]:
        raise AssertionError("values are read back")

    def unseen(launch: object) -> object:
        def launched(own: object, *tensors: Tensor) -> None:
            with torch.utils._python_dispatch._disable_current_modes():  # what the interpreter does a GPU does not
                launch(own, *tensors)  # type: ignore[operator]

        return launched

    with pytest.MonkeyPatch.context() as patch, Refusing():
        patch.setattr(Tensor, "tolist", refused)
        for kind in (Launch, Launcher):
            patch.setattr(kind, "__call__", unseen(kind.__call__))
        yield


SHAPES = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}


def packed_experts(gpu: torch.device) -> dict[str, object]:
    return {
        f"mlp.experts.{number}.{name}.weight": PackedMatrix(
            packed(*shape, 4).roll(number, 0).to(gpu), Tiled(4).name, shape[0], None
        )
        for number in OWN
        for name, shape in SHAPES.items()
    }


def plain_experts(gpu: torch.device) -> dict[str, object]:
    draw = torch.Generator().manual_seed(7)
    return {
        f"mlp.experts.{number}.{name}.weight": torch.randn(shape, generator=draw).mul_(0.1).to(gpu, torch.float16)
        for number in OWN
        for name, shape in SHAPES.items()
    }


def a_state(tokens: int, gpu: torch.device) -> Tensor:
    """The hidden states before a slice, with choices of all experts but one."""
    joined = torch.zeros(tokens, Routed.width(WIDTH, 3, "float16"), dtype=torch.float16)
    state = Routed.of(joined, WIDTH, 3)
    made = (state.normed, x_of(tokens, WIDTH)), (state.total, x_of(tokens, WIDTH)), *zip(state.chosen, a_choice(tokens, 3))
    for part, values in made:
        part.copy_(values)
    return joined[None].to(gpu)


@pytest.fixture
def both_ways(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, object], int], tuple[Tensor, ...]]:
    """What a slice with these weights makes of so many tokens where Python counts, and where nothing waits for counts."""
    monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON, HALVES))
    model, given = ASlice(), mixture.Given(torch.zeros(0))

    def both(weights: dict[str, object], tokens: int) -> tuple[Tensor, ...]:
        there = a_state(tokens, gpu)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixture.tensor_ops, "counts_stay", lambda *_: False)
            expected = model.given_to_experts(there, weights, given)
            with pytest.raises(AssertionError, match=r"nonzero|bincount|read back"), without_waits():
                model.given_to_experts(there, weights, given)
        with without_waits():
            found = model.given_to_experts(there, weights, given)
        return tuple(each.cpu() for each in (there, expected, found))

    return both


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_slice_of_few_tokens_is_as_where_python_counts_and_waits_for_nothing(
    tokens: int, gpu: torch.device, both_ways: Callable[[dict[str, object], int], tuple[Tensor, ...]]
) -> None:
    parts = both_ways(packed_experts(gpu), tokens)
    before, bits, after = (each.view(torch.int16) for each in parts)  # whole numbers are among them
    assert torch.equal(after, bits) and not torch.equal(after, before)


def test_a_slice_of_plain_experts_waits_for_nothing_either(
    gpu: torch.device, both_ways: Callable[[dict[str, object], int], tuple[Tensor, ...]]
) -> None:
    before, expected, found = (Routed.of(each[0], WIDTH, 3).total for each in both_ways(plain_experts(gpu), 3))
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)
    assert not torch.equal(found, before)


def test_experts_that_many_rows_are_given_to_are_left_to_torch(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are those in memory that would have to be copied first, and of another type."""
    monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON, HALVES))
    x, matrices = x_of(2, WIDTH, torch.float16).to(gpu), [torch.zeros(8, WIDTH, dtype=torch.float16, device=gpu)] * 2
    assert can_be_counted(x, ROWS_OF_COUNTED, matrices)
    assert not can_be_counted(x, ROWS_OF_COUNTED + 1, matrices)
    for other in (x.new_zeros(WIDTH, 8).T, matrices[0].float(), PackedMatrix(matrices[0], Tiled(4).name, 8, None)):
        assert not can_be_counted(x, 1, [*matrices, other])


@pytest.mark.parametrize(
    ("name", "has_bias"),
    first_of(spread([("mxfp4", True), ("q4_K", False), ("q4_0", True), ("fp8-128x128-float32", False)]), 2),
)
def test_so_do_those_in_a_checkpoints_own_form(name: str, has_bias: bool, gpu: torch.device) -> None:
    format = FORMATS[name]
    assert isinstance(format, Stored)
    inputs = inputs_of(format, 256)
    x, begins = x_of(9, inputs, torch.float16).to(gpu), torch.tensor([0, 1, 1, 7, 8])
    matrices = [random_matrix(format, 36, inputs, seed).to(gpu) for seed in range(4)]
    biases = [x_of(number + 1, 36, x.dtype)[0].to(gpu) if has_bias else None for number in range(4)]
    out = torch.full((9, 36), 7.0, dtype=x.dtype, device=gpu)
    meetings = [Meeting(0, 0, *each) for each in zip(matrices, biases)]
    counted_stored_products(format, Factor(x, CountedRows(begins.to(gpu), 4, 6)), meetings, out)
    for data, bias, first, end in zip(matrices, biases, begins, begins[1:]):
        assert torch.equal(out[first:end], stored_product(format, Factor(x[first:end]), data, 36, bias))
    assert (out[8] == 7.0).all()
