"""The comparison on a GPU, without one: its plans fit, a call ends in time, the next one goes on, and the table has ratios.

Systems are made up; where they are real, a CPU computes tiny shapes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.baselines.made_up import fill, is_made_up
from benchmarks.baselines.request import Answer, Request
from benchmarks.baselines.systems import system_named
from benchmarks.baselines.this_engine import plan_options, workloads
from benchmarks.comparison import calibration, checkpoint, command, comparison
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.checkpoint import made_up_of, made_up_spec, spec_of
from benchmarks.comparison.comparison import Comparison, Shared
from benchmarks.comparison.gpu_suites import GB, GPT_OSS, GPU_SUITES, HOST_BYTES, OPT_6, OPT_30
from benchmarks.comparison.kept import Kept
from benchmarks.comparison.launch import Failed
from benchmarks.comparison.report import Report
from benchmarks.comparison.suites import ROWS, Contender, Load, Suite, own
from benchmarks.comparison.time_left import Deadline
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.planning.footprint import MemoryLimits, left_to_system
from h2o_flexgen.planning.machine import Machine, find_machine, kept_folder
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling.gpu_checks import KEPT
from h2o_flexgen.session.opened_model import OpenedModel
from tests.helpers.pretended import open_any_device, pretend
from tests.helpers.tiny import BLOCKS, tiny_config
from tests.scripts.loading import load_script

LOAD = Load(16, 32)
RATES = {"cpu": "a processor", "cores": 16, "device": "NVIDIA Some 80GB", "torch": "2", "instructions": "some"}
MACHINE = Calibration(4e14, 1e11, None, 5e10, dict(RATES), 2e12)
ANSWER = Answer({"one": "1.2"}, "somewhere", 1.0, 1.0, (1.0,) * 6, 5 * 10**8, 0.0, peak_device_bytes=15 * 10**9)


# -- the plans -------------------------------------------------------------------------------------------------------------


def planned_cases() -> Iterator[Any]:
    for suite_name, suite in GPU_SUITES.items():
        for contender in suite.contenders():
            for (model, load), options in contender.cases.items():
                for rows in suite.rows or (options[ROWS],):
                    yield pytest.param(
                        suite, contender, model, load, rows, id=f"{suite_name}-{contender.name}-{model}-{load}-{rows}"
                    )


def limits(machine: Machine, device_bytes: int, host_bytes: int) -> MemoryLimits:
    """What may be held on a machine, and with so much of its memory."""
    left = left_to_system(machine)
    device = min(machine.device_bytes - left[DEVICE], device_bytes)
    return MemoryLimits(device=int(device), host=int(min(machine.host_bytes, host_bytes) - left[HOST]), disk=0)


def machines_of(suite: Suite) -> Iterator[MemoryLimits]:
    """A large GPU that is held to the memory of the suite, with 128 GB of the host; and a card that has no more."""
    assert suite.device_bytes is not None
    yield limits(find_machine("h100"), suite.device_bytes, HOST_BYTES)
    yield limits(find_machine({16 * GB: "t4-gcp", 24 * GB: "rtx-a5000"}[suite.device_bytes]), suite.device_bytes, HOST_BYTES)


@pytest.mark.parametrize(("suite", "contender", "model", "load", "rows"), list(planned_cases()))
def test_every_plan_fits_the_memory_of_its_suite(suite: Suite, contender: Contender, model: str, load: str, rows: int) -> None:
    of = Load.of(load)
    options = contender.options_for((model, load))
    request = Request("", "", suite.dtype, "cuda", rows, of.prompt_len, of.gen_len, 6, None, suite.device_bytes, "", options)
    chosen = plan_options(request, rows)
    percent = chosen.pop("percent")
    assert all(there + in_memory == 100 for there, in_memory in zip(percent[::2], percent[1::2])), "nothing goes to a disk"
    plan = Plan.create(**chosen).with_percent(percent)
    site = Site(accelerator=True, graph_bytes=GRAPH_BYTES)  # as where a check was passed
    spec = OpenedModel.of(model, True, suite.dtype, site).spec(plan)
    for workload in workloads(plan, request, rows):
        needs = WorkloadPlan(spec, plan, workload, site)
        for machine in machines_of(suite):
            needs.refuse_what_does_not_fit(machine)


@pytest.mark.parametrize("name", GPU_SUITES)
def test_the_first_and_all_that_compute_like_others_have_a_plan_for_every_case(name: str) -> None:
    suite = GPU_SUITES[name]
    cases = {(model, str(load)) for model in suite.models for load in suite.loads}
    everywhere = [one.name for one in suite.contenders() if cases <= one.cases.keys()]
    assert suite.contenders()[0].name in everywhere
    assert name == "gpu-24gb-experts" or {"16 bits, full KV", "flexgen_barrier, 16 bits, full KV"} <= set(everywhere)


# -- rows that are expected to fit -----------------------------------------------------------------------------------------


def rows_to_try(system: str, model: str, tmp_path: Path, **changes: Any) -> tuple[int, ...]:
    folder = made_up_of(model, "float16", tmp_path)
    plain = Request(system, str(folder), "float16", "cuda", 1, 512, 32, 2, None, 16 * GB, str(tmp_path))
    return system_named(system).rows_to_try(replace(plain, **changes))


def options_of(name: str) -> Mapping[str, Any]:
    return next(one.options for one in GPU_SUITES["gpu-16gb"].contenders() if one.name == name)


def test_flexgen_gets_as_many_rows_of_opt_30b_as_its_authors_gave_it(tmp_path: Path) -> None:
    options = options_of("flexgen, KV in host memory")
    assert rows_to_try("flexgen", OPT_30, tmp_path, options=options, host_bytes=208 * GB) == (144,)
    assert rows_to_try("flexgen", OPT_30, tmp_path, options=options, host_bytes=60 * GB) == (0,)
    assert rows_to_try("flexgen", OPT_30, tmp_path, options=options_of("flexgen, all on the GPU")) == (0,)
    assert rows_to_try("flexgen", OPT_6, tmp_path, options=options_of("flexgen, all on the GPU"))[0] >= 2
    there = rows_to_try("flexgen", OPT_30, tmp_path, options=options_of("flexgen"))[0]
    kept = rows_to_try("h2o original", OPT_30, tmp_path, options=options_of("h2o original"))[0]
    assert 8 <= there < kept < 144


def test_accelerate_is_tried_with_weights_in_host_memory_and_with_all_of_them_there(tmp_path: Path) -> None:
    (offloaded, resident), (most, none) = (rows_to_try("accelerate", model, tmp_path) for model in (OPT_6, OPT_30))
    assert offloaded > 8 * resident >= 16 and most >= 8 and none == 0
    assert rows_to_try("transformers", OPT_6, tmp_path) == (resident,)
    assert rows_to_try("deepspeed", OPT_30, tmp_path)[0] >= 4


def test_rows_of_flexgen_are_whole_batches(tmp_path: Path) -> None:
    from benchmarks.baselines.flexgen_original import batch_of

    folder = made_up_of(OPT_30, "float16", tmp_path)
    options = options_of("flexgen, KV in host memory")
    request = Request("flexgen", str(folder), "float16", "cuda", 96, 512, 32, 2, None, 16 * GB, str(tmp_path), options)
    assert [batch_of(replace(request, rows=rows)) for rows in (96, 48, 50, 24)] == [48, 48, 25, 24]


def test_h2os_own_engine_is_asked_for_and_refused_in_a_line(tmp_path: Path) -> None:
    folder = made_up_of(OPT_6, "float16", tmp_path)
    request = Request("h2o original", str(folder), "float16", "cuda", 1, 64, 256, 2, None, 16 * GB, str(tmp_path), {})
    system = system_named("h2o original")
    assert system.missing(request).startswith("it is in no package: git clone https://github.com/FMInference/H2O, and give")
    assert "has no flexgen/flex_opt.py" in system.missing(replace(request, options={"sources": str(tmp_path)}))
    (tmp_path / "flexgen").mkdir()
    (tmp_path / "flexgen" / "flex_opt.py").touch()
    there = replace(request, options={"sources": str(tmp_path)})
    assert "less than 2 heavy hitters" in system.missing(replace(there, prompt_len=8, gen_len=4))
    assert "float16 only" in system.missing(replace(there, dtype="bfloat16"))


# -- calls that end, and go on ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeUp:
    """A system that fits up to so many rows, needs so many seconds for a run, and may have a reason not to be there."""

    most: int = 64
    tried: tuple[int, ...] = (8,)
    seconds: float = 10.0
    reason: str | None = None
    error: str = "torch.OutOfMemoryError: CUDA out of memory"
    loads_within_cap: bool = True

    def missing(self, request: Request) -> str | None:
        return self.reason

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        return self.tried


SYSTEMS: dict[str, MadeUp] = {
    "ours": MadeUp(),
    "accelerate": MadeUp(most=5, tried=(16, 2), seconds=40.0),
    "flexgen": MadeUp(tried=(4,)),
    "crashes": MadeUp(most=0, error="ImportError: cannot import name 'x'"),
    "absent": MadeUp(reason="is not installed: pip install absent"),
    "fits nothing": MadeUp(tried=(0,)),
}


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeLauncher:
    """Every run takes its time by the clock, or is ended when the call is over."""

    clock: Clock
    deadline: Deadline
    runs: list[tuple[str, int]] = field(default_factory=list)

    def run(self, request: Request, loads_within_cap: bool) -> Answer:
        system = SYSTEMS[request.system]
        self.runs.append((request.system, request.rows))
        if self.deadline.left < system.seconds:
            self.clock.now += self.deadline.left
            raise Failed("took longer than it had")
        self.clock.now += system.seconds
        if request.rows > system.most:
            raise Failed(system.error)
        return replace(ANSWER, prefill_seconds=1.0 + len(request.system), wall_seconds=system.seconds)


@dataclass(frozen=True)
class Call:
    """A call of a suite of these systems: what it left, and what it ran."""

    report: Report
    runs: list[tuple[str, int]]


class Calls:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.args = folder, argparse.Namespace()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(comparison, "system_named", SYSTEMS.__getitem__)
        monkeypatch.setattr(comparison, "made_up_of", lambda *_: folder)
        monkeypatch.setattr(comparison, "expected_seconds", lambda *_, **__: 5.0)
        monkeypatch.setattr(Comparison, "calibrated", lambda _: MACHINE)

    def call(self, *arguments: str, seconds: float = 1000.0, systems: tuple[str, ...] = tuple(SYSTEMS)) -> Call:
        asked = ["--suite", "gpu-16gb", "--output", str(self.folder / "out"), "--folder", str(self.folder)]
        args = command.parse([*asked, "--seconds", str(seconds)])
        self.args = args
        args.again = [*arguments]
        args.known = [Contender(name, name) for name in SYSTEMS]
        args.contenders = [one for one in args.known if one.name in systems]
        clock = Clock()
        deadline = Deadline(seconds, clock, 0.0)
        one = Comparison(args, OPT_6, None, LOAD, Shared(deadline))
        one.launcher = launcher = FakeLauncher(clock, deadline)  # type: ignore[assignment]
        report = one.run(lambda report: command.written(args, "python benchmarks/compare.py", report))
        return Call(report, launcher.runs)

    @property
    def document(self) -> dict[str, Any]:
        (file,) = (self.folder / "out").iterdir()
        found: dict[str, Any] = json.loads(file.read_text())
        return found


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(tmp_path, monkeypatch)


def best_rows(report: Report) -> dict[str, int]:
    return {entry.name: entry.best.rows for entry in report.entries}


def test_a_call_goes_on_whatever_becomes_of_one_system(calls: Calls) -> None:
    found = calls.call()
    assert best_rows(found.report) == {"ours": 8, "accelerate": 4, "flexgen": 4}
    assert found.report.skipped == {
        "absent": "is not installed: pip install absent",
        "crashes": "ImportError: cannot import name 'x'",
        "fits nothing": "not even one row is expected to fit",
    }
    # what lacks memory is tried with fewer rows, what crashes is not
    assert found.runs == [
        *(("ours", 8), ("accelerate", 16), ("accelerate", 8), ("accelerate", 4), ("accelerate", 2)),
        *(("flexgen", 4), ("crashes", 8)),
    ]


def test_what_is_there_already_is_not_run_again(calls: Calls) -> None:
    first = calls.call()
    again = calls.call()
    assert again.runs == []
    assert [entry.best for entry in again.report.entries] == [entry.best for entry in first.report.entries]
    assert again.report.skipped == first.report.skipped
    assert calls.call("flexgen", "crashes").runs == [("flexgen", 4), ("crashes", 8)]


def test_a_call_that_is_over_names_what_it_has_not_run_and_the_next_one_does(calls: Calls) -> None:
    first = calls.call(seconds=52.0)  # of 40 s that accelerate takes, 42 are left, then 2
    late = "2 s were left, and it takes about 5"
    assert first.report.not_run == dict.fromkeys(("accelerate", "flexgen", "crashes"), late)
    assert "flexgen: not run, 2 s were left, and it takes about 5." in first.report.table()
    assert calls.document["not_run"] == first.report.not_run
    second = calls.call()
    assert second.runs[0] == ("accelerate", 8) and best_rows(second.report) == {"ours": 8, "accelerate": 4, "flexgen": 4}
    assert second.report.not_run == {} and calls.document["not_run"] == {}


def test_a_run_that_the_end_of_a_call_has_stopped_is_tried_once_more(calls: Calls) -> None:
    first = calls.call(seconds=18.0, systems=("ours", "accelerate"))
    assert first.report.not_run == {"accelerate": "was stopped after 8 s, when the call was over"}
    assert "accelerate" not in calls.document["failures"]
    assert ("accelerate", 16) in calls.call().runs


def test_a_run_that_more_than_half_of_a_call_was_not_enough_for_has_failed(calls: Calls) -> None:
    first = calls.call(seconds=30.0, systems=("ours", "accelerate"))
    assert calls.document["failures"]["accelerate"] == {"16": "took longer than it had"} and not first.report.not_run[
        "accelerate"
    ].startswith("was")
    assert ("accelerate", 16) not in calls.call().runs


def test_a_system_is_expected_to_take_as_long_as_it_took_before(calls: Calls) -> None:
    calls.call(systems=("ours", "accelerate"))
    late = calls.call("accelerate", seconds=35.0, systems=("ours", "accelerate"))
    assert late.runs == [] and late.report.not_run["accelerate"].startswith("35 s were left, and it takes about 40")


def test_results_are_there_after_each_system(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(launcher: FakeLauncher, request: Request, loads_within_cap: bool) -> Answer:
        if request.system == "flexgen":
            raise KeyboardInterrupt
        return run(launcher, request, loads_within_cap)

    run = FakeLauncher.run
    with monkeypatch.context() as patched:
        patched.setattr(FakeLauncher, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.call()
    assert [row["name"] for row in calls.document["rows"]] == ["ours", "accelerate"]
    assert calls.call().runs == [("flexgen", 4), ("crashes", 8)]


def test_results_of_another_gpu_are_left_alone(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.call(systems=("ours",))
    other = replace(MACHINE, machine={**RATES, "device": "NVIDIA Other"})
    monkeypatch.setattr(Comparison, "calibrated", lambda _: other)
    assert calls.call(systems=("ours",)).runs == [("ours", 8)]
    names = sorted(file.name for file in (calls.folder / "out").iterdir())
    assert names == [f"compare-nvidia-{gpu}-16gb-opt-6.7b-16-32.json" for gpu in ("other", "some-80gb")]


def test_rates_of_the_machine_are_the_best_of_all_calls(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.call(systems=("ours",))
    monkeypatch.setattr(Comparison, "calibrated", lambda _: replace(MACHINE, link_per_s=9e9, device_read_per_s=3e12))
    report = calls.call(systems=("ours",)).report
    assert (report.before.link_per_s, report.before.device_read_per_s) == (5e10, 3e12)


def test_systems_that_are_not_asked_for_keep_their_results(calls: Calls) -> None:
    calls.call()
    some = calls.call("flexgen", systems=("ours", "flexgen"))
    assert some.runs == [("flexgen", 4)] and best_rows(some.report) == {"ours": 8, "accelerate": 4, "flexgen": 4}
    assert set(calls.document["failures"]) == {"accelerate", "crashes", "fits nothing"}


def test_what_a_call_has_not_come_to_is_named_in_the_file_meanwhile(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    written = command.written

    def noted(args: Any, words: str, report: Report) -> None:
        named.append(sorted(report.not_run))
        written(args, words, report)

    monkeypatch.setattr(command, "written", noted)
    calls.call(systems=("ours", "flexgen", "accelerate"))
    assert named == [["accelerate", "flexgen"], ["flexgen"], [], []]


def test_the_first_systems_are_run_for_all_models_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begun = []

    def run(one: Comparison, note: Callable[[Report], None]) -> Report:
        one.before = one.after = MACHINE
        begun.append((one.model, str(one.load), [contender.name for contender in one.part]))
        one.shared.deadline.now.now += 100.0  # type: ignore[attr-defined]
        return one.report()

    monkeypatch.setattr(Comparison, "run", run)
    monkeypatch.setattr(command, "Deadline", lambda seconds: Deadline(seconds, Clock(), 0.0))
    asked = ["--suite", "gpu-16gb", "--seconds", "550", "--output", str(tmp_path), "--folder", str(tmp_path)]
    assert command.main([*asked, "--systems", "accelerate", "transformers"]) == 0
    first, rest = ["h2o_flexgen", "accelerate"], ["transformers"]
    cases = [(model, load) for load in ("512+32", "64+256") for model in (OPT_6, OPT_30)]
    assert begun == [*((*case, first) for case in cases), *((*case, rest) for case in cases[:2])]
    assert f"{OPT_30}, 64+256 tokens: transformers: not begun, the same command goes on" in capsys.readouterr().err


def test_a_check_of_the_gpu_that_was_passed_counts_for_systems(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a cache of their own, and plans have graphs by default only where such a check is kept: here, or in the results
    of another machine of this kind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(calls.folder / "home"))
    for name, folder in (("here.json", kept_folder(KEPT)), ("there.json", calls.folder / "out" / KEPT)):
        folder.mkdir(parents=True)
        (folder / name).write_text("{}")
    calls.call(systems=("ours",))
    there = kept_folder(KEPT, calls.folder / "cache")
    assert str(there).startswith(Comparison(calls.args, OPT_6, None, LOAD, Shared(Deadline())).environment["XDG_CACHE_HOME"])
    assert sorted(file.name for file in there.iterdir()) == ["here.json", "there.json"]


def test_repetitions_go_on_too(calls: Calls) -> None:
    def repeated(seconds: float, asked: int) -> Call:
        with pytest.MonkeyPatch.context() as patched:
            parse = command.parse
            patched.setattr(command, "parse", lambda argv: parse([*argv, "--repeats", str(asked)]))
            return calls.call(seconds=seconds, systems=("ours", "flexgen"))

    first = repeated(34.0, 2)
    assert first.runs == [("ours", 8), ("flexgen", 4), ("ours", 8)] and set(first.report.not_run) == {"flexgen"}
    assert repeated(100.0, 2).runs == [("flexgen", 4)]


def test_a_file_of_something_else_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": 1}')
    with pytest.raises(ValueError, match=r"a\.json is not what this comparison writes .*; run the comparison without --resume"):
        Kept.in_file(tmp_path / "a.json", LOAD)
    assert Kept.in_file(tmp_path / "none.json", LOAD) == Kept()


def test_what_a_call_lacks_is_said_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in (
        (["--seconds", "9"], "--resume and --seconds need an --output"),
        ([], "suite gpu-16gb needs a CUDA device, and torch finds none"),
        (["--device", "cpu", "--again", "who"], "unknown system 'who'"),
    ):
        with pytest.raises(SystemExit):
            command.parse(["--suite", "gpu-16gb", *arguments])
        assert said in capsys.readouterr().err


# -- the table -------------------------------------------------------------------------------------------------------------


def rated(calls: Calls, rates: Mapping[str, float]) -> Report:
    """A report of systems that made so many tokens per second; of 32 tokens the first is that of the prompts."""
    report = calls.call(systems=("ours",)).report
    entry = report.entries[0]

    def of(name: str, rate: float) -> Any:
        answer = replace(ANSWER, prefill_seconds=8 / rate, step_seconds=(8 / rate,) * 31, link_bytes_per_step=2e11 / rate)
        point = replace(entry.best, answers=(answer,))
        lossy = name.startswith("ours") or name.endswith("4 bits")
        return replace(entry, name=name, best=point, points=(point,), computes="4 bits" if lossy else "exactly, in 16 bits")

    return replace(report, entries=tuple(of(name, rate) for name, rate in rates.items()))


RATED = {"ours": 100.0, "accelerate": 4.0, "flexgen": 10.0, "flexgen, KV in host memory": 20.0, "flexgen, 4 bits": 50.0}


def test_rates_stand_beside_those_of_the_best_way_of_each_peer(calls: Calls) -> None:
    report = rated(calls, RATED)
    ours = dict(zip(report.columns, report.cells(report.entries[0]), strict=True))
    assert (ours["times accelerate"], ours["times deepspeed"], ours["times flexgen"]) == ("25.00", "-", "5.00")
    assert ours["link busy"] == "50%" and ours["peak GPU GB"] == "15.00"
    share = report.entries[0].best.tokens_per_s / report.entries[0].ceiling
    assert ours["of ceiling"] == f"{share:.0%}" and ours["ceiling tokens/s"] == f"{report.entries[0].ceiling:.3g}"


def test_a_gpu_is_measured_with_its_link_and_its_memory_and_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "open_device", open_any_device)
    monkeypatch.setattr(calibration, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(calibration, "SHAPE", (64, 32))  # the whole one keeps a processor busy for a minute
    found = Calibration.taken("pretended", "float32", tmp_path, seconds=0.01)
    assert found.link_per_s and found.device_read_per_s and found.flops_per_s > 0
    assert found.disk_read_per_s is None and "disk" not in str(found) and "link" in str(found)
    assert Calibration(**json.loads(json.dumps(asdict(found)))) == found


def test_a_machine_that_cannot_be_measured_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(comparison.sys, "executable", "false")
    monkeypatch.setattr(comparison, "made_up_of", lambda *_: tmp_path)
    asked = ["--suite", "gpu-16gb", "--seconds", "9", "--output", str(tmp_path), "--folder", str(tmp_path)]
    assert command.main(asked) == 2
    assert "the machine could not be measured, exit status 1; the lines above say why" in capsys.readouterr().err


def test_the_ceiling_is_what_does_not_fit_the_gpu_over_its_link(calls: Calls) -> None:
    spec = spec_of(OPT_30, "float16")
    beyond = spec.weight_bytes - 16 * GB
    assert comparison.Ceiling(spec, MACHINE, device_bytes=16 * GB).pass_seconds(1, 1) == pytest.approx(beyond / 5e10, rel=0.01)
    fitting = comparison.Ceiling(spec, MACHINE, device_bytes=80 * GB)
    assert fitting.pass_seconds(1, 1) == pytest.approx(spec.weight_bytes / 2e12, rel=0.01)


def test_the_document_becomes_tables_of_two_pages(calls: Calls, tmp_path: Path) -> None:
    document = rated(calls, {"h2o_flexgen": 100.0, **RATED}).document("python benchmarks/compare.py", "abc")
    script, results = load_script("readme_results.py"), tmp_path / "results"
    results.mkdir()
    (results / "compare.json").write_text(json.dumps(document))
    pages = [tmp_path / "all.md", tmp_path / "gpu.md"]
    for page, part in zip(pages, (script.RESULTS, script.GPUS), strict=True):
        page.write_text("\n".join(script.marks(part)))
    assert script.main(["--results", str(results), "--documents", *map(str, pages)]) == 0
    whole, gpus = (page.read_text() for page in pages)
    assert "facebook/opt-6.7b shapes in float16, 16+32 tokens, NVIDIA Some 80GB held to 16 GB" in whole
    assert "| accelerate |" in whole and "| accelerate |" not in gpus
    (line,) = [line for line in gpus.splitlines() if "| h2o_flexgen |" in line]
    assert line.split(" | ")[2:7] == ["8", "100", "25.00", "-", "5.00"]


# -- with real systems -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a tiny OPT whose weights are made up."""
    monkeypatch.setattr(checkpoint, "known_config", lambda _: SimpleNamespace(**tiny_config("opt").to_dict()))
    return made_up_of("tiny", "float32", tmp_path)


