"""What is computed in where no type is asked for: it depends on what the place has instructions for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from h2o_flexgen.cli.plan_request import parse, request_of
from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_table import CUDA, Processor
from h2o_flexgen.kernels import native
from h2o_flexgen.planning.machine import find_machine
from h2o_flexgen.profiling.measured_machine import measured_dtypes
from h2o_flexgen.session.opened_model import ModelShapes

T4 = Site(True, processor=Processor(CUDA, instructions=("float16",)))
A100 = Site(True, processor=Processor(CUDA, instructions=("float16", "bfloat16")))


@pytest.mark.parametrize(
    ("site", "stored", "dtype"),
    [
        (Site(), "float16", "bfloat16"),
        (Site(), None, "bfloat16"),
        (A100, "bfloat16", "bfloat16"),
        (A100, "float16", "float16"),
        (A100, "float32", "float16"),
        (A100, None, "float16"),
        (T4, "bfloat16", "float16"),
        (T4, "float16", "float16"),
        (Site(True), "bfloat16", "float16"),
    ],
)
def test_a_type_that_is_slow_here_is_not_taken_by_itself(site: Site, stored: str | None, dtype: str) -> None:
    assert site.usual_dtype(stored) == dtype


def test_a_profile_measures_the_types_that_could_be_taken() -> None:
    assert measured_dtypes("float16", T4) == ("float16",) and measured_dtypes("float16", A100) == ("float16", "bfloat16")
    assert measured_dtypes("bfloat16", T4) == ("bfloat16", "float16") and measured_dtypes("float32", Site()) == ("float32",)


@pytest.mark.parametrize(
    ("capabilities", "types"),
    [
        ([(7, 5)], ("float16",)),
        ([(8, 0)], ("float16", "bfloat16")),
        ([(9, 0), (8, 9)], ("float16", "bfloat16")),
        ([(9, 0), (7, 0)], ("float16",)),
        ([], ()),
    ],
)
def test_all_gpus_of_a_machine_count(
    capabilities: list[tuple[int, int]], types: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    _forget_gpus()
    try:
        assert native.processor(CUDA).instructions == types
    finally:
        _forget_gpus()


def _forget_gpus() -> None:
    native._instructions_of_gpus.cache_clear()
    native._accelerator.cache_clear()


@pytest.mark.parametrize(("types", "dtype"), [(("float16",), "float16"), (("float16", "bfloat16"), "bfloat16")])
def test_a_plan_for_another_machine_asks_what_that_one_multiplies(types: tuple[str, ...], dtype: str) -> None:
    machine = find_machine("t4-gcp")
    machine = replace(machine, flops_per_s=dict.fromkeys(types, machine.flops_per_s["float16"]))
    flags = (
        "--model",
        "facebook/opt-1.3b",
        "--machine",
        "t4-gcp",
        "--evaluate",
        "--percent",
        "100",
        "0",
        "100",
        "0",
        "100",
        "0",
    )
    request = request_of(parse(flags))
    site = ModelShapes(request.model, request.site, machine).subject_on(machine).site
    assert site.usual_dtype("bfloat16") == dtype and site.usual_dtype("float16") == "float16"
