"""Disk: ranges of files as they become values in memory, the offload file, and what happens when a disk refuses."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.core.buffer_layout import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE_BYTES, aligned
from h2o_flexgen.memory import disk
from h2o_flexgen.memory.disk import (
    Checked,
    DiskFiles,
    DiskRegion,
    DiskTier,
    FilePiece,
    OffloadFolder,
    huge_pages,
)
from h2o_flexgen.memory.host import HostTier
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.threads import new_threads

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("float32", "float16", "bfloat16")


@pytest.fixture
def files() -> Iterator[DiskFiles]:
    before = set(threading.enumerate())
    with DiskFiles() as opened:
        yield opened
    assert not new_threads(before)


def values_of(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(folder: Path, values: torch.Tensor, before: int = 0, behind: int = 0, name: str = "file") -> Path:
    """A file with the values from byte `before` on."""
    file = folder / name
    noise = numpy.random.default_rng(1).bytes(before + behind)
    file.write_bytes(noise[:before] + values.view(torch.uint8).numpy().tobytes() + noise[before:])
    return file


def arena(values: int, dtype: torch.dtype, skip: int = 0) -> torch.Tensor:
    """Page-aligned, or `skip` bytes behind a page."""
    region = HostTier().alloc(values * dtype.itemsize + skip)
    return region[skip : skip + values * dtype.itemsize].view(dtype)


# -- reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", FLOATS, ids=NAMES)
@pytest.mark.parametrize("stored", FLOATS, ids=NAMES)
@pytest.mark.parametrize("before", [0, 4096, 130, 4099])
def test_any_range_becomes_the_values_that_torch_converts_it_to(
    stored: torch.dtype, computed: torch.dtype, before: int, tmp_path: Path, files: DiskFiles
) -> None:
    values = values_of(stored, 5000)
    file = written(tmp_path, values, before, behind=77)
    for first, last in ((0, 5000), (1, 2), (7, 4111), (2048, 4096), (4999, 5000)):
        out = arena(last - first, computed)
        piece = FilePiece(file, before + first * stored.itemsize, out, stored)
        assert files.read([piece]) == (last - first) * stored.itemsize
        assert torch.equal(out, values[first:last].to(computed))


@settings(max_examples=60, deadline=None)
@given(
    before=draw.integers(0, 9000),
    count=draw.integers(1, 40_000),
    behind=draw.integers(0, 9000),
    skip=draw.sampled_from([0, 64, 4096, 4160]),
    pair=draw.tuples(draw.sampled_from(FLOATS), draw.sampled_from(FLOATS)),
    chunk=draw.sampled_from([4096, 12288, CHUNK_BYTES]),
)
def test_reading_equals_numpys_slice_whatever_is_aligned(
    tmp_path_factory: pytest.TempPathFactory,
    before: int,
    count: int,
    behind: int,
    skip: int,
    pair: tuple[torch.dtype, torch.dtype],
    chunk: int,
) -> None:
    stored, computed = pair
    file = written(tmp_path_factory.mktemp("range"), values_of(stored, count), before, behind)
    whole = numpy.frombuffer(file.read_bytes(), dtype=numpy.uint8)[before : before + count * stored.itemsize]
    expected = torch.from_numpy(whole.copy()).view(stored).to(computed)
    out = arena(count, computed, skip)
    with DiskFiles(readers=2) as files:
        files.each(files._read_chunk, FilePiece(file, before, out, stored).cut(chunk))
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_several_files_and_many_pieces_in_one_call(tmp_path: Path, files: DiskFiles) -> None:
    values = [values_of(torch.float32, 3 * CHUNK_BYTES // 4 + 11 * part, seed=part) for part in range(3)]
    outs = [arena(len(each), torch.float32) for each in values]
    pieces = [
        FilePiece(written(tmp_path, each, 64 * at, name=str(at)), 64 * at, outs[at], torch.float32)
        for at, each in enumerate(values)
    ]
    assert files.read(pieces) == sum(each.nbytes for each in values)
    assert all(torch.equal(*pair) for pair in zip(values, outs))


def test_reading_nothing_reads_nothing(files: DiskFiles) -> None:
    assert files.read([]) == 0


def test_a_range_is_direct_when_its_place_agrees_with_its_offset() -> None:
    page, odd = arena(2048, torch.float32), arena(2048, torch.float32, skip=64)
    assert FilePiece(Path("x"), 8192, page, torch.float32).is_direct
    assert FilePiece(Path("x"), 8192 + 64, odd, torch.float32).is_direct
    assert not FilePiece(Path("x"), 8192 + 64, page, torch.float32).is_direct
    assert not FilePiece(Path("x"), 8192, page, torch.bfloat16).is_direct


@pytest.mark.parametrize(("before", "is_straight"), [(8192, True), (8192 + 36, False)])
def test_an_aligned_range_goes_straight_to_its_place_and_any_other_through_a_buffer(
    before: int, is_straight: bool, tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(torch.float32, 64 * 1024)
    file, out = written(tmp_path, values, before), arena(64 * 1024, torch.float32)
    places: list[int] = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        places.append(numpy.frombuffer(buffers[0], numpy.uint8).ctypes.data)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    files.read([FilePiece(file, before, out, torch.float32)])
    inside = [out.data_ptr() <= place < out.data_ptr() + out.nbytes for place in places]
    assert places and all(inside) == is_straight == any(inside)
    assert torch.equal(out, values)


@settings(max_examples=40, deadline=None)
@given(
    before=draw.integers(1, 9000),
    count=draw.integers(1, 60_000),
    behind=draw.sampled_from([0, 1, 5000]),
    chunk=draw.sampled_from([4096, 12288, CHUNK_BYTES]),
)
def test_a_range_with_pages_for_itself_goes_straight_to_its_place(
    tmp_path_factory: pytest.TempPathFactory, before: int, count: int, behind: int, chunk: int
) -> None:
    """Whatever page of the file it begins and ends in; nothing outside its own pages is written."""
    values = torch.randint(0, 255, (count,), dtype=torch.uint8)
    file, skip = written(tmp_path_factory.mktemp("range"), values, before, behind), before % ALIGNMENT
    memory = arena(3 * ALIGNMENT + aligned(skip + count), torch.uint8).fill_(255)
    out = memory[ALIGNMENT + skip : ALIGNMENT + skip + count]
    pages = memory[ALIGNMENT : ALIGNMENT + aligned(skip + count)]
    with DiskFiles(readers=2) as files, patch.object(DiskFiles, "_read_to_buffer", side_effect=AssertionError("not straight")):
        assert files.read(chunks := FilePiece(file, before, out, torch.uint8).alone_in(pages).cut(chunk)) == count
        assert all(piece.pages is not None for piece in chunks)
    assert torch.equal(out, values)
    assert (memory[:ALIGNMENT] == 255).all() and (memory[ALIGNMENT + len(pages) :] == 255).all()


def beside_each_other(
    folder: Path, sizes: Sequence[int], before: int, gaps: Sequence[int]
) -> tuple[list[FilePiece], list[torch.Tensor]]:
    """Ranges of a file with bytes between them, each with pages of its own in memory, which lie in another order."""
    values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    noise = [torch.full((gap,), 255, dtype=torch.uint8) for gap in (before, *gaps)]
    file = written(folder, torch.cat([part for pair in zip(noise, values, strict=True) for part in pair]))
    pieces, at = [], 0
    for gap, size in zip((before, *gaps), sizes, strict=True):
        at += gap
        pages = arena(aligned(at % ALIGNMENT + size), torch.uint8).fill_(7)
        own = pages[at % ALIGNMENT : at % ALIGNMENT + size]
        pieces.append(FilePiece(file, at, own, torch.uint8).alone_in(pages))
        at += size
    return pieces, values


@settings(max_examples=60, deadline=None)
@given(
    sizes=draw.lists(draw.integers(1, 14_000), min_size=2, max_size=7),
    before=draw.integers(0, 9000),
    gaps=draw.lists(draw.sampled_from([0, 0, 0, 32, 4096, 8192]), min_size=6, max_size=6),
    most=draw.sampled_from([8192, CHUNK_BYTES]),
    ends_early=draw.booleans(),
)
def test_neighbours_in_a_file_have_their_own_bytes_however_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], before: int, gaps: list[int], most: int, ends_early: bool
) -> None:
    """Also where the system gives fewer bytes than a run wants."""
    pieces, values = beside_each_other(tmp_path_factory.mktemp("run"), sizes, before, gaps[: len(sizes) - 1])
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, buffers[:1] if ends_early else buffers, offset)

    with (
        DiskFiles(readers=2) as files,
        patch.object(disk, "CHUNK_BYTES", most),
        patch.object(DiskFiles, "_read_to_buffer", side_effect=AssertionError("not straight")),
        patch.object(os, "preadv", short),
    ):
        assert files.read(reversed(pieces)) == sum(sizes)
    for piece, own in zip(pieces, values, strict=True):
        assert torch.equal(piece.out, own)


@pytest.mark.parametrize("before", [0, 96])
def test_neighbours_in_a_file_are_one_read_of_up_to_a_chunk(
    before: int, tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As blocks of experts are: 1.2 MB each, side by side, with or without a page that two share. One that nothing wants is
    between the last two."""
    size, shared = 288 * ALIGNMENT, aligned(before)
    pieces, values = beside_each_other(tmp_path, [size] * 6, before, [0, 0, 0, 0, size])
    reads, preadv = list[tuple[int, int]](), os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    assert files.read(pieces) == 6 * size
    assert sorted(reads) == [(0, 3 * size + shared), (3 * size, 2 * size + shared), (6 * size, size + shared)]
    assert all(torch.equal(piece.out, own) for piece, own in zip(pieces, values))


