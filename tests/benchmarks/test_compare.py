"""The comparison: its search, its cap, its arithmetic; and whole, with the engine itself on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.baselines.__main__ import make_device_smaller
from benchmarks.baselines.request import Answer, Request
from benchmarks.baselines.systems import system_named
from benchmarks.comparison import command, comparison, launch, suites
from benchmarks.comparison.by_rows import ReportByRows
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.cap import Ballast, ControlGroup, NoCap, SystemdScope, open_cap
from benchmarks.comparison.ceiling import Ceiling, state_bytes, weight_bytes
from benchmarks.comparison.checkpoint import checkpoint_of, spec_of
from benchmarks.comparison.comparison import Comparison, Shared
from benchmarks.comparison.gpu_suites import ALL_SUITES
from benchmarks.comparison.launch import Failed, Launcher, _Watched
from benchmarks.comparison.picture import lines_in, lines_of
from benchmarks.comparison.point import Point
from benchmarks.comparison.report import Entry, Report
from benchmarks.comparison.search import Search
from benchmarks.comparison.suites import Contender, Load
from benchmarks.comparison.time_left import Deadline
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.formats.kernel_table import EXACT, INT8
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.tiny import tiny_config
from tests.scripts.loading import PROJECT, load_script

MB = 10**6


# -- the best number of rows -------------------------------------------------------------------------------------------------


def searched(rates: Mapping[int, float], most: int) -> Search[float]:
    """What is not among the rates fails."""

    def measure(rows: int) -> float:
        if rows not in rates:
            raise Failed("out of memory")
        return rates[rows]

    return Search(measure, score=float)


def test_rows_are_doubled_until_they_fail_and_tried_half_way() -> None:
    search = searched({1: 1.0, 2: 2.0, 4: 3.9, 6: 5.0}, 64)
    search.upwards(most=64)
    assert (search.best, search.failures) == (6, {8: "out of memory"})


def test_rows_are_doubled_until_they_are_slower() -> None:
    search = searched({1: 1.0, 2: 2.0, 4: 1.5, 3: 1.9, 8: 9.0}, 64)
    search.upwards(most=64)
    assert search.best == 2
    assert list(search.runs) == [1, 2, 4, 3]


def test_a_little_slower_is_no_end() -> None:
    search = searched({1: 1.0, 2: 0.99, 4: 2.0}, 4)
    search.upwards(most=4)
    assert (search.best, search.failures) == (4, {})


def test_from_what_fits_rows_are_halved_until_that_is_slower() -> None:
    search = searched({100: 10.0, 50: 12.0, 25: 8.0, 12: 99.0}, 100)
    search.downwards(most=100)
    assert search.best == 50
    assert list(search.runs) == [100, 50, 25]


def test_what_is_not_to_be_halved_is_run_once() -> None:
    search = searched({100: 10.0, 50: 12.0}, 100)
    search.downwards(most=100, halved=False)
    assert list(search.runs) == [100]


def test_what_fails_in_spite_of_its_planner_is_tried_with_fewer() -> None:
    search = searched({50: 12.0, 25: 8.0}, 100)
    search.downwards(most=100)
    assert (search.best, list(search.failures)) == (50, [100])


def test_what_is_counted_is_tried_so_many_times_at_most() -> None:
    search = searched({1: 1.0}, 64)
    search.downwards(64, halved=False, tries=3)
    assert search.best is None and list(search.failures) == [64, 32, 16]


def test_what_lacks_no_memory_is_not_tried_with_less() -> None:
    def crash(rows: int) -> float:
        raise Failed("ImportError: cannot import name 'x'")

    search = Search(crash, score=float)
    search.downwards(64, halved=False)
    assert list(search.failures) == [64]


def test_a_system_that_never_comes_to_its_end_has_no_best() -> None:
    search = searched({}, 8)
    search.downwards(most=8)
    assert search.best is None
    assert list(search.failures) == [8, 4, 2, 1]


# -- the cap -----------------------------------------------------------------------------------------------------------------

HUNGRY = """
import sys
sys.stdin.readline()
room = bytearray(int(sys.argv[1]))
for place in range(0, len(room), 4096):
    room[place] = 1
