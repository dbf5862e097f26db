"""Checksums: they see whatever disks do to a tensor, and do not depend on how it is read."""

from __future__ import annotations

import numpy
import pytest

from h2o_flexgen.checkpoints.stored_tensors import STRETCH_BYTES, Sums, page_weights

NBYTES = 2 * STRETCH_BYTES + 3 * 4096 + 1234
DATA = numpy.random.default_rng(0).bytes(NBYTES)
SUMS = Sums.of(DATA)


@pytest.mark.parametrize("place", [0, 4095, STRETCH_BYTES - 1, STRETCH_BYTES, NBYTES - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_every_bit_counts(place: int, bit: int) -> None:
    data = bytearray(DATA)
    data[place] ^= 1 << bit
    assert not SUMS.are_of(data, 0, NBYTES)


@pytest.mark.parametrize("bit", [0, 31, 32, 61, 62, 63])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_same_bit_of_many_words_counts(bit: int, step: int) -> None:
    """The sign of every second float32 of a whole stretch, say: the top bit of 8-byte words."""
    words = numpy.frombuffer(DATA[:STRETCH_BYTES], dtype="<u8").copy()
    words[::step] ^= numpy.uint64(1 << bit)
    assert not SUMS.are_of(words.tobytes(), 0, NBYTES)


@pytest.mark.parametrize("places", [(7, 15), (3, 7), (3, 11), (7, 4087)])
@pytest.mark.parametrize("bit", [5, 6, 7])
def test_two_bits_never_cancel(places: tuple[int, int], bit: int) -> None:
    data = bytearray(DATA)
    for place in places:
        data[place] ^= 1 << bit
    assert not SUMS.are_of(data, 0, NBYTES)


def test_words_that_differ_at_the_top_alone_are_seen_to_change_places() -> None:
    words = numpy.zeros(STRETCH_BYTES // 8, dtype="<u8")
    words[3] = 1 << 63
    moved = numpy.roll(words, 8)
    assert Sums.of(words.tobytes()) != Sums.of(moved.tobytes())


def test_sums_of_halves_do_not_exceed_their_bits() -> None:
    weights = [int(weight) for weight in page_weights()]
    assert len(set(weights)) == 512 and all(weight % 2 for weight in weights)
    assert sum(weights) * (2**32 - 1) < 2**64


@pytest.mark.parametrize("nbytes", [8, 64, 512, 4096, STRETCH_BYTES])
def test_what_changes_places_is_seen(nbytes: int) -> None:
    data = bytearray(DATA)
    data[:nbytes], data[nbytes : 2 * nbytes] = data[nbytes : 2 * nbytes], data[:nbytes]
    assert not SUMS.are_of(data, 0, NBYTES)


@pytest.mark.parametrize("first", [0, STRETCH_BYTES + 4096, NBYTES - 4096, NBYTES - 100])
def test_zeros_to_the_end_are_seen(first: int) -> None:
    assert not SUMS.are_of(DATA[:first] + bytes(NBYTES - first), 0, NBYTES)


def test_parts_of_whole_stretches_are_known_again() -> None:
    starts = (0, STRETCH_BYTES, 2 * STRETCH_BYTES)
    assert all(SUMS.are_of(DATA[start:], start, NBYTES) for start in starts)
    assert all(SUMS.are_of(DATA[start : start + STRETCH_BYTES], start, NBYTES) for start in starts[:2])
    assert not SUMS.are_of(DATA[:STRETCH_BYTES], STRETCH_BYTES, NBYTES)


def test_zeros_that_fill_the_last_page_make_no_difference() -> None:
    filled = DATA + bytes(-NBYTES % 4096)
    assert Sums.of(filled) == SUMS and SUMS.are_of(DATA, 0, len(filled))


def test_parts_that_are_no_whole_stretches_are_a_mistake_of_the_reader() -> None:
    for start, end in ((4096, NBYTES), (0, 4096), (0, NBYTES - 4096)):
        with pytest.raises(AssertionError):
            SUMS.are_of(DATA[start:end], start, NBYTES)


def test_where_the_bytes_lie_in_memory_makes_no_difference() -> None:
    moved = memoryview(b"x" + DATA)[1:]
    assert Sums.of(moved) == SUMS and Sums.of(b"") == Sums("")
