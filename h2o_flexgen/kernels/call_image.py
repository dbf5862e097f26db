"""CallImage: noted calls of kernels as bytes in one piece of memory, from which the same calls on other memory are made.

Two layers that are alike do the same work, each on memory of its own. So the calls of one are those of the other with other
addresses. To exchange addresses takes microseconds, to record the calls takes milliseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy
from torch import Tensor

from h2o_flexgen.kernels.native import entry_of, run
from h2o_flexgen.kernels.raw_memory import address_of

WORD = 8
Words: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]"
Numbers: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]"  # half as large: images may have many thousands


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kernel", "given")),
        ("threads", ctypes.c_int),
        *((name, ctypes.c_char_p) for name in ("name", "place")),
    )


class _Calls(ctypes.Structure):
    _fields_ = (("calls", ctypes.c_void_p), ("count", ctypes.c_long))


CALL_WORDS = ctypes.sizeof(_Call) // WORD


class NotedCall(NamedTuple):
    """A call of a kernel."""

    name: str
    given: ctypes.Structure
    threads: int
    place: bytes  # of the model, which a crash is reported with

    def in_c(self) -> _Call:
        return _Call(entry_of(self.name), ctypes.addressof(self.given), self.threads, _name_in_c(self.name), self.place)

    @property
    def told(self) -> Iterator[ctypes.Structure | ctypes.Array[ctypes.Structure]]:
        """What the kernel reads besides the memory of tensors. Nothing else of the call stays."""
        kept = getattr(self.given, "kept", ())
        yield from (self.given, *(kept if isinstance(kept, tuple) else (kept,)))


@cache
def _name_in_c(name: str) -> bytes:
    return name.encode()


class Moves:
    """Memory that other memory takes the place of: addresses, bytes, and the addresses from now on."""

    def __init__(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        known = sorted(each for each in ranges if each[1])
        begins, nbytes, places = (numpy.array([each[part] for each in known], numpy.int64) for part in range(3))
        self._begins, self._ends, self._shifts = begins, begins + nbytes, places - begins

    def of(self, addresses: Words) -> Words:
        """Addresses elsewhere stay what they are."""
        if not len(self._begins):
            return addresses
        at = numpy.maximum(numpy.searchsorted(self._begins, addresses, "right") - 1, 0)
        is_inside = (addresses >= self._begins[at]) & (addresses < self._ends[at])
        moved: Words = addresses + numpy.where(is_inside, self._shifts[at], 0)
        return moved


def extent(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's memory, and its bytes."""
    if not tensor.numel():
        return address_of(tensor), 0
    values = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return address_of(tensor), values * tensor.itemsize


def text_range(before: bytes, after: bytes) -> tuple[int, int, int]:
    """One text that takes the place of another; both must stay."""
    return _address_of_text(before), 1, _address_of_text(after)


def _address_of_text(text: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    assert address is not None
    return address


@dataclass(frozen=True, eq=False)
class CallImage:
    words: Words  # the calls, and behind them what they are told
    pointers: Numbers  # of the words that are addresses
    count: int  # calls
    kept: object = None  # what must stay as long as the image: texts, and other images; not the calls, of which it has copies

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.pointers.nbytes

    @classmethod
    def of(cls, calls: Sequence[NotedCall]) -> CallImage:
        in_c = (_Call * len(calls))(*(call.in_c() for call in calls))
        parts = {ctypes.addressof(part): part for part in (in_c, *(told for call in calls for told in call.told))}
        places, pointers, size = dict[int, int](), list[int](), 0
        for address, part in parts.items():
            places[address] = size
            pointers += (size + word for word in pointer_words(type(part)))
            size += -(-ctypes.sizeof(part) // WORD)
        words = numpy.zeros(size, numpy.int64)
        for address, part in parts.items():
            ctypes.memmove(words.ctypes.data + places[address] * WORD, address, ctypes.sizeof(part))
        places_in_model = tuple({id(call.place): call.place for call in calls}.values())
        image = cls(words, numpy.array(pointers, numpy.int32), len(calls), places_in_model)
        here = image.address
        image._exchange(Moves((at, ctypes.sizeof(part), here + places[at] * WORD) for at, part in parts.items()))
        return image

    @classmethod
    def joined(cls, images: Sequence[CallImage]) -> CallImage:
        """All calls one after the other; what they are told stays where it is."""
        words = numpy.concatenate([image.words[: image.count * CALL_WORDS] for image in images])
        return cls(words, numpy.array([], numpy.int32), sum(image.count for image in images), images)

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def __call__(self) -> None:
        run("run_program", _Calls(self.address, self.count), 1)

    def moved(self, moves: Moves) -> CallImage:
        """The same calls on other memory."""
        image = CallImage(self.words.copy(), self.pointers, self.count, self)
        image._exchange(moves)
        image._exchange(Moves([(self.address, self.words.nbytes, image.address)]))
        return image

    def does_as(self, other: CallImage) -> bool:
        """Whether both have the same calls, and tell them the same."""
        return (
            self.count == other.count
            and numpy.array_equal(self.pointers, other.pointers)
            and numpy.array_equal(self._in_itself(), other._in_itself())
        )

    def _in_itself(self) -> Words:
        """The words, with addresses of the image counted from its beginning."""
        words: Words = self.words.copy()
        words[self.pointers] = Moves([(self.address, words.nbytes, 0)]).of(words[self.pointers])
        return words

    def _exchange(self, moves: Moves) -> None:
        self.words[self.pointers] = moves.of(self.words[self.pointers])


@cache
def pointer_words(kind: type) -> tuple[int, ...]:
    """The words of a struct or an array in C that are addresses."""
    if issubclass(kind, ctypes.Array):
        element: Any = kind
        own, size = pointer_words(element._type_), ctypes.sizeof(element._type_) // WORD
        return tuple(number * size + word for number in range(element._length_) for word in own)
    if issubclass(kind, ctypes.Structure):
        inner = ((getattr(kind, name).offset // WORD, type_) for name, type_ in _fields_of(kind))
        return tuple(at + word for at, type_ in inner for word in pointer_words(type_))
    return (0,) if issubclass(kind, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer)) else ()


def _fields_of(kind: type[ctypes.Structure]) -> Iterator[tuple[str, type]]:
    """The fields of a struct, with those of the structs that it extends."""
    for base in reversed(kind.__mro__):
        yield from ((field[0], field[1]) for field in vars(base).get("_fields_", ()))
