"""The output of a job: what is appended, what a crash leaves, and what a later run makes of it, in both orders."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from h2o_flexgen.jobs.index import Index
from h2o_flexgen.jobs.openai_answers import as_line, refusal
from h2o_flexgen.jobs.output import JobOutput, OrderedOutput, waiting_file
from h2o_flexgen.jobs.recovery import AppendFile, OutputReader
from tests.helpers.refusals import one_line
from tests.jobs.made import index_of

COUNT = 12
KINDS = (JobOutput, OrderedOutput)


def record(place: int, failed: bool = False) -> bytes:
    fine = {"id": f"batch_req_{place}", "custom_id": f"r{place}", "response": {"number": place}, "error": None}
    return as_line(refusal(f"r{place}", "bad") if failed else fine)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = index_of(tmp_path, COUNT)
    yield index
    index.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def written(kind: type[JobOutput], path: Path, index: Index, places: Sequence[int], failed: Sequence[int] = ()) -> None:
    with kind(path, OutputReader(index)) as output:
        for place in places:
            output.add(place, record(place, place in failed), place in failed)
            output.sync()


def names(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def done(output: JobOutput) -> list[int]:
    return [place for place in range(COUNT) if not output.finished.is_open(place)]


def test_records_are_there_as_soon_as_they_are_added(path: Path, index: Index) -> None:
    with JobOutput(path, OutputReader(index)) as output:
        for count, place in enumerate((3, 1, 2), start=1):
            output.add(place, record(place), failed=False)
            assert path.read_bytes().count(b"\n") == count
        assert done(output) == [1, 2, 3]
    assert names(path) == ["r3", "r1", "r2"]


def test_records_in_order_wait_for_those_before_them(path: Path, index: Index) -> None:
    with OrderedOutput(path, OutputReader(index)) as output:
        for place, there in ((3, 0), (1, 0), (0, 2), (4, 2), (2, 5)):
            output.add(place, record(place), failed=False)
            assert len(names(path)) == there, "and not one later than it can be there"
            assert done(output).count(place) == 1
        output.sync()
        assert waiting_file(path).stat().st_size == 0, "what has waited is let go"
    assert names(path) == ["r0", "r1", "r2", "r3", "r4"] and not waiting_file(path).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_run_knows_what_is_done(kind: type[JobOutput], path: Path, index: Index) -> None:
    written(kind, path, index, (3, 0, 5), failed=(5,))
    with kind(path, OutputReader(index)) as output:
        assert (done(output), output.finished.num_failed, output.finished.dropped) == ([0, 3, 5], 1, 0)
        for place in (1, 2, 4):
            output.add(place, record(place), failed=False)
    assert sorted(names(path)) == [f"r{place}" for place in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_run_again_if_that_is_asked_for(kind: type[JobOutput], path: Path, index: Index) -> None:
    written(kind, path, index, range(6), failed=(1, 4))
    with kind(path, OutputReader(index, retry_errors=True)) as output:
        assert done(output) == [0, 2, 3, 5]
        for place in (4, 1):
            output.add(place, record(place), failed=False)
    there = names(path)
    assert sorted(there) == [f"r{place}" for place in range(6)]
    assert there == sorted(there) or kind is JobOutput
    assert b"bad" not in path.read_bytes() and not waiting_file(path).exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [b'{"id": "batch_req_4", "cust', b'{"i', b"\0" * 100, b"\0" * 50 + b"\n"])
def test_a_torn_end_is_cut_off(kind: type[JobOutput], path: Path, index: Index, garbage: bytes) -> None:
    written(kind, path, index, (0, 1))
    whole = path.read_bytes()
    path.write_bytes(whole + garbage)
    with kind(path, OutputReader(index)) as output:
        assert (done(output), output.finished.dropped, path.read_bytes()) == ([0, 1], 1, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_a_loss_of_power_broke_goes_and_the_records_around_it_stay(
    kind: type[JobOutput], path: Path, index: Index
) -> None:
    path.write_bytes(record(0) + b"\0" * 30 + b"\n" + record(2) + record(0) + record(3))
    with kind(path, OutputReader(index)) as output:
        assert (done(output), output.finished.dropped) == ([0, 2, 3], 1)
        output.add(1, record(1), failed=False)
    assert names(path) == (["r0", "r2", "r3", "r1"] if kind is JobOutput else ["r0", "r1", "r2", "r3"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "line", ['{"custom_id": "other", "response": {}}', '{"prompt": "x"}', '"text"', '{"custom_id": "r1"}', "text", ""]
)
def test_an_output_of_something_else_is_refused_and_left_as_it_is(
    kind: type[JobOutput], path: Path, index: Index, line: str
) -> None:
    for end in ("\n", ""):
        path.write_text(line + end)
        if path.stat().st_size:
            said = one_line(lambda: kind(path, OutputReader(index)))
            assert said.startswith(f"line 1 of {path} is ") and path.read_text() == line + end


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_do_not_write_one_output(kind: type[JobOutput], path: Path, index: Index) -> None:
    with kind(path, OutputReader(index)) as output:
        assert "is being written by another process" in one_line(lambda: kind(path, OutputReader(index)))
        output.add(0, record(0), failed=False)
    assert names(path) == ["r0"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_without_records_leaves_no_file(kind: type[JobOutput], path: Path, index: Index) -> None:
    with kind(path, OutputReader(index)):
        assert path.exists()
    assert not path.exists() and not waiting_file(path).exists()


# -- crashes at any byte -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_crash_leaves_all_records_come_once(kind: type[JobOutput], path: Path, index: Index, seed: int) -> None:
    """Runs are cut at random bytes of both files, where the one that was written last may have lost more; some lines are lost
    in the middle."""
    chance = random.Random(seed)
    for _ in range(6):
        with kind(path, OutputReader(index, retry_errors=chance.random() < 0.3)) as output:
            left = [place for place in range(COUNT) if output.finished.is_open(place)]
            chance.shuffle(left)
            for place in left[: chance.randint(0, 5)]:
                failed = chance.random() < 0.2
                output.add(place, record(place, failed), failed)
                if chance.random() < 0.5:
                    output.sync()
        for file in (path, waiting_file(path)):
            if file.exists():
                _damage(file, chance)
    with kind(path, OutputReader(index, retry_errors=True)) as output:
        for place in range(COUNT):
            if output.finished.is_open(place):
                output.add(place, record(place), failed=False)
    expected = [record(place) for place in range(COUNT)]
    lines = path.read_bytes().splitlines(keepends=True)
    assert (lines if kind is OrderedOutput else sorted(lines)) == (expected if kind is OrderedOutput else sorted(expected))
    assert sorted(file.name for file in path.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def _damage(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data and chance.random() < 0.3:
        start = chance.randrange(len(data))
        data[start : start + 40] = bytes(len(data[start : start + 40]))
    if chance.random() < 0.7:
        data = data[: chance.randint(len(data) // 2, len(data))]
    file.write_bytes(bytes(data))


# -- files that cannot be written --------------------------------------------------------------------------------------


def test_half_a_line_does_not_stay_when_the_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with AppendFile(path) as file:
        file.append(b"first\n")

        def full(descriptor: int, data: bytes) -> int:
            if len(data) < 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[:3])

        monkeypatch.setattr(os, "write", full)
        said = one_line(lambda: file.append(b"second\n"))
        assert said == (
            f"{path} cannot be written (No space left on device); whole records stay there: fix this, and go on with --resume"
        )
        monkeypatch.undo()
        assert path.read_bytes() == b"first\n"
        file.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_a_disk_that_loses_what_was_written_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with AppendFile(path) as file:
        file.append(b"first\n")
        file.sync()
        file.append(b"second\n")
        monkeypatch.setattr(os, "fsync", broken)
        assert "cannot be written (Input/output error)" in one_line(file.sync)
        assert path.read_bytes() == b"first\n", "nothing takes for durable what is not"
    with AppendFile(path) as again:
        assert "cannot be written" in one_line(again.sync) and path.read_bytes() == b"first\n"


def test_what_was_synced_is_not_synced_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with AppendFile(path) as file:
        monkeypatch.setattr(os, "fsync", synced.append)
        file.sync()
        assert len(synced) == 1, "an earlier process may have been killed before it did"
        file.append(b"a\n")
        file.append(b"b\n")
        file.sync()
        file.sync()
    assert len(synced) == 2, "records that finish together are made durable together"


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    said = one_line(lambda: AppendFile(tmp_path / "none" / "out.jsonl"))
    assert said == f"{tmp_path}/none/out.jsonl cannot be written (No such file or directory); give another file"


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_removed_while_a_job_writes_it_is_written_again(
    kind: type[JobOutput], path: Path, index: Index
) -> None:
    gc.collect()  # or what an earlier test of this process has left may be closed meanwhile
    folder, descriptors = path.parent / "folder", len(os.listdir("/proc/self/fd"))
    folder.mkdir()
    path = folder / path.name
    with kind(path, OutputReader(index)) as output:
        for place in (0, 1, 3):
            output.add(place, record(place), failed=False)
        assert not output.sync()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        assert output.sync() and not output.sync()
        said = one_line(lambda: AppendFile(path))
        output.add(2, record(2), failed=False)
        path.unlink()
    assert "is being written by another process" in said, "what is written again is locked"
    assert sorted(names(path)) == ["r0", "r1", "r2", "r3"] and os.listdir(folder) == [path.name]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_output_that_is_replaced_while_a_job_writes_it_is_kept_beside_the_other_file(path: Path, index: Index) -> None:
    def run() -> None:
        with JobOutput(path, OutputReader(index)) as output:
            output.add(0, record(0), failed=False)
            path.unlink()
            path.write_text("of somebody else")

    kept = path.with_name("out.jsonl.kept")
    assert f"{path} was replaced by another file while it was written; the records are in {kept}: " in one_line(run)
    assert path.read_text() == "of somebody else" and names(kept) == ["r0"]


def test_an_empty_output_is_not_removed_where_its_name_is_of_another_file(path: Path, index: Index) -> None:
    with JobOutput(path, OutputReader(index)):
        path.unlink()
        path.write_text("of somebody else")
    assert path.read_text() == "of somebody else"
