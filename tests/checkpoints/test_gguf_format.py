"""What a GGUF file says is read as it was written; a file that contradicts itself, or lacks a part, is told so in one line."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter

from h2o_flexgen.checkpoints.gguf_format import Gguf, Metadata, read_gguf, read_metadata
from tests.helpers.gguf_files import save_gguf
from tests.helpers.refusals import one_line

Kind = GGUFValueType
NAME = "blk.0.attn_q.weight"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = NAME, shape: Iterable[int] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    dims = list(shape)
    return text(name.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    path: Path,
    pairs: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    """A file written by hand, with `data` bytes of data."""
    pairs, tensors = list(pairs), list(tensors)
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join((*pairs, *tensors))
    path.write_bytes(header + bytes(-len(header) % alignment + data))
    return path


def refused(path: Path) -> str:
    message = one_line(lambda: read_gguf(path))
    assert path.name in message
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write(path: Path, values: dict[str, tuple[object, Kind, Kind | None]], **options: object) -> None:
    writer = GGUFWriter(path, "llama", **options)  # type: ignore[arg-type]
    for key, (value, kind, of) in values.items():
        writer.add_key_value(key, value, kind, of)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WHOLE = [Kind.UINT8, Kind.INT8, Kind.UINT16, Kind.INT16, Kind.UINT32, Kind.INT32, Kind.UINT64, Kind.INT64]


def test_every_kind_of_value_is_read_as_it_was_written(path: Path) -> None:
    wholes = {f"whole.{kind.name}": (100 + kind, kind, None) for kind in WHOLE}
    lists = {f"list.{kind.name}": ([kind, 0, 127], Kind.ARRAY, kind) for kind in WHOLE}
    numbers = {"f": (0.5, Kind.FLOAT32, None), "d": (0.1, Kind.FLOAT64, None), "fs": ([0.5, -2.0], Kind.ARRAY, Kind.FLOAT32)}
    others = {"yes": (True, Kind.BOOL, None), "no": (False, Kind.BOOL, None), "text": ("h\u00e9\n", Kind.STRING, None)}
    texts = {"texts": (["a", "", "\u0120\U0001f600"], Kind.ARRAY, Kind.STRING)}
    write(path, {**wholes, **lists, **numbers, **others, **texts})
    found = read_metadata(path)
    assert all(found.whole(f"whole.{kind.name}") == 100 + kind for kind in WHOLE)
    assert all(list(found.wholes(f"list.{kind.name}")) == [kind, 0, 127] for kind in WHOLE)
    assert (found.number("f"), found.number("d"), list(found.numbers("fs"))) == (0.5, 0.1, [0.5, -2.0])
    assert (found.flag("yes"), found.flag("no"), found.text("text")) == (True, False, "h\u00e9\n")
    assert found.texts("texts") == ("a", "", "\u0120\U0001f600")
    assert found.text("general.architecture") == "llama"


def test_a_key_of_another_type_is_named_with_its_value(path: Path) -> None:
    found = Metadata(path, {"n": 3, "x": float("inf"), "yes": True, "t": "seven"})
    assert (found.whole("m", 7), found.text("m", ""), found.number("n"), "m" in found) == (7, "", 3.0, False)
    for ask, value in (
        (lambda: found.whole("t"), "'seven'"),
        (lambda: found.whole("yes"), "True"),
        (lambda: found.text("n"), "3"),
        (lambda: found.number("x"), "inf"),
        (lambda: found.wholes("n"), "3"),
    ):
        message = one_line(ask)
        assert str(path) in message and value in message
    assert "'m'" in one_line(lambda: found.whole("m"))


@pytest.mark.parametrize("alignment", [0, 16, 4096])
def test_tensors_lie_where_the_package_finds_them(path: Path, alignment: int) -> None:
    save_gguf("llama-gqa", path, "q4_1", "q8_0", alignment=alignment)
    expected = {
        one.name: (int(one.data_offset), int(one.n_bytes), tuple(map(int, reversed(one.shape))))
        for one in GGUFReader(path).tensors
    }
    found = read_gguf(path).tensors
    assert {one.name: (one.offset, one.nbytes, one.shape) for one in found} == expected
    assert {one.format for one in found} == {"float32", "q4_1", "q8_0"}


def test_both_versions_are_read_and_no_others(path: Path) -> None:
    for version in (2, 3):
        assert read_gguf(file_of(path, tensors=[tensor()], data=256, version=version)).tensors[0].shape == (2, 32)
    for version in (0, 1, 4):
        assert f"version {version} " in refused(file_of(path, version=version))
    write(path, {}, endianess=GGUFEndian.BIG)
    assert "byte order" in refused(path)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    save_gguf("llama-mha", tmp_path / "tiny.gguf", tensors_per_part=12)
    found = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(found) == 3
    return found


def same(one: Gguf, other: Gguf) -> bool:
    return one.metadata.values == other.metadata.values and one.tensors == other.tensors


def test_any_part_opens_the_whole(parts: list[Path], tmp_path: Path) -> None:
    whole = read_gguf(parts[0])
    save_gguf("llama-mha", tmp_path / "one.gguf")
    assert {one.name: one.shape for one in whole.tensors} == {
        one.name: one.shape for one in read_gguf(tmp_path / "one.gguf").tensors
    }
    assert {one.file for one in whole.tensors} == set(parts)
    assert all(same(read_gguf(part), whole) for part in parts)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    message = one_line(lambda: read_gguf(parts[1]))
    assert str(parts[missing]) in message and "missing" in message


def test_a_part_in_the_place_of_another_is_refused(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[1].symlink_to(parts[0])
    assert "part 1 of 3" in one_line(lambda: read_gguf(parts[0]))


def test_a_first_part_of_another_name_is_told_the_name_that_it_needs(parts: list[Path], tmp_path: Path) -> None:
    other = parts[0].rename(tmp_path / "model.gguf")
    message = refused(other)
    assert "3 parts" in message and "-00001-of-00003.gguf" in message


def test_parts_of_two_models_are_not_mixed(parts: list[Path], tmp_path: Path) -> None:
    save_gguf("llama-mha", tmp_path / "other.gguf", tensors_per_part=12, num_hidden_layers=2)
    others = sorted(tmp_path.glob("other-*.gguf"))
    parts[0].write_bytes(parts[1].read_bytes())
    assert "part 2 of 3" in one_line(lambda: read_gguf(parts[2]))
    others[0].rename(parts[0])
    assert "parts" in one_line(lambda: read_gguf(parts[2]))


def test_a_tensor_of_which_two_parts_have_one_is_refused(tmp_path: Path) -> None:
    def numbered(key: bytes, number: int) -> bytes:
        return pair(key, 2, struct.pack("<H", number))

    for number in (0, 1):
        pairs = [numbered(b"split.no", number), numbered(b"split.count", 2), numbered(b"split.tensors.count", 2)]
        file_of(tmp_path / f"m-0000{number + 1}-of-00002.gguf", pairs, [tensor()], 256)
    message = one_line(lambda: read_gguf(tmp_path / "m-00001-of-00002.gguf"))
    assert "2 tensors" in message and NAME in message


# -- hostile files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ([pair(b"a", 13, b"")], "type 13"),
        ([pair(b"a", 9, struct.pack("<IQ", 9, 1))], "type 9"),
        ([pair(b"a", 9, struct.pack("<IQ", 99, 1))], "type 99"),
        ([pair(b"a", 9, struct.pack("<IQ", 8, 1 << 60))], "truncated"),
        ([pair(b"a", 9, struct.pack("<IQ", 12, 1 << 61))], "truncated"),
        ([pair(b"a", 9, struct.pack("<IQ", 0, (1 << 64) - 1))], "truncated"),
        ([pair(b"a", 8, struct.pack("<Q", 1 << 40))], "truncated"),
        ([pair(b"a", 8, text(b"\xff\xfe"))], "UTF-8"),
        ([pair(b"\xff", 0, b"\0")], "UTF-8"),
        ([pair(b"a", 0, b"\0"), pair(b"a", 0, b"\1")], "twice"),
        ([pair(b"general.alignment", 4, struct.pack("<I", 0))], "general.alignment"),
        ([pair(b"general.alignment", 4, struct.pack("<I", 24))], "general.alignment"),
        ([pair(b"general.alignment", 4, struct.pack("<I", 1 << 31))], "general.alignment"),
        ([pair(b"general.alignment", 8, text(b"32"))], "general.alignment"),
    ],
)
def test_metadata_that_cannot_be_are_refused(path: Path, pairs: list[bytes], word: str) -> None:
    assert word in refused(file_of(path, pairs, [tensor()], 256))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ([tensor(kind=10)], "q2_K"),
        ([tensor(kind=22)], "iq2_s"),
        ([tensor(kind=4)], "number 4"),
        ([tensor(kind=1 << 31)], f"number {1 << 31}"),
        ([tensor(shape=(33, 2), kind=2)], "blocks of 32"),
        ([tensor(shape=(32, 2), kind=12)], "blocks of 256"),
        ([tensor(shape=(), kind=8)], "blocks of 32"),
        ([tensor(shape=(2, 2, 2, 2, 2))], "5 dimensions"),
        ([tensor(shape=(1 << 63, 1 << 63))], "truncated"),
        ([tensor(shape=(32, 3))], "truncated"),
        ([tensor(offset=32)], "truncated"),
        ([tensor(offset=1 << 63)], "truncated"),
        ([tensor(offset=8)], "no multiple of 32"),
        ([tensor(), tensor("other", offset=32, shape=(32,))], "share bytes"),
        ([tensor(shape=(32,)), tensor(shape=(32,), offset=128)], "2 tensors"),
    ],
)
def test_tensors_that_cannot_be_are_refused(path: Path, tensors: list[bytes], word: str) -> None:
    message = refused(file_of(path, (), tensors, 256))
    assert word in message
    if "q" in word:
        assert "q4_K" in message and "bfloat16" in message  # those that are read


@pytest.mark.parametrize("counts", [(1 << 63, 0), (0, 1 << 63), (2, 0), (1, 1), (1 << 17, 0)])
def test_counts_are_not_believed(path: Path, counts: tuple[int, int]) -> None:
    refused(file_of(path, (), [tensor()], 256, counts=counts))


def test_more_than_any_model_has_is_not_made_into_objects(path: Path) -> None:
    texts = pair(b"tokens", 9, struct.pack("<IQ", 8, (1 << 22) + 1) + bytes(8))
    os.truncate(file_of(path, [texts]), 1 << 26)  # the file has room for as many, and they would all be empty
    assert "4194304" in refused(path)
    os.truncate(file_of(path, (), [tensor()], counts=((1 << 16) + 1, 0)), 1 << 26)
    assert "65536" in refused(path)
    os.truncate(file_of(path, [pair(b"text", 8, struct.pack("<Q", 1 << 27))]), 1 << 28)
    assert "corrupt header" in refused(path)


def test_files_of_other_kinds_are_refused(path: Path, tmp_path: Path) -> None:
    for content, word in (
        (b"", "no GGUF"),
        (b"GG", "no GGUF"),
        (b"PK\x03\x04" + bytes(60), "no GGUF"),
        (b"GGUF\x03", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ):
        path.write_bytes(content)
        assert word in refused(path)
    assert "missing" in refused(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "no file" in refused(tmp_path / "folder.gguf")


def test_no_broken_file_does_more_than_raise_a_value_error_or_takes_much_memory(tmp_path: Path) -> None:
    """Shorter files, and files with bytes that were changed."""
    whole = tmp_path / "whole.gguf"
    save_gguf("qwen3", whole, num_hidden_layers=1)
    size, draw = whole.stat().st_size, random.Random(0)
    header = whole.read_bytes()[: min(one.offset for one in read_gguf(whole).tensors)]
    broken = [(header[:length], length) for length in range(0, len(header), 17)] + [(header, size - 33)]
    for _ in range(250):
        changed = bytearray(header)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(header))] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        broken.append((bytes(changed), size))
    refusals = 0
    tracemalloc.start()
    for content, length in broken:
        (path := tmp_path / "model.gguf").write_bytes(content)
        os.truncate(path, length)  # the data are not read
        try:
            read_gguf(path)
        except ValueError as error:
            refusals += 1
            assert "\n" not in str(error) and len(str(error)) < 700
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(broken) * 0.7 < refusals < len(broken)  # a changed letter of a text is no contradiction
    assert peak < 10 * size
