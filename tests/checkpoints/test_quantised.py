"""Quantised checkpoints: what is found in them, that it means what their specifications say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints import importing as importing_module
from h2o_flexgen.checkpoints import packed as stored_values_module
from h2o_flexgen.checkpoints import stored_tensors as reading_module
from h2o_flexgen.checkpoints.checkpoint import Checkpoint, open_checkpoint
from h2o_flexgen.checkpoints.derived import Damaged
from h2o_flexgen.checkpoints.packed import PackedCheckpoint, stored_values
from h2o_flexgen.checkpoints.quantisation import folder_quantisation
from h2o_flexgen.checkpoints.quantised import find_matrices
from h2o_flexgen.checkpoints.safetensors_format import BITS, FLOATS, read_header
from h2o_flexgen.checkpoints.stored_tensors import Located
from h2o_flexgen.core.model_spec import MOST_WIDTH, ModelSpec
from h2o_flexgen.formats.table import PLAIN, matrix_format
from h2o_flexgen.kernels.operations import decode, encode
from h2o_flexgen.models import create_model, load_config
from tests.helpers.quantised import (
    METHODS,
    WIDE,
    Method,
    Quantised,
    awq,
    awq_config,
    fp8,
    fp8_config,
    mxfp4,
    save_quantised,
)

KIND = "llama-gqa"
PROJECTIONS = 7  # matrices of a block
BLOCKS = 3

# the codec of the matrices of each method, and whether the bytes lie so in the file
EXPECTED = {
    "awq": ("int4-32-float16-zeros", False),
    "awq-64": ("int4-64-float16-zeros", False),
    "awq-columns": ("int4-64-float16-zeros", False),  # of 64 inputs; those of 160 are in groups of 32
    "gptq": ("int4-32-float16-zeros", False),
    "gptq-v2": ("int4-32-float16-zeros", False),
    "gptq-symmetric": ("int4-32-float16-zeros", False),
    "gptq-ordered": ("int4-32-float16-zeros-ordered", False),
    "compressed": ("int4-32-bfloat16", True),
    "compressed-columns": ("int4-64-bfloat16", True),
    "compressed-asymmetric": ("int4-32-bfloat16-zeros", False),
    "compressed-ordered": ("int4-32-bfloat16-ordered", False),
    "fp8": ("fp8-128x128-float32", True),
    "fp8-bfloat16": ("fp8-128x128-bfloat16", True),
    "fp8-tensor": ("fp8-0x0-float32", True),
    "mxfp8": ("fp8-1x32-e8m0", True),
    "compressed-fp8": ("fp8-1x0-bfloat16", True),
    "compressed-fp8-block": ("fp8-128x128-bfloat16", True),
    "mxfp4": ("fp4-32", True),
    "compressed-mxfp4": ("fp4-32", True),
}


def saved(method: str, folder: Path, **options: Any) -> Quantised:
    return save_quantised(KIND, folder, METHODS[method], **{**WIDE, "head_dim": 16, **options})


def spec_of(folder: Path, checkpoint: Checkpoint, format: str = PLAIN) -> ModelSpec:
    spec = create_model(load_config(str(folder)), "float32").spec
    spec = spec.map_tensors(lambda one: replace(one, format=checkpoint.stored_as(one.name).format))
    return spec.written_as(format, PLAIN, "exact")


def bytes_at(located: Located, nbytes: int) -> Tensor:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    for start, stored in located.segments:
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            part = torch.frombuffer(bytearray(file.read(min(stored.nbytes, nbytes - start))), dtype=torch.uint8)
        data[start : start + len(part)] = part
    return data


def everything(folder: Path, cache: Path, format: str = PLAIN) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The bytes of every tensor, as a run would have them."""
    checkpoint = open_checkpoint(folder)
    spec = spec_of(folder, checkpoint, format)
    source = PackedCheckpoint(checkpoint, spec, cache) if checkpoint.to_write(spec) else checkpoint
    located = source.locate(spec.tensors.values())
    return spec, {
        name: bytes_at(located[name], tensor.nbytes) for name, tensor in spec.tensors.items() if tensor.format != PLAIN
    }


@pytest.mark.parametrize("method", METHODS)
def test_matrices_mean_what_their_form_says(method: str, tmp_path: Path) -> None:
    """Bit for bit, from several files."""
    made = saved(method, tmp_path / "model", files=3)
    spec, data = everything(tmp_path / "model", tmp_path / "cache")
    assert set(data) == set(made.values) and len(data) >= BLOCKS * (PROJECTIONS - 1)
    format, in_place = EXPECTED[method]
    assert spec.tensors["model.layers.0.self_attn.q_proj.weight"].format == format
    assert (tmp_path / "cache").exists() is not in_place or method == "compressed-columns", "some of its groups are cut"
    for name, expected in made.values.items():
        values = torch.empty(expected.shape)
        decode(spec.tensors[name].format, data[name], values)
        assert torch.equal(values, expected), name


