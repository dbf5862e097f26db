"""scripts/gpu_check without a GPU: its commands are accepted and fit, its time limits hold, one failure stops nothing else."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from h2o_flexgen import run
from h2o_flexgen.cli import profile_request
from h2o_flexgen.cli.run_request import parse
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.machines import SUFFIXES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from tests.patience import PATIENCE_SECONDS
from tests.scripts.loading import load_script

SCRIPT = load_script("gpu_check")
MODELS = sorted(SCRIPT.MODELS)
HOST_BYTES = 110_000_000_000  # of the 128 GB of the machine that it is meant for
DOCUMENT: dict[str, Any] = {
    "total_seconds": 20.0,
    "tokens_per_second": 50.0,
    "peak_bytes": {"device": 15_000_000_000},
    "lanes": {"load": {"bound_seconds": 15.0}, "compute": {"bound_seconds": 5.0}},
}


def stage(name: str, code: str, stop_at: float = 60.0, **options: Any) -> Any:
    return SCRIPT.Stage(name, (sys.executable, "-c", code), stop_at, **options)


def printing(document: object) -> str:
    return f"import json; print('progress'); print({json.dumps(json.dumps(document))})"


def wait_until_gone(pid: int) -> None:
    """A process that was killed may stay as a zombie for a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_command_accepts_what_it_is_called_with(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = list(SCRIPT.run_command(model)[3:])
    if not torch.cuda.is_available():  # where a limit on its memory is refused
        place = flags.index("--gpu-mem")
        del flags[place : place + 2]
    assert run.main([*flags, "--cpu-mem", "200GB", "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (planned["model"], planned["num_prompts"]) == (f"facebook/{model}", 32)


@pytest.mark.parametrize("model", MODELS)
def test_its_plans_fit_a_gpu_that_is_held_to_16_gb(model: str) -> None:
    args = parse(SCRIPT.run_command(model)[3:])
    plan = Plan(args.gpu_batch_size, args.num_gpu_batches).with_percent(args.percent)
    spec = create_model(known_config(args.model), "float16", name=args.model).spec
    workload = Workload.uniform(plan.block_size, args.prompt_len, args.gen_len)
    needed = WorkloadPlan(spec, plan, workload, Site(accelerator=True)).footprint
    assert needed.total(DEVICE) < SCRIPT.GPU_BYTES and needed.total(HOST) < HOST_BYTES
    assert needed.total(DEVICE) > SCRIPT.GPU_BYTES / 2, "a smaller GPU would do: the check would show little"


def test_the_whole_check_ends_within_ten_minutes_and_writes_eight_files_at_most(tmp_path: Path) -> None:
    planned = SCRIPT.stages(tmp_path)
    limits = [one.until_seconds for one in planned]
    assert limits == sorted(limits) and limits[-1] + 2 * SCRIPT.KILL_SECONDS <= 570
    files = [f"{one.name}.txt" for one in planned] + [f"{one.name}.json" for one in planned if one.is_run]
    assert len([*files, "machine.yaml", "gpu_check.json"]) <= 8


def test_plan_only_prints_every_command_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert SCRIPT.main([str(folder), "--plan-only"]) == 0
    said = capsys.readouterr().out
    assert "pytest -m 'cuda" in said and all(f"--model facebook/{model}" in said for model in MODELS)
    assert not folder.exists()


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_against_its_busiest_lane(tmp_path: Path) -> None:
    outcome = SCRIPT.run_stage(stage("a", printing(DOCUMENT), is_run=True), tmp_path, time.monotonic())
    assert outcome.passed and outcome.run == SCRIPT.Run(20.0, 50.0, "load", 15.0, 15_000_000_000)
    assert json.loads((tmp_path / "a.json").read_text()) == DOCUMENT
    assert "75%" in SCRIPT.report({"a": outcome})[1]


@pytest.mark.parametrize("held", [0, 17_000_000_000])
def test_a_run_that_leaves_the_gpu_alone_or_takes_too_much_of_it_has_not_passed(tmp_path: Path, held: int) -> None:
    document = {**DOCUMENT, "peak_bytes": {"device": held}}
    assert not SCRIPT.run_stage(stage("a", printing(document), is_run=True), tmp_path, time.monotonic()).passed


def test_a_stage_that_fails_says_its_last_line(tmp_path: Path) -> None:
    failing = stage("a", "import sys; print('error: it is Monday'); sys.exit(2)")
    outcome = SCRIPT.run_stage(failing, tmp_path, time.monotonic())
    assert not outcome.passed and "error: it is Monday" in outcome.words


def test_a_run_without_json_has_not_passed(tmp_path: Path) -> None:
    outcome = SCRIPT.run_stage(stage("a", "print('done')", is_run=True), tmp_path, time.monotonic())
    assert not outcome.passed and "JSON" in outcome.words


def test_a_stage_is_ended_when_its_time_is_over_with_all_that_it_started(tmp_path: Path) -> None:
    child, told = tmp_path / "child", f"import time; time.sleep({2 * PATIENCE_SECONDS})"
    code = (
        "import pathlib, subprocess, sys, time; "
        f"pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen([sys.executable, '-c', {told!r}]).pid)); {told}"
    )
    for stop_at in (1.0, 10.0, 100.0):  # on a busy machine it may not have begun when its time is over
        began = time.monotonic()
        outcome = SCRIPT.run_stage(stage("a", code, stop_at=stop_at), tmp_path, began)
        assert not outcome.passed and time.monotonic() - began < PATIENCE_SECONDS
        if child.exists() and child.read_text():
            break
    wait_until_gone(int(child.read_text()))


def test_one_failure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        stage("tests", "raise SystemExit(1)"),
        stage("never", "", lacks="pytest is not installed"),
        stage("opt-6.7b", printing(DOCUMENT), is_run=True),
    ]
    monkeypatch.setattr(SCRIPT, "stages", lambda folder: planned)
    monkeypatch.setattr(SCRIPT, "probe", lambda: {"gpu": "a GPU", "torch": "2.13", "host_bytes": 128e9})
    assert SCRIPT.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "pytest is not installed" in said and "75%" in said
    monkeypatch.setattr(SCRIPT, "stages", lambda folder: planned[2:])
    assert SCRIPT.main([str(tmp_path)]) == 0


def test_its_summary_can_go_into_the_documents(tmp_path: Path) -> None:
    outcome = SCRIPT.Outcome(True, 21.0, "", SCRIPT.read_run(DOCUMENT))
    summary = SCRIPT.summary({"gpu": "a GPU", "torch": "2.13", "host_bytes": 128e9}, {"opt-6.7b": outcome})
    file = tmp_path / "gpu_check.json"
    file.write_text(json.dumps(summary))
    results = load_script("readme_results.py")
    parts = results.parts_of([results.read_result(file)])
    assert "| opt-6.7b, load lane | 20.0 | 15.0 | 75% |" in parts["results"]


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [{"gpu": "", "torch": "2.13", "host_bytes": 1}, None])
def test_without_a_gpu_or_torch_it_says_so_in_one_line_and_writes_nothing(
    tmp_path: Path, machine: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"print({json.dumps(machine)!r})" if machine else "import no_such_torch"
    monkeypatch.setattr(SCRIPT, "PROBE", code)
    folder = tmp_path / "out"
    assert SCRIPT.main([str(folder)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert not folder.exists()


def test_runs_are_predicted_for_the_machine_that_was_profiled_before(tmp_path: Path) -> None:
    planned = {stage.name: stage.command for stage in SCRIPT.stages(tmp_path)}
    file = profile_request.parse(planned["machine"][3:]).output
    assert Path(file).suffix in SUFFIXES
    assert [parse(planned[model][3:]).machine for model in MODELS] == [file] * len(MODELS)