def in_two_folders(path: Path) -> list[tuple[list[FilePiece], list[torch.Tensor]]]:
    """Two neighbours in a file of each folder, at the same places."""
    folders = [path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    return [beside_each_other(folder, [9000, 9000], 10, [0]) for folder in folders]


def test_ranges_of_two_files_are_no_neighbours(tmp_path: Path, files: DiskFiles) -> None:
    ((first, _), begins), ((_, second), ends) = in_two_folders(tmp_path)
    files.read([first, second])
    assert torch.equal(first.out, begins[0]) and torch.equal(second.out, ends[1])


def test_neighbours_in_each_of_two_files_are_one_read(tmp_path: Path) -> None:
    (one, _), (other, _) = in_two_folders(tmp_path)
    assert sorted(map(len, disk.runs([*one, *other]))) == [2, 2]


def test_a_run_that_fails_is_told_with_the_piece_that_cannot_be_read(
    tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, _ = beside_each_other(tmp_path, [8000, 9000], 10, [0])
    preadv = os.preadv

    def failing_behind(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset + sum(map(len, buffers)) > 12_288:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing_behind)
    with pytest.raises(OSError, match="from byte 4096 on were to be read"):
        files.read(pieces)


def test_short_reads_are_gone_on_with(tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than asked for, and not whole pages."""
    values = values_of(torch.bfloat16, 30_000)
    file, out = written(tmp_path, values, 130), arena(30_000, torch.float32)
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        part = buffers[0][: max(2 * ALIGNMENT, len(buffers[0]) // 2 // ALIGNMENT * ALIGNMENT)]
        return preadv(descriptor, [part], offset) - (100 if len(part) < len(buffers[0]) else 0)

    monkeypatch.setattr(os, "preadv", short)
    files.read([FilePiece(file, 130, out, torch.bfloat16)])
    assert torch.equal(out, values.float())


@pytest.mark.parametrize("before", [0, 130])
def test_where_direct_reads_stop_short_of_a_page_the_page_cache_gives_the_rest(
    before: int, tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(torch.float32, 30_000)
    file, out = written(tmp_path, values, before), arena(30_000, torch.float32)
    preadv, reads = os.preadv, []

    def never_past(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """Of a direct read no byte behind 10,000 comes; and a direct read must be of whole pages."""
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        reads.append((is_direct, offset))
        if not is_direct:
            return preadv(descriptor, buffers, offset)
        assert offset % ALIGNMENT == 0
        return min(preadv(descriptor, buffers, offset), max(0, 10_000 - offset))

    monkeypatch.setattr(os, "preadv", never_past)
    files.read([FilePiece(file, before, out, torch.float32)])
    assert torch.equal(out, values)
    if not reads[0][0]:
        pytest.skip("this file system has no direct reads")
    assert reads == [(True, 0), (True, 8192), (False, 10_000)]


# -- what goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5000, 4096 * 1024])
def test_a_file_that_ends_too_early_is_named(count: int, tmp_path: Path, files: DiskFiles) -> None:
    file, out = written(tmp_path, values_of(torch.float32, 3000)), arena(count, torch.float32)
    with pytest.raises(OSError, match=rf"{file}: ends at byte 12000, .* too early; is it truncated\?"):
        files.read([FilePiece(file, 0, out, torch.float32)])


def test_a_disk_that_fails_is_told_with_the_file_and_what_was_wanted(
    tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, values_of(torch.float32, 3000))
    failing(monkeypatch, "preadv", errno.EIO)
    with pytest.raises(OSError, match="Input/output error where 8192 bytes from byte 4096 on were to be read") as caught:
        files.read([FilePiece(file, 4096, arena(2048, torch.float32), torch.float32)])
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file))
    assert one_line(caught.value) == f"{caught.value.strerror}: {file}"


def test_a_truncated_file_is_not_read_again_and_again(
    tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads, preadv = written(tmp_path, values_of(torch.float32, 3000)), [], os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with pytest.raises(OSError, match="is it truncated"):
        files.read([FilePiece(file, 0, arena(5000, torch.float32), torch.float32)])
    assert len(reads) <= 2


def test_what_is_read_is_looked_at_as_it_is_stored(tmp_path: Path, files: DiskFiles) -> None:
    """In whole chunks from the start of a tensor on, whether it goes straight to its place or not."""
    values = values_of(torch.float16, CHUNK_BYTES // 2 + 5000)
    file = written(tmp_path, values, 4096, behind=4096)
    seen: dict[int, bytes] = {}

    class Kept:
        def __call__(self, offset: int, data: memoryview) -> None:
            seen[offset] = bytes(data)

        def unreadable(self, error: OSError) -> Exception:
            return ValueError("unreadable")

    for computed in (torch.float16, torch.float32):
        seen.clear()
        files.read([FilePiece(file, 4096, arena(len(values), computed), torch.float16, Kept())])
        assert sorted(seen) == [4096, 4096 + CHUNK_BYTES]
        assert b"".join(seen[at] for at in sorted(seen)) == values.view(torch.uint8).numpy().tobytes()
    looked_at = dict(seen)
    seen.clear()
    files.check([Checked(file, 4096, values.nbytes, Kept())])
    assert seen == looked_at
    with pytest.raises(ValueError, match="unreadable"):
        files.check([Checked(file, 4096, 2 * values.nbytes, Kept())])


def test_a_file_that_is_gone_is_named(tmp_path: Path, files: DiskFiles) -> None:
    with pytest.raises(OSError, match="gone"):
        files.read([FilePiece(tmp_path / "gone", 0, arena(8, torch.float32), torch.float32)])


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system without O_DIRECT (tmpfs of older kernels, some network file systems)."""
    opened: list[int] = []
    work = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        opened.append(flags)
        return work(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    return opened


def test_where_direct_reads_are_refused_buffered_ones_do(
    tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = refuse_direct(monkeypatch)
    values = values_of(torch.float16, 30_001)
    file, out = written(tmp_path, values, 37), arena(30_001, torch.float32)
    files.read([FilePiece(file, 37, out, torch.float16)])
    assert torch.equal(out, values.float()) and opened


def test_where_direct_access_is_refused_the_offload_file_is_buffered(
    tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    round_trip(DiskTier(files, tmp_path))


def test_an_error_in_one_range_comes_out_after_all_have_ended(files: DiskFiles) -> None:
    running: list[int] = []

    def action(place: int) -> None:
        running.append(place)
        if place == 3:
            raise OSError(errno.EIO, "cable")
        running.remove(place)

    with pytest.raises(OSError, match="cable"):
        files.each(action, list(range(20)))
    assert running == [3]


def test_every_item_is_done_once_and_the_caller_does_some_of_them(files: DiskFiles) -> None:
    done, caller, is_here = list[int](), threading.get_ident(), threading.Event()

    def action(place: int) -> None:
        if threading.get_ident() == caller:
            is_here.set()
        assert is_here.wait(PATIENCE_SECONDS)
        done.append(place)

    files.each(action, list(range(50)))
    assert sorted(done) == list(range(50))


def test_of_several_errors_the_first_items_comes_out(files: DiskFiles) -> None:
    def action(place: int) -> None:
        raise OSError(errno.EIO, f"cable {place}")

    with pytest.raises(OSError, match="cable 0"):
        files.each(action, list(range(20)))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted so on Linux")
@pytest.mark.parametrize("nbytes", [ALIGNMENT, HUGE_PAGE_BYTES, CHUNK_BYTES + 2 * ALIGNMENT])
def test_a_readers_buffer_lies_on_huge_pages_as_far_as_it_fills_them(nbytes: int) -> None:
    before = held_on_huge_pages()
    if before is None:
        pytest.skip("this system has no huge pages")
    memory = huge_pages(nbytes)
    memory[:] = bytes(nbytes)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert len(memory) == nbytes and address % HUGE_PAGE_BYTES == 0
    assert held_on_huge_pages() == before + nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def held_on_huge_pages() -> int | None:
    """Bytes of this process; None where the system gives no huge pages to memory that asks for them."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        return None
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def test_a_file_is_opened_once_and_closed_at_the_end(tmp_path: Path) -> None:
    file = written(tmp_path, values_of(torch.float32, 100))
    with DiskFiles() as files:
        for _ in range(3):
            files.read([FilePiece(file, 0, arena(100, torch.float32), torch.float32)])
        assert descriptors_of(file) == 1
    assert descriptors_of(file) == 0


def descriptors_of(path: Path) -> int:
    gc.collect()
    return sum(target.startswith(str(path)) for target in map(link_of, os.listdir("/proc/self/fd")))


def link_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the descriptor of the listing itself
        return ""


# -- the offload file ----------------------------------------------------------------------------------------------------


def round_trip(tier: DiskTier) -> None:
    regions = [tier.alloc(size) for size in (1, 4096, 10_000)]
    pages = [values_of(torch.float32, 1024 * (1 + at), seed=at) for at in range(3)]
    for region, page in zip(regions, pages):
        source = arena(len(page), torch.float32).copy_(page)
        tier.write_from(region, 0, source[: region.nbytes // 4])
    for region, page in zip(regions, pages):
        out = arena(region.nbytes // 4, torch.float32)
        tier.read_into(region, 0, out)
        assert torch.equal(out[: len(page)], page[: len(out)])
    tier.close()


def test_what_is_written_to_a_region_is_read_back(tmp_path: Path, files: DiskFiles) -> None:
    round_trip(DiskTier(files, tmp_path))


def test_regions_do_not_overlap_and_are_as_large_as_asked(tmp_path: Path, files: DiskFiles) -> None:
    tier = DiskTier(files, tmp_path)
    regions = [tier.alloc(size) for size in (5, 4096, 4097, 0, 12_288)]
    assert [region.nbytes for region in regions] == [4096, 4096, 8192, 0, 12_288]
    ends = [region.offset + region.nbytes for region in regions]
    assert [region.offset for region in regions] == [0, *ends[:-1]]
    assert tier.meter.used_bytes == tier.meter.peak_bytes == ends[-1]
    tier.close()


def test_the_file_has_no_name_takes_its_room_at_once_and_gives_it_back(tmp_path: Path, files: DiskFiles) -> None:
    tier = DiskTier(files, tmp_path)
    assert not list(tmp_path.iterdir())
    regions = [tier.alloc(1 << 20) for _ in range(3)]
    assert not list(tmp_path.iterdir()), "a crash would leave this file behind"
    assert tier._descriptor is not None
    assert os.fstat(tier._descriptor).st_blocks * 512 >= 3 << 20, "a full disk would be met in mid-run"
    for region in regions:
        tier.free(region)
    assert os.fstat(tier._descriptor).st_size == 0
    tier.close()
    assert descriptors_of(tmp_path) == 0


def failing(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)


@pytest.mark.parametrize("step", ["alloc", "write"])
def test_a_full_disk_is_told_with_its_folder_and_what_to_do(
    step: str, tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(files, tmp_path)
    region = tier.alloc(8192)
    failing(monkeypatch, "posix_fallocate" if step == "alloc" else "pwrite", errno.ENOSPC)
    work: Callable[[], object] = {
        "alloc": lambda: tier.alloc(5_000_000),
        "write": lambda: tier.write_from(region, 0, arena(2048, torch.float32)),
    }[step]
    with pytest.raises(
        OSError, match=rf"disk is full: 0.00\d GB more could not be written in {tmp_path}; lower the disk share"
    ) as caught:
        work()
    assert caught.value.errno == errno.ENOSPC
    assert tier.meter.used_bytes == 8192 and not list(tmp_path.iterdir())
    tier.close()


def test_a_disk_that_fails_is_not_called_full(tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(files, tmp_path)
    region = tier.alloc(4096)
    failing(monkeypatch, "pwrite", errno.EIO)
    with pytest.raises(OSError, match=r"disk failed \(Input/output error\)"):
        tier.write_from(region, 0, arena(1024, torch.float32))
    tier.close()


def test_a_write_that_is_cut_short_is_gone_on_with(tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, source, offset: pwrite(descriptor, source[:4096], offset))
    round_trip(DiskTier(files, tmp_path))


def test_short_writes_go_on_from_whole_pages_and_end(tmp_path: Path, files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def short(descriptor: int, source: memoryview, offset: int) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return pwrite(descriptor, source, offset)
        assert offset % ALIGNMENT == 0
        return pwrite(descriptor, source[:4096], offset) - 100

    monkeypatch.setattr(os, "pwrite", short)
    round_trip(DiskTier(files, tmp_path))


def test_scratch_memory_is_aligned_and_of_its_thread(tmp_path: Path, files: DiskFiles) -> None:
    tier = DiskTier(files, tmp_path)
    own = tier.scratch(5000)
    assert own.nbytes == 8192 and own.data_ptr() % ALIGNMENT == 0
    assert tier.scratch(100).data_ptr() == own.data_ptr(), "one buffer per thread, used again"
    places: list[int] = []
    barrier = threading.Barrier(3)

    def take() -> None:
        places.append(tier.scratch(100).data_ptr())
        barrier.wait(PATIENCE_SECONDS)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({own.data_ptr(), *places}) == 4
    assert tier.scratch(3 * CHUNK_BYTES).nbytes == 3 * CHUNK_BYTES


def test_space_behind_what_is_in_use_is_had_again(tmp_path: Path, files: DiskFiles) -> None:
    """As turns of a conversation do: what it holds stays, each turn's hidden values come and go."""
    with closing(DiskTier(files, tmp_path)) as tier:
        stays = tier.alloc(8192)
        source = values_of(torch.float32, 2048)
        tier.write_from(stays, 0, arena(2048, torch.float32).copy_(source))
        for size in (4096, 40_960, 12_288):
            comes, goes = tier.alloc(size), tier.alloc(size)
            assert comes.offset == 8192 and goes.offset == 8192 + size
            tier.free(comes)  # a gap: waits until what is behind it goes
            assert tier.alloc(4096).offset == 8192 + 2 * size
            tier.free(DiskRegion(8192 + 2 * size, 4096))
            tier.free(goes)
        out = arena(2048, torch.float32)
        tier.read_into(stays, 0, out)
        assert torch.equal(out, source)
        assert os.fstat(tier._descriptor).st_size == 8192


# -- the offload folder --------------------------------------------------------------------------------------------------


def test_a_folder_that_was_not_there_is_made_and_taken_away(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path / "a" / "b")
    assert folder.path.is_dir()
    folder.close()
    assert not list(tmp_path.iterdir())
    folder.close()


def test_a_folder_that_was_there_or_holds_something_is_left(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    OffloadFolder(there).close()
    assert there.is_dir()
    made = OffloadFolder(tmp_path / "a" / "b")
    (tmp_path / "a" / "note").write_text("mine")
    made.close()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["note"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_made_the_same_folder_leave_none(order: tuple[int, int], tmp_path: Path) -> None:
    """Two engines that start at once both find parts of it missing."""
    first = OffloadFolder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").rmdir()
    second = OffloadFolder(tmp_path / "a" / "b")
    for place in order:
        (first, second)[place].close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=rf"offload folder {tmp_path} cannot be written \(Permission denied\); give another"):
        OffloadFolder(tmp_path)


@pytest.mark.parametrize("step", ["mkdir", "access"])
def test_a_refused_folder_leaves_no_part_of_its_path(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "access":
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        name = "b" * 300  # longer than a file system takes: its parent is made before that shows
    with pytest.raises(ValueError, match="cannot be written"):
        OffloadFolder(tmp_path / "a" / ("b" if step == "access" else name))
    assert not list(tmp_path.iterdir())


def test_regions_are_plain_ranges() -> None:
    assert DiskRegion(4096, 8192) == DiskRegion(offset=4096, nbytes=8192)
