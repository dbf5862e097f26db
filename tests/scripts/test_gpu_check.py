"""scripts/gpu_check without a GPU: its commands are accepted and fit, its time limits hold, one failure stops nothing else."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from h2o_flexgen import run
from h2o_flexgen.cli.run_request import parse
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling.gpu_checks import check_file, keep_check
from tests.delayed.contract import parse as parse_contract
from tests.helpers.patience import PATIENCE_SECONDS
from tests.scripts.loading import load_script

SCRIPT = load_script("gpu_check")
MODELS = sorted([*SCRIPT.MODELS, *SCRIPT.OTHERS])
HOST_BYTES = 110_000_000_000  # of the 128 GB of the machine that it is meant for
DOCUMENT: dict[str, Any] = {
    "total_seconds": 20.0,
    "tokens_per_second": 50.0,
    "peak_bytes": {"device": 15_000_000_000},
    "lanes": {"load": {"bound_seconds": 15.0}, "compute": {"bound_seconds": 5.0}},
}


def stage(name: str, code: str, seconds: float = 60.0, **options: Any) -> Any:
    return SCRIPT.Stage(name, (sys.executable, "-c", code), seconds, **options)


def ran(one: Any, folder: Path, limit: float = 60.0) -> Any:
    return SCRIPT.run_stage(one, folder, limit)


def printing(document: object) -> str:
    return f"import json; print('progress'); print({json.dumps(json.dumps(document))})"


def wait_until_gone(pid: int) -> None:
    """A process that was killed may stay as a zombie for a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- the commands ------------------------------------------------------------------------------------------------------

COMMANDS = [(model, way) for model in MODELS for way in SCRIPT.WAYS if model in SCRIPT.MODELS or not way]