def test_floats_mean_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Its own dequantisers, which know the forms from their authors."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    for written in (fp8(128, 128), fp8(128, 128, "bfloat16"), fp8(1, 32, "e8m0"), fp8(1, 0)):
        tensors, values = written(weight)
        codes, scales = tensors["weight"], tensors["weight_scale_inv"]
        assert torch.equal(Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32), values)
    tensors, values = mxfp4()(weight)
    blocks, exponents = tensors["weight_blocks"][None], tensors["weight_scales"][None]
    assert torch.equal(convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].T, values)


ON_DISK, IN_MEMORY = (0, 0, 0, 100, 0, 100), (0, 100, 0, 100, 0, 100)


@pytest.mark.parametrize(
    ("method", "percent"),
    [(method, ON_DISK) for method in METHODS] + [(method, IN_MEMORY) for method in ("gptq-ordered", "fp8", "compressed-mxfp4")],
)
def test_a_model_computes_with_what_its_checkpoint_means(
    method: str, percent: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = saved(method, tmp_path / "model", head=method in ("awq", "fp8"), tie_word_embeddings=False)
    prompt, logits = [5, 9, 2, 7, 4, 11], []
    options: Any = {"tokenizer": "bytes", "dtype": "float32", "device": "cpu", "offload_dir": tmp_path / "offload"}
    with LLM(str(tmp_path / "model"), percent=percent, **options) as llm:
        (found,) = llm.generate([prompt], SamplingParams(max_tokens=4), on_logits=lambda *args: logits.append(args[-1].clone()))
    model: Any = made.model
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    expected = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    assert list(found.token_ids) == expected.sequences[0, len(prompt) :].tolist()
    assert torch.allclose(torch.stack(logits).view(4, -1), torch.cat(expected.logits), atol=1e-4)


# -- other forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "format"), [("fp8", "group8"), ("fp8", "group4"), ("mxfp8", "group4"), ("gptq-ordered", "group4")]
)
def test_what_takes_fewer_bytes_in_groups_is_packed_from_its_values(
    method: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some outputs at a time; and what would not is left in its method."""
    made = saved(method, tmp_path / "model", intermediate_size=256)
    monkeypatch.setattr(stored_values_module, "PART_BYTES", 1)
    spec, data = everything(tmp_path / "model", tmp_path / "cache", format)
    changed = {name for name in made.values if spec.tensors[name].format == matrix_format(format)}
    assert bool(changed) == (format == "group4")
    for name, values in made.values.items():
        expected, decoded = torch.empty(spec.tensors[name].nbytes, dtype=torch.uint8), torch.empty(values.shape)
        if name in changed:
            encode(matrix_format(format), values, expected)
            assert torch.equal(data[name], expected), name
        else:
            decode(spec.tensors[name].format, data[name], decoded)
            assert torch.equal(decoded, values), name


@pytest.mark.parametrize("method", ["gptq-ordered", "compressed", "fp8-tensor", "mxfp4"])
def test_any_form_gives_its_values_some_outputs_at_a_time(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(method, tmp_path / "model", intermediate_size=320)
    monkeypatch.setattr(stored_values_module, "PART_BYTES", 1)
    matrices = open_checkpoint(tmp_path / "model").matrices
    for name, expected in made.values.items():
        parts = list(stored_values(matrices[name], 16))
        assert torch.equal(torch.cat(parts), expected), name
        assert len(parts) == -(-len(expected) // 128)


def test_imported_matrices_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("awq", tmp_path / "model")
    first = everything(tmp_path / "model", tmp_path / "cache")[1]
    monkeypatch.setattr(importing_module, "read_rows", None)
    again = everything(tmp_path / "model", tmp_path / "cache")[1]
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def test_parts_do_not_change_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("awq", "gptq-ordered", "compressed-asymmetric"):
        saved(method, tmp_path / method)
        whole = everything(tmp_path / method, tmp_path / "cache")[1]
        for module in (reading_module, importing_module):
            monkeypatch.setattr(module, "PART_BYTES", 100)
        cut = everything(tmp_path / method, tmp_path / "other")[1]
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
        monkeypatch.undo()


def test_another_reading_of_the_same_files_is_another_copy(tmp_path: Path) -> None:
    """Zero points less one, or not, look alike."""
    saved("gptq", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    first = everything(tmp_path / "model", tmp_path / "cache")[1]
    changed = json.loads(config.read_text())
    changed["quantization_config"]["checkpoint_format"] = "gptq_v2"
    config.write_text(json.dumps(changed))
    second = everything(tmp_path / "model", tmp_path / "cache")[1]
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_copy_of_bin_files_may_be_quantised(tmp_path: Path) -> None:
    for method in ("fp8", "gptq"):
        made, folder = saved(method, tmp_path / method), tmp_path / method
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        checkpoint = open_checkpoint(folder, tmp_path / "converted")
        for name, expected in made.values.items():
            assert torch.equal(torch.cat(list(stored_values(checkpoint.matrices[name], 1))), expected)


def test_numbers_of_groups_that_are_damaged_in_a_copy_are_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """The copy is then made again."""
    saved("gptq-ordered", folder := tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    open_checkpoint(folder, tmp_path / "converted")
    (copy,) = (tmp_path / "converted").glob("*/*.safetensors")
    (groups,) = (one for one in read_header(copy) if one.name == f"{LAYER}.g_idx")
    with copy.open("r+b") as file:
        file.seek(groups.offset)
        file.write(b"\xff")
    with pytest.raises(Damaged):
        open_checkpoint(folder, tmp_path / "converted")


# -- names in a file ---------------------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]
LAYER = "model.layers.1.mlp.up_proj"


def rewritten(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def put(end: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(f"{LAYER}.{end}", value(tensors[f"{LAYER}.{end}"]))


def test_groups_that_were_never_filled_in_are_those_in_order(tmp_path: Path) -> None:
    made = saved("gptq", tmp_path / "model")
    rewritten(tmp_path / "model", put("g_idx", torch.zeros_like))
    (values,) = stored_values(open_checkpoint(tmp_path / "model").matrices[f"{LAYER}.weight"], 1)
    assert torch.equal(values, made.values[f"{LAYER}.weight"])


def test_groups_of_compressed_tensors_that_were_never_filled_in_are_those_in_order(tmp_path: Path) -> None:
    made = saved("compressed", tmp_path / "model")
    rewritten(tmp_path / "model", lambda tensors: tensors.update({f"{LAYER}.weight_g_idx": torch.full((64,), -1).int()}))
    (values,) = stored_values(open_checkpoint(tmp_path / "model").matrices[f"{LAYER}.weight"], 1)
    assert torch.equal(values, made.values[f"{LAYER}.weight"])


def test_zero_points_may_be_bytes_with_signs(tmp_path: Path) -> None:
    """As older files of compressed-tensors have them."""
    made = saved("compressed-asymmetric", tmp_path / "model")
    words = load_file(tmp_path / "model" / "model.safetensors")[f"{LAYER}.weight_zero_point"]
    nibbles = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], dim=1).flatten(0, 1)
    rewritten(tmp_path / "model", put("weight_zero_point", lambda _: (nibbles - 8).to(torch.int8)))
    (values,) = stored_values(open_checkpoint(tmp_path / "model").matrices[f"{LAYER}.weight"], 1)
    assert torch.equal(values, made.values[f"{LAYER}.weight"])


@pytest.mark.parametrize("method", ["fp8", "compressed-fp8", "awq", "mxfp4"])
def test_layers_that_are_not_quantised_are_plain(method: str, tmp_path: Path) -> None:
    """Whatever lists of them the config has."""
    saved(method, tmp_path / "model")

    def plain(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            tensors.pop(name)
        tensors[f"{LAYER}.weight"] = torch.ones(160, 64, dtype=torch.float16)

    rewritten(tmp_path / "model", plain)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.stored_as(f"{LAYER}.weight").format == PLAIN
    assert checkpoint.stored_as(f"{LAYER.replace('.1.', '.0.')}.weight").format != PLAIN


# -- refusals ----------------------------------------------------------------------------------------------------------------


def narrow(tensor: Tensor) -> Tensor:
    return tensor[:, :-1] if tensor.dim() > 1 else tensor[:-1]


def fewer_outputs(tensors: Tensors, count: int) -> None:
    for end, less in (("qweight", count), ("scales", count), ("qzeros", 1)):
        put(end, lambda one, less=less: one[:, :-less])(tensors)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("awq", lambda tensors: tensors.pop(f"{LAYER}.scales"), "tensor model.layers.1.mlp.up_proj.scales is missing"),
        ("awq", put("qzeros", narrow), "qzeros .* has the shape"),
        ("gptq", lambda tensors: fewer_outputs(tensors, 4), "scales .* has 156 outputs, but zero points come in whole words"),
        ("awq", put("scales", lambda one: one.float()), "scales .* has the dtype float32 where bfloat16 or float16 is read"),
        ("awq", put("qweight", lambda one: torch.cat((one, one), 1)), "codes of 8 bits; those of 4 bits are read"),
        ("awq", put("qweight", lambda one: one[:, 0]), "has the shape .* where 2 sizes are to stand"),
        ("compressed", put("weight_scale", lambda one: one[:, :1]), "has 1 scales for 64 inputs: groups of 32 do not divide"),
        ("gptq", put("qweight", lambda one: torch.cat((one, one))), "codes of 8 bits"),
        ("gptq", put("g_idx", lambda one: one + 1), "g_idx .* names a group that is not one of 2"),
        ("gptq-ordered", put("g_idx", lambda one: one * 0 + one[0].clamp(1)), "does not put 32 inputs into every group"),
        ("compressed", put("weight_scale", lambda one: one[:-1]), "weight_packed .* has the shape"),
        ("compressed-asymmetric", put("weight_zero_point", narrow), "weight_zero_point .* where the scales ask for"),
        ("compressed-ordered", put("weight_g_idx", narrow), "weight_g_idx .* has the shape"),
        ("fp8", put("weight_scale_inv", lambda one: torch.ones(3, 5)), "has the shape .3, 5. beside a weight of 160 x 64"),
        ("fp8", put("weight_scale_inv", lambda one: one.long()), "has the dtype I64, which is none of scales"),
        ("mxfp4", put("weight_scales", narrow), "has the shape .* beside 160 x 64 values; each 32 have a scale"),
        ("compressed-mxfp4", put("weight_scale", lambda one: one.to(torch.float8_e4m3fn)), "F8_E4M3 where U8 or F8_E8M0"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_by_name(
    method: str, change: Callable[[Tensors], object], said: str, tmp_path: Path
) -> None:
    saved(method, tmp_path / "model")
    rewritten(tmp_path / "model", change)
    with pytest.raises(ValueError, match=said) as caught:
        open_checkpoint(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_more_inputs_than_a_model_has_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A file with holes is as long as one likes."""
    saved("gptq", tmp_path)
    tensors = {tensor.name: tensor for tensor in read_header(tmp_path / "model.safetensors")}
    inputs = MOST_WIDTH + 32
    shapes = {"qweight": (inputs // 8, 160), "scales": (inputs // 32, 160), "qzeros": (inputs // 32, 20), "g_idx": (inputs,)}
    drawn = {f"{LAYER}.{end}": replace(tensors[f"{LAYER}.{end}"], shape=shape) for end, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"g_idx .* has {inputs} inputs, and {MOST_WIDTH} are the most"):
        find_matrices(folder_quantisation(tmp_path), {**tensors, **drawn})


def test_blocks_that_would_fit_otherwise_than_they_are_meant_are_refused(tmp_path: Path) -> None:
    save_quantised(KIND, tmp_path, Method(fp8_config(100, 100), fp8(100, 100)), **{**WIDE, "head_dim": 16})
    with pytest.raises(
        ValueError, match="beside a weight of 64 x 160; scales are read for blocks of 128 x 128, 1 x 32, 1 x all"
    ):
        open_checkpoint(tmp_path)


def test_groups_that_no_form_has_are_refused(tmp_path: Path) -> None:
    save_quantised(KIND, tmp_path, Method(awq_config(16), awq(16), 16, 8), **WIDE)
    with pytest.raises(ValueError, match="has a scale for each 16 inputs; groups of 128, 64, 32 are read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq-ordered", "compressed-asymmetric", "fp8", "mxfp4", "compressed-mxfp4"])
def test_any_headers_are_read_or_refused_in_a_line(method: str, tmp_path: Path) -> None:
    """Tensors of drawn shapes and types in the place of those of one matrix."""
    random = Random(method)
    codes = ["I32", "F32", "U8", "I8", "F8_E4M3", "F8_E8M0", "BF16", "F16", "I64"]
    made = saved(method, tmp_path)
    quantisation = folder_quantisation(tmp_path)
    tensors = {tensor.name: tensor for tensor in read_header(tmp_path / "model.safetensors")}
    refused = 0
    for _ in range(300):
        drawn = dict(tensors)
        for name in [name for name in tensors if name.startswith(LAYER)]:
            if random.random() < 0.4:
                shape = tuple(random.choice((0, 1, 2, 8, 20, 64, 160)) for _ in range(random.randrange(4)))
                code = random.choice(codes)
                nbytes = prod(shape) * BITS[code] // 8
                drawn[name] = replace(tensors[name], shape=shape, dtype=FLOATS.get(code, code), nbytes=nbytes, offset=0)
            elif random.random() < 0.1:
                del drawn[name]
        try:
            found = find_matrices(quantisation, drawn)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and LAYER in str(error)
        else:
            assert set(found.matrices) >= {name for name in made.values if not name.startswith(LAYER)}
    assert 30 < refused < 300