def test_values_are_made_up_as_far_as_a_tensor_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.baselines import made_up

    monkeypatch.setattr(made_up, "BLOCK_VALUES", 7)
    plain, half, one = torch.zeros(3, 5), torch.zeros(20, dtype=torch.float16), torch.zeros(())
    fill([plain, half, one])
    assert plain.count_nonzero() == 15 and half.count_nonzero() == 20 and one != 0
    assert torch.equal(plain.view(-1)[7:14], plain.view(-1)[:7]) and plain.view(-1)[:7].unique().numel() == 7
    assert 0.001 < plain.std() < 0.1


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_peers_run_on_weights_that_are_made_up(name: str, tiny_shapes: Path, tmp_path: Path) -> None:
    request = Request(name, str(tiny_shapes), "float32", "cpu", 2, 12, 10, 2, None, None, str(tmp_path), {})
    system = system_named(name)
    if (lacking := system.missing(request)) is not None:
        pytest.skip(lacking)
    answer = system.run(request, lambda: None)
    assert len(answer.step_seconds) == 2 and [file.suffix for file in tiny_shapes.iterdir()].count(".safetensors") == 0


def test_made_up_shapes_are_those_of_a_checkpoint(tiny_shapes: Path, tmp_path: Path) -> None:
    from benchmarks.baselines.sizes import tensor_shapes

    assert is_made_up(str(tiny_shapes)) and not is_made_up(str(tmp_path))
    written = checkpoint.checkpoint_of("tiny", "float32", tmp_path)
    assert tensor_shapes(str(tiny_shapes)) == tensor_shapes(str(written))