print("held")
"""


def held_under(cap: Any, nbytes: int, limit: int) -> int:
    """The exit status of a process that takes so much memory under a limit that is lowered when it has started."""
    asked = [sys.executable, "-c", HUNGRY, str(nbytes)]
    with subprocess.Popen(cap.started(asked), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        cap.lower(limit)
        process.communicate("\n")
    return process.returncode


def control_group() -> ControlGroup:
    group = ControlGroup.made()
    if group is None:
        pytest.skip("no memory control group can be made here")
    return group


@pytest.mark.parametrize(("nbytes", "status"), [(50 * MB, 0), (400 * MB, -signal.SIGKILL)])
def test_a_control_group_ends_what_takes_too_much(nbytes: int, status: int) -> None:
    cap = control_group()
    try:
        assert held_under(cap, nbytes, 200 * MB) == status
    finally:
        cap.close()


def test_a_control_group_leaves_nothing_behind() -> None:
    cap = control_group()
    folder = cap._folder
    assert folder.is_dir()
    held_under(cap, MB, 100 * MB)
    cap.close()
    assert not folder.exists()


def test_a_ballast_leaves_what_is_allowed_and_goes_with_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=400 * MB))
    cap = Ballast()
    cap.lower(100 * MB)
    monkeypatch.undo()
    assert cap._holder is not None
    holder = psutil.Process(cap._holder.pid)
    assert 300 * MB <= holder.memory_info().rss < 360 * MB
    cap.close()
    assert not psutil.pid_exists(holder.pid)


def test_a_scope_of_systemd_starts_the_command_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are stood in for: they write down what they are asked."""
    for name in ("systemd-run", "systemctl"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert SystemdScope.can_be_had()
    cap = SystemdScope()
    cap.lower(123)
    subprocess.run(cap.started(["python", "-m", "benchmarks.baselines"]), check=True)
    cap.lower(99)
    first, second, third = (tmp_path / "asked").read_text().splitlines()
    assert first.endswith("MemoryMax=1G true")
    assert second.endswith("-p MemorySwapMax=0 -p MemoryMax=123 python -m benchmarks.baselines")
    assert third.startswith("systemctl --user set-property --runtime compare-") and third.endswith(".scope MemoryMax=99")


def test_without_control_groups_and_systemd_there_is_the_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroup, "made", lambda: None)
    monkeypatch.setattr(SystemdScope, "can_be_had", lambda: False)
    assert isinstance(open_cap(), Ballast)


# -- arithmetic --------------------------------------------------------------------------------------------------------------

MACHINE = Calibration(1e12, 5e10, 2e9, None, {"cpu": "a CPU", "cores": 2, "device": "cpu", "torch": "2.13.0"})
ANSWER = Answer({"one": "1.2"}, "somewhere", 1.0, 10.0, (2.0, 4.0, 3.0), 5 * 10**8, 0.0)
LOAD = Load(8, 11)


def test_untimed_steps_count_as_the_median_of_the_timed() -> None:
    point = Point(4, LOAD, (ANSWER,))
    assert point.decode_seconds == 9.0 + 7 * 3.0
    assert point.tokens_per_s == pytest.approx(4 * 11 / 40.0)
    assert not point.is_whole


def test_of_a_whole_run_every_step_counts_as_it_was() -> None:
    whole = replace(ANSWER, step_seconds=(1.0,) * 9 + (11.0,))
    assert Point(4, LOAD, (whole,)).decode_seconds == 20.0
    assert Point(4, LOAD, (whole,)).is_whole


def test_of_several_runs_the_median_counts() -> None:
    point = Point(4, LOAD, (ANSWER,)).with_answer(replace(ANSWER, prefill_seconds=20.0))
    assert point.with_answer(replace(ANSWER, prefill_seconds=12.0)).prefill_seconds == 12.0


