"""The file of --output and its neighbour: what an earlier run kept stays, and a link stays a link."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from h2o_flexgen.cli.output_files import CompletionsFile
from tests.cli.test_report import completion


def test_what_an_earlier_run_kept_is_neither_written_over_nor_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kept = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    kept.write_text("of an earlier run\n")
    with CompletionsFile(str(file)):
        pass  # refused, or ended, before the first text
    assert capsys.readouterr().err == f"{kept} is there already, from another run, and is left as it is\n"
    with CompletionsFile(str(file)) as output:
        output.add(completion(0))
        output.finish([completion(0)])
    assert kept.read_text() == "of an earlier run\n" and set(tmp_path.iterdir()) == {file, kept}
    capsys.readouterr()
    with CompletionsFile(str(file)) as output:
        output.add(completion(0))
    another = tmp_path / "out.jsonl.partial.1"
    assert f"(1) are kept in {another}" in capsys.readouterr().err
    assert kept.read_text() == "of an earlier run\n" and another.read_text() == file.read_text()


def test_nothing_lies_beside_the_file_before_the_first_text(tmp_path: Path) -> None:
    with CompletionsFile(str(tmp_path / "out.jsonl")):
        assert list(tmp_path.iterdir()) == []


def test_the_texts_go_where_a_link_points(tmp_path: Path) -> None:
    target, link = tmp_path / "there" / "texts", tmp_path / "out.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    with CompletionsFile(str(link)) as output:
        output.add(completion(0))
        output.finish([completion(0)])
    assert link.is_symlink() and list(target.parent.iterdir()) == [target]


def test_a_disk_that_is_full_leaves_whole_lines_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files refuses a line in the midst, as a full disk does."""
    file, limit = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with CompletionsFile(str(file)) as output:
        output.add(completion(0))
        whole = output.partial.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 3 // 2, limit[1]))
        try:
            for write in (lambda: output.add(completion(1)), lambda: output.finish([completion(0), completion(1)])):
                with pytest.raises(
                    ValueError, match=rf"^--output {file} cannot be written \(File too large\); give another file"
                ):
                    write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == whole and not file.exists()
    assert "(1) are kept in" in capsys.readouterr().err
