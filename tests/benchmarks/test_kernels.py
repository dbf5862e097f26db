"""The benchmark of the kernels: every line has a limit that was measured, and nothing stays behind on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_flexgen.memory.disk import DiskFiles
from tests.scripts.loading import load_script

kernels = load_script("kernels.py", "benchmarks")


@pytest.fixture(scope="module")
def small() -> dict[str, object]:
    return kernels.benchmark(kernels.parse(["--seconds", "0.001", "--scale", "0.01"]))


def test_each_line_is_a_share_of_a_limit_of_the_same_run(small: dict[str, object]) -> None:
    limits = small["limits"]
    for line in small["rows"]:
        assert line["ceiling"] == limits[line["limit"]] > 0 and 0 < line["aim"] < 1
        assert line["share"] == pytest.approx(line["measured"] / line["ceiling"]) and line["share"] > 0
    assert {line["limit"] for line in small["rows"]} == set(limits)
    assert set(limits) == {"read", "in place", "copy", "products", "plain reading", "peak of bf16", "peak of fp32"}


def test_notes_have_a_figure_for_each_twin_in_torch(small: dict[str, object]) -> None:
    kernels.print_table(small)
    for line in small["rows"]:
        assert (line["name"] in small["notes"]) == (line["twin"] is not None)


def test_flops_of_a_prompt_are_those_of_its_products_and_of_causal_attention() -> None:
    subject = kernels.prompts("facebook/opt-125m", 3, 10)
    products = 2 * 30 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert subject.work == products + 3 * sum(2 * 2 * 768 * seen for seen in range(1, 11))
    assert subject.kernel().shape == (3, 10, 768)


def test_the_file_is_read_whole_by_both_and_gone_afterwards(tmp_path: Path) -> None:
    with kernels.file_on_disk(str(tmp_path), 3 << 20) as file, DiskFiles() as files:
        assert file.stat().st_size == 3 << 20
        subject = kernels.reading(files, file)
        assert subject.work == subject.kernel() == 3 << 20
        subject.twin()
        with pytest.raises(OSError):
            file.write_bytes(bytes(torch.zeros(1 << 20, dtype=torch.uint8).tolist()))
            subject.twin()
    assert list(tmp_path.iterdir()) == []