def test_a_ceiling_is_the_slowest_of_disk_memory_and_products() -> None:
    spec = spec_of("facebook/opt-1.3b", "bfloat16")
    flops = sum(spec.flops(layer, 1, 1, 0) for layer in range(len(spec.layers)))
    tight, wide = Ceiling(spec, MACHINE, host_bytes=1e9), Ceiling(spec, MACHINE)
    assert tight.pass_seconds(1, 1) == pytest.approx((weight_bytes(spec, 1) - 1e9) / 2e9)
    assert wide.pass_seconds(1, 1) == pytest.approx(weight_bytes(spec, 1) / 5e10)
    assert tight.pass_seconds(10_000, 1) == pytest.approx(10_000 * flops / 1e12)
    assert tight.seconds(1, LOAD) == pytest.approx(tight.pass_seconds(1, 8) + 10 * tight.pass_seconds(1, 1))


def test_a_gpu_is_fed_over_its_link() -> None:
    spec = spec_of("facebook/opt-1.3b", "bfloat16")
    machine = replace(MACHINE, link_per_s=1e10)
    ceiling = Ceiling(spec, machine, 1e12, device_bytes=1e9)
    assert ceiling.pass_seconds(1, 1) == pytest.approx((weight_bytes(spec, 1) - 1e9) / 1e10)


def test_states_come_before_weights_in_memory_as_each_pass_reads_and_writes_them() -> None:
    spec = spec_of("Qwen/Qwen3.6-35B-A3B", "bfloat16")
    states, weights = 512 * state_bytes(spec), weight_bytes(spec, 512)
    assert states == pytest.approx(512 * 65.9e6, rel=0.01)
    some, all_of_it = (Ceiling(spec, MACHINE, host_bytes=room).pass_seconds(512, 1) for room in (8e9, states + 1e9))
    assert some == pytest.approx((weights + 2 * (states - 8e9)) / 2e9)
    assert all_of_it == pytest.approx((weights - 1e9) / 2e9)


def test_of_tables_that_are_no_head_a_pass_needs_a_few_rows() -> None:
    tied, untied = spec_of("facebook/opt-1.3b", "bfloat16"), spec_of("meta-llama/Meta-Llama-3-8B", "bfloat16")
    positions, tokens = tied.tensors["model.decoder.embed_positions.weight"], untied.tensors["model.embed_tokens.weight"]
    assert weight_bytes(tied, 1) == tied.weight_bytes - positions.nbytes
    assert weight_bytes(untied, 1) == untied.weight_bytes - tokens.nbytes


@pytest.mark.cuda
def test_a_gpu_is_made_smaller_for_whoever_runs() -> None:
    request = Request("", "", "float16", "cuda", 1, 8, 8, None, None, 10**9, "")
    try:
        make_device_smaller(request)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("text", ["64", "64x256", "+", "0+8", "8+1", "a+b"])
