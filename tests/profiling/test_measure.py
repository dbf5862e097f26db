"""Measurements: rates that are plausible, of what was asked for, and nothing left on the disk."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen.formats.kernel_table import INT8_PRODUCT
from h2o_flexgen.formats.table import MATRIX_FORMATS
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.disk import DiskFiles
from h2o_flexgen.profiling import measure
from h2o_flexgen.profiling.measure import Needs, Products, cpu_name, disk_read_rate, host_copy_rate, offload_rates
from tests.helpers.inverted import Inverted, registered

SMALL = Needs("float32", (96, 64), rows=(5, 3, 5))


def test_only_what_is_needed_is_measured() -> None:
    machine = measure.measure(Device(), SMALL, seconds=0.002)
    assert (machine.disk_read_per_s, machine.disk_write_per_s, machine.host_to_device_per_s) == (inf, inf, inf)
    assert [rows for rows, _ in machine.flops_per_s["float32"]] == [3, 5]
    assert all(1e3 < rate < 1e14 for _, rate in machine.flops_per_s["float32"])
    assert machine.host_bytes > 0 and machine.disk_bytes > 0 and machine.device == "cpu"


def test_the_offload_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    needs = Needs("float32", (96, 64), rows=(3,), offload_folder=folder, offload_bytes=300_000)
    machine = measure.measure(Device(), needs, seconds=0.002)
    assert all(1e3 < rate < inf for rate in (machine.disk_read_per_s, machine.disk_write_per_s))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 9_000_000])
def test_any_size_can_be_measured_with(tmp_path: Path, nbytes: int) -> None:
    write, read = offload_rates(tmp_path, nbytes, seconds=0.001)
    assert write > 0 and read > 0


def test_files_are_read_all_over_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "READ_BYTES_AT_ONCE", 8192)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=count(0.0, 0.001).__next__))
    files = [tmp_path / name for name in ("a", "b")]
    files[0].write_bytes(b"a" * 20_000)
    files[1].write_bytes(b"b" * 9_000)
    read, places = DiskFiles.read, []
    monkeypatch.setattr(DiskFiles, "read", lambda self, pieces: (places.extend(pieces), read(self, pieces))[1])
    assert disk_read_rate(files, seconds=0.02) > 0
    assert {(piece.file, piece.offset, piece.nbytes) for piece in places} == {
        (files[0], 0, 8192), (files[0], 8192, 8192), (files[1], 0, 8192),
    }  # fmt: skip
    assert bytes(places[-1].out[:10].tolist()) in (b"a" * 10, b"b" * 10)
    assert [len(file.read_bytes()) for file in files] == [20_000, 9_000]


def test_what_takes_longer_than_its_time_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process had to wait before the first call."""
    (tmp_path / "a").write_bytes(b"a" * 8192)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=count(0.0, 1.0).__next__))
    assert disk_read_rate([tmp_path / "a"], seconds=0.02) == 8192 / 2


def test_a_file_below_a_page_gives_no_bound(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    assert disk_read_rate([tmp_path / "small"], seconds=0.001) == inf


def test_a_product_that_would_not_fit_is_made_smaller() -> None:
    needs = Needs("float32", (4096, 64), rows=(100_000,), memory_bytes=1 << 20)
    ((rows, rate),) = Products(Device(), needs, seconds=0.001).rates()[0]["float32"]
    assert rows * 64 * 4 < 1 << 20 and rate > 0


def test_prompts_of_many_lengths_do_not_make_it_long() -> None:
    plain, packed = Products(Device(), Needs("float32", (96, 64), rows=tuple(range(1, 101))), seconds=0.001).rates()
    assert [rows for rows, _ in plain["float32"]] == [1, 34, 67, 100] and packed == {}


def test_products_with_packed_matrices_are_those_of_a_run() -> None:
    """Few rows are multiplied with the bytes; for more they are decoded, and what is measured is a product with the values."""
    with registered(Inverted(few_rows=4)) as format:
        needs = Needs("float32", (96, 64), rows=(2, 3, 4, 9), format=format.name)
        plain, packed = Products(Device(), needs, seconds=0.001).rates()
        before = format.multiplied
        assert before and [rows for rows, _ in packed[format.name]] == [2, 4] and [rows for rows, _ in plain["float32"]] == [9]
        assert set(packed) == {format.name} and set(plain) == {"float32"} and not format.decoded
        plain, packed = Products(Device(), replace(needs, rows=(9, 70)), seconds=0.001).rates()
        assert format.multiplied == before and packed == {} and [rows for rows, _ in plain["float32"]] == [9, 70]


@pytest.mark.parametrize("form", MATRIX_FORMATS)
def test_products_of_8_bits_have_rates_of_their_own(form: str) -> None:
    plain, packed = Products(Device(), Needs("bfloat16", (96, 64), (1, 9), form, INT8_PRODUCT), seconds=0.001).rates()
    assert plain == {} and {price: [rows for rows, _ in curve] for price, curve in packed.items()} == {f"int8 {form}": [1, 9]}


def test_copies_have_a_rate() -> None:
    assert 1e4 < host_copy_rate(1 << 20, repetitions=2) < 1e13


def test_the_cpu_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model name": ["", "Some CPU @ 2 GHz"]}
    monkeypatch.setattr(measure, "processor_facts", lambda name: facts.get(name, []))
    assert cpu_name() == "Some CPU @ 2 GHz"
    facts.clear()
    assert cpu_name()


@pytest.mark.cuda
def test_a_device_with_memory_of_its_own_has_links() -> None:
    needs = Needs("bfloat16", (256, 128), rows=(4,), links=True, memory_bytes=32 << 20)
    machine = measure.measure(open_device(), needs, seconds=0.01)
    rates = (machine.host_copy_per_s, machine.host_to_device_per_s, machine.device_to_host_per_s)
    assert all(1e8 < rate < 1e13 for rate in rates)
    assert machine.device_bytes > 0
    assert measure.describe_machine(open_device())["device"] != "cpu"
