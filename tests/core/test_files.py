"""Text files that are written whole, wherever their name leads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from h2o_flexgen.checkpoints.model_files import read_object
from h2o_flexgen.checkpoints.probe_file import read_probe
from h2o_flexgen.core import files
from h2o_flexgen.core.files import read_text, write_text
from h2o_flexgen.jobs.output import Manifest
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.policies.head_budgets import read_head_budgets
from tests.helpers.refusals import one_line

READERS = (read_head_budgets, read_probe, Machine.load, Manifest.read, lambda path: read_object(path, "mend it"))


def test_a_link_goes_on_to_point_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("first", "second"):
        write_text(tmp_path / "link", text)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert pipe.is_fifo() and os.read(reader, 100) == b"text"
    finally:
        os.close(reader)


def test_the_link_to_an_open_pipe_is_written_to(tmp_path: Path) -> None:
    """As the system has them for /dev/stdout: what the link says is no path."""
    reader, writer = os.pipe()
    try:
        write_text(f"/proc/self/fd/{writer}", "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("read", READERS)
def test_a_document_is_no_pipe_and_no_device(read: Callable[[Path], object], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        said = one_line(lambda path=path: read(path))
        assert str(path) in said and "it is a pipe or a device; give a plain file" in said


@pytest.mark.parametrize("read", READERS)
def test_a_document_that_is_too_large_is_refused(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 10)
    path = tmp_path / "file"
    path.write_text("x" * 11)
    assert "it has more than 10 bytes; give a smaller file" in one_line(lambda: read(path))


def test_a_text_of_a_pipe_is_read_and_one_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, "Käse\r\n".encode())
    os.close(writer)
    try:
        assert read_text(Path(f"/dev/fd/{reader}"), "text") == "Käse\n"
    finally:
        os.close(reader)
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 10)
    assert one_line(lambda: read_text(Path("/dev/zero"), "text of zeros")).startswith(
        "text of zeros cannot be read (it has more"
    )
