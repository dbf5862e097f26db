"""Programs that are made from another one: the same work on other memory, and nothing else."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.call_image import CallImage, Moves, extent, pointer_words
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.products import plain_product
from h2o_flexgen.kernels.recording import CallRecording, Program, WorkingRoom, _note_of, enter
from h2o_flexgen.kernels.stored_product import stored_dots
from tests.kernels.stored import random_matrix
from tests.kernels.variants import VARIANTS

pytestmark = pytest.mark.skipif(not VARIANTS, reason="there are no kernels in C")
ROWS, WIDTH = 3, 64
Memory = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, weights of a norm, a matrix, outcome


def memory(seed: int) -> Memory:
    random = torch.Generator().manual_seed(seed)
    x, weight, matrix = (torch.randn(*shape, generator=random) for shape in ((ROWS, WIDTH), (WIDTH,), (WIDTH, WIDTH)))
    return x, weight, matrix, torch.zeros(ROWS, WIDTH)


def layer(x: Tensor, weight: Tensor, matrix: Tensor, eps: float = 1e-5) -> Tensor:
    """Calls of kernels, one product of torch, and a constant."""
    normed = operations.add_scaled(operations.rms_norm(x, weight, eps), x.new_full(x.shape, 0.5))
    return operations.add_scaled(plain_product(FORMATS[PLAIN], Factor(normed), matrix, WIDTH, None), x)


def recorded(own: Memory, room: WorkingRoom, place: str, work: Callable[[Tensor, Tensor, Tensor], Tensor] = layer) -> Program:
    *given, out = own

    def once() -> None:
        enter(place)
        out.copy_(work(*given))

    return CallRecording.of(once, room)


def test_a_moved_program_does_the_same_work_on_other_memory() -> None:
    room, first, third = WorkingRoom(), memory(1), memory(3)
    program = recorded(first, room, "first")
    moved = program.moved([*zip(first, third)], b"third")
    for _ in range(2):
        third[0].copy_(torch.randn(ROWS, WIDTH))
        moved()
        assert torch.equal(third[3], layer(*third[:3]))
    assert not first[3].any(), "the first program's memory is left alone"
    program()
    assert torch.equal(first[3], layer(*first[:3]))


def test_it_is_the_program_that_would_have_been_recorded() -> None:
    room, first, second = WorkingRoom(), memory(1), memory(2)
    one, other = (recorded(own, room, place) for own, place in ((first, "first"), (second, "second")))
    pairs = [*zip(first, second)]
    assert one.does_as(other, pairs)
    for place in range(len(pairs)):
        assert not one.does_as(other, [pair for at, pair in enumerate(pairs) if at != place]), "some memory was not moved"


def test_a_chain_of_moved_programs_runs_as_one() -> None:
    room, all_memory = WorkingRoom(), [memory(seed) for seed in range(3)]
    first = recorded(all_memory[0], room, "first")
    programs = [first, *(first.moved([*zip(all_memory[0], own)], b"other") for own in all_memory[1:])]
    moments = torch.zeros(4, dtype=torch.long)
    Program.timed(programs, moments)()
    assert all(torch.equal(own[3], layer(*own[:3])) for own in all_memory)
    assert moments.tolist() == sorted(moments.tolist()) and moments[0] > 0


def test_an_image_keeps_no_call_that_it_was_made_of() -> None:
    """What calls of thousands of experts are told would be there twice."""
    moment = torch.zeros(1, dtype=torch.long)
    call = _note_of(moment[0])
    told, image = weakref.ref(call.given), CallImage.of([call])
    del call
    gc.collect()
    assert told() is None
    image()
    assert moment.item() > 0


def test_what_an_arranging_points_to_is_part_of_its_image() -> None:
    """Runs of rows that are known while it is recorded, for dot products with a stored form."""
    room, x, out = WorkingRoom(), torch.randn(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    data = random_matrix(FORMATS["q4_0"], WIDTH, WIDTH)
    program = CallRecording.of(lambda: out.copy_(stored_dots(FORMATS["q4_0"], Factor(x), data, WIDTH, None)), room)
    gc.collect()
    junk = [(ctypes.c_long * 2)(-1, -1) for _ in range(1000)]  # takes the place of what is gone
    program()
    assert torch.equal(out, stored_dots(FORMATS["q4_0"], Factor(x), data, WIDTH, None)) and junk


def _with_another_number(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    return layer(x, weight, matrix, 1e-3)


def _with_another_constant(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    normed = operations.add_scaled(operations.rms_norm(x, weight, 1e-5), x.new_full(x.shape, 0.25))
    return operations.add_scaled(plain_product(FORMATS[PLAIN], Factor(normed), matrix, WIDTH, None), x)


def _with_more_work(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    return operations.add_scaled(layer(x, weight, matrix), x)


def _without_the_product(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    return operations.add_scaled(operations.rms_norm(x, weight, 1e-5), x.new_full(x.shape, 0.5))


OTHERS = _with_another_number, _with_another_constant, _with_more_work, _without_the_product


@pytest.mark.parametrize("work", OTHERS, ids=lambda work: work.__name__)
def test_other_work_is_seen(work: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    room, first, second = WorkingRoom(), memory(1), memory(2)
    one, other = recorded(first, room, "first"), recorded(second, room, "second", work)
    assert not one.does_as(other, [*zip(first, second)])


def test_addresses_move_with_their_memory_alone() -> None:
    moves = Moves([(1000, 100, 5000), (2000, 0, 1), (300, 10, 300)])
    before = torch.tensor([0, 299, 300, 309, 999, 1000, 1099, 1100, 2000]).numpy()
    assert moves.of(before).tolist() == [0, 299, 300, 309, 999, 5000, 5099, 1100, 2000]
    assert Moves([]).of(before).tolist() == before.tolist()


def test_the_extent_of_a_view_is_what_it_may_touch() -> None:
    whole = torch.zeros(4, 6)
    assert extent(whole[1:3, 2:4]) == (whole.data_ptr() + 8 * 4, 8 * 4)
    assert extent(whole[:0])[1] == 0


class _Inner(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("data", ctypes.c_void_p), ("runs", ctypes.POINTER(ctypes.c_long)))


class _Outer(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_long), ("inner", _Inner * 2), ("name", ctypes.c_char_p), ("sizes", ctypes.c_long * 3))


class _Longer(_Outer):
    _fields_ = (("last", ctypes.c_void_p),)


@pytest.mark.parametrize(("kind", "words"), [(_Inner, (1, 2)), (_Outer, (2, 3, 5, 6, 7)), (_Longer, (2, 3, 5, 6, 7, 11))])
def test_addresses_are_found_in_structs(kind: type, words: Sequence[int]) -> None:
    assert pointer_words(kind) == words
