"""Checks of GPUs that are kept: graphs are the default where one was passed, on that GPU and with those libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.cli.slow import unchecked_reason
from h2o_flexgen.core.site import Site
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from h2o_flexgen.profiling import gpu_checks
from h2o_flexgen.profiling.gpu_checks import KEPT, check_file, forget_check, keep_check, kept_graph_bytes, take_checks
from tests.helpers.contract import Case, Checkpoints, generate_with
from tests.helpers.pretended import PretendedDevice


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


@pytest.mark.parametrize("damaged", ["", "{}", "[1]", '{"graph_bytes": "many"}'])
def test_a_damaged_file_is_none(damaged: str) -> None:
    keep_check("cpu", 74, 70_000).write_text(damaged)
    assert kept_graph_bytes("cpu") is None


@pytest.mark.parametrize("part", ["gpu", "torch", "triton", "package"])
def test_a_check_is_of_one_gpu_and_of_its_libraries(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_check("cpu", 74, 70_000)
    own = gpu_checks.what_is_checked("cpu")
    monkeypatch.setattr(gpu_checks, "what_is_checked", lambda device: {**own, part: "another"})
    assert kept_graph_bytes("cpu") is None


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
