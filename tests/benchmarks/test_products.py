"""The benchmark of products: every form at every number of rows, beside limits that the same run has measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peaks import LOOPS, SOURCE, Peaks
from h2o_flexgen.formats.kernel_table import EXACT, PRODUCTS, rounds
from tests.scripts.loading import load_script

products = load_script("products.py", "benchmarks")
PEAKS = Peaks(fp32=100e9, integer=400e9, bf16=200e9, integer_of_4_bits=None)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    asked = ["--rows", "1", "3", "--shape", "80x256", "--seconds", "0", "--matrix-bytes", "1"]
    measured = products.Limits.measured
    products.Limits.measured = classmethod(lambda cls: cls(10e9, PEAKS))
    try:
        return products.benchmark(products.parse(asked))
    finally:
        products.Limits.measured = measured


def test_every_form_has_a_rate_and_a_share_at_every_number_of_rows(small: dict[str, Any]) -> None:
    forms = ["fp32", "bf16", *(f"{bits} bits, {compute}" for bits in (4, 8) for compute in ("exact", "int8"))]
    stored = [
        f"{form}, {compute}" for form in products.STORED_FORMS for compute in PRODUCTS if compute == EXACT or rounds(form)
    ]
    assert [cells[0] for cells in small["cells"]] == [*forms, *stored, "torch, fp32", "torch, bf16"]
    assert small["columns"] == ["", "1 row", "3 rows"]
    for line in small["rows"]:
        assert line["measured"] == pytest.approx(2 * line["rows"] * 80 * 256 / line["seconds"] / 1e9)
        assert line["share"] == pytest.approx(line["measured"] / line["ceiling"])


def test_each_product_has_another_matrix_and_rows_that_are_new() -> None:
    x = torch.randn(3, 256)
    for form in products.forms_of((48, 256), 1):
        one, other = (product(x.to(form.dtype)) for product in form.products[:2])
        assert one.shape == (3, 48) and one.isfinite().all() and not torch.equal(one, other)
        assert torch.equal(form.products[0](x.to(form.dtype)), one)


@pytest.mark.parametrize("compute", PRODUCTS)
def test_packed_matrices_are_multiplied_as_their_values_are(compute: str) -> None:
    x = torch.randn(5, 128)
    matrix = replace(products.packed_matrices("tiles8", (48, 128), x.dtype, 1)[0], product=PRODUCTS[compute])
    torch.testing.assert_close(products.as_it_lies(matrix, x), x @ matrix.values().T, rtol=0.05, atol=0.01)


def test_the_document_can_become_a_table(small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    products.print_table(small)
    assert "3 rows" in capsys.readouterr().out
    (tmp_path / "products.json").write_text(json.dumps(small))
    result = load_script("readme_results.py").read_result(tmp_path / "products.json")
    assert result.cells[0] == ("", "1 row", "3 rows")


def test_a_shape_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        products.parse(["--shape", "5632"])
    assert "shape '5632' is not understood; write it like 5632x2048: outputs and inputs" in capsys.readouterr().err


def test_the_loops_of_every_library_are_written() -> None:
    written = SOURCE.read_text()
    for loops in LOOPS.values():
        for name in (loops.fp32, loops.integer, loops.bf16, loops.integer_of_4_bits):
            assert name is None or f"LOOP({name}," in written or f"long {name}(" in written


def test_peaks_are_measured_where_a_compiler_is() -> None:
    peaks = Peaks.measured(threads=1, seconds=0.0)
    if peaks is None:
        pytest.skip("peaks.c cannot be compiled here")
    assert peaks.fp32 > 0 and peaks.integer > 0 and peaks.exact >= peaks.fp32
