"""A checkpoint says exactly where its tensors lie, or in one line what is wrong with the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM

from h2o_flexgen.checkpoints.checkpoint import folder_checkpoint, open_checkpoint
from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, read_header, write_safetensors
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.core.model_spec import TensorSpec
from tests.helpers.refusals import one_line

DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, 4, 4)


def read(stored: StoredTensor) -> torch.Tensor:
    raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes]
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, stored.dtype)).view(stored.shape)


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save_sharded(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    owner = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file)
        owner.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {DOWN: torch.randn(6, 10), NORM: torch.randn(6).half(), "lm_head.weight": torch.randn(9, 6).bfloat16()}


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_every_tensor_is_found_where_it_lies(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    located = checkpoint.locate([spec(name, *value.shape) for name, value in tensors.items()])
    assert set(located) == set(tensors)
    for name, value in tensors.items():
        assert checkpoint.stored_as(name).itemsize == value.itemsize
        assert read(located[name]).dtype == value.dtype and torch.equal(read(located[name]), value)


def test_a_checkpoint_leaves_filling_to_the_reader(folder: Path) -> None:
    out = torch.zeros(6)
    assert folder_checkpoint(folder).fill(spec(NORM, 6), out) is False
    assert not out.any()


def test_a_model_saved_by_transformers_in_shards_is_found_whole(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    )
    model = OPTForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    values = dict(model.named_parameters())
    located = folder_checkpoint(tmp_path).locate([spec(name, *value.shape) for name, value in values.items()])
    assert len({stored.file for stored in located.values()}) > 1
    for name, value in values.items():
        assert torch.equal(read(located[name]), value)


@pytest.mark.parametrize(
    ("in_file", "asked_for"),
    [
        ("decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("model.decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight"),
        ("layers.0.attention.dense.bias", "gpt_neox.layers.0.attention.dense.bias"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("transformer.lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_prefix_of_the_base_model_may_lack_or_be_added(tmp_path: Path, in_file: str, asked_for: str) -> None:
    value = torch.randn(3, 4)
    save_file({in_file: value, "model.layers.1.other.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    located = folder_checkpoint(tmp_path).locate([spec(asked_for, 3, 4)])
    assert torch.equal(read(located[asked_for]), value)


def test_the_exact_name_goes_before_a_similar_one(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.zeros(3), "model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = folder_checkpoint(tmp_path)
    assert read(checkpoint.locate([spec("model.norm.weight", 3)])["model.norm.weight"]).sum() == 3
    assert read(checkpoint.locate([spec("norm.weight", 3)])["norm.weight"]).sum() == 0
    message = one_line(lambda: checkpoint.locate([spec("decoder.norm.weight", 3)]))
    assert "norm.weight and " in message or " and norm.weight" in message


def test_dtype_is_that_of_most_values(folder: Path) -> None:
    assert folder_checkpoint(folder).dtype == "float32"


def test_dtype_of_a_folder_without_floats_is_an_error(tmp_path: Path) -> None:
    save_file({"codes": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "F32, F16, BF16" in one_line(lambda: folder_checkpoint(tmp_path).dtype)


def test_a_missing_tensor_is_named_with_its_folder(folder: Path) -> None:
    message = one_line(lambda: folder_checkpoint(folder).locate([spec("model.embed_tokens.weight", 9, 6)]))
    assert "model.embed_tokens.weight" in message and str(folder) in message


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    message = one_line(lambda: folder_checkpoint(folder).locate([spec(NORM, 7)]))
    assert NORM in message and "(6,)" in message and "(7,)" in message


def test_another_dtype_is_refused_only_where_it_is_asked_for(tmp_path: Path) -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    save_file({NORM: torch.ones(6), "attention.bias": mask, "q.weight": mask.to(torch.int8)}, tmp_path / "model.safetensors")
    checkpoint = folder_checkpoint(tmp_path)
    assert checkpoint.locate([spec(NORM, 6)])
    for ask in (lambda: checkpoint.locate([spec("q.weight", 2, 2)]), lambda: checkpoint.stored_as("q.weight").itemsize):
        message = one_line(ask)
        assert "q.weight" in message and "I8" in message


@pytest.mark.parametrize("length", [0, 5, 50, -1])
def test_a_truncated_file_is_named_with_what_it_should_be(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    message = one_line(lambda: folder_checkpoint(folder))
    assert str(path) in message and "truncated" in message
    assert f" {len(whole[:length])}" in message
    if length == -1:
        assert f"{len(whole)} bytes" in message


def test_a_file_that_is_too_long_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    assert "too long" in one_line(lambda: folder_checkpoint(folder))


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", ',
        b"\xff\xfe\xfd\xfc",
        b"[1, 2, 3]",
        b"[" * 100_000,
        b'{"a": 7}',
        json.dumps({"a": entry([2], 0, 8, dtype="F32") | {"dtype": None}}).encode(),
        json.dumps({"a": entry([-2], 0, 8)}).encode(),
        json.dumps({"a": entry([2], 0, 8) | {"data_offsets": "0-8"}}).encode(),
        json.dumps({"a": entry([2], 0, 8) | {"shape": [2.0]}}).encode(),
    ],
)
def test_a_corrupt_header_is_refused(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    message = one_line(lambda: folder_checkpoint(tmp_path))
    assert str(tmp_path / "model.safetensors") in message and "corrupt header" in message


@pytest.mark.parametrize(
    "table",
    [
        {"a": entry([2], 0, 8), "b": entry([2], 12, 20)},  # a hole
        {"a": entry([2], 0, 8), "b": entry([3], 4, 16)},  # an overlap
        {"a": entry([2], 4, 12)},  # not from the start
        {"a": entry([2], 8, 0)},  # backwards
        {"a": entry([2, 3], 0, 20)},  # more values than bytes
        {"a": entry([5], 0, 20, dtype="F16")},
    ],
)
def test_offsets_that_do_not_add_up_are_refused(tmp_path: Path, table: dict[str, object]) -> None:
    write_raw(tmp_path / "model.safetensors", json.dumps(table).encode(), bytes(20))
    message = one_line(lambda: folder_checkpoint(tmp_path))
    assert str(tmp_path / "model.safetensors") in message and ("tensor a" in message or "tensor b" in message)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(range(200)))
    assert "no safetensors file" in one_line(lambda: folder_checkpoint(tmp_path))


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    assert "git lfs pull" in one_line(lambda: folder_checkpoint(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path, [{"a.weight": torch.ones(2)}, {"b.weight": torch.ones(2)}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = one_line(lambda: open_checkpoint(tmp_path))
    assert str(tmp_path / "model-00002-of-00002.safetensors") in message and "1 of the 2" in message


def test_a_truncated_shard_is_found_before_any_tensor_is_asked_for(tmp_path: Path) -> None:
    save_sharded(tmp_path, [{"a.weight": torch.ones(2)}, {"b.weight": torch.ones(2)}])
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    assert str(shard) in one_line(lambda: folder_checkpoint(tmp_path))


def test_of_two_shards_with_the_same_name_the_index_decides(tmp_path: Path) -> None:
    save_sharded(tmp_path, [{"b.weight": torch.zeros(2)}, {"b.weight": torch.ones(2)}])
    for number in (1, 2):
        owner = {"b.weight": f"model-{number:05d}-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}
        owner["c"] = "model-00002-of-00002.safetensors"
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
        located = folder_checkpoint(tmp_path).locate([spec("b.weight", 2)])["b.weight"]
        assert located.file.name == owner["b.weight"] and read(located).sum() == 2 * (number - 1)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
    ],
)
def test_a_corrupt_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert str(tmp_path / "model.safetensors.index.json") in one_line(lambda: open_checkpoint(tmp_path))


def test_a_folder_without_weights_or_no_folder_is_an_error(tmp_path: Path) -> None:
    assert "pytorch_model.bin" in one_line(lambda: open_checkpoint(tmp_path))
    assert "does not exist" in one_line(lambda: open_checkpoint(tmp_path / "no"))
    assert "has no weights" in one_line(lambda: folder_checkpoint(tmp_path))


def test_a_written_file_is_read_by_us_and_by_safetensors_and_its_data_are_aligned(tmp_path: Path) -> None:
    values = {
        "mask": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 3).bfloat16().t(),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "wide": torch.randn(5, dtype=torch.float64),
    }
    path = tmp_path / "model.safetensors"
    headers = [TensorHeader(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    write_safetensors(path, headers, values.__getitem__)
    assert {name: value.tolist() for name, value in load_file(path).items()} == {
        name: value.tolist() for name, value in values.items()
    }
    stored = {tensor.name: tensor for tensor in read_header(path)}
    assert min(tensor.offset for tensor in stored.values()) % 4096 == 0
    assert torch.equal(read(stored["transposed"]), values["transposed"])
    assert stored["scalar"].offset % 4 == 0 and stored["transposed"].offset % 2 == 0
