"""Where tensors lie that are read from files: where reads can go straight to their place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.core.buffer_layout import (
    ALIGNMENT,
    HUGE_PAGE_BYTES,
    PAGE_ALIGNED_FROM,
    VIEW_ALIGNMENT,
    Arena,
    aligned,
    keeps_its_place,
    read_arena,
    read_buffer_bytes,
)
from h2o_flexgen.core.model_spec import TensorSpec
from h2o_flexgen.formats.table import PLAIN

BLOCK_BYTES, BLOCK_VALUES = 18, 32  # of Q4_0
KINDS = [(PLAIN, 4, 4), (PLAIN, 4, 2), (PLAIN, 2, 2), ("q4_0", 2, 2)]  # the bytes of a value in memory, and in the file
KEPT = KINDS[2:]
MATRICES = st.tuples(st.sampled_from(KINDS), st.integers(1, 3 * PAGE_ALIGNED_FROM // BLOCK_BYTES))
PLACES = st.integers(0, ALIGNMENT - 1)
Kind = tuple[str, int, int]


@given(st.integers(0, 100 << 20))
def test_a_large_buffer_for_reads_has_whole_huge_pages_and_is_little_larger(nbytes: int) -> None:
    found = read_buffer_bytes(nbytes)
    assert aligned(nbytes) <= found <= max(aligned(nbytes), nbytes * 5 // 4)
    assert found % (HUGE_PAGE_BYTES if nbytes >= 8 << 20 else ALIGNMENT) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(MATRICES, PLACES), min_size=1, max_size=9))
def test_what_keeps_its_place_has_its_pages_for_itself_wherever_that_is(drawn: list[tuple[tuple[Kind, int], int]]) -> None:
    tensors = [
        TensorSpec(f"{at}", (count, BLOCK_VALUES), itemsize, stored, format)
        for at, (((format, itemsize, stored), count), _) in enumerate(drawn)
    ]
    places = {tensor.name: place for tensor, (_, place) in zip(tensors, drawn)}
    found = read_arena(tensors, False, places)
    assert found.nbytes == read_arena(tensors, False).nbytes, "what a plan promises knows no file"
    ranges = []
    for tensor, start in zip(tensors, found.starts, strict=True):
        kind = tensor.format, tensor.itemsize, tensor.stored_itemsize
        assert keeps_its_place(tensor) == (kind in KEPT and tensor.nbytes >= PAGE_ALIGNED_FROM)
        if keeps_its_place(tensor):
            assert start % ALIGNMENT == places[tensor.name]
            ranges.append((start - start % ALIGNMENT, aligned(start + tensor.nbytes)))
        else:
            assert start % (ALIGNMENT if tensor.nbytes >= PAGE_ALIGNED_FROM else VIEW_ALIGNMENT) == 0
            ranges.append((start, start + tensor.nbytes))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges)) and ranges[-1][1] <= found.nbytes
    assert read_arena(tensors, True, places) == Arena.of(tensor.nbytes for tensor in tensors)
