"""Checks of GPUs that are kept: graphs are the default where one was passed, on that GPU, with those libraries and code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copyfile

import pytest

from h2o_flexgen.cli.slow import unchecked_reason
from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_table import Processor
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from h2o_flexgen.profiling import gpu_checks
from h2o_flexgen.profiling.gpu_checks import (
    KEPT,
    check_file,
    forget_check,
    keep_check,
    kept_graph_bytes,
    outlived_check,
    take_checks,
)
from tests.helpers.contract import Case, Checkpoints, generate_with
from tests.helpers.pretended import PretendedDevice
from tests.test_imports import ROOMS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_kept_is_found_until_it_is_forgotten() -> None:
    assert kept_graph_bytes("cpu") is None
    assert keep_check("cpu", 74, 70_000) == check_file("cpu")
    assert kept_graph_bytes("cpu") == 70_000
    forget_check("cpu")
    forget_check("cpu")
    assert kept_graph_bytes("cpu") is None and kept_graph_bytes("a device that torch does not know") is None


@pytest.mark.parametrize("part", ["driver", "torch", "triton", "code"])
def test_a_check_takes_the_place_of_those_of_other_code_alone(part: str, change: Callable[[str], object]) -> None:
    earlier = keep_check("cpu", 74, 70_000)
    change(part)
    latest = keep_check("cpu", 74, 80_000)
    assert set(latest.parent.iterdir()) == ({latest} if part == "code" else {earlier, latest})
    earlier.write_text("damaged")
    assert keep_check("cpu", 74, 80_000) == latest and list(latest.parent.iterdir()) == [latest]


@pytest.mark.parametrize("damaged", ["", "{}", "[1]", '{"graph_bytes": "many"}'])
def test_a_damaged_file_is_none(damaged: str) -> None:
    keep_check("cpu", 74, 70_000).write_text(damaged)
    assert kept_graph_bytes("cpu") is None


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Makes a part of what checks depend on another one."""
    own = gpu_checks.what_is_checked("cpu")
    return lambda part: monkeypatch.setattr(gpu_checks, "what_is_checked", lambda device: {**own, part: "another"})


@pytest.mark.parametrize("part", ["gpu", "driver", "torch", "triton", "code"])
def test_a_check_is_of_one_gpu_and_of_its_libraries_and_code(part: str, change: Callable[[str], object]) -> None:
    keep_check("cpu", 74, 70_000)
    assert outlived_check("cpu") is None
    change(part)
    assert kept_graph_bytes("cpu") is None
    assert str(outlived_check("cpu")).endswith("other code" if part == "code" else ", and not another")
    forget_check("cpu")
    assert outlived_check("cpu") is None


def test_code_is_what_files_of_a_step_hold_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a check is found on another machine of the kind, by what is installed as well as by a checkout."""
    read = gpu_checks.code_of_steps.__wrapped__
    own = read()
    for file in gpu_checks.written_in((gpu_checks.PACKAGE / room for room in gpu_checks.ROOMS), gpu_checks.PYTHON):
        copy = tmp_path / file.relative_to(gpu_checks.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copyfile(file, copy)
    monkeypatch.setattr(gpu_checks, "PACKAGE", tmp_path)
    assert read() == own
    changed = tmp_path / "kernels" / "gpu" / "evict.py"
    changed.write_text(changed.read_text() + "#")
    assert read() != own


def test_what_a_step_is_made_of_is_the_engine_and_all_that_it_may_import() -> None:
    """But for what plans, reads files and reads texts: a captured step does nothing of that."""
    assert set(gpu_checks.ROOMS) == {"engine", *ROOMS["engine"]} - {"planning", "checkpoints", "text"}


def test_no_code_is_read_where_no_check_of_the_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "code_of_steps", lambda: pytest.fail("it takes some ms"))
    assert kept_graph_bytes("cpu") is None and outlived_check("cpu") is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104", "535.104"),
        ("nothing", "none"),
        (None, "none"),
    ],
)
def test_a_driver_is_known_by_its_version(
    text: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "DRIVER", tmp_path / "version")
    if text is not None:
        gpu_checks.DRIVER.write_text(text)
    assert gpu_checks.what_is_checked("cpu")["driver"] == version


def test_a_check_can_be_taken_to_another_machine_of_the_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_check("cpu", 74, 70_000)
    take_checks([check_file("cpu").parent, tmp_path / "none"], tmp_path / "results" / KEPT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another machine"))
    assert kept_graph_bytes("cpu") is None
    take_checks([tmp_path / "results" / KEPT], check_file("cpu").parent)
    assert kept_graph_bytes("cpu") == 70_000


STAYING = Plan().with_percent((100, 0, 100, 0, 100, 0))
MOVING = Plan().with_percent((100, 0, 0, 100, 100, 0))


def test_graphs_are_the_default_where_a_check_has_found_that_they_hold() -> None:
    assert STAYING.may_capture(0) and not STAYING.may_capture(None) and not MOVING.may_capture(0)
    asked, refused = (Plan(graphs=graphs).with_percent(STAYING.percent) for graphs in ("on", "off"))
    assert asked.may_capture(None) and not refused.may_capture(0)


def test_a_run_says_that_a_check_is_of_other_code_and_how_it_is_renewed(change: Callable[[str], object]) -> None:
    site = Site(accelerator=True, processor=Processor("cpu"))
    keep_check("cpu", 74, 70_000)
    change("code")
    (line,) = unchecked_reason(STAYING, site)
    assert "\n" not in line and "was made with other code; in a checkout, `scripts/gpu_check OUT_FOLDER --only" in line
    assert "renews it" in line


def test_a_run_says_how_a_gpu_is_checked() -> None:
    unchecked, checked = Site(accelerator=True), Site(accelerator=True, graph_bytes=1)
    (line,) = unchecked_reason(STAYING, unchecked)
    assert "scripts/gpu_check OUT_FOLDER --only contract graphs" in line
    for plan, site in ((STAYING, checked), (MOVING, unchecked), (STAYING, Site()), (Plan(graphs="off"), unchecked)):
        assert not list(unchecked_reason(plan, site))


@pytest.mark.parametrize("kept", [None, 3 * GRAPH_BYTES])
def test_a_run_takes_what_its_gpus_check_says(
    kept: int | None,
    checkpoints: Checkpoints,
    offload: Path,
    pretended: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PretendedDevice, "graph_bytes", None)
    if kept is not None:
        keep_check("cpu", 74, kept)
    case = Case("opt", STAYING.percent, (5, 9), 8, device="pretended")
    with case.open(checkpoints, offload) as llm:
        generate_with(llm, case)
        assert llm.stats is not None and (llm.stats.replayed > 0) == (kept is not None)
        counted = llm.stats.last_block.planned
        assert llm.loaded.site.graph_bytes == kept
        assert counted.plan.graphs == "auto"
