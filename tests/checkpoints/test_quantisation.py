"""What configs say of quantisation: what is read, and every method and form that is not by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.checkpoints.checkpoint import open_checkpoint
from h2o_flexgen.checkpoints.dummy import DummySource
from h2o_flexgen.checkpoints.quantisation import KEYS, Quantisation, quantisation_of
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.operations import decode
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.quantised import METHODS, WIDE, awq_config, compressed_config, gptq_config, int4_config, save_quantised
from tests.helpers.tiny import save_tiny


def of(**stored: Any) -> Quantisation | None:
    return quantisation_of({"quantization_config": stored})


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_here_is_read(method: str) -> None:
    found = quantisation_of({"quantization_config": dict(METHODS[method].config)})
    assert found is not None and found.method == METHODS[method].config["quant_method"]


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_a_config_without_quantisation(config: dict[str, Any]) -> None:
    assert quantisation_of(config) is None


def test_older_checkpoints_have_another_key() -> None:
    assert quantisation_of({"compression_config": int4_config(32, True)}) == of(**int4_config(32, True))


def test_zero_points_are_less_one_in_the_first_version_alone() -> None:
    for format, less in (("gptq", True), ("gptq_v2", False)):
        found = of(**gptq_config(128, format))
        assert found is not None and found.zeros_one_less == less


def test_layers_may_have_sizes_of_their_own() -> None:
    found = of(**gptq_config(128), dynamic={"+:.*down_proj": {"group_size": 32}, "-:.*up_proj": {}})
    assert found is not None and found.groups == (128, 32)


INT8 = compressed_config("int-quantized", num_bits=8, type="int", strategy="channel")
ROTATED = {**int4_config(128, True), "transform_config": {"config_groups": {"u": {}}}}
SPARSE = {**int4_config(128, True), "sparsity_config": {"format": "sparse-24-bitmask"}}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes' ('nf4')"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' ('NVFP4')"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": ["awq"]}, "['awq']"),
        ({**awq_config(128), "version": "gemv"}, "awq in the form 'gemv'"),
        ({**awq_config(128), "bits": 8}, "awq in 8 bits"),
        ({**gptq_config(128), "bits": 8}, "gptq in 8 bits"),
        ({**gptq_config(128), "bits": True}, "gptq in True bits"),
        (gptq_config(128, "marlin"), "gptq in the form 'marlin'"),
        ({**gptq_config(128), "is_marlin_format": True}, "gptq in the form 'marlin'"),
        (compressed_config("nvfp4-pack-quantized"), "compressed-tensors in the form 'nvfp4-pack-quantized'"),
        (compressed_config("marlin-24"), "compressed-tensors in the form 'marlin-24'"),
        (INT8, "compressed-tensors in the form 'int-quantized'"),
        ({**INT8, "format": "pack-quantized"}, "compressed-tensors with weights of type 'int' in 8 bits"),
        (compressed_config("pack-quantized", num_bits=[4]), "compressed-tensors with weights of type 'int' in [4] bits"),
        (ROTATED, "compressed-tensors with a transform_config"),
        (SPARSE, "compressed-tensors with sparsity ('sparse-24-bitmask')"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name_beside_what_is(stored: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        of(**stored)
    message = str(caught.value)
    assert f"quantised as {said}, which is not read" in message.replace(" (rotations around its products)", "")
    assert all(name in message for name in ("awq (gemm)", "gptq", "compressed-tensors", "fp8", "mxfp4", "GGUF"))


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({**awq_config(128), "group_size": "128"}, "group_size is '128'"),
        ({**awq_config(128), "group_size": 0}, "group_size is 0"),
        ({**awq_config(128), "group_size": True}, "group_size is True"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"block of weights is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, r"block of weights is \[128, -1\]"),
        (compressed_config("float-quantized", num_bits=8, type="float", block_structure="128x"), "block of weights is '128x'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(stored: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of(**stored)


def test_a_config_that_names_no_method_is_refused() -> None:
    with pytest.raises(ValueError, match="quantization_config names no quant_method"):
        of(bits=4)


def test_names_of_forms_may_be_in_capitals() -> None:
    assert of(**gptq_config(128, "GPTQ")) == of(**gptq_config(128, "gptq"))


@pytest.mark.parametrize("stored", ["awq", 4, ["awq"]])
def test_what_is_no_object_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="which is no object"):
        quantisation_of({"quantization_config": stored})


@pytest.mark.parametrize("groups", [None, [], {"group_0": ["Linear"]}, {"group_0": {"weights": None}}, "all"])
def test_groups_of_layers_that_say_nothing_leave_it_to_the_tensors(groups: object) -> None:
    found = of(**{**compressed_config("pack-quantized"), "config_groups": groups})
    assert found is not None and found.groups == ()


@pytest.mark.parametrize("key", KEYS)
def test_random_weights_are_not_quantised(key: str, tmp_path: Path) -> None:
    save_tiny("llama-mha", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: awq_config(128)}))
    with pytest.raises(ValueError, match=r"the model is quantised \(awq\), and random weights are not"):
        LLM(str(tmp_path), dummy_weights=True, device="cpu")


def test_random_weights_take_the_form_of_mxfp4(tmp_path: Path) -> None:
    """As many bytes as the checkpoint has, the same in memory and on disk, and of the size of trained ones."""
    save_quantised("gpt-oss", tmp_path / "model", METHODS["mxfp4"], **WIDE)
    stored = open_checkpoint(tmp_path / "model")
    asked = {"dummy_weights": True, "device": "cpu", "dtype": "float32", "tokenizer": "bytes", "offload_dir": tmp_path}
    said = []
    for percent in ((100, 0, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)):
        with LLM(str(tmp_path / "model"), percent=percent, **asked) as llm:
            spec = llm.spec
            said.append(llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True)))
    assert [one.token_ids for one in said[0]] == [one.token_ids for one in said[1]]
    assert {name: tensor.format for name, tensor in spec.tensors.items()} == {
        name: stored.stored_as(name).format for name in spec.tensors
    }
    expert = next(tensor for tensor in spec.tensors.values() if tensor.format != PLAIN)
    data, values = torch.empty(expert.nbytes, dtype=torch.uint8), torch.empty(expert.shape)
    DummySource(0, "float32", tmp_path).fill(expert, data)
    decode(expert.format, data, values)
    assert 0.015 < values.std() < 0.03 and abs(values.mean()) < 0.002


@pytest.mark.parametrize("named", ["lm_head", [1], 7])
def test_modules_that_are_not_quantised_have_names(named: object) -> None:
    with pytest.raises(ValueError, match=r"modules_to_not_convert is .*, which is no list of names"):
        of(quant_method="mxfp4", modules_to_not_convert=named)
