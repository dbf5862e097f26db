"""Recordings: the calls of kernels that a piece of work makes, noted once and then run again and again without the interpreter.

While a recording is made, `native.run` notes calls instead of making them, and nothing is computed. Of what the work asks of
torch, views and empty memory cost nothing later. Copies and zeros become calls of kernels. Any other operation is refused by
its name: that work cannot be recorded. A recorded call reads and writes the addresses that it was noted with. So what changes
from step to step must lie in tensors that stay.

Tensors that recorded work makes lie in a `WorkingRoom`, and give their part of it back when nothing refers to them any more.
Programs run one after the other, also those of several threads, and none needs what another has left there. So they share it,
and it is as large as the largest of them wants.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import groupby
from math import prod
from threading import Lock
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.formats.kernel_sizes import ROOM_CHUNK
from h2o_flexgen.kernels.call_image import CallImage, Moves, NotedCall, extent, text_range
from h2o_flexgen.kernels.copies import copy_values, zero_bytes
from h2o_flexgen.kernels.native import KINDS, RECORDER
from h2o_flexgen.kernels.raw_memory import address_of

PART = 64  # bytes: a line of the cache, at which all parts begin


class WorkingRoom:
    def __init__(self) -> None:
        self.in_use = Lock()  # by a program that runs or is recorded
        self._chunks: list[mmap.mmap] = []
        self._free: list[tuple[int, int]] = []  # address and bytes of each gap, by address
        self._returned: list[tuple[int, int]] = []  # parts that are free again, and are not among the gaps yet

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._chunks))

    def empty(self) -> None:
        """Returns all pages to the system until they are written again. Addresses stay."""
        with self.in_use:
            for chunk in self._chunks:
                with suppress(OSError, AttributeError):  # if the system can
                    chunk.madvise(mmap.MADV_DONTNEED)

    def take(self, nbytes: int) -> Tensor:
        """Memory of this many bytes. It is free again when the tensor and all its views are gone."""
        whole = max(1, -(-nbytes // PART)) * PART
        address = self._address_of(whole)
        part = (ctypes.c_uint8 * max(1, nbytes)).from_address(address)
        finalize(part, self._give_back, address, whole).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)[:nbytes]

    def _give_back(self, address: int, nbytes: int) -> None:
        """Called by the collector of garbage, at any moment and in any thread."""
        self._returned.append((address, nbytes))

    def _address_of(self, nbytes: int) -> int:
        while self._returned:
            self._add_gap(*self._returned.pop())
        for place, (address, gap) in enumerate(self._free):
            if gap >= nbytes:
                self._free[place : place + 1] = [(address + nbytes, gap - nbytes)] if gap > nbytes else []
                return address
        chunk = mmap.mmap(-1, max(ROOM_CHUNK, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins at a page
        self._chunks.append(chunk)
        self._add_gap(address_of(torch.frombuffer(chunk, dtype=torch.uint8)), len(chunk) // PART * PART)
        return self._address_of(nbytes)

    def _add_gap(self, address: int, nbytes: int) -> None:
        insort(self._free, (address, nbytes))
        joined: list[tuple[int, int]] = []
        for begin, gap in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + gap
            else:
                joined.append((begin, gap))
        self._free = joined


aten = torch.ops.aten
Work: TypeAlias = Callable[[], object]
BETWEEN_LAYERS = b"no layer"


class CannotBeRecorded(RuntimeError):
    """Raised where work asks torch for an operation that no kernel does."""


class _Moment(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p),)


# What a recording does instead of an operation of torch, which it gets with its arguments; None where it cannot.
TakenOver: TypeAlias = "Callable[[CallRecording, Any, Sequence[Any], Mapping[str, Any]], Any]"


class TorchCall(NamedTuple):
    """Work of torch between calls of kernels, work(out, *given)."""

    work: Callable[..., object]
    tensors: Sequence[Tensor | None]  # out, and what is given

    def __call__(self) -> None:
        self.work(*self.tensors)

    def moved(self, moves: Moves) -> TorchCall:
        addresses = [0 if each is None else address_of(each) for each in self.tensors]
        places = moves.of(numpy.array(addresses, numpy.int64)).tolist()
        return TorchCall(
            self.work, [None if each is None else _alike(each, place) for each, place in zip(self.tensors, places)]
        )

    def does_as(self, other: TorchCall) -> bool:
        return self.work == other.work and [*map(_memory, self.tensors)] == [*map(_memory, other.tensors)]


def _memory(tensor: Tensor | None) -> object:
    return None if tensor is None else (address_of(tensor), tensor.dtype, tensor.shape, tensor.stride())


Step: TypeAlias = NotedCall | TorchCall
Piece: TypeAlias = CallImage | TorchCall


class Program:
    """Recorded steps. Calls of kernels that follow each other are one call of the library."""

    def __init__(self, pieces: Sequence[Piece], room: WorkingRoom, kept: Sequence[object] = (), place: bytes = b"") -> None:
        """`kept`: what must stay as long as the program. `place`: of the model, for which all of it was recorded."""
        self.pieces = pieces
        self.room = room
        self.place = place
        self._kept = kept

    @property
    def nbytes(self) -> int:
        """Bytes of its calls, without the values that it keeps."""
        return sum(piece.nbytes for piece in self.pieces if isinstance(piece, CallImage))

    def __call__(self) -> None:
        with self.room.in_use:
            for piece in self.pieces:
                piece()

    @classmethod
    def of(cls, steps: Sequence[Step], room: WorkingRoom, kept: Sequence[object], place: bytes) -> Program:
        return cls([*_pieces(steps)], room, kept, place)

    @classmethod
    def timed(cls, programs: Sequence[Program], moments: Tensor) -> Program:
        """Programs one after the other; `moments` (programs + 1,), int64, gets when each begins and the last one ends, in
        nanoseconds."""
        notes = [CallImage.of([_note_of(moment)]) for moment in moments]
        pieces: list[Piece] = [notes[0]]
        for program, note in zip(programs, notes[1:], strict=True):
            pieces += *program.pieces, note
        return cls([*_joined(pieces)], programs[0].room, [programs, moments])

    def copied(self) -> Program:
        """The same steps on the same memory, as they are now: a replay may write to what calls are told."""
        return Program([piece.moved(Moves(())) for piece in self.pieces], self.room, self._kept, self.place)

    def moved(self, memory: Sequence[tuple[Tensor, Tensor]], place: bytes) -> Program:
        """The same steps for another place of the model, on other memory: pairs of what was used and what is used instead."""
        moves = Moves((*_ranges(memory), text_range(self.place, place)))
        return Program([piece.moved(moves) for piece in self.pieces], self.room, [self, place], place)

    def does_as(self, other: Program, memory: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether the other one, which was recorded, is what comes of moving this one. Constants may lie elsewhere."""
        constants = [(own, its) for own, its in zip(self._kept, other._kept) if _are_equal(own, its)]
        if not len(constants) == len(self._kept) == len(other._kept) or len(self.pieces) != len(other.pieces):
            return False
        moved = self.moved([*memory, *constants], other.place)  # type: ignore[list-item]
        return all(
            type(own) is type(its) and own.does_as(its)  # type: ignore[arg-type]
            for own, its in zip(moved.pieces, other.pieces)
        )


