"""Text files that are written whole, wherever their name leads."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_flexgen.core.files import write_text


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