def test_a_mixture_that_is_made_up_keeps_its_format(tmp_path: Path) -> None:
    folder = made_up_of(GPT_OSS, "bfloat16", tmp_path)
    packed = OpenedModel.of(str(folder), True, "bfloat16", Site()).spec(Plan(sep_layer=False))
    assert packed.weight_bytes == made_up_spec(GPT_OSS, "bfloat16").weight_bytes
    assert 60e9 < packed.weight_bytes < 67e9 < spec_of(GPT_OSS, "bfloat16").weight_bytes


def on_pretended_gpu(folder: Path, scratch: Path, options: Mapping[str, Any], **changes: Any) -> Answer:
    plain = Request("h2o_flexgen", str(folder), "float32", "pretended", 4, 12, 10, 2, None, None, str(scratch), options)
    with pretend():
        return system_named("h2o_flexgen").run(replace(plain, **changes), lambda: None)


@pytest.mark.parametrize("suite", GPU_SUITES)
def test_ways_of_this_engine_run_on_a_pretended_gpu(suite: str, tiny_shapes: Path, tmp_path: Path) -> None:
    """Every set of options that a plan of the suite may have; of plans that differ in numbers alone, the first."""
    seen = set[str]()
    for contender in GPU_SUITES[suite].contenders():
        for case in contender.cases:
            options = contender.options_for(case)
            kind = str({name: value for name, value in options.items() if name not in ("percent", "rows_at_once", "buffers")})
            if kind in seen:
                continue
            seen.add(kind)
            answer = on_pretended_gpu(tiny_shapes, tmp_path, {**options, "rows_at_once": 2})
            assert len(answer.step_seconds) == 2 and answer.prefill_seconds > 0