@pytest.mark.parametrize(("model", "way"), COMMANDS)
def test_the_command_accepts_what_it_is_called_with(model: str, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = list(SCRIPT.run_command(model, way)[3:])
    if not torch.cuda.is_available():  # where a limit on its memory is refused
        place = flags.index("--gpu-mem")
        del flags[place : place + 2]
    assert run.main([*flags, "--cpu-mem", "200GB", "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert planned["model"].endswith(f"/{model}") and planned["num_prompts"] == 32


@pytest.mark.parametrize("model", MODELS)
def test_its_plans_fit_a_gpu_that_is_held_to_16_gb(model: str) -> None:
    args = parse(SCRIPT.run_command(model)[3:])
    plan = Plan(args.gpu_batch_size, args.num_gpu_batches).with_percent(args.percent)
    spec = create_model(known_config(args.model), "float16", name=args.model).spec
    workload = Workload.uniform(plan.block_size, args.prompt_len, args.gen_len)
    needed = WorkloadPlan(spec, plan, workload, Site(accelerator=True)).footprint
    assert needed.total(DEVICE) < SCRIPT.GPU_BYTES and needed.total(HOST) < HOST_BYTES
    assert needed.total(DEVICE) > SCRIPT.GPU_BYTES / 2, "a smaller GPU would do: the check would show little"


def test_the_plan_that_is_found_has_to_be_searched_for() -> None:
    args = parse(SCRIPT.AUTO.split())
    spec = create_model(known_config(args.model), "float16", name=args.model).spec
    assert args.percent == "auto" and spec.weight_bytes > parse_bytes(args.gpu_mem)


def test_the_whole_check_ends_within_ten_minutes(tmp_path: Path) -> None:
    planned = SCRIPT.stages(tmp_path, tmp_path)
    certain = sum(one.seconds for one in planned if not one.if_time)
    assert certain <= SCRIPT.TOTAL_SECONDS and SCRIPT.TOTAL_SECONDS + 4 * SCRIPT.KILL_SECONDS <= 580
    assert len({one.name for one in planned}) == len(planned)


def test_its_tests_are_there_and_need_a_gpu(tmp_path: Path) -> None:
    for one in SCRIPT.stages(tmp_path, tmp_path):
        if one.ends_with == SCRIPT.TESTS:
            places = [SCRIPT.ROOT / word for word in one.command if word.startswith("tests/")]
            assert places and all(place.exists() for place in places), one.name


def test_the_contract_alone_takes_all_of_the_time_and_all_plans(tmp_path: Path) -> None:
    (alone,) = SCRIPT.asked_stages(tmp_path, tmp_path, ["contract"])
    beside = next(one for one in SCRIPT.stages(tmp_path, tmp_path) if one.name == "contract")
    assert (alone.seconds, beside.seconds) == (SCRIPT.TOTAL_SECONDS - SCRIPT.GRAPHS_SECONDS, SCRIPT.CONTRACT_SECONDS)
    assert [one.seconds for one in SCRIPT.asked_stages(tmp_path, tmp_path, ["contract", "graphs"])] == [alone.seconds, 35.0]
    assert [one.seconds for one in SCRIPT.asked_stages(tmp_path, tmp_path, ["contract", "graphs"], 120.0)] == [85.0, 35.0]
    for one, every in ((alone, 1), (beside, 4)):
        options = parse_contract(one.command[3:])
        assert one.command[:3] == (sys.executable, "-m", "tests.delayed.contract")
        assert options.every == every and options.seconds < one.seconds and options.pretended is None


def test_the_verdict_of_the_contract_is_what_the_table_says(tmp_path: Path) -> None:
    said = {"verdict": "3 of 4 plans are sound; 1: a race; late lanes: load", "sound": False}
    outcome = ran(stage("contract", f"{printing(said)}; raise SystemExit(1)", ends_with=SCRIPT.DOCUMENT), tmp_path)
    assert (outcome.result, outcome.words) == (SCRIPT.FAILED, said["verdict"])


@pytest.mark.parametrize(
    ("contract", "graphs", "kept"),
    [
        ("passed 1", "passed", {"plans": 74, "graph_bytes": 70_000}),
        ("passed 4", "passed", {"plans": 1, "graph_bytes": 1}),  # as before: a quarter of the plans proves too little
        ("passed 1", "not run", {"plans": 1, "graph_bytes": 1}),
        ("FAILED 1", "passed", None),
        ("passed 1", "FAILED", None),
        ("FAILED 0", "passed", {"plans": 1, "graph_bytes": 1}),  # there was no time for some plans
        ("FAILED", "passed", {"plans": 1, "graph_bytes": 1}),  # it said nothing of plans
    ],
)
def test_a_check_that_is_passed_is_kept(
    contract: str, graphs: str, kept: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("KEEP", "FORGET"):
        monkeypatch.setattr(SCRIPT, name, getattr(SCRIPT, name).replace('"cuda"', '"cpu"'))
    keep_check("cpu", 1, 1)
    result, _, every = contract.partition(" ")
    of_plans = {"plans": 74, "every": int(every), "failed": [7] if every == "1" else []} if every else None
    documents = of_plans, {"graph_bytes": 70_000}
    results = zip(("contract", "graphs"), (result, graphs), documents)
    out = tmp_path / "out"
    SCRIPT.keep_check({name: SCRIPT.Outcome(said, 1.0, "", document=own) for name, said, own in results}, out)
    assert [file.name for file in out.rglob("*.json")] == ([check_file("cpu").name] if kept and kept["plans"] == 74 else [])
    found = json.loads(check_file("cpu").read_text()) if check_file("cpu").exists() else None
    assert (found and {name: found[name] for name in ("plans", "graph_bytes")}) == kept


def test_plan_only_prints_every_command_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert SCRIPT.main([str(folder), "--plan-only"]) == 0
    said = capsys.readouterr().out
    assert "pytest -o addopts= -q" in said and all(f"/{model} --percent" in said for model in MODELS)
    assert SCRIPT.main([str(folder), "--plan-only", "--only", "opt-30b", "pins"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")] == [
        "# pins: 40 s",
        "# opt-30b: if 100 s are left",
    ]
    with pytest.raises(SystemExit):
        SCRIPT.main([str(folder), "--plan-only", "--only", "opt-175b"])
    assert "no stage is called 'opt-175b'; there are pins, contract" in capsys.readouterr().err
    assert not folder.exists()


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_against_its_busiest_lane(tmp_path: Path) -> None:
    outcome = ran(stage("a", printing(DOCUMENT), ends_with=SCRIPT.RUN), tmp_path)
    assert outcome.result == SCRIPT.PASSED and outcome.run == SCRIPT.Run(20.0, 50.0, "load", 15.0, 15_000_000_000)
    assert outcome.document == DOCUMENT and "progress" in (tmp_path / "gpu_check.txt").read_text()
    assert "75%" in SCRIPT.report({"a": outcome})[1]


@pytest.mark.parametrize("held", [0, 17_000_000_000])
def test_a_run_that_leaves_the_gpu_alone_or_takes_too_much_of_it_has_not_passed(tmp_path: Path, held: int) -> None:
    document = {**DOCUMENT, "peak_bytes": {"device": held}}
    assert ran(stage("a", printing(document), ends_with=SCRIPT.RUN), tmp_path).result == SCRIPT.FAILED


@pytest.mark.parametrize(
    ("last", "status", "result"),
    [
        ("60 passed in 9.00s", 0, "passed"),
        ("60 skipped in 1.00s", 0, "FAILED"),
        ("1 failed, 59 passed in 9.00s", 1, "FAILED"),
        ("0 passed", 0, "FAILED"),
    ],
)
def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path, last: str, status: int, result: str) -> None:
    assert ran(stage("a", f"print({last!r}); raise SystemExit({status})"), tmp_path).result == result


def test_kernels_below_their_shares_are_named(tmp_path: Path) -> None:
    rows = [{"name": name, "share": 0.2, "expected_share": 0.3, "reaches": name == "fast"} for name in ("fast", "slow")]
    code = printing({"rows": rows}) + "; raise SystemExit(1)"
    outcome = ran(stage("a", code, ends_with=SCRIPT.DOCUMENT), tmp_path)
    assert (outcome.result, outcome.words) == (SCRIPT.FAILED, "slow: 20% of 30%")


@pytest.mark.parametrize("ends_with", [SCRIPT.TESTS, SCRIPT.RUN, SCRIPT.DOCUMENT])
def test_a_stage_that_fails_says_its_last_line(tmp_path: Path, ends_with: str) -> None:
    outcome = ran(stage("a", "import sys; print('error: it is Monday'); sys.exit(2)", ends_with=ends_with), tmp_path)
    assert outcome.result == SCRIPT.FAILED and "error: it is Monday" in outcome.words


def test_a_run_without_json_has_not_passed(tmp_path: Path) -> None:
    outcome = ran(stage("a", "print('done')", ends_with=SCRIPT.RUN), tmp_path)
    assert outcome.result == SCRIPT.FAILED and "JSON" in outcome.words


def test_a_stage_is_ended_when_its_time_is_over_with_all_that_it_started(tmp_path: Path) -> None:
    child, told = tmp_path / "child", f"import time; time.sleep({2 * PATIENCE_SECONDS})"
    code = (
        "import pathlib, subprocess, sys, time; "
        f"pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen([sys.executable, '-c', {told!r}]).pid)); {told}"
    )
    for limit in (1.0, 10.0, 100.0):  # on a busy machine it may not have begun when its time is over
        began = time.monotonic()
        outcome = ran(stage("a", code), tmp_path, limit)
        assert outcome.result == SCRIPT.FAILED and time.monotonic() - began < PATIENCE_SECONDS
        if child.exists() and child.read_text():
            break
    wait_until_gone(int(child.read_text()))


def test_the_profile_of_the_first_run_serves_the_next_ones(tmp_path: Path) -> None:
    """Without one they are run all the same."""
    cache, machine = tmp_path / "cache", tmp_path / "machine.yaml"
    profile = "import os, pathlib; f = pathlib.Path(os.environ['XDG_CACHE_HOME'], 'h2o_flexgen', 'machines', 'a.yaml')"
    profile += "; f.parent.mkdir(parents=True); f.write_text('name: this')"
    say = "import sys; print(len(sys.argv), 'passed')"
    asks = SCRIPT.Stage("asks", (sys.executable, "-c", say, "x", "--machine", str(machine)), 60.0)
    cache.mkdir()
    planned = [replace(asks, name="before"), stage("auto", profile, environment={"XDG_CACHE_HOME": str(cache)}), asks]
    outcomes = SCRIPT.run_all(planned, tmp_path, cache, time.monotonic())
    assert machine.read_text() == "name: this"
    assert [outcomes[name].words for name in ("before", "asks")] == ["2 passed", "4 passed"]


def test_what_has_no_time_left_is_not_run_and_says_how_to_run_it(tmp_path: Path) -> None:
    began, whole = time.monotonic() - SCRIPT.TOTAL_SECONDS / 2, SCRIPT.TOTAL_SECONDS
    late, soon = stage("late", "", whole, if_time=True), stage("soon", "print('1 passed')", whole / 4, if_time=True)
    outcomes = SCRIPT.run_all([late, soon], tmp_path, tmp_path / "none", began)
    assert outcomes["late"].result == SCRIPT.NOT_RUN and "--only late runs it" in outcomes["late"].words
    assert outcomes["soon"].result == SCRIPT.PASSED


def test_one_failure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        stage("tests", "raise SystemExit(1)"),
        stage("never", "", lacks="pytest is not installed"),
        stage("opt-6.7b", printing(DOCUMENT), ends_with=SCRIPT.RUN),
    ]
    monkeypatch.setattr(SCRIPT, "stages", lambda *given: planned)
    monkeypatch.setattr(SCRIPT, "probe", lambda: {"gpu": "a GPU", "torch": "2.13", "host_bytes": 128e9})
    assert SCRIPT.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    table = said[said.index("stage") :].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["tests", "never", "opt-6.7b"]
    assert "FAILED" in table[1] and "not run" in table[2] and "pytest is not installed" in table[2] and "75%" in table[3]
    assert {file.name for file in tmp_path.iterdir()} == {"gpu_check.json", "gpu_check.txt"}
    assert SCRIPT.main([str(tmp_path), "--only", "opt-6.7b"]) == 0


def test_after_each_stage_what_is_known_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may be ended from outside. And what is left of the contract is not thrown away by another call."""
    file, told = tmp_path / "gpu_check.json", "print(open({file!r}).read().count('passed'), 'passed')"
    planned = [stage("first", "print('1 passed')"), stage("second", told.format(file=str(file)))]
    monkeypatch.setattr(SCRIPT, "stages", lambda *given: planned)
    monkeypatch.setattr(SCRIPT, "probe", lambda: {"gpu": "a GPU", "torch": "2.13", "host_bytes": 128e9})
    (tmp_path / "contract.jsonl").write_text("kept")
    assert SCRIPT.main([str(tmp_path)]) == 0
    assert list(json.loads(file.read_text())["stages"]) == ["first", "second"]
    assert (tmp_path / "contract.jsonl").read_text() == "kept"
    assert SCRIPT.main([str(tmp_path), "--seconds", "0"]) == 1, "no time is left for any stage"


def test_what_needs_a_package_that_is_not_there_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCRIPT, "find_spec", lambda name: None if name in ("pulp", "hypothesis") else SimpleNamespace())
    lacking = {one.name: one.lacks for one in SCRIPT.stages(tmp_path, tmp_path) if one.lacks}
    assert lacking["auto"] == "pulp not installed: no plan was searched for"
    assert lacking["contract"] == "hypothesis not installed: no test was run" and "kernels" not in lacking


def test_its_summary_can_go_into_the_documents(tmp_path: Path) -> None:
    outcome = SCRIPT.Outcome(SCRIPT.PASSED, 21.0, "", SCRIPT.read_run(DOCUMENT))
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
