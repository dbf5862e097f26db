"""What the system counts for a process and for the disk that its files lie on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.baselines import process

LINE = "   7       {} loop{} 100 0 2000 10 0 0 0 0 0 {} 70 0 0 0 0 0 0\n"


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of the system's, and all files on the disk 7:1."""
    written = tmp_path / "diskstats"
    monkeypatch.setattr(process, "Path", lambda _: written)
    there = SimpleNamespace(st_dev=os.makedev(7, 1))
    monkeypatch.setattr(process, "os", SimpleNamespace(stat=lambda _: there, major=os.major, minor=os.minor))
    return written


def test_the_disk_of_a_file_is_the_one_whose_seconds_count(counts: Path) -> None:
    counts.write_text("".join(LINE.format(number, number, 1500 + number) for number in (0, 1, 11)))
    assert process.disk_seconds(Path("file")) == 1.501


def test_what_no_system_counts_is_unknown(counts: Path) -> None:
    counts.write_text(LINE.format(11, 11, 1500))
    assert process.disk_seconds(Path("file")) is None
    counts.unlink()
    assert process.disk_seconds(Path("file")) is None