def test_a_workload_is_written_with_a_plus(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not understood; write it like 64\+256"):
        Load.of(text)


def test_every_contender_has_a_name_of_its_own() -> None:
    for all_of_them in (*(suite.contenders() for suite in ALL_SUITES.values()), suites.by_rows()):
        names = [one.name for one in all_of_them]
        assert len(set(names)) == len(names)


def report(*names: str) -> Report:
    entries = []
    for number, name in enumerate(names, start=1):
        point = Point(4, LOAD, (replace(ANSWER, prefill_seconds=10.0 * number),))
        entries.append(Entry(name, "1.2", (point,), point, 2.0, {8: "out of memory"}, "exactly"))
    day, skipped = "2026-01-01", {"b": "no"}
    return Report(
        "cpu", "some/model", "bfloat16", 4 << 30, "a cap", LOAD, MACHINE, MACHINE, day, names[0], tuple(entries), skipped
    )


def test_the_table_says_what_was_shortened_skipped_and_failed() -> None:
    text = report("first", "second").table()
    assert "first *" in text and "3 decode steps" in text
    assert "b: skipped, no." in text and "second, 8 rows: out of memory." in text
    assert "1,000 GFLOP/s, memory 50.0 GB/s, disk 2.00 GB/s" in text
    second = next(line for line in text.splitlines() if line.startswith("second"))
    assert second.split() == ["second", "*", "1.2", "exactly", "4", "20.0", "30", "3.00", "0.88", "0.50", "1.25", "44%"]


def test_the_document_can_become_a_table_of_the_readme(tmp_path: Path) -> None:
    document = report("first", "second").document("python benchmarks/compare.py", "abc")
    (tmp_path / "compare.json").write_text(json.dumps(document))
    result = load_script("readme_results.py").read_result(tmp_path / "compare.json")
    assert [cells[0] for cells in result.cells] == ["system", "first *", "second *"]
    assert document["rows"][1]["times_slower"] == pytest.approx(50 / 40)


def test_the_picture_shows_every_system(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.comparison.picture import draw

    draw("two systems", lines_of(report("first", "second")), tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").stat().st_size > 1000


def test_the_document_of_a_report_is_drawn_as_the_report_is() -> None:
    found = report("first", "second")
    assert lines_in(json.loads(json.dumps(found.document("command", "abc")))) == lines_of(found)


# -- whole -------------------------------------------------------------------------------------------------------------------


def tiny(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "opt") -> Path:
    """A checkpoint of tiny shapes, as the comparison writes one of known shapes."""
    from benchmarks.comparison import checkpoint as written

    monkeypatch.setattr(written, "known_config", lambda _: SimpleNamespace(**tiny_config(kind).to_dict()))
    return checkpoint_of("tiny", "float32", folder)


def test_the_checkpoint_is_one_that_transformers_reads_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, monkeypatch, "llama-gqa")
    peer = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    prompt = [3, 5, 7, 9]
    theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 4:].tolist()
    assert len(set(theirs)) > 1
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        assert list(llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids) == theirs


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("policy", [{}, {"kv_policy": "h2o", "kv_budget": 0.5}], ids=["full", "h2o"])
def test_the_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, policy: dict[str, Any]) -> None:
    from benchmarks.baselines.this_engine import System

    options = {"percent": (0, 0, 0, 100, 0, 100), "buffers": 2, "rows_at_once": 2, **policy}
    request = Request(
        "h2o_flexgen", str(tiny(tmp_path, monkeypatch)), "float32", "cpu", 3, 12, 8, steps, None, None, str(tmp_path), options
    )
    called = []
    answer = System().run(request, lambda: called.append("ready"))
    assert called == ["ready"]
    assert len(answer.step_seconds) == (7 if steps is None else 2)
    assert answer.prefill_seconds > 0 and answer.peak_host_bytes > 0
    assert answer.notes == ("steps behind prompts of 16 tokens" if steps and not policy else "")
    assert "2 x 2 rows" in answer.placement


@pytest.mark.slow
def test_a_run_has_a_process_of_its_own_that_is_told_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, monkeypatch)
    options = {"percent": (0, 0, 0, 100, 0, 100)}
    scratch = tmp_path / "scratch"
    request = Request("h2o_flexgen", str(folder), "float32", "cpu", 2, 6, 4, None, None, None, str(scratch), options)
    launcher = Launcher(timeout=PATIENCE_SECONDS, environment={"PYTHONPATH": str(PROJECT)})
    answer = Answer.from_json(launcher.run(request, loads_within_cap=False).to_json())
    assert len(answer.step_seconds) == 3
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_what_fails_says_why_in_a_line(tmp_path: Path) -> None:
    request = Request("h2o_flexgen", str(tmp_path), "float32", "cpu", 2, 6, 4, None, None, None, str(tmp_path / "s"), {})
    launcher = Launcher(timeout=PATIENCE_SECONDS, environment={"PYTHONPATH": str(PROJECT)})
    with pytest.raises(Failed, match=r"ValueError: .*config\.json") as caught:
        launcher.run(request, loads_within_cap=True)
    assert "\n" not in str(caught.value)


NOISY = r"""
import os, sys
os.write(2, b"\xff" + b"warning\n" * 30_000 + b"SomeError: no such thing\nwarning behind it\n")
sys.exit(1)
"""


def watched(code: str, timeout: float = PATIENCE_SECONDS) -> list[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = {"encoding": "utf-8", "errors": "replace"}
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes, **words)
    with _Watched(process, timeout, NoCap()) as one:
        return one.output()


