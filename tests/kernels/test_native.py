"""Which library of kernels is used, and how that is chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from h2o_flexgen.formats.kernel_table import AMX, CPU, LIBRARIES, PAIRS, TORCH, VNNI
from h2o_flexgen.kernels import native as kernels
from tests.kernels.variants import VARIANTS, used


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_can_be_asked_for(variant: str) -> None:
    with used(variant):
        assert kernels.processor(CPU).build == variant and kernels.in_use() == f"C ({variant})"


def test_unless_asked_the_best_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    best = next(iter(kernels.variants()), None)
    assert kernels.in_use() == (f"C ({best})" if best else TORCH)


def test_the_library_can_be_switched_off() -> None:
    with used(TORCH):
        assert kernels.processor(CPU).build == kernels.in_use() == TORCH


@pytest.mark.skipif(len(VARIANTS) < 2, reason="there is no second library here")
def test_a_library_that_suits_the_processor_and_was_not_built_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = kernels._usable()
    best, *others = usable
    monkeypatch.setattr(kernels, "_usable", lambda: {name: usable[name] for name in others})
    assert kernels.unbuilt() == best
    monkeypatch.setattr(kernels, "_usable", dict)
    assert kernels.unbuilt() is None


def test_where_products_of_pairs_are_slow_the_library_with_them_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(kernels, "processor_facts", lambda name: ["AuthenticAMD"])
    assert list(kernels._fitting()) == list(LIBRARIES)
    monkeypatch.setattr(kernels, "processor_facts", lambda name: ["GenuineIntel"])
    found = list(kernels._fitting())
    assert found[:3] == [AMX, VNNI, PAIRS] and sorted(found) == sorted(LIBRARIES)


def test_one_that_is_not_there_is_refused_with_those_that_are() -> None:
    with used("avx1024"), pytest.raises(ValueError, match=r"^H2O_FLEXGEN_KERNELS is 'avx1024', which .*; known here: torch"):
        kernels.in_use()


def test_every_source_in_c_has_a_function_that_python_in_its_folder_calls_or_a_table_that_others_declare() -> None:
    folder = Path(kernels.__file__).parent
    headers = " ".join(file.read_text("ascii") for file in folder.glob("*.h"))
    declared = " ".join(re.findall(r"^extern .*;", headers, re.M))
    called = set(re.findall(r"\w+", " ".join([declared, *(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))])))
    exported = r"^(?:void|int|const \w+) (\w+)[(\[]"
    exports = {file.name: re.findall(exported, file.read_text("ascii"), re.M) for file in folder.glob("*.c")}
    assert len(exports) > 20 and [name for name, functions in exports.items() if called.isdisjoint(functions)] == []


def test_every_function_in_c_that_is_told_something_has_the_one_signature_of_kernels() -> None:
    sources = " ".join(file.read_text("ascii") for file in sorted(Path(kernels.__file__).parent.glob("*.c")))
    signatures = dict(re.findall(r"^void (\w+)\(([^)]*)\)", sources, re.M))
    assert len(signatures) > 20
    assert {name for name, takes in signatures.items() if takes != "const void *given, int threads"} == {"share_out"}
