"""Reports: what is shown of completions, plans and lanes, and how errors are put into one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.cli.report.plan_report import PlanReport, placed_bytes
from h2o_flexgen.cli.report.summary import FIRST, INDENT, completion_lines, log_name
from h2o_flexgen.cli.terminal import table
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DISK, Site
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion, StepLogprobs, TokenLogprob
from h2o_flexgen.schedule.ops import Op, Task
from h2o_flexgen.session.open_request import SiteRequest
from tests.planning.worlds import tiny_spec


def completion(index: int, text: str = "text", **changes: object) -> Completion:
    values = {"prompt": None, "prompt_token_ids": (1, 2), "token_ids": (3, 4, 5), "logprobs": None, "finish_reason": "stop"}
    return Completion(index=index, text=text, **{**values, **changes})  # type: ignore[arg-type]


def lines_of(count: int, everything: bool) -> list[str]:
    return list(completion_lines([completion(index) for index in range(count)], everything))


def test_the_first_completions_are_shown_and_the_others_counted() -> None:
    lines = lines_of(FIRST + 2, everything=False)
    assert lines[:3] == ["prompt 0 (2 + 3 tokens, stop)", f"{INDENT}text", ""]
    assert lines[-1] == "(2 more; --verbose 2 shows all, --output FILE writes all)"
    assert [sum(line == f"{INDENT}text" for line in lines_of(FIRST + 2, every)) for every in (False, True)] == [
        FIRST,
        FIRST + 2,
    ]


@pytest.mark.parametrize(
    ("given", "as_text", "expected"),
    [
        ({"text": "so\n\tit 'was' ü"}, True, ["so", "\tit 'was' ü"]),
        ({"text": "\x1b[31m\x00 \ud800"}, True, ["\\x1b[31m\\x00 \\ud800"]),  # a terminal would obey or refuse these
        ({"text": ""}, False, ["token ids 3 4 5"]),
    ],
)
def test_texts_are_shown_as_text(given: dict[str, Any], as_text: bool, expected: list[str]) -> None:
    _, *lines = completion_lines([completion(0, **given)], everything=False, as_text=as_text)
    assert lines == [f"{INDENT}{line}" for line in expected]


def test_a_long_text_is_cut_and_of_a_long_prompt_the_end_is_shown() -> None:
    one = completion(0, "x" * 10_000, prompt="begun " * 1000 + "and\nended")
    head, cut = completion_lines([one], everything=False)
    assert head.endswith("begun and ended") and "): ... " in head and len(head) < 200
    assert cut.endswith("x ...") and len(cut) < 1000
    assert list(completion_lines([one], everything=True))[1] == INDENT + "x" * 10_000


def test_logprobs_name_the_chosen_token_and_its_rivals() -> None:
    steps = tuple(StepLogprobs(TokenLogprob(token, -0.5), (TokenLogprob(9, -0.25),)) for token in (3, 4, 5, 6))
    lines = list(completion_lines([completion(0, logprobs=steps)], everything=False))
    assert lines[2] == "  logprobs: 3:-0.500 (of 9:-0.250), 4:-0.500 (of 9:-0.250), 5:-0.500 (of 9:-0.250) ..."


def test_the_name_of_a_log_tells_the_plan() -> None:
    plan = Plan(gpu_batch_size=48, num_gpu_batches=3).with_percent((20, 80, 0, 100, 0, 100))
    name = log_name("facebook/opt-30b", plan, 512, 32)
    assert name == "fo-opt-30b-gbs48-ngbs3-prompt512-gen32-percent-20-80-0-100-0-100.log"


def test_what_each_device_of_a_pipeline_computes_is_said_by_name() -> None:
    spec, joined = tiny_spec(3), tiny_spec(3)
    joined = replace(joined, layers=tuple(layer for layer in joined.layers if layer.functions != ("mlp",)))
    assert devices_of(spec) == [
        "embed to mlp of block 0",
        "attention of block 1 to mlp of block 1",
        "attention of block 2 to head",
    ]
    assert devices_of(joined) == ["embed to attention of block 0", "attention of block 1", "attention of block 2 to head"]


def devices_of(spec: ModelSpec) -> list[str]:
    """What a report says of a pipeline of three devices."""
    plan, site = Plan(2, 3, pipeline=3), Site(accelerator=True)
    planned = WorkloadPlan(spec, plan, Workload((4,) * 6, 3), site)
    lines = PlanReport("tiny", False, plan, planned, MemoryLimits(), None).lines()
    said = [line.split(", needs at most ")[0] for line in lines if ", needs at most " in line]
    return [line.removeprefix(f"GPU {device}     ") for device, line in enumerate(said)]


@pytest.mark.parametrize(("rows", "on_disk", "is_said"), [(2, 100, True), (2, 0, False), (512, 100, False)])
def test_it_is_said_where_pages_make_kv_on_disk_larger(rows: int, on_disk: int, is_said: bool) -> None:
    plan = Plan(rows, 1).with_percent((0, 100, 0, 100 - on_disk, 0, 100))
    planned = WorkloadPlan(tiny_spec(1), plan, Workload((60,) * rows, 4), Site())
    said = [line for line in PlanReport("tiny", False, plan, planned, MemoryLimits(), None).lines() if "whole pages" in line]
    placed = placed_bytes(planned.blocks.first)["KV"][DISK]
    times = planned.footprint.parts[DISK]["KV"] / placed if on_disk else 1.0
    begins = [f"KV takes {times:.1f} times its {format_bytes(placed)} on disk: slots fill whole pages of 4.10 kB"] * is_said
    assert [line.partition(" there,")[0] for line in said] == begins and (times > 1.5) is is_said


def test_of_pages_nothing_is_said_where_the_first_block_has_no_kv_on_disk() -> None:
    """A later one has some: its rows are shorter, so that the last of them lack more of the disk."""
    plan = Plan(1, 2).with_percent((0, 100, 0, 90, 0, 100))
    planned = WorkloadPlan(tiny_spec(1), plan, Workload((90, 60, 60, 2), 4), Site())
    report = PlanReport("tiny", False, plan, planned, MemoryLimits(), None)
    assert placed_bytes(planned.blocks.first)["KV"][DISK] == 0 < planned.footprint.parts[DISK]["KV"]
    assert not any("whole pages" in line for line in report.lines())


def test_one_of_a_kind_is_no_plural() -> None:
    def said(plan: Plan, lengths: tuple[int, ...]) -> list[str]:
        planned = WorkloadPlan(tiny_spec(1), plan, Workload(lengths, 3), Site())
        return PlanReport("tiny", False, plan, planned, MemoryLimits(), None).lines()

    alone, several = said(Plan(1, 1), (1,)), said(Plan(2, 2), (1, 4))
    assert {"prompts   1 of 1 token, 3 to generate for each", "block     1 row x 1 batch; 1 block to run"} <= {*alone}
    assert {"prompts   2 of up to 4 tokens, 3 to generate for each", "block     2 rows x 2 batches; 1 block to run"} <= {
        *several
    }


def test_a_folder_that_is_made_for_a_run_is_said(tmp_path: Path) -> None:
    site, there = SiteRequest(offload_dir=tmp_path / "new"), SiteRequest(offload_dir=tmp_path)
    assert (SiteRequest().folder_to_make, there.folder_to_make) == (None, None)
    planned = WorkloadPlan(tiny_spec(1), Plan(), Workload((1,), 3), Site())
    made = PlanReport("tiny", False, Plan(), planned, MemoryLimits(), None, folder_to_make=site.folder_to_make)
    said = f"--offload-dir {tmp_path}/new is not there: it is made, and removed at the end"
    assert said in made.lines() and said not in replace(made, folder_to_make=there.folder_to_make).lines()


def test_columns_of_a_table_stand_below_each_other() -> None:
    lines = table([["a", "long head", "b"], ["longer", "x", "y"]])
    assert [line.index(word) for line, word in zip(lines, ("b", "y"))] == [19, 19]


def test_an_error_is_one_line_without_numbers_of_the_system() -> None:
    assert one_line(ValueError("one\n  and two")) == "one and two"
    assert one_line(OSError(28, "disk is full")) == "disk is full"
    assert one_line(FileNotFoundError(2, "No such file or directory", "x.txt")) == "No such file or directory: x.txt"
    assert one_line(MemoryError()) == "MemoryError"


def test_an_error_of_a_lane_names_its_task_and_a_bug_is_no_users_error() -> None:
    task = Task(Op.WRITE_KV, 1, 2, 3)
    assert one_line(TaskFailed(task, OSError(28, "disk is full"))) == "disk is full (while running WRITE_KV 1.2.3)"
    assert one_line(TaskFailed(task, KeyError("bug"))) is None
    assert one_line(RuntimeError("bug")) is None
