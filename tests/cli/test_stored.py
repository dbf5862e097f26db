"""What was found in a checkpoint is said in one line, and as JSON: method, form, bits, group, and the share of each form."""

from __future__ import annotations

import pytest

from h2o_flexgen.cli.report.arithmetic import StoredWeights
from h2o_flexgen.core.site import Site
from h2o_flexgen.session.opened_model import OpenedModel
from tests.helpers.contract import Checkpoints

LINES = {
    "gguf-q8_0": "gguf: q8_0 (8.5 bits, blocks of 32)",
    "gguf-q4_K": "gguf: q4_K (4.5 bits, blocks of 256)",
    "awq": "safetensors, awq: of the values 82 % in int4-32-float16-zeros (4.78 bits, groups of 32), 18 % in float32 (32 bits)",
    "compressed": "safetensors, compressed-tensors: of the values 82 % in int4-32-bfloat16 (4.51 bits, groups of 32), "
    "18 % in float32 (32 bits)",
    "mxfp4": "safetensors, mxfp4: of the values 82 % in fp4-32 (4.26 bits, groups of 32), 18 % in float32 (32 bits)",
    "bfloat16": "safetensors: bfloat16 (16 bits)",
}


def found(checkpoints: Checkpoints, stored: str, kind: str = "llama-gqa") -> StoredWeights:
    opened = OpenedModel.of(str(checkpoints.folder(kind, stored)), False, "float32", Site())
    weights = StoredWeights.of(opened)
    assert weights is not None
    return weights


@pytest.mark.parametrize("stored", LINES)
def test_a_line_names_method_forms_bits_and_groups(stored: str, checkpoints: Checkpoints) -> None:
    assert found(checkpoints, stored).entry().words == (LINES[stored],)


@pytest.mark.parametrize(
    ("stored", "group"),
    [
        ("fp8", "blocks of 128 x 128"),
        ("fp8-tensor", "a scale for a matrix"),
        ("compressed-fp8", "a scale for an output"),
        ("mxfp8", "blocks of 1 x 32"),
    ],
)
def test_blocks_of_floats_are_named(stored: str, group: str, checkpoints: Checkpoints) -> None:
    assert found(checkpoints, stored).formats[0].group == group


def test_json_has_the_same(checkpoints: Checkpoints) -> None:
    assert found(checkpoints, "gguf-q8_0").entry().values["stored"] == {
        "files": "gguf",
        "method": None,
        "forms": [{"form": "q8_0", "bits": 8.5, "group": "blocks of 32", "share": 1.0}],
    }


def test_random_weights_are_not_stored() -> None:
    assert StoredWeights.of(OpenedModel.of("facebook/opt-125m", True, "float32", Site())) is None