def test_the_line_that_names_the_error_is_found_in_much_noise() -> None:
    with pytest.raises(Failed, match=r"^SomeError: no such thing$"):
        watched(NOISY)


def test_what_is_killed_says_that_it_was_memory() -> None:
    with pytest.raises(Failed, match="killed, most likely because it went beyond its memory"):
        watched("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_a_process_that_leaves_the_group_and_holds_the_pipe_does_not_hold_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "HEARD_WITHIN", 0.1)
    sleeps = f"[sys.executable, '-c', 'import time; time.sleep({2 * PATIENCE_SECONDS})']"
    started = f"subprocess.Popen({sleeps}, start_new_session=True, stdout=subprocess.DEVNULL)"
    begun = time.perf_counter()
    (pid,) = watched(f"import subprocess, sys; print({started}.pid)")
    os.kill(int(pid), signal.SIGKILL)
    assert time.perf_counter() - begun < PATIENCE_SECONDS


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    request = Request("h2o_flexgen", str(tmp_path), "float32", "cpu", 2, 6, 4, None, None, None, str(tmp_path / "s"), {})
    with pytest.raises(Failed, match="took longer than 0 s"):
        Launcher(timeout=0.01, environment={"PYTHONPATH": str(PROJECT)}).run(request, loads_within_cap=True)


# -- the whole of it, with systems that are made up --------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeUp:
    """Takes a second for a prompt, and fails beyond so many rows; the second time it may fail altogether."""

    most: int
    reason: str | None = None
    fails_again: bool = False
    loads_within_cap: bool = True

    def missing(self, request: Request) -> str | None:
        return self.reason


class Planned(MadeUp):
    def most_rows(self, request: Request) -> int:
        return self.most


SYSTEMS = {
    "ours": Planned(6),
    "peer": MadeUp(3),
    "absent": MadeUp(3, "is not installed"),
    "fails again": MadeUp(2, fails_again=True),
    "fits nothing": Planned(0),
}


class FakeLauncher:
    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []

    def most_rows(self, request: Request) -> int:
        return SYSTEMS[request.system].most

    def run(self, request: Request, loads_within_cap: bool) -> Answer:
        system, run = SYSTEMS[request.system], (request.system, request.rows)
        if request.rows > system.most:
            raise Failed("out of memory")
        if system.fails_again and run in self.runs:
            raise Failed("had enough")
        self.runs.append(run)
        return replace(ANSWER, prefill_seconds=1.0, step_seconds=(1.0,) * 4)


def compared(args: Namespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeLauncher]:
    """The report of all systems."""
    args.known = args.contenders = [Contender(name, name) for name in SYSTEMS]
    monkeypatch.setattr(comparison, "system_named", SYSTEMS.__getitem__)
    monkeypatch.setattr(comparison, "checkpoint_of", lambda *_: folder)
    monkeypatch.setattr(Comparison, "calibrated", lambda _: MACHINE)
    one = Comparison(args, "facebook/opt-1.3b", 2 << 30, Load(16, 32), Shared(Deadline()))
    one.launcher = launcher = FakeLauncher()
    report = one.run()
    return report, launcher


def test_a_comparison_goes_on_whatever_becomes_of_one_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = command.parse(["--loads", "16+32", "--steps", "4", "--repeats", "3", "--folder", str(tmp_path)])
    report, launcher = compared(args, tmp_path, monkeypatch)
    best = {entry.name: (entry.best.rows, len(entry.best.answers)) for entry in report.entries}
    assert best == {"ours": (6, 3), "peer": (3, 3), "fails again": (2, 1)}
    assert report.skipped == {"absent": "is not installed", "fits nothing": "not even one row fits, says its planner"}
    assert launcher.runs == [
        *[("ours", 6), ("ours", 3), ("peer", 1), ("peer", 2), ("peer", 3), ("fails again", 1), ("fails again", 2)],
        *2 * [("ours", 6), ("peer", 3)],
    ]
    assert {entry.name: entry.failures for entry in report.entries}["fails again"][2] == "in a repetition: had enough"
    assert report.times_slower(report.entries[1]) == pytest.approx(2.0)


def by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[ReportByRows, FakeLauncher]:
    args = command.parse(["--loads", "16+32", "--steps", "4", "--rows", "2", "3", "--folder", str(tmp_path), *arguments])
    report, launcher = compared(args, tmp_path, monkeypatch)
    assert isinstance(report, ReportByRows)
    return report, launcher


def test_given_rows_are_run_in_turns_and_nothing_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, launcher = by_rows(tmp_path, monkeypatch, "--repeats", "2")
    both = [("ours", 2), ("peer", 2)], [("ours", 3), ("peer", 3)]
    assert launcher.runs == [*both[0], ("fails again", 2), *both[1], *both[0], *both[1]]
    entries = [(entry.name, entry.best.rows, len(entry.best.answers)) for entry in report.entries]
    assert entries == [("ours", 2, 2), ("peer", 2, 2), ("fails again", 2, 1), ("ours", 3, 2), ("peer", 3, 2)]
    assert report.skipped == {"absent": "is not installed", "fits nothing": "out of memory"}
    failures = next(entry.failures for entry in report.entries if entry.name == "fails again")
    assert failures == {2: "in a repetition: had enough", 3: "out of memory"}


def test_prompts_and_steps_stand_beside_limits_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = by_rows(tmp_path, monkeypatch)
    spec, first = spec_of("facebook/opt-1.3b", "bfloat16"), report.entries[0]
    ceiling = Ceiling(spec, MACHINE, 2 << 30)
    assert first.prompt_limit == pytest.approx(2 * 16 / ceiling.pass_seconds(2, 16))
    assert first.step_limit == pytest.approx(2 / ceiling.pass_seconds(2, 1))
    cells = report.cells(first)
    assert cells[3:] == (
        "2",
        "32",
        f"{32 / first.prompt_limit:.0%}",
        "1.00",
        "2",
        f"{2 / first.step_limit:.0%}",
        "1.00",
        "0.50",
    )
    assert len(cells) == len(report.columns)
    (tmp_path / "rows.json").write_text(json.dumps(report.document("python benchmarks/compare.py", "abc")))
    result = load_script("readme_results.py").read_result(tmp_path / "rows.json")
    assert result.cells[0] == report.columns and len(result.cells) == 1 + len(report.entries)


@dataclass(frozen=True)
class Prepared(MadeUp):
    def prepare(self, request: Request) -> None:
        raise AssertionError("only in a process of its own")


def test_what_a_system_needs_is_made_before_the_runs_or_it_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(launcher: FakeLauncher, request: Request) -> None:
        asked.append((request.system, len(launcher.runs)))
        if request.system == "peer":
            raise Failed("no compiler")

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(FakeLauncher, "prepare", prepare, raising=False)
    monkeypatch.setitem(SYSTEMS, "ours", Prepared(3))
    monkeypatch.setitem(SYSTEMS, "peer", Prepared(3))
    report, _ = by_rows(tmp_path, monkeypatch)
    assert asked == [("ours", 0), ("peer", 0)]
    assert report.skipped["peer"] == "could not be prepared: no compiler"


def test_integer_products_have_the_integer_peak_for_their_limit() -> None:
    machine = replace(MACHINE, fp32_peak_per_s=2e12, integer_peak_per_s=4e12)
    assert (MACHINE.products_per_s(INT8), machine.products_per_s(EXACT), machine.products_per_s(INT8)) == (1e12, 2e12, 4e12)
    assert "peaks 2,000 in fp32, 4,000 in int8" in str(machine)


def test_every_system_says_in_a_line_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("", str(tiny(tmp_path, monkeypatch)), "float32", "cpu", 2, 6, 4, None, None, None, str(tmp_path), {})
    for name in {one.system for suite in ALL_SUITES.values() for one in suite.contenders()}:
        reason = system_named(name).missing(replace(request, system=name))
        assert reason is None or (reason and "\n" not in reason), name


def test_steps_that_do_not_fit_the_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--loads", "64+8", "--steps", "6"])
    assert "--steps 6 do not fit into the second half of 8 tokens; use --whole" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["--caps", "much"])
    assert "size 'much' is not understood; write it like 16GB or 8GiB" in capsys.readouterr().err
