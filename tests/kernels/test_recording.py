"""Recordings: what is recorded gives the bits of what is done at once, on the values that lie in its tensors at each replay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.copies import copy_values
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.products import plain_product
from h2o_flexgen.kernels.recording import PART, CallRecording, CannotBeRecorded, Program, WorkingRoom, kept
from tests.helpers.room import holds
from tests.kernels.variants import VARIANTS

pytestmark = pytest.mark.skipif(not VARIANTS, reason="there are no kernels in C")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def recorded(work: Callable[[], Tensor], out: Tensor) -> Program:
    return CallRecording.of(lambda: out.copy_(work()), WorkingRoom())


def layer(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    normed = operations.rms_norm(x, weight, 1e-5)
    made = operations.gated_silu(operations.plain_product(Factor(normed), matrix, None))
    return operations.add_scaled(made, x).float().transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_repeats_the_work_on_new_values(dtype: torch.dtype) -> None:
    x, weight, matrix = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(64, 64).to(dtype)
    out = torch.zeros(64, 3)
    program = recorded(lambda: layer(x, weight, matrix), out)
    assert not out.any(), "a recording computes nothing"
    for _ in range(3):
        x.copy_(torch.randn(3, 64))
        program()
        assert torch.equal(out, layer(x, weight, matrix))


class _Emptied(list[tuple[int, int]]):
    """Gaps; while they are looked through, parts are given back, as the collector of garbage may do at any moment."""

    def __init__(self, gaps: Iterable[tuple[int, int]], held: list[Tensor]) -> None:
        super().__init__(gaps)
        self._held = held

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for place, gap in enumerate(list(super().__iter__())):
            if place == 2:
                self._held.clear()
            yield gap


def test_parts_may_come_back_while_another_is_taken() -> None:
    room = WorkingRoom()
    first, middle, third, last = (room.take(PART) for _ in range(4))
    held = [middle]
    del first, third, middle
    room.take(PART)  # the first ones are gaps from here on
    room._free = _Emptied(room._free, held)
    taken = [room.take(size * PART) for size in (2, 4, 8)]
    begins = sorted((each.data_ptr(), each.nbytes) for each in (*taken, last))
    assert all(begin + nbytes <= behind for (begin, nbytes), (behind, _) in pairwise(begins))


def test_programs_one_after_the_other_share_their_room() -> None:
    x, weight, room = torch.randn(2, 64), torch.randn(64), WorkingRoom()
    states = [torch.zeros(2, 64) for _ in range(4)]
    states[0].copy_(x)

    def step(place: int) -> Callable[[], object]:
        return lambda: states[place + 1].copy_(operations.rms_norm(states[place], weight, 1e-5))

    programs = [CallRecording.of(step(place), room) for place in range(3)]
    moments = torch.zeros(4, dtype=torch.long)
    Program.timed(programs, moments)()
    expected = x
    for _ in range(3):
        expected = operations.rms_norm(expected, weight, 1e-5)
    assert torch.equal(states[3], expected)
    assert moments.tolist() == sorted(moments.tolist()) and moments[0] > 0
    assert room.nbytes < 3 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only there pages that were given back are known to be of zeros")
def test_an_emptied_room_holds_nothing_and_programs_work_in_it_as_before() -> None:
    x, weight, out, room = torch.randn(64, 256), torch.randn(256), torch.zeros(64, 256), WorkingRoom()
    program = CallRecording.of(lambda: out.copy_(operations.rms_norm(x, weight, 1e-5)), room)
    program()
    made = out.clone()
    out.zero_()
    assert holds(room)
    room.empty()
    assert room.nbytes and not holds(room)
    program()
    assert torch.equal(out, made) and made.any()


def test_what_is_kept_is_not_overwritten_by_other_programs() -> None:
    room, weight, found = WorkingRoom(), torch.ones(64), list[Tensor]()
    first, second = torch.randn(2, 64), torch.randn(2, 64)
    out = torch.zeros(2, 64)

    def keeping() -> None:
        found.append(kept(operations.rms_norm(first, weight, 1e-5)))

    one = CallRecording.of(keeping, room)
    other = CallRecording.of(lambda: out.copy_(operations.rms_norm(second, weight, 1e-5)), room)
    one()
    other()
    assert torch.equal(found[0], operations.rms_norm(first, weight, 1e-5))


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (lambda: torch.ones(4).softmax(0), "aten.ones"),
        (lambda: torch.empty(4).exp(), "aten.exp"),
        (lambda: torch.empty(4) + torch.empty(4), "aten.add.Tensor"),
        (lambda: torch.empty(4).long(), "aten._to_copy"),
        (lambda: torch.empty(4).add_(torch.empty(4)), "aten.add_"),
        (lambda: torch.empty(4)[0].item(), "aten._local_scalar_dense"),
        (lambda: torch.tensor([1.0, 2.0]), "aten.lift_fresh"),
    ],
)
def test_what_no_kernel_does_is_named(work: Callable[[], object], named: str) -> None:
    with pytest.raises(CannotBeRecorded, match=rf"torch does {named}.* here, and no kernel"):
        CallRecording.of(work, WorkingRoom())


def test_large_products_stay_with_torch_between_two_pieces() -> None:
    x, weight, matrix, out = torch.randn(1, 64), torch.randn(64), torch.randn(32, 64), torch.zeros(1, 32)

    def work() -> Tensor:
        return plain_product(FORMATS[PLAIN], Factor(operations.rms_norm(x, weight, 1e-5)), matrix, 32, None)

    program = recorded(work, out)
    for _ in range(2):
        x.copy_(torch.randn(1, 64))
        program()
        assert torch.equal(out, work())


def test_no_compiler_of_torch_is_loaded() -> None:
    code = """
import sys, torch
from h2o_flexgen.kernels import recording
out = torch.zeros(3)
work = lambda: recording.kept(out.copy_(torch.empty(3).bfloat16().reshape(3)))
recording.CallRecording.of(work, recording.WorkingRoom())()
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- the room ----------------------------------------------------------------------------------------------------------------


def test_a_place_is_free_again_when_all_views_of_it_are_gone() -> None:
    room = WorkingRoom()
    first = room.take(100)
    view = first.view(torch.float32)[3:]
    address, other = first.data_ptr(), room.take(100)
    del first
    assert room.take(100).data_ptr() not in (address, other.data_ptr())
    del view
    assert room.take(100).data_ptr() == address and address % PART == 0


def test_a_room_grows_and_its_gaps_are_joined() -> None:
    room = WorkingRoom()
    parts = [room.take(400_000) for _ in range(5)]
    assert len({part.data_ptr() for part in parts}) == 5
    grown = room.nbytes
    del parts
    again = [room.take(800_000), room.take(800_000)]
    assert room.nbytes == grown and again[0].data_ptr() != again[1].data_ptr()


# -- copies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 4, 5), (1, 300, 64), (0, 3)])
def test_copies_have_the_bits_of_torch(source: torch.dtype, target: torch.dtype, shape: tuple[int, ...]) -> None:
    for values in (torch.randn(shape).to(source), torch.randn(shape).to(source).transpose(0, -1)):
        made, everywhere = torch.empty(values.shape, dtype=target), torch.zeros(*values.shape, 2, dtype=target)
        copy_values(values, made)
        copy_values(values, everywhere[..., 1])
        assert torch.equal(made, values.to(target)) and torch.equal(everywhere[..., 1], values.to(target))
        assert not everywhere[..., 0].any()
