"""The file of a probe: what was written is read, published ones too, and whatever is wrong with one is said in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.checkpoints.probe_file import FILE, read_probe, write_probe
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.session.open_request import probe_of
from tests.helpers.probes import made_up_probe, probe_for
from tests.planning.worlds import tiny_spec

PROBE = made_up_probe(3, 2, 8)


def test_what_was_written_is_read_with_the_same_checksum(tmp_path: Path) -> None:
    write_probe(PROBE, tmp_path / FILE)
    read = read_probe(tmp_path / FILE)
    assert read == PROBE and (read.model, read.source) == (PROBE.model, PROBE.source)
    assert np.array_equal(read.weights, PROBE.weights) and np.array_equal(read.biases, PROBE.biases)
    assert [*tmp_path.iterdir()] == [tmp_path / FILE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_published_probe_is_read_which_does_not_say_whose_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = [torch.nn.Linear(8, 2).to(dtype) for _ in range(12)]
    tensors = {f"layers.{at}.{name}": value for at, one in enumerate(layers) for name, value in one.state_dict().items()}
    save_file(tensors, tmp_path / FILE)
    read = read_probe(tmp_path / FILE)
    for at, layer in enumerate(layers):
        assert torch.equal(torch.from_numpy(read.weights[at]), layer.weight.float())
        assert torch.equal(torch.from_numpy(read.biases[at]), layer.bias.float())


GOOD: dict[str, Any] = {"layers.0.weight": torch.ones(2, 8), "layers.0.bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.0.0.weight": torch.ones(8, 8)}, "it has layers.0.0.weight, and a linear probe has a weight and a bias"),
        ({"layers.2.weight": torch.ones(2, 8)}, "layers.1.weight is missing"),
        ({"layers.9999999999.weight": torch.ones(2, 8)}, "layers.1.weight is missing"),
        ({"layers.1.weight": torch.ones(2, 8)}, "layers.1.bias is missing"),
        ({f"layers.{10**12}.weight": torch.ones(2, 8)}, "layers.1.weight is missing"),
        ({"layers.1.weight": torch.ones(3, 8), "layers.1.bias": torch.ones(3)}, "its layers have different shapes"),
        ({"layers.0.bias": torch.ones(2, dtype=torch.int32)}, "layers.0.bias is I32; known are F32, F16 and BF16"),
        ({"layers.0.bias": torch.ones(3)}, r"a probe has weights \(1, 2, 8\) and biases \(1, 3\)"),
        ({"layers.0.bias": torch.tensor([1.0, torch.nan])}, "a probe has values that are no numbers"),
    ],
)
def test_a_wrong_file_is_refused_in_a_line_with_its_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_file({**GOOD, **changes}, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"^{tmp_path / FILE}: {said}"):
        read_probe(tmp_path / FILE)


def test_what_is_no_file_of_a_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"probe {tmp_path / FILE} cannot be read"):
        read_probe(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(b"no header")
    with pytest.raises(ValueError, match=f"{tmp_path / FILE} is no safetensors file"):
        read_probe(tmp_path / FILE)


def test_a_probe_of_another_shape_is_refused_with_its_file(tmp_path: Path) -> None:
    probe_for(tiny_spec()).refuse_other(tiny_spec())
    write_probe(PROBE, tmp_path / FILE)
    has = f"probe {tmp_path / FILE} is of a made-up model, 3 layers of 2 KV heads over 8 values"
    with pytest.raises(ValueError, match=has):
        read_probe(tmp_path / FILE).refuse_other(tiny_spec())


def test_the_own_probe_lies_beside_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no probe of {tmp_path} in {tmp_path}; make the file .*calibrate"):
        probe_of("own", str(tmp_path))
    write_probe(PROBE, tmp_path / FILE)
    assert probe_of("own", str(tmp_path)) == probe_of(tmp_path / FILE, "any") == probe_of(PROBE, "any") == PROBE
    with pytest.raises(ValueError, match="probe is a int"):
        probe_of(3, "any")


def test_a_plan_has_a_probe_where_its_policy_asks_for_one_and_names_it_by_its_checksum() -> None:
    plan = Plan.create(kv_policy="kvzap", probe=PROBE)
    assert plan.as_json()["probe"] == {"model": "a made-up model", "source": "nothing", "checksum": PROBE.checksum}
    assert plan == Plan.create(kv_policy="kvzap", probe=Probe("b", "c", PROBE.weights.copy(), PROBE.biases))
    for options, said in (
        ({"kv_policy": "kvzap"}, "kv_policy 'kvzap' ranks tokens by a probe; give probe=FILE, or probe='own'"),
        ({"kv_policy": "h2o", "probe": PROBE}, "kv_policy 'h2o' asks no probe; leave probe out"),
        ({"kv_policy": "kvzap", "probe": "a file"}, "probe is a str"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan.create(**options)