@pytest.mark.parametrize("percent", [(0, 100, 100, 0, 100, 0), (40, 60, 0, 100, 100, 0), (100, 0, 100, 0, 100, 0)])
def test_bytes_over_the_link_are_those_that_a_step_moves(percent: tuple[int, ...], tiny_shapes: Path, tmp_path: Path) -> None:
    from h2o_flexgen import LLM, SamplingParams

    answer = on_pretended_gpu(tiny_shapes, tmp_path, {"percent": percent, "rows_at_once": 2}, steps=None)
    moved = []
    for steps in (1, 2):
        with pretend():
            llm = LLM(str(tiny_shapes), dtype="float32", device="pretended", dummy_weights=True, percent=percent,
                      gpu_batch_size=2, num_gpu_batches=2)  # fmt: skip
        with llm:
            llm.generate([[5] * 12] * 4, SamplingParams(max_tokens=1 + steps, ignore_eos=True))
            assert llm.stats is not None
            moved.append(llm.stats.moved_bytes.get("load", 0))
    second_step = moved[1] - moved[0]
    slots = 0 if percent[2] == 100 else 4 * BLOCKS * 2 * 32 * 4  # one more slot of each row in the second step, of 32 floats
    assert answer.link_bytes_per_step == second_step - slots
    assert (answer.link_bytes_per_step == 0) == (percent[0] == 100)


