"""Pack: tensors side by side in one buffer, seen as bytes and as values, and the parts of nearly equal bytes in which a layer
arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as draw

from h2o_flexgen.core.buffer_layout import ALIGNMENT, PAGE_ALIGNED_FROM
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.operations import decode, encode
from h2o_flexgen.memory.pack import Layout, Pack, PackEntry, Range, copies_between, slices
from tests.helpers.inverted import Inverted, registered

SHAPES = draw.lists(draw.lists(draw.integers(1, 60), min_size=1, max_size=3).map(tuple), max_size=8)
DTYPES = draw.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(SHAPES, DTYPES)
def test_views_lie_apart_aligned_and_inside(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = Layout.pack({str(place): PackEntry(0, shape, dtype) for place, shape in enumerate(shapes)})
    assert layout.nbytes % ALIGNMENT == 0
    end = 0
    for place, shape in enumerate(shapes):
        entry = layout.entries[str(place)]
        assert entry.shape == shape and entry.offset >= end
        assert entry.offset % (ALIGNMENT if entry.nbytes >= PAGE_ALIGNED_FROM else 64) == 0  # else last bits may differ
        end = entry.offset + entry.nbytes
    assert end <= layout.nbytes


@given(SHAPES, DTYPES)
def test_what_is_put_into_a_view_stays_there(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = Layout.pack({str(place): PackEntry(0, shape, dtype) for place, shape in enumerate(shapes)})
    pack = Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
    values = {name: torch.randn(entry.shape).to(dtype) for name, entry in layout.entries.items()}
    for name, value in values.items():
        pack.view(name).copy_(value)
    assert all(torch.equal(pack.view(name), value) for name, value in values.items())
    assert all(torch.equal(pack.bytes(name), value.view(-1).view(torch.uint8)) for name, value in values.items())


@given(draw.lists(draw.tuples(SHAPES, draw.booleans()), max_size=3), DTYPES)
def test_what_is_encoded_into_its_bytes_is_decoded_beside_them(
    groups: list[tuple[list[tuple[int, ...]], bool]], dtype: torch.dtype
) -> None:
    """Tensors of both kinds lie in one buffer, and none reaches into its neighbour's bytes."""
    shapes = [(shape, inverted) for shapes, inverted in groups for shape in shapes]
    with registered(Inverted()) as format:
        names = [format.name if inverted else PLAIN for _, inverted in shapes]
        layout = Layout.pack({str(at): PackEntry(0, shape, dtype, names[at]) for at, (shape, _) in enumerate(shapes)})
        pack = Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
        values = [torch.randn(shape).to(dtype) for shape, _ in shapes]
        for at, value in enumerate(values):
            encode(names[at], value, pack.bytes(str(at)))
        for at, value in enumerate(values):
            decoded = torch.empty_like(value)
            decode(names[at], pack.bytes(str(at)), decoded)
            assert torch.equal(decoded, value)
            assert names[at] != PLAIN or torch.equal(pack.view(str(at)), value)


BEGUN_AT = draw.integers(0, ALIGNMENT - 1)  # the place in a page at which a tensor begins


@example([(3149, 1), (29, 4095), (17649, 4095), (8858, 381)], 4)  # a place near the end of a page moves a cut the most
@given(draw.lists(draw.tuples(draw.integers(1, 200_000), BEGUN_AT), max_size=6), draw.integers(1, 7))
def test_slices_are_every_byte_once_in_order_and_cut_at_pages(drawn: list[tuple[int, int]], parts: int) -> None:
    tensors = {str(place): nbytes for place, (nbytes, _) in enumerate(drawn)}
    places = {str(place): begun_at for place, (_, begun_at) in enumerate(drawn) if begun_at % 2}
    cut = slices(tensors, parts, places)
    assert len(cut) == parts
    whole = [value for part in cut for value in part]
    for name, nbytes in tensors.items():
        own = [value for value in whole if value.name == name]
        assert own[0].start == 0 and own[-1].stop == nbytes
        assert all(first.stop == second.start for first, second in pairwise(own))
        assert all((places.get(name, 0) + value.start) % ALIGNMENT == 0 for value in own[1:])
    assert [value.name for value in whole] == sorted((value.name for value in whole), key=int)