def _ranges(memory: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, int, int]]:
    return ((*extent(before), address_of(after)) for before, after in memory)


def _are_equal(own: object, its: object) -> bool:
    return isinstance(own, Tensor) and isinstance(its, Tensor) and own.dtype == its.dtype and torch.equal(own, its)


def _note_of(moment: Tensor) -> NotedCall:
    return NotedCall("note_time", _Moment(address_of(moment, writes=True)), 1, BETWEEN_LAYERS)


def _pieces(steps: Iterable[Step]) -> Iterator[Piece]:
    for is_noted, each in groupby(steps, lambda step: isinstance(step, NotedCall)):
        if is_noted:
            yield CallImage.of([step for step in each if isinstance(step, NotedCall)])
        else:
            yield from (step for step in each if isinstance(step, TorchCall))


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for is_image, each in groupby(pieces, lambda piece: isinstance(piece, CallImage)):
        if is_image:
            yield CallImage.joined([piece for piece in each if isinstance(piece, CallImage)])
        else:
            yield from each


class CallRecording(TorchDispatchMode):
    """What a piece of work asks of kernels. The tensors that it makes lie in a room that programs share."""

    def __init__(self, room: WorkingRoom) -> None:
        super().__init__()
        self._room = room
        self._steps: list[Step] = []
        self._kept: list[object] = []
        self._place = BETWEEN_LAYERS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; otherwise torch would load its compiler, a hundred MB, to be told so."""
        return False

    @classmethod
    def of(cls, work: Work, room: WorkingRoom) -> Program:
        """Records work without doing it."""
        recording = cls(room)
        with room.in_use, recording, recording._listening():
            work()
        return Program.of(recording._steps, room, recording._kept, recording._place)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        token = RECORDER.set(self)
        try:
            yield
        finally:
            RECORDER.reset(token)

    # -- what the work may ask of a recording ------------------------------------------------------------------------------

    def note(self, name: str, given: ctypes.Structure, threads: int) -> None:
        """Notes a call of a kernel."""
        self._steps.append(NotedCall(name, given, threads, self._place))

    def by_torch(self, work: Callable[..., object], given: Sequence[Tensor | None], out: Tensor) -> None:
        """Notes work of torch between calls of kernels, work(out, *given): large products, which it does faster."""
        seen = [None if each is None else _alike(each, address_of(each)) for each in (out, *given)]
        self._steps.append(TorchCall(work, seen))

    def lasting(self, values: Tensor) -> Tensor:
        """Values that no other program overwrites: a copy outside of the room."""
        with _unheard():
            there = torch.empty(values.shape, dtype=values.dtype)
        copy_values(values, there)
        self._kept.append(there)
        return there

    def enter(self, place: str) -> None:
        """Says which layer the work that follows is for."""
        self._place = place.encode()

    # -- what it asks of torch ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if (taken_over := _taken_over(func)) is not None and (made := taken_over(self, func, args, given)) is not None:
            return made
        raise CannotBeRecorded(f"torch does {func} here, and no kernel")

    def composed(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """What is no operation of its own, but made of others."""
        with self:
            return func.decompose(*args, **given)

    def viewed(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        return func(*args, **given)

    def constant(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        self._kept.append(made := func(*args, **given))
        return made

    def filled(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        """A copy of what is made once, as later work may change it."""
        return self.cloned(self.constant(func, args, given))

    def empty(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        return self._made(func(*args, **{**given, "device": "meta"}))

    def contiguous(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        (shape, *_), dtype = args, given.get("dtype") or torch.get_default_dtype()
        if given.get("memory_format") not in (None, torch.contiguous_format):
            return self.empty(func, args, given)
        return self._room.take(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def zeros(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
        made = self.empty(func, args, given)
        zero_bytes(made)
        return made

    def cloned(self, source: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
        made = self._made(torch.empty_like(source, device="meta", memory_format=memory_format))
        copy_values(source, made)
        return made

    def converted(self, source: Tensor, dtype: torch.dtype, **others: Any) -> Tensor | None:
        if not {source.dtype, dtype}.issubset(KINDS):
            return None
        made = self._made(torch.empty_like(source, device="meta", dtype=dtype))
        copy_values(source, made)
        return made

    def copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor | None:
        if source.dtype != target.dtype and not {source.dtype, target.dtype}.issubset(KINDS):
            return None
        copy_values(source.expand(target.shape), target)
        return target

    def _made(self, like: Tensor) -> Tensor:
        """A tensor in the room, with the shape, strides and type of another one."""
        values = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride())) if like.numel() else 0
        return self._room.take(values * like.itemsize).view(like.dtype).as_strided(like.shape, like.stride())


def _alike(values: Tensor, address: int) -> Tensor:
    """A tensor of this kind at an address. It does not keep its memory from others: in a program each value is used before its
    place is."""
    with _unheard():
        there = (ctypes.c_uint8 * extent(values)[1]).from_address(address)
        return torch.frombuffer(there, dtype=values.dtype).as_strided(values.shape, values.stride())


def kept(values: Tensor) -> Tensor:
    """Values that are needed when the work is over: in a recording, those of the present replay."""
    recorder = RECORDER.get()
    return values if recorder is None else recorder.lasting(values)


def enter(place: str) -> None:
    """Says which layer the work that follows is for. A crash of a recorded program is reported with it."""
    if (recorder := RECORDER.get()) is not None:
        recorder.enter(place)


# Operations of torch that kernels do instead, with the same bits.
BY_KERNELS: Mapping[Any, Callable[..., Tensor | None]] = {
    aten.clone.default: CallRecording.cloned,
    aten._to_copy.default: CallRecording.converted,
    aten.copy_.default: CallRecording.copied,
}
MADE: Mapping[Any, TakenOver] = {
    aten.empty.memory_format: CallRecording.contiguous,
    **dict.fromkeys((aten.empty_like.default, aten.empty_strided.default), CallRecording.empty),
    **dict.fromkeys((aten.new_empty.default, aten.new_empty_strided.default), CallRecording.empty),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), CallRecording.zeros),
    **dict.fromkeys((aten.arange.default, aten.arange.start), CallRecording.constant),
    **dict.fromkeys((aten.full.default, aten.new_full.default), CallRecording.filled),
    aten._unsafe_view.default: CallRecording.viewed,
}
FROM_PYTHON = (aten.lift.default, aten.lift_fresh.default)  # a tensor of numbers of Python, which may be others in another step


@cache
def _taken_over(func: Any) -> TakenOver | None:
    """What becomes of an operation. A view is one that says of all its outcomes that they are parts of what it was given."""
    if func in MADE:
        return MADE[func]
    if (by_kernels := BY_KERNELS.get(func)) is not None:
        return lambda recording, _, args, given: by_kernels(recording, *args, **given)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return CallRecording.composed
    returns = func._schema.returns
    is_view = bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return CallRecording.viewed if is_view and func not in FROM_PYTHON else None


@contextmanager
def _unheard() -> Iterator[None]:
    """What is done in here is done now, and not noted."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield
