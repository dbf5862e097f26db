"""The benchmark of the kernels of GPUs, on the CPU and at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.kernels.products import tile_product_twin
from tests.scripts.loading import load_script

gpu_kernels = load_script("gpu_kernels.py", "benchmarks")
QUICK = ("--device", "cpu", "--seconds", "0.001", "--scale", "0.002")


def test_every_line_is_a_share_of_a_ceiling_of_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_kernels.main([*QUICK, "--output", str(tmp_path / "found.json")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == (found := json.loads((tmp_path / "found.json").read_text()))
    assert len(found["rows"]) == 9 and all(row["share"] == row["measured"] / row["ceiling"] > 0 for row in found["rows"])
    assert all(0 < row["expected_share"] < 1 and row["launch_seconds"] > 0 for row in found["rows"])


def test_products_on_tensor_cores_stand_beside_those_of_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu_kernels.open_device("cpu")
    assert gpu_kernels.on_tensor_cores(device) is None
    monkeypatch.setattr(gpu_kernels, "on_tensor_cores", lambda _: tile_product_twin)
    found = [one for one in gpu_kernels.subjects(device, 0.002) if "rows with 4-bit weights, " in one.name]
    assert [one.name.rpartition(", ")[2] for one in found] == ["on tensor cores", "decoded first"] * 4
    for multiplied, decoded in zip(found[::2], found[1::2], strict=True):
        shapes = {one.call().shape for one in (multiplied, decoded)}
        assert len(shapes) == 1 and multiplied.nbytes == decoded.nbytes


@pytest.mark.parametrize(("measured", "status"), [(0.31, 0), (0.29, 1)])
def test_whoever_is_strict_gets_a_status(
    measured: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kernels, "lines", lambda *given: [gpu_kernels.Line("attention", measured, 1.0, 0.3, 1e-5)])
    assert gpu_kernels.main([*QUICK, "--strict"]) == status and gpu_kernels.main(QUICK) == 0
    assert ("below the 30% that are expected" in capsys.readouterr().out) == bool(status)