@given(draw.lists(draw.integers(1, 200_000), min_size=1, max_size=6), draw.integers(1, 7))
def test_no_slice_is_more_than_a_page_per_cut_larger_than_its_part(sizes: list[int], parts: int) -> None:
    cut = slices({str(place): nbytes for place, nbytes in enumerate(sizes)}, parts, {})
    cut_sizes = [sum(each.stop - each.start for each in part) for part in cut]
    assert sum(cut_sizes) == sum(sizes)
    assert max(cut_sizes) <= sum(sizes) / parts + 2 * ALIGNMENT


def test_a_range_is_the_bytes_of_its_tensor() -> None:
    layout = Layout.pack({"a": PackEntry(0, (3, 4), torch.float32), "b": PackEntry(0, (5,), torch.float32)})
    pack = Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
    pack.view("a").copy_(torch.arange(12).view(3, 4))
    assert pack.range(Range("a", 20, 36)).view(torch.float32).tolist() == [5, 6, 7, 8]
    pack.range(Range("b", 4, 8)).view(torch.float32).fill_(7)
    assert pack.view("b").tolist() == [0, 7, 0, 0, 0]


def test_nothing_is_packed_into_nothing() -> None:
    assert Layout.pack({}).nbytes == 0
    assert slices({}, 3, {}) == [[], [], []]


@pytest.mark.parametrize("parts", [1, 4])
def test_a_tensor_smaller_than_a_page_is_not_cut(parts: int) -> None:
    assert [value for part in slices({"norm": 4000}, parts, {"norm": 200}) for value in part] == [Range("norm", 0, 4000)]


@given(draw.lists(draw.tuples(draw.integers(1, 2 * PAGE_ALIGNED_FROM), draw.booleans()), max_size=8), draw.integers(1, 4))
def test_copies_bring_every_byte_of_the_tensors_that_are_there(sizes: list[tuple[int, bool]], parts: int) -> None:
    """The source has some of the target's tensors; what lies between two of them in the target is not touched."""
    target = Layout.pack({str(at): PackEntry(0, (size,), torch.uint8) for at, (size, _) in enumerate(sizes)})
    source = Layout.pack({str(at): PackEntry(0, (size,), torch.uint8) for at, (size, is_there) in enumerate(sizes) if is_there})
    here, there = (Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout) for layout in (target, source))
    for at, name in enumerate(target.entries):
        here.bytes(name).fill_(100 + at)
    for at, name in enumerate(source.entries):
        there.bytes(name).copy_(torch.arange(source.entries[name].nbytes) % 90 + at % 9)
    for part in slices({name: entry.nbytes for name, entry in source.entries.items()}, parts, {}):
        for to, origin in copies_between(there, here, part):
            to.copy_(origin)
    for at, (name, (_, is_there)) in enumerate(zip(target.entries, sizes)):
        assert torch.equal(here.bytes(name), there.bytes(name)) if is_there else bool((here.bytes(name) == 100 + at).all())


@pytest.mark.parametrize(("gone", "copies"), [((), 1), ((2,), 2), ((0,), 1), ((1, 3), 3)])
def test_neighbours_that_lie_alike_come_in_one_copy(gone: tuple[int, ...], copies: int) -> None:
    sizes = (96, 32, 96, 160, 64)
    target = Layout.pack({str(at): PackEntry(0, (size,), torch.uint8) for at, size in enumerate(sizes)})
    source = Layout.pack({name: entry for name, entry in target.entries.items() if int(name) not in gone})
    here, there = (Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout) for layout in (target, source))
    (part,) = slices({name: entry.nbytes for name, entry in source.entries.items()}, 1, {})
    assert len(copies_between(there, here, part)) == copies