@pytest.mark.slow
def test_a_suite_runs_to_its_end_with_real_processes(
    tiny_shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"percent": (0, 100, 100, 0, 100, 0), "rows": 4, "rows_at_once": 2}
    ways = (
        own("h2o_flexgen", cases={("tiny", "12+10"): options}),
        own("of another load", cases={("tiny", "99+10"): options}),
        Contender("unknown option", "h2o_flexgen", {"no_such": 1}, cases={("tiny", "12+10"): {"rows": 8}}),
    )
    suite = replace(GPU_SUITES["gpu-16gb"], contenders=lambda: ways, dtype="float32")
    monkeypatch.setitem(command.ALL_SUITES, "gpu-16gb", suite)
    monkeypatch.setattr(comparison, "made_up_spec", lambda *_: spec_of("tiny", "float32"))
    monkeypatch.setattr(comparison, "expected_seconds", lambda *_, **__: 0.0)
    monkeypatch.setattr(Comparison, "calibrated", lambda _: MACHINE)
    asked = [
        "--suite",
        "gpu-16gb",
        "--device",
        "cpu",
        "--models",
        "tiny",
        "--loads",
        "12+10",
        "--steps",
        "2",
        "--seconds",
        "500",
    ]
    folders = ["--folder", str(tmp_path), "--output", str(tmp_path / "out")]
    assert command.main([*asked, *folders]) == 0
    (document,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = {row["name"]: row["rows"] for row in document["rows"]}
    assert measured == {"h2o_flexgen": 4}
    assert document["skipped"]["of another load"].startswith("no plan is given for tiny and 12+10 tokens")
    assert "no_such" in document["failures"]["unknown option"]["8"] and len(document["failures"]["unknown option"]) == 1
    assert command.main([*asked, *folders]) == 0
    assert "h2o_flexgen, 4 rows: kept" in capsys.readouterr().err
