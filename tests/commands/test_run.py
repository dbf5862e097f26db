"""The main command, from its arguments to its last line: what it prints, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM, SamplingParams, run
from h2o_flexgen.checkpoints.probe_file import write_probe
from h2o_flexgen.cli import run_job, run_work
from h2o_flexgen.cli.watch import RunWatch
from h2o_flexgen.engine import resources
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.formats.kernel_table import LIBRARIES, TORCH
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine, find_machine
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.policy import PROBE
from h2o_flexgen.profiling import measure, profile_cache
from h2o_flexgen.session import machine_source
from h2o_flexgen.session.loaded_model import LoadedModel
from h2o_flexgen.session.plan_finder import WITH_ROOM, PlanFinder
from tests.checkpoints.test_adapters import matrices_of, save_adapter, values_in
from tests.helpers.commands import Result, called
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.planted import CPU_MEM, CROWDED, OVER, SAID, plant_a_crowd, plant_a_peak
from tests.helpers.probes import made_up_probe
from tests.helpers.samples import first_of
from tests.helpers.signals import as_in_a_terminal
from tests.helpers.threads import new_threads
from tests.helpers.tiny import POSITIONS, save_tiny, tiny_config

IN_MEMORY = ("--percent", "0", "100", "0", "100", "0", "100")
DISK_HEAVY = ("--percent", "0", "30", "0", "40", "0", "50")
SEARCHED = ("--machine", "cpu-2core", "--cpu-mem", "100GB")
BYTES = ("--tokenizer", "bytes")  # a tiny model comes without a tokenizer
SMALL = ("--gpu-batch-size", "2", "--num-gpu-batches", "2", "--prompt-len", "7", "--gen-len", "5")
KEYS = {
    "model", "plan", "requested_percent", "placed_percent", "num_prompts", "generated_tokens", "prefill_seconds",
    "decode_seconds", "total_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "tokens_per_second",
    "peak_bytes", "lanes", "projected", "machine", "shrunk",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_work, "measure", partial(measure.measure, seconds=0.005))


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are found for a machine of the package: to measure this one would take a third of a minute. Named, it is searched
    for also where everything fits."""
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: find_machine("cpu-2core"))


@pytest.fixture(autouse=True)
def nothing_left_running() -> Any:
    before = set(threading.enumerate())
    yield
    assert not new_threads(before)


@pytest.fixture(autouse=True)
def few_weights_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny layers it would take thousands to outgrow a processor's caches."""
    monkeypatch.setattr(measure, "WEIGHT_BYTES_AT_LEAST", 1 << 20)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-opt"
    save_tiny("opt", folder)
    return folder


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path) -> Any:
    """Runs the command with an offload folder that must be gone afterwards."""

    def call(*argv: object) -> Result:
        return called(run.main, capfd, "--device", "cpu", "--offload-dir", offload, *argv)

    return call


# -- what a run says -----------------------------------------------------------------------------------------------------


def test_the_last_line_is_json_with_every_promised_key(command: Any, opt: Path) -> None:
    result = command("--model", opt, *SMALL, *DISK_HEAVY)
    assert result.status == 0, result.err
    document = result.json
    assert document.keys() >= KEYS
    assert document["requested_percent"] == [0, 30, 0, 40, 0, 50]
    assert (document["num_prompts"], document["generated_tokens"], document["projected"]) == (4, 20, False)
    assert document["total_seconds"] == pytest.approx(document["prefill_seconds"] + document["decode_seconds"], abs=1e-5)
    assert document["tokens_per_second"] == pytest.approx(20 / document["total_seconds"], rel=0.01)
    assert document["decode_tokens_per_second"] == pytest.approx(16 / document["decode_seconds"], rel=0.01)
    assert document["prefill_tokens_per_second"] == pytest.approx(28 / document["prefill_seconds"], rel=0.01)
    assert set(document["peak_bytes"]) == {"device", "host", "disk"} and document["peak_bytes"]["disk"] > 0


def test_all_prompts_have_the_adapter_that_is_given(command: Any, opt: Path, tmp_path: Path) -> None:
    values = values_in(opt)
    shapes = {name: (values[name].shape[0], values[name].shape[1]) for name in matrices_of(values) if "layers" in name}
    flags, adapter = ("--model", opt, *SMALL, *DISK_HEAVY, "--dtype", "float32"), save_adapter(tmp_path / "adapter", shapes)
    ways = ((), ("--lora", f"one={adapter}"), ("--adapter", adapter))
    plain, beside, merged = (command(*flags, "--verbose", 2, *way) for way in ways)
    assert beside.status == merged.status == 0 and beside.texts == merged.texts != plain.texts


def test_a_run_that_held_more_than_its_budget_says_so(command: Any, opt: Path, monkeypatch: Any) -> None:
    flags = ("--model", opt, *SMALL, *IN_MEMORY)
    within = command(*flags)
    assert set(within.json["over_budget_bytes"].values()) == {0} and not [
        line for line in within.err if line.startswith("memory")
    ]
    plant_a_peak(monkeypatch)
    result = command(*flags, *CPU_MEM)
    assert result.status == 0, "what was computed is right"
    [line] = [line for line in result.err if line.startswith("memory: ")]
    assert line.startswith(SAID) and result.json["over_budget_bytes"] == {"device": 0, "host": OVER, "disk": 0}


def test_a_crowd_is_said_once_in_a_run(command: Any, opt: Path, monkeypatch: Any) -> None:
    plant_a_crowd(monkeypatch)
    assert command("--model", opt, *SMALL, *IN_MEMORY).err.count(CROWDED) == 1


def test_the_peak_of_a_run_is_taken_before_the_machine_is_measured(command: Any, opt: Path, monkeypatch: Any) -> None:
    held = [300_000_000]
    monkeypatch.setattr("h2o_flexgen.session.loaded_model.peak_resident_bytes", lambda: held[0])
    monkeypatch.setattr(run_work, "peak_resident_bytes", lambda: held[0])
    measuring = run_work.measure

    def holding(*given: Any) -> Any:
        held[0] += 50_000_000
        return measuring(*given)

    monkeypatch.setattr(run_work, "measure", holding)
    document = command("--model", opt, *SMALL, *IN_MEMORY).json
    assert (document["peak_bytes"]["host"], document["process_peak_bytes"]) == (300_000_000, 350_000_000)


def test_when_memory_runs_out_a_line_says_so_and_the_texts_are_the_same(command: Any, opt: Path, monkeypatch: Any) -> None:
    flags = ("--model", opt, *SMALL, "--num-prompts", "7", *DISK_HEAVY, "--dtype", "float32", "--verbose", 2)
    plain = command(*flags)
    allocate = KVStore._allocate

    def failing(self: KVStore, held: Any) -> None:
        allocate(self, held)
        rows = {batch: layout.rows for (_, batch), layout in self._layouts.items()}
        if sum(rows.values()) > 2:
            raise MemoryError("no room")

    monkeypatch.setattr(KVStore, "_allocate", failing)
    result = command(*flags)
    assert result.status == 0 and result.texts == plain.texts
    notes = [line for line in result.err if "memory ran out" in line]
    assert notes == ["CPU memory ran out in a block of 2 x 2 rows: going on with 1 x 2"]
    assert (plain.json["shrunk"], result.json["shrunk"]) == ([], [[2, 2]])
    assert result.json["generated_tokens"] == plain.json["generated_tokens"] == 35
    for name, lane in result.json["lanes"].items():
        assert lane["moved_bytes"] == lane["predicted_bytes"], name  # of the blocks that were run


def test_when_memory_runs_out_in_mid_run_all_that_was_done_counts(command: Any, opt: Path, monkeypatch: Any) -> None:
    visit = RunWatch.visit

    def failing(self: RunWatch, task: Any, tokens: int) -> None:
        visit(self, task, tokens)
        if task.step == 3 and self.blocks[self._index].block.num_rows > 2:
            raise MemoryError("no room")

    monkeypatch.setattr(RunWatch, "visit", failing)
    result = command("--model", opt, *SMALL, *DISK_HEAVY)
    assert result.status == 0, result.err
    document = result.json
    assert document["shrunk"] == [[2, 2]] and document["generated_tokens"] == 20
    assert document["total_seconds"] == pytest.approx(document["prefill_seconds"] + document["decode_seconds"], abs=1e-5)
    assert document["lanes"]["read"]["moved_bytes"] > document["lanes"]["read"]["predicted_bytes"]


def test_memory_that_does_not_last_for_one_row_is_one_line(command: Any, opt: Path, monkeypatch: Any) -> None:
    def failing(self: KVStore, held: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(KVStore, "_allocate", failing)
    result = command("--model", opt, *SMALL)
    assert result.status == 2 and result.err[-1].startswith("error: no room; a block of one row is the smallest: keep less KV")
    assert [line.rpartition(" x")[0] for line in result.err[:-1] if "memory ran out" in line] == [
        "CPU memory ran out in a block of 2 x 2 rows: going on with 1",
        "CPU memory ran out in a block of 1 x 2 rows: going on with 1",
    ]


def test_every_lane_moved_what_was_predicted_and_has_a_bound(command: Any, opt: Path) -> None:
    result = command("--model", opt, *SMALL, "--num-prompts", "7", *DISK_HEAVY)
    lanes, of_data = result.json["lanes"], result.json["moved_by_data"]
    assert set(of_data) == {"weights", "KV", "activations"} and any(line.startswith("moved ") for line in result.out)
    for name, lane in lanes.items():
        assert lane["moved_bytes"] == sum(by_lane.get(name, 0) for by_lane in of_data.values()), name
    assert set(lanes) == {"read", "load", "store", "write", "compute"}
    for name, lane in lanes.items():
        assert lane["moved_bytes"] == lane["predicted_bytes"], name
        assert 0 <= lane["busy_share"] <= 1 and lane["bound_seconds"] > 0, name
    assert all(lanes[name]["moved_bytes"] > 0 for name in ("read", "load", "store", "write"))


def test_the_bound_of_compute_is_that_of_the_products_that_were_made(command: Any, opt: Path) -> None:
    flags = ("--model", opt, *SMALL, *IN_MEMORY)
    plain, rounded = (command(*flags, *more).json for more in ((), ("--compress-weight", "--compute", "int8")))
    assert set(plain["rates"]["flops_per_s"]) == {"bfloat16"} and "packed_flops_per_s" not in plain["rates"]
    assert set(rounded["rates"]["packed_flops_per_s"]) == {"int8 tiles4"} and "flops_per_s" not in rounded["rates"]
    assert all(one["lanes"]["compute"]["bound_seconds"] > 0 for one in (plain, rounded))


def test_what_the_host_attends_has_a_lane_without_a_bound(command: Any, opt: Path, pretended: None) -> None:
    on_host = ("--device", "pretended", "--percent", 100, 0, 0, 100, 100, 0, "--cpu-cache-compute")
    lanes = command("--model", opt, *SMALL, *on_host).json["lanes"]
    assert lanes["attend"]["moved_bytes"] > 0 and lanes["attend"]["bound_seconds"] is None


def test_an_accelerators_lanes_too_move_what_was_predicted(command: Any, opt: Path, pretended: None) -> None:
    flags = ("--device", "pretended", "--percent", 30, 30, 30, 30, 0, 40)
    result = command("--model", opt, *SMALL, *flags)
    assert not any("no GPU" in line for line in result.out)
    lanes = result.json["lanes"]
    assert {name: lane["moved_bytes"] for name, lane in lanes.items()} == {
        name: lane["predicted_bytes"] for name, lane in lanes.items()
    }
    assert all(lanes[name]["moved_bytes"] > 0 for name in ("read", "load", "store", "write"))


def test_weights_that_are_not_page_locked_have_a_bound_of_their_own(
    command: Any, opt: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate of pageable memory is measured where weights lie in it; KV and activations cross as fast as before."""
    rates = {"locked": (4e6, 3e6), "pageable": (1e6, 5e5)}
    monkeypatch.setattr(measure, "link_rates", lambda device, memory, *_: rates["locked" if memory._locker else "pageable"])
    monkeypatch.setattr(run_work, "measure", lambda *given: replace(measure.measure(*given), device="cuda"))
    bounds = {}
    for mix in ((0, 100, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100)):
        flags = ("--model", opt, *SMALL, "--device", "pretended", "--percent", *mix)
        plain, pageable = (command(*flags, "--pin-weight", pin).json for pin in (1, 0))
        assert "unpinned_to_device_per_s" not in plain["rates"] and pageable["rates"]["unpinned_to_device_per_s"] == 1e6
        bounds[mix[3]] = tuple(one["lanes"]["load"]["bound_seconds"] for one in (plain, pageable))
    assert bounds[0][1] == pytest.approx(4 * bounds[0][0], rel=0.02), "weights alone are loaded"
    others = bounds[100][0] - bounds[0][0]
    assert others > 0 and bounds[100][1] == pytest.approx(bounds[0][1] + others, rel=0.02)


def test_the_plan_comes_first_and_says_what_lives_where(command: Any, opt: Path) -> None:
    out = command("--model", opt, *SMALL, "--percent", 50, 0, 0, 100, 100, 0).out
    assert out[0].startswith(f"model     {opt}: opt, ")
    assert "no GPU: what was meant for it lives in CPU memory" in out
    weights = next(line for line in out if line.startswith("weights "))
    assert weights.split()[1:6] == ["50", "+", "0", "/", "50"] and "kB" in weights
    assert any(line.startswith("CPU ") and "budget" not in line for line in out)
    first_text = next(place for place, line in enumerate(out) if line.startswith("prompt 0 ("))
    assert out.index("no GPU: what was meant for it lives in CPU memory") < first_text


def test_a_share_for_a_gpu_that_is_not_there_is_shown_beside_what_it_went_to(command: Any, opt: Path) -> None:
    out = command("--model", opt, *SMALL, "--percent", 20, 30, 0, 50, 0, 100, "--dry-run").out
    head, weights = (next(line for line in out if line.startswith(start)) for start in ("    ", "weights "))
    assert re.split(r" {2,}", head.strip()) == [
        "requested % GPU + CPU / disk",
        "placed % CPU / disk",
        "bytes on CPU",
        "bytes on disk",
    ]
    assert weights.split()[1:6] == ["20", "+", "30", "/", "50"] and weights.split()[7] == "/"
    assert float(weights.split()[6]) == pytest.approx(50, abs=10)


def test_the_buffers_that_are_shown_are_those_of_the_schedule(command: Any, opt: Path) -> None:
    shown = {}
    for flags in ((), ("--buffers", 3), ("--overlap", 0), ("--schedule", "flexgen_barrier"), ("--schedule", "row_by_row")):
        out = command("--model", opt, *SMALL, "--dry-run", *flags).out
        shown[flags] = next(line for line in out if line.startswith("schedule ")).split(", ")[1]
    assert list(shown.values()) == [
        "2 buffers for weights and 3 for KV and activations",
        "3 buffers for weights and 4 for KV and activations",
        "1 buffer",
        "2 buffers for weights and 3 for KV and activations",
        "2 buffers",
    ]


def test_a_checkpoint_that_has_to_be_converted_says_so_once_and_where_the_copy_is(
    command: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("opt", tmp_path / "model", safe=False)
    first, second = (command("--model", tmp_path / "model", *SMALL) for _ in range(2))
    assert (first.status, second.status) == (0, 0)
    (line,) = (line for line in first.err if "converted to safetensors" in line)
    assert str(tmp_path / "cache" / "h2o_flexgen" / "converted") in line and "kB" in line
    assert not any("converted" in line for line in second.err)


def test_without_a_share_for_the_gpu_nothing_is_said_about_one(command: Any, opt: Path) -> None:
    out = command("--model", opt, *SMALL, "--percent", 0, 100, 0, 100, 0, 100).out
    assert not any("GPU" in line for line in out)


def test_the_summary_has_the_five_lines_of_flexgen(command: Any, opt: Path) -> None:
    summary = command("--model", opt, *SMALL).out[-6:-1]
    number = r"\d+\.\d{3}"
    for line, form in zip(
        summary,
        (
            f"model size: {number} GiB\tcache size: {number} GiB\thidden size \\(p\\): {number} GiB",
            f"peak gpu mem: {number} GiB\tprojected: False",
            f"prefill latency: {number} s\tprefill throughput: {number} token/s",
            f"decode latency: {number} s\tdecode throughput: {number} token/s",
            f"total latency: {number} s\ttotal throughput: {number} token/s",
        ),
        strict=True,
    ):
        assert re.fullmatch(form, line), line


def test_without_overlap_the_tokens_are_the_same(command: Any, opt: Path) -> None:
    common = ("--model", opt, *SMALL, *DISK_HEAVY, "--verbose", 2, "--logprobs", "--dtype", "float32")
    with_overlap, without = command(*common), command(*common, "--overlap", "0")
    assert without.json["plan"]["slots"] == 1 and with_overlap.json["plan"]["slots"] == 2
    assert len(with_overlap.texts) == 8  # a line of text and one of tokens for each prompt
    assert without.texts == with_overlap.texts


def test_results_come_in_the_order_of_the_prompts(command: Any, opt: Path, tmp_path: Path) -> None:
    prompts = ["of middling length", "short", "the longest of them all, by far", "tiny", "another one"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts[1:]) + "\n", encoding="utf-8")
    options = ("--model", opt, *BYTES, "--gpu-batch-size", 2, "--gen-len", 3, "--verbose", 2, "--logprobs")
    together = command(*options, "--prompt", prompts[0], "--prompt-file", file)
    lengths = [int(re.match(r"prompt \d+ \((\d+) \+ 3 tokens", line)[1]) for line in together.texts[::2]]  # type: ignore[index]
    assert lengths == [len(prompt) for prompt in prompts]
    for place in (0, 2):
        alone = command(*options, "--prompt", prompts[place])
        assert alone.texts[0].split(":", 1)[1] == together.texts[2 * place].split(":", 1)[1]


def test_a_prompt_length_is_said_to_be_unused_when_prompts_are_given(command: Any, opt: Path) -> None:
    out = command("--model", opt, *BYTES, "--prompt", "hello", "--prompt-len", 9, "--gen-len", 2).out
    assert "--prompt-len 9 is not used: the prompts are given" in out


def test_verbose_chooses_how_many_texts_are_shown(command: Any, opt: Path) -> None:
    options = ("--model", opt, *SMALL, "--num-prompts", 5)
    shown = [command(*options, "--verbose", level) for level in (0, 1, 2)]
    assert [len(result.texts) for result in shown] == [0, 5, 5]
    assert any(line.startswith("compute |") for line in shown[2].out)


def test_one_seed_gives_one_result(command: Any, opt: Path) -> None:
    options = ("--model", opt, *SMALL, "--temperature", 1.0, "--top-k", 50, "--verbose", 2, "--logprobs")
    first, again, other = (command(*options, "--seed", seed) for seed in (3, 3, 4))
    assert first.texts == again.texts != other.texts
    assert first.json["seed"] == 3


def test_a_stop_token_ends_the_text_there(command: Any, opt: Path) -> None:
    options = ("--model", opt, *BYTES, "--prompt", "hello", "--gen-len", 4, "--logprobs", "--verbose", 2, "--dtype", "float32")
    whole = command(*options)
    second = re.findall(r"(\d+):-", whole.texts[1])[1]
    stopped = command(*options, "--stop-token-id", second)
    assert "+ 2 tokens, stop)" in stopped.texts[0] or "+ 1 tokens, stop)" in stopped.texts[0]
    assert stopped.json["generated_tokens"] < 4
    later = command(*options, "--stop-token-id", second, "--min-tokens", 4)
    assert later.json["generated_tokens"] == 4
    cut = command(*options, "--stop-token-id", second, "--min-tokens", 4, "--cut-gen-len", 3)
    assert cut.status == 0 and "+ 3 tokens, length)" in cut.texts[0]


def test_penalties_change_what_is_said(command: Any, opt: Path) -> None:
    options = ("--model", opt, *BYTES, "--prompt", "hello", "--gen-len", 8, "--verbose", 2, "--dtype", "float32", "--logprobs")
    plain, other = command(*options), command(*options, "--presence-penalty", 2, "--frequency-penalty", 2, "--top-k", -1)
    plain_ids, ids = (re.findall(r"(\d+):-", result.texts[1]) for result in (plain, other))
    assert len(set(ids)) > len(set(plain_ids))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--stop-token-id", 5000), "error: stop_token_ids has the token id 5000; "),
        (("--presence-penalty", 3), "error: argument --presence-penalty: '3' is not allowed; give a number from -2 to 2"),
        (("--min-tokens", 50), "error: --min-tokens 50 cannot be reached: --gen-len has 4 generated; give 4 or fewer"),
        (
            ("--repetition-penalty", "1e-300"),
            "error: argument --repetition-penalty: '1e-300' is not allowed; give a number from",
        ),
        (("--threads", 4096), "error: argument --threads: '4096' is not allowed; give a whole number from 1 to "),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_the_machine_is_measured(
    flags: tuple[object, ...], message: str, command: Any, opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: pytest.fail("measured"))
    result = command("--model", opt, *BYTES, "--prompt", "hello", "--gen-len", 4, "--percent", "auto", *flags)
    assert result.error.startswith(message)


# -- what a run writes ---------------------------------------------------------------------------------------------------


def test_no_file_is_written_unless_it_is_asked_for(command: Any, opt: Path, tmp_path: Path, monkeypatch: Any) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert command("--model", opt, *SMALL).status == 0
    assert command("--model", opt, *SMALL, "--log-file", "--no-log").status == 0
    assert list(here.iterdir()) == []


def test_the_log_gets_the_summary_of_every_run(command: Any, opt: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [command("--model", opt, *SMALL, *DISK_HEAVY, "--log-file") for _ in range(2)]
    log = tmp_path / "fo-tiny-opt-gbs2-ngbs2-prompt7-gen5-percent-0-30-0-40-0-50.log"
    assert log.read_text().splitlines() == [line for result in runs for line in result.out[-7:-2]]  # before what moved


def test_the_output_file_holds_every_text_whole_and_in_order(command: Any, opt: Path, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text("of an earlier run")
    texts = ("a longer prompt", "short", "one that is the longest\u2028of all")
    prompts = [word for text in texts for word in ("--prompt", text)]
    options = ("--model", opt, *BYTES, *prompts, "--gpu-batch-size", 1, "--gen-len", 3, "--logprobs", 1, "--verbose", 0)
    assert command(*options, "--output", file).status == 0
    found = [json.loads(line) for line in file.read_bytes().decode().strip("\n").split("\n")]
    with LLM(str(opt), tokenizer="bytes", device="cpu") as llm:
        expected = llm.generate(texts, SamplingParams(max_tokens=3, logprobs=1))
    for one, record in zip(expected, found, strict=True):
        assert (record["index"], record["prompt"], record["text"]) == (one.index, one.prompt, one.text)
        assert record["finish_reason"] == one.finish_reason and record["prompt_token_ids"] == list(one.prompt_token_ids)
        assert record["token_ids"] == list(one.token_ids) == [step["token_id"] for step in record["logprobs"]]
        assert all(len(step["top"]) == 1 for step in record["logprobs"])
    assert sorted(tmp_path.glob("completions*")) == [file], "nothing else is left"


def test_a_run_that_is_ended_early_keeps_the_texts_that_were_done(
    command: Any, opt: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    file, visits = tmp_path / "completions.jsonl", iter(range(12))
    visit = RunWatch.visit

    def interrupted(self: RunWatch, task: Any, tokens: int) -> None:
        visit(self, task, tokens)
        if self.blocks and next(visits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunWatch, "visit", interrupted)
    options = ("--model", opt, *SMALL, "--gen-len", 1, "--gpu-batch-size", 1, "--num-gpu-batches", 1, "--num-prompts", 3)
    result = command(*options, *DISK_HEAVY, "--output", file)
    partial = file.with_name("completions.jsonl.partial")
    assert result.status == 130 and not file.exists()
    assert [json.loads(line)["index"] for line in partial.read_text().splitlines()] == [0]
    assert any(f"kept in {partial}" in line for line in result.err)


def test_an_output_file_that_cannot_be_written_is_refused_before_a_model_is_opened(
    command: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(run_work, "open_llm", lambda *_: pytest.fail("opened"))
    for place in (tmp_path, tmp_path / "none" / "a.jsonl"):
        assert f"--output {place} cannot be written" in command("--model", "x", "--output", place).error
    long = tmp_path / ("a" * 250)  # and .partial makes it too long
    assert "cannot be written (File name too long)" in command("--model", "x", "--output", long).error
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(os.devnull)
    for place in (tmp_path / "pipe", tmp_path / "nowhere"):
        assert f"--output {place} is a device or a pipe" in command("--model", "x", "--output", place).error
    assert "runs nothing" in command("--model", "x", "--dry-run", "--output", tmp_path / "a.jsonl").error
    assert "is for texts" in command("--model", "x", "--debug-mode", "fewer_batch", "--output", tmp_path / "a.jsonl").error
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_text_for_a_model_without_a_tokenizer_is_refused_before_the_machine_is_measured(
    command: Any, opt: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: pytest.fail("measured"))
    error = command("--model", opt, "--prompt", "The ferry").error
    assert f"{opt} has no tokenizer (it has none of tokenizer.json, " in error and "--tokenizer" in error
    result = command("--model", opt, *SMALL, *DISK_HEAVY)
    assert f"tokens    none: {opt} has no tokenizer, so prompts and outputs are token ids" in result.out
    assert "token ids " in result.texts[0]
    noise = command("--model", opt, "--dummy-weights", *SMALL, *DISK_HEAVY, "--dry-run")
    assert "tokens    every byte is a token" in noise.out


def test_the_trace_file_holds_the_last_block_for_perfetto(command: Any, opt: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command("--model", opt, *SMALL, *DISK_HEAVY, "--trace", file)
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"COMPUTE 4.7.1", "READ_W 0.1.0", "WRITE_KV 0.1.0"} & names and "COMPUTE 4.7.1" in names


def test_a_file_for_which_there_is_no_room_is_named(command: Any, opt: Path) -> None:
    said = "--log-file /dev/full cannot be written (No space left on device); make room, or give another file"
    result = command("--model", opt, *SMALL, *DISK_HEAVY, "--log-file", "/dev/full")
    assert result.status == 2 and f"error: {said}" in result.said


def test_a_file_that_cannot_be_written_keeps_no_other_from_being_written(command: Any, opt: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = command("--model", opt, *SMALL, *DISK_HEAVY, "--log-file", "/dev/full", "--trace", trace)
    assert "--log-file /dev/full cannot be written" in result.error and json.loads(trace.read_text())["traceEvents"]
    neither = command("--model", opt, *SMALL, *DISK_HEAVY, "--log-file", "/dev/full", "--trace", "/dev/full").error
    assert all(f"{flag} /dev/full cannot be written (No space left" in neither for flag in ("--log-file", "--trace"))


def test_a_dry_run_loads_and_writes_nothing(command: Any, opt: Path, offload: Path, monkeypatch: Any) -> None:
    from h2o_flexgen.llm import LLM

    monkeypatch.setattr(LLM, "generate", lambda *_, **__: pytest.fail("a dry run generates"))
    monkeypatch.setattr(LoadedModel, "_load", lambda *_: pytest.fail("a dry run loads weights"))
    result = command("--model", opt, *SMALL, *DISK_HEAVY, "--dry-run")
    assert result.status == 0 and not offload.exists()
    assert any(line.startswith("activations ") for line in result.out)
    placed = result.json["placed_bytes"]
    assert sum(placed["weights"].values()) > placed["weights"]["disk"] > 0
    assert result.json["needed_bytes"]["host"] > 0


def test_a_dry_run_says_what_a_run_keeps_and_what_makes_it_slow(command: Any, opt: Path) -> None:
    recall = ("--kv-recall", 0.5, "--kv-recall-reuse")
    slow = "slow: --kv-recall-reuse keeps nothing: no KV is on disk, and only what is read there stays; leave it out"
    assert slow in command("--model", opt, *SMALL, *IN_MEMORY, *recall, "--dry-run").err
    out = command("--model", "facebook/opt-125m", *SMALL, *IN_MEMORY, "--kv-policy", "h2o", "--dry-run").out
    assert any(line.startswith("heads     equal budgets: what each needs is measured by the first run") for line in out)
    assert any(line.startswith("facts     how many facts of a text survive this policy was not measured") for line in out)
    assert "seen by its config alone: a run takes its own weights and tokenizer, in which texts have fewer tokens" in out
    assert "weights are random, so the text is noise" not in out


def test_a_limit_above_what_this_machine_has_is_said(command: Any, opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_source, "whole_bytes", lambda: 25 * 10**9)
    for size, is_said in (("25GB", False), ("900GB", True)):
        out = command("--model", opt, *SMALL, *IN_MEMORY, "--cpu-mem", size, "--dry-run").out
        line = "--cpu-mem 900GB is more than there is: the machine has 25.00 GB in CPU memory"
        assert out and (line in out) is is_said


@pytest.mark.parametrize("percent", [(0, 100, 0, 0, 0, 100), ("auto",)], ids=["given", "searched"])
def test_a_run_is_limited_on_the_disk(command: Any, opt: Path, percent: tuple[object, ...]) -> None:
    asked = ("--model", opt, *SMALL, "--percent", *percent, "--dry-run", "--disk-mem")
    assert command(*asked, "1GB").status == 0
    if len(percent) > 1:
        refused = command(*asked, "5kB")
        assert refused.status == 2
        assert re.search(r"on disk \(.*\), the limit is 5\.00 kB; would fit: .* or a larger --disk-mem$", refused.error)


def test_a_dry_run_knows_the_sizes_of_the_largest_models(command: Any) -> None:
    published = ("--percent", 0, 50, 0, 0, 0, 100, "--gpu-batch-size", 32, "--num-gpu-batches", 8)
    result = command("--model", "facebook/opt-175b", "--path", "_DUMMY_", *published, "--dry-run", "--cpu-mem", "100TB")
    if result.status == 2:  # honest where the disk is too small for it
        assert "on disk" in result.error
    else:
        assert sum(result.json["placed_bytes"]["weights"].values()) == pytest.approx(350e9, rel=0.01)


# -- parts of a run ------------------------------------------------------------------------------------------------------


def test_a_cut_run_is_projected_and_says_so(command: Any, opt: Path) -> None:
    result = command("--model", opt, *SMALL, "--gen-len", 40, "--cut-gen-len", 4)
    document = result.json
    assert document["projected"] is True and "projected: True" in result.out[-5]
    assert document["generated_tokens"] == 4 * 40
    assert document["decode_seconds"] > 39 * document["step_seconds_median"] * 0.3
    assert any("projected to 40 tokens" in line for line in result.out)
    assert all("+ 4 tokens" in line for line in result.texts)


def test_fewer_batch_stops_early_and_prints_no_texts(command: Any, tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "deep", num_hidden_layers=14)
    visits = []
    watched = RunWatch.visit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWatch, "visit", lambda self, task, tokens: (visits.append(task), watched(self, task, tokens)))
        result = command("--model", tmp_path / "deep", *SMALL, *DISK_HEAVY, "--debug", "fewer_batch")
    assert (visits[-1].step, visits[-1].layer, visits[-1].batch) == (1, 19, 1)
    assert result.json["projected"] is True and result.json["generated_tokens"] == 20
    assert result.json["decode_seconds"] > 0 and result.texts == []
    for lane in result.json["lanes"].values():  # the run ends within a layer, and a slice counts as its even part of one
        assert lane["moved_bytes"] == pytest.approx(lane["predicted_bytes"], rel=0.02)


def test_breakdown_shows_the_seconds_of_every_operation_without_overlap(command: Any, opt: Path) -> None:
    result = command("--model", opt, *SMALL, *DISK_HEAVY, "--debug-mode", "breakdown")
    assert result.json["plan"]["slots"] == 1
    rows = {line.split()[0]: line.split()[1:] for line in result.out if line.startswith(("COMPUTE ", "READ_", "WRITE_"))}
    assert rows.keys() == {"READ_W", "READ_KV", "COMPUTE", "WRITE_KV"}
    assert rows["READ_KV"][0] == "0.000"  # there is nothing to read in prefill
    assert result.json["breakdown_seconds"]["COMPUTE"]["decode"] > 0


# -- which model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", first_of([(), ("--dummy-weights",)], 1), ids=["of the package", "random"])
def test_without_a_model_a_small_one_uses_every_tier(command: Any, weights: tuple[str, ...]) -> None:
    result = command(*weights, "--prompt-len", 5, "--gen-len", 2, "--gpu-batch-size", 1)
    assert result.status == 0, result.err
    assert ("weights are random, so the text is noise" in result.out) == bool(weights)
    for kind, tiers in result.json["placed_bytes"].items():
        assert tiers["host"] > 0 and (tiers["disk"] > 0 or kind == "activations")


def test_path_names_the_folder_that_has_the_model(command: Any, opt: Path) -> None:
    by_folder = command("--model", opt, *SMALL, "--verbose", 2)
    for model in (("--model", "somebody/tiny-opt"), ("--model", "tiny-opt")):
        assert command(*model, "--path", opt.parent, *SMALL, "--verbose", 2).texts == by_folder.texts
    assert command("--path", opt, *SMALL, "--verbose", 2).texts == by_folder.texts
    assert "no config.json" in command("--model", "other", "--path", opt.parent, *SMALL).error


# -- a plan that is found ------------------------------------------------------------------------------------------------


def test_without_a_plan_one_is_found_for_the_prompts_that_are_given(command: Any, opt: Path) -> None:
    texts = ("--prompt", "The ferry", "--prompt", "left", "--ignore-eos")
    result = command("--model", opt, *BYTES, *texts, "--gen-len", 4, *SEARCHED)
    assert result.status == 0, result.err
    assert result.out[0].startswith("machine   ") and result.out[1].startswith("found     in ")
    assert result.json["num_prompts"] == 2 and result.json["plan"]["weights"] == {"device": 0, "host": 1}
    predicted = result.json["predicted"]
    assert predicted["total_seconds"] == pytest.approx(predicted["prefill_seconds"] + predicted["decode_seconds"], abs=1e-5)
    (line,) = [line for line in result.out if line.startswith("a decode step, mean")]
    assert float(line.split()[-3]) == pytest.approx(result.json["decode_seconds"] / 3, rel=0.02)  # beside what was predicted


def test_as_many_prompts_are_made_up_as_the_block_that_is_found_takes(command: Any, opt: Path) -> None:
    document = command("--model", opt, "--prompt-len", 7, "--gen-len", 3, "--gpu-batch-size", 3, *SEARCHED).json
    plan = document["plan"]
    assert plan["gpu_batch_size"] == 3 and document["num_prompts"] == 3 * plan["num_gpu_batches"]


@pytest.mark.parametrize(
    ("flags", "is_predicted"),
    [
        (("--cut-gen-len", 3), True),
        (("--debug-mode", "breakdown"), True),
        (("--debug-mode", "fewer_batch"), False),  # ends in mid step
        (("--compress-weight", "--kv-policy", "h2o", "--kv-budget", 0.5), True),
        (("--allow-4bit", "--allow-int8", "--prefer", "latency", "--latency-limit", 1000), True),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_plan_is_found_whatever_else_is_asked(command: Any, opt: Path, flags: tuple[object, ...], is_predicted: bool) -> None:
    result = command("--model", opt, *SMALL, *SEARCHED, *flags)
    assert result.status == 0, result.err
    assert ("predicted" in result.json) == is_predicted
    assert any(line.startswith("found ") for line in result.out)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: pytest.fail("a machine was measured"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt", "It was", "--prompt", "a dark", "--prompt", "night"),
        ("--prompt", "It was", "--gpu-batch-size", 2),
        ("--model", "demo", "--prompt-len", 5),
        (),
    ],
    ids=["prompts", "a size", "made up", "nothing asked"],
)
def test_what_fits_with_room_to_spare_needs_no_search_and_no_machine(
    command: Any, opt: Path, unmeasured: None, flags: tuple[object, ...]
) -> None:
    """Whatever the model, where prompts are given; and the package's own in any case."""
    model = () if not flags or "demo" in flags else ("--model", opt, *BYTES)
    result = command(*model, *flags, "--gen-len", 2)
    assert result.status == 0 and "predicted" not in result.json, result.err
    if not flags:  # it has a plan of its own, over every tier
        assert result.json["requested_percent"] == [20, 30, 20, 30, 100, 0]
        return
    assert result.out[0] == f"plan      {WITH_ROOM}" and result.json["requested_percent"] == [100, 0] * 3
    plan, rows = result.json["plan"], result.json["num_prompts"]
    size = 2 if "--gpu-batch-size" in flags else plan["gpu_batch_size"] if "demo" in flags else rows
    assert (plan["gpu_batch_size"], plan["num_gpu_batches"]) == (size, -(-rows // size))


def test_what_fits_without_room_to_spare_is_searched(command: Any, opt: Path) -> None:
    need = command("--model", opt, *BYTES, "--prompt", "a", "--gen-len", 2, "--dry-run").json["needed_bytes"]["host"]
    result = command("--model", opt, *BYTES, "--prompt", "a", "--gen-len", 2, "--cpu-mem", need + (16 << 20))
    assert result.status == 0 and result.out[0].startswith("machine   "), result.err


def test_what_no_machine_could_do_is_refused_before_one_is_measured(
    command: Any, opt: Path, unmeasured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("a" * (POSITIONS + 1))
    monkeypatch.setattr(PlanFinder, "_plan_with_room", lambda *_: None)
    for flags, words in (
        (("--prompt-len", POSITIONS, "--gen-len", 2), f"has {POSITIONS} positions"),
        (("--prompt-file", tmp_path / "long.txt"), f"has {POSITIONS} positions"),
        (("--prompt-len", 4, "--num-prompts", 0), "give a whole number from 1"),
        (
            ("--prompt-len", 100, "--num-prompts", 10**6, "--gen-len", 2, "--cpu-mem", "0.7GB"),
            "made-up prompts of 100 tokens",
        ),
        (("--prompt-len", 4, "--cpu-mem", "1MB"), "no plan fits"),
        (("--prompt-len", 4, "--positions", "rolling", "--kv-budget", 0.5), "rotary"),
    ):
        assert words in command("--model", opt, *BYTES, *flags).error


def test_a_run_is_drawn_below_its_prediction(command: Any, opt: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "run.png", tmp_path / "cut.png"]
    assert command("--model", opt, *SMALL, *DISK_HEAVY, "--timeline", files[0]).status == 0
    assert command("--model", opt, *SMALL, *DISK_HEAVY, "--timeline", files[1], "--debug-mode", "fewer_batch").status == 0
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--percent", -10, 50, 0, 100, 0, 100), ("-10", "weights", "from 0 to 100")),
        (("--percent", 0, 100, 60, 50, 0, 100), ("60", "50", "KV", "exceed 100")),
        (("--prompt", ""), ("prompt 0 is empty",)),
        (("--prompt", "fine", "--prompt", " "), ("prompt 1 is empty",)),
        (("--prompt-len", POSITIONS + 1), (str(POSITIONS + 1), f"{POSITIONS} positions")),
        (("--prompt-len", POSITIONS - 2, "--gen-len", 4), ("4 are to be generated", f"{POSITIONS} positions")),
        (("--gpu-batch-size", 0), ("--gpu-batch-size", "'0'")),
        (("--slots", 0), ("--buffers/--slots", "'0'")),
        (("--num-prompts", 0), ("--num-prompts", "'0'")),
        (("--prompt", "one", "--num-prompts", 2), ("--num-prompts is 2", "1 prompt is given; give 1, or leave it out")),
        (("--gen-len", 0), ("--gen-len", "'0'")),
        (("--temperature", -1), ("--temperature", "'-1'")),
        (("--cut-gen-len", 1), ("--cut-gen-len is 1",)),
        (("--gpu-mem", "many"), ("'many'", "16GB")),
        (("--gpu-mem", "2GB"), ("--gpu-mem 2GB is for a GPU", "leave it out")),
        ((*SMALL, "--cut-gen-len", 6), ("--cut-gen-len 6 cuts nothing: --gen-len has 5",)),
        (("--device", "abacus"), ("--device abacus is unknown", "cpu")),
        (("--trace", "/no/such/folder/trace.json"), ("--trace", "/no/such/folder")),
        (("--trace", "~nobody-here/trace.json"), ("--trace", "~nobody-here")),
        (("--log-file", "/no/such/folder/log"), ("--log-file", "/no/such/folder")),
        (("--attn-sparsity", 0.1), ("--attn-sparsity", "not supported")),
        ((*SMALL, "--hh-ratio", "0.001"), ("--kv-policy h2o has a budget of 0 slots",)),
        ((*SMALL, "--kv-budget", "0.2", "--recent", "500"), ("recent is 500",)),
        ((*SMALL, "--kv-policy", "h2o", "--cut-gen-len", 3), ("--cut-gen-len 3 would cut the budget of h2o",)),
        (("--hh-ratio", "1.5"), ("--hh-ratio: '1.5' is not allowed; give a number above 0 and at most 1",)),
        (("--kv-budget", "0"), ("--kv-budget: '0' is not allowed",)),
        (("--hh-all", "--hh-prompt-only"), ("give one of them",)),
        (("--positions", "rolling"), ("'rolling' needs rotary positions", "learned")),
        (("--kv-policy", "full", "--heavy", "3"), ("--kv-policy full does not take --heavy",)),
        (("--kv-policy", "local", "--sinks", "3"), ("--kv-policy local does not take --sinks",)),
        ((*SMALL, "--heavy", "2", "--recent", "2", "--grace", "9"), ("protects 9 tokens",)),
        (("--kv-policy", "h20"), ("'h20' is unknown; known: full, h2o",)),
        (("--schedule", "zigzagg"), ("'zigzagg'", "row_by_row", "did you mean zigzag?")),
        (("--schedule", "flexgen_barrier", "--overlap", 0), ("flexgen_barrier", "cannot do without overlap")),
        (("--schedule", "flexgen_barrier", "--debug-mode", "breakdown"), ("flexgen_barrier", "cannot do without overlap")),
        (("--schedule", "flexgen_barrier", "--slots", 3), ("--buffers 3", "flexgen_barrier has buffers of its own")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) and str(value[0]).startswith("--") else "",
)
def test_bad_flags_get_one_line(command: Any, opt: Path, flags: tuple[object, ...], words: tuple[str, ...]) -> None:
    error = command("--model", opt, *flags).error
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--machine", "nowhere"), ("'nowhere' is unknown", "cpu-2core")),
        (("--machine", "t4-gcp"), ("t4-gcp", "computes on cuda, and not on cpu", "--device")),
        ((*DISK_HEAVY, "--machine", "t4-gcp"), ("t4-gcp", "computes on cuda, and not on cpu", "--device")),
        (("--latency-limit", "1e-9"), ("no plan ends a block within 1e-09 s", "even one row")),
        (("--latency-limit", "nan"), ("--latency-limit: 'nan' is not allowed",)),
        (("--cpu-mem", "1MB"), ("no plan fits", "in CPU memory")),
        ((*DISK_HEAVY, "--latency-limit", 3), ("--latency-limit is for a search", "--percent auto")),
        ((*DISK_HEAVY, "--allow-4bit"), ("--allow-4bit is for a search", "--percent auto")),
        ((*DISK_HEAVY, "--allow-int8"), ("--allow-int8 is for a search", "--percent auto")),
        ((*DISK_HEAVY, "--compute", "int8"), ("--compute int8 is for weights that are packed", "--compress-weight")),
        ((*DISK_HEAVY, "--prefer", "latency"), ("--prefer is for a search", "--percent auto")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) and str(value[0]).startswith("--") else "",
)
def test_a_plan_that_cannot_be_found_gets_one_line(
    command: Any, opt: Path, flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    error = command("--model", opt, *SMALL, *flags).error
    assert all(word in error for word in words), error


def test_a_machine_that_is_not_there_is_told_of_before_a_model_is_opened(
    command: Any, opt: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(run_work, "open_llm", lambda *_: pytest.fail("opened"))
    damaged = tmp_path / "damaged.yaml"
    damaged.write_text("name: half\ndevice: cpu\n")
    for machine, words in (("nowhere", "'nowhere' is unknown"), (damaged, str(damaged)), (tmp_path / "no.yaml", "no.yaml")):
        assert words in command("--model", opt, *SMALL, "--machine", machine).error


def test_a_run_on_another_kind_of_device_than_the_machine_is_refused_before_anything_is_loaded(
    opt: Path, capfd: Any, monkeypatch: Any
) -> None:
    """Also where the device is not named, and it is this one's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status = run.main(["--model", str(opt), *SMALL, *DISK_HEAVY, "--machine", "t4-gcp"])
    out, err = capfd.readouterr()
    assert status == 2 and out == "" and "and not on cpu" in err.splitlines()[-1]


def test_flags_that_are_refused_when_on_are_fine_when_off(command: Any, opt: Path) -> None:
    assert command("--model", opt, *SMALL, "--attn-sparsity", "1.0").status == 0


def test_an_empty_prompt_file_is_named(command: Any, opt: Path, tmp_path: Path) -> None:
    file = tmp_path / "none.txt"
    file.write_text("\n\n")
    assert f"prompt file {file} is empty" in command("--model", opt, "--prompt-file", file).error


def test_a_truncated_shard_is_named(command: Any, tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model")
    shard = tmp_path / "model" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert str(shard) in command("--model", tmp_path / "model", *SMALL).error


def test_a_corrupt_shard_is_named(command: Any, tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model")
    shard = tmp_path / "model" / "model.safetensors"
    shard.write_bytes(b"\xff" * 500)
    assert str(shard) in command("--model", tmp_path / "model", *SMALL).error


def test_a_missing_shard_is_named(command: Any, tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model", max_shard_size=40_000)
    shard = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in command("--model", tmp_path / "model", *SMALL).error


def test_an_unknown_architecture_is_answered_with_those_like_it(command: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gptneox"}))
    error = command("--model", tmp_path, "--dummy-weights", *SMALL).error
    assert "'gptneox'" in error and "gpt_neox" in error and "docs/checkpoints.md" in error


def test_a_plan_that_does_not_fit_says_what_would(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "bytes_to_begin_with", lambda: 320 << 20)  # what tests before this left here may be too much
    model = ("--model", "facebook/opt-1.3b", "--dummy-weights", "--prompt-len", 16, "--gen-len", 4)
    error = command(*model, "--percent", 0, 100, 0, 100, 0, 100, "--cpu-mem", "2GB").error
    assert re.search(r"needs \d\.\d\d GB in CPU memory .*, the limit is 2\.00 GB; would fit: .*percent", error), error


def test_an_offload_folder_that_cannot_be_made_is_named(opt: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "below"
    status = run.main(["--model", str(opt), *SMALL, *DISK_HEAVY, "--device", "cpu", "--offload-dir", str(folder)])
    errors = Result(status, [], capfd.readouterr().err.splitlines()).error
    assert str(folder) in errors


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system without room for files")
def test_an_offload_folder_that_takes_no_files_is_named_and_not_the_plan(opt: Path, capfd: Any) -> None:
    assert run.main(["--model", str(opt), *SMALL, *DISK_HEAVY, "--device", "cpu", "--offload-dir", "/proc/x"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "error: --offload-dir /proc/x: no file can be written in /proc; give another folder"


def test_a_disk_that_fills_up_in_mid_run_ends_it_cleanly(command: Any, opt: Path, offload: Path, monkeypatch: Any) -> None:
    writes = []

    def full(*call: Any) -> int:
        writes.append(call)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    error = command("--model", opt, *SMALL, "--percent", 100, 0, 0, 0, 100, 0).error
    assert writes and "disk is full" in error and str(offload) in error and "WRITE_KV" in error
    assert not offload.exists()


def test_an_error_that_is_a_bug_is_not_hidden(command: Any, opt: Path, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(RunWatch, "visit", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        command("--model", opt, *SMALL)


def test_the_highest_verbosity_shows_where_an_error_comes_from(command: Any, opt: Path) -> None:
    result = command("--model", opt, "--prompt-len", 500, "--verbose", 3)
    assert result.err[0].startswith("Traceback") and result.err[-1].startswith("error: ") and result.status == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--overlap", "perhaps"), ("--overlap", "'perhaps'")),
        (("--percent", "1", "2"), ("--percent", "six")),
        (("--gpu", "3"), ("--gpu-mem", "--gpu-batch-size")),
        (("--modle", "facebook/opt-1.3b"), ("unknown flag --modle; did you mean --model?",)),
        (("--gen-length=3",), ("unknown flag --gen-length; did you mean --gen-len?",)),
        (("--abacus",), ("unknown flag --abacus; --help-all names those that there are",)),
        (("--output-file=x",), ("unknown flag --output-file; it is a flag of batch; did you mean --output?",)),
        (("--max-tokens", "3"), ("unknown flag --max-tokens; it is called --gen-len",)),
        (("facebook/opt-1.3b",), ("'facebook/opt-1.3b' belongs to no flag", "--model")),
        (("--model", "m", "--prompt", "The", "ferry"), ("'ferry' belongs to no flag", "quotes")),
    ],
    ids=" ".join,
)
def test_flags_that_cannot_be_parsed_get_one_line_and_status_2(
    flags: tuple[str, ...], words: tuple[str, ...], capfd: Any
) -> None:
    status = run.main(list(flags))
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert status == 2 and captured.out == "" and line.startswith("error: ")
    assert all(word in line for word in words), line


def test_an_interrupt_leaves_no_file_and_one_line(command: Any, opt: Path, offload: Path, monkeypatch: Any) -> None:
    watched = RunWatch.visit

    def interrupted(self: RunWatch, task: Any, tokens: int) -> None:
        watched(self, task, tokens)
        if task.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunWatch, "visit", interrupted)
    result = command("--model", opt, *SMALL, *DISK_HEAVY)
    assert (result.status, result.said) == (130, ["interrupted"])
    assert not offload.exists()


@pytest.mark.parametrize(
    ("sent", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")], ids=["int", "term"]
)
def test_a_signal_ends_a_run_with_nothing_left_behind(
    sent: signal.Signals, status: int, word: str, command: Any, opt: Path, offload: Path, monkeypatch: Any
) -> None:
    watched = RunWatch.visit

    def signalled(self: RunWatch, task: Any, tokens: int) -> None:
        watched(self, task, tokens)
        if task.step == 2:
            os.kill(os.getpid(), sent)

    monkeypatch.setattr(RunWatch, "visit", signalled)
    with as_without_a_handler(sent):
        result = command("--model", opt, *SMALL, *DISK_HEAVY)
    assert (result.status, result.said) == (status, [word])
    assert not offload.exists()


@contextmanager
def as_without_a_handler(number: signal.Signals) -> Iterator[None]:
    """A context in which a signal does what it does in a new process of Python."""
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


# -- as a process --------------------------------------------------------------------------------------------------------


WITHOUT_END = """
import sys
from threading import Event
from h2o_flexgen import run
from h2o_flexgen.cli.watch import RunWatch
visit = RunWatch.visit
def visiting(self, task, tokens):
    visit(self, task, tokens)
    while task.step == 1000:
        Event().wait(0.01)  # a signal that another thread takes up is heard between two waits
RunWatch.visit = visiting
sys.exit(run.main())
"""


def test_a_terminal_that_goes_ends_the_process_with_nothing_left_behind(tmp_path: Path) -> None:
    folder, model = tmp_path / "offload", tmp_path / "opt"
    tiny_config("opt", max_position_embeddings=2048).save_pretrained(model)
    command = [sys.executable, "-c", WITHOUT_END, "--device", "cpu", "--offload-dir", str(folder)]
    command += ["--model", str(model), *BYTES, *DISK_HEAVY, "--dummy-weights", "--gen-len", "1500"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=as_in_a_terminal)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("disk "):
        assert process.poll() is None
    for _ in range(2):  # a shell and the system both tell of it
        process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 129, errors
    assert errors.splitlines()[-1] == "hung up" and "Traceback" not in errors
    assert not folder.exists()


def test_help_comes_without_loading_torch() -> None:
    code = "import sys\nfrom h2o_flexgen import run\nrun.main(['--help'])\nprint('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--percent W_GPU W_CPU KV_GPU" in output and output.splitlines()[-1] == "False"


# -- what is kept --------------------------------------------------------------------------------------------------------


def test_what_was_asked_to_be_kept_is_told_in_slots(command: Any, opt: Path) -> None:
    flags = ("--prompt-len", 20, "--gen-len", 11, "--hh-ratio", 0.2, "--hh-all", "--num-prompts", 2, "--dry-run")
    done = command("--model", opt, *flags)
    kept = done.json["kept"]
    assert kept["policy"] == "h2o" and kept["asked"] == {"hh_ratio": 0.2} and kept["slots"] == [8, 8] and kept["evicts"]
    assert kept["share"] == round(8 / 30, 4)
    assert 2.5 < kept["rows_in_same_memory"] < 30 / 9, "one slot is spare, and notes take some"
    assert "h2o (--hh-ratio 0.2) keeps 8 of 30 tokens of a row (26.7 %)" in "\n".join(done.out)


def test_the_full_cache_says_so(command: Any, opt: Path) -> None:
    done = command("--model", opt, "--prompt-len", 20, "--gen-len", 11, *IN_MEMORY, "--dry-run")
    assert done.json["kept"]["policy"] == "full" and not done.json["kept"]["evicts"]
    assert "full keeps all 30 tokens of a row" in "\n".join(done.out)


def test_a_share_that_steps_attend_is_said_and_run(command: Any, opt: Path) -> None:
    done = command("--model", opt, "--prompt-len", 60, "--gen-len", 5, "--num-prompts", 2, *IN_MEMORY, "--kv-recall", 0.5)
    assert (done.status, done.json["kept"]["policy"], done.json["kept"]["asked"]) == (0, "full", {"kv_recall": 0.5})
    assert "keeps all 64 tokens of a row; a step attends 32 of them" in "\n".join(done.out)
    assert done.json["generated_tokens"] == 2 * 5


@pytest.fixture(scope="module")
def run_once() -> dict[tuple[object, ...], Result]:
    """By their flags: what runs have given that several tests look at."""
    return {}


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_every_policy_runs_from_the_command_and_fits_a_smaller_memory(
    command: Any, opt: Path, policy: str, run_once: dict[tuple[object, ...], Result]
) -> None:
    shape = ("--prompt-len", 40, "--gen-len", 6, "--percent", 0, 0, 0, 50, 100, 0)
    kept = ["--kv-policy", policy, "--kv-budget", 0.2]
    if POLICIES[policy].ranks_by == PROBE:
        write_probe(made_up_probe(3, 4, 32), opt.parent / "probe.safetensors")
        kept += ["--probe", opt.parent / "probe.safetensors"]
    if shape not in run_once:
        run_once[shape] = command("--model", opt, *shape)
    full, done = run_once[shape], command("--model", opt, *shape, *kept)
    assert done.status == 0 and done.json["kept"]["policy"] == policy
    assert done.json["lanes"]["read"]["moved_bytes"] < full.json["lanes"]["read"]["moved_bytes"]
    assert done.json["placed_bytes"]["KV"]["host"] < 0.3 * full.json["placed_bytes"]["KV"]["host"]
    assert done.json["lanes"]["read"]["moved_bytes"] == done.json["lanes"]["read"]["predicted_bytes"]


def test_fewer_bits_say_what_is_packed_and_move_what_was_predicted(
    command: Any, opt: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = ("--compress-weight", "--compress-cache", "--kv-policy", "h2o", "--heavy", "3", "--recent", "2")
    flags = ("--model", opt, *SMALL, *DISK_HEAVY, *packed)
    dry = command(*flags, "--dry-run")
    assert any("the weights are packed first, once" in line for line in dry.out) and dry.json["bytes_to_pack"] > 0
    assert not (tmp_path / "cache").exists(), "a dry run writes nothing"
    first, second = command(*flags), command(*flags)
    assert [one.json["bytes_to_pack"] for one in (first, second)] == [dry.json["bytes_to_pack"], 0]
    for result in (first, second):
        assert (result.json["plan"]["weight_codec"], result.json["plan"]["kv_codec"]) == ("group4", "group4")
        assert all(lane["moved_bytes"] == lane["predicted_bytes"] for lane in result.json["lanes"].values())
        assert any("with matrices as group4" in line for line in result.out)
        assert any(line.startswith("KV ") and line.endswith(", as group4") for line in result.out)
    assert first.json["kernels"] in (TORCH, *(f"C ({name})" for name in LIBRARIES))


def test_a_profile_at_hand_tells_of_faster_products(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(find_machine("cpu-2core"), flops_per_s={"bfloat16": ((1, 1e6),)}, packed_flops_per_s={}, visit_seconds={})
    fast = replace(slow, packed_flops_per_s={"int8 tiles4": ((1, 1e15),)})
    flags = ("--gen-len", 4, "--compress-weight", *IN_MEMORY)
    for machine, extra, times in ((fast, (), 1), (slow, (), 0), (fast, ("--compute", "int8"), 0), (None, (), 0)):
        monkeypatch.setattr(profile_cache, "saved_machine", lambda name, machine=machine: machine)
        result = command(*flags, *extra)
        found = [line for line in result.err if line.startswith("slow: products are exact; --compute int8 would be ")]
        assert result.status == 0 and len(found) == times and not any("slow: " in line for line in result.out)
        assert result.json["arithmetic"]["compute"] == result.json["plan"]["compute"] == ("int8" if extra else "exact")


def test_of_a_given_plan_it_is_said_that_lanes_wait_for_buffers(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = find_machine("cpu-2core")

    def reason(planned: WorkloadPlan, machine: Machine, limits: MemoryLimits) -> list[str]:
        return [f"{planned.plan.buffers} buffers on {machine.name}, in {limits.host} bytes"]

    monkeypatch.setattr(run_job, "buffers_reason", reason)
    monkeypatch.setattr(profile_cache, "saved_machine", lambda name: known)
    memory = ("--cpu-mem", 4_000_000_000, "--gen-len", 2)
    for flags, times in ((DISK_HEAVY, 1), (("--percent", "auto", "--model", "smollm2", "--prompt", "a"), 0)):
        said = [line for line in command(*memory, *flags).err if "buffers on" in line]
        assert said == [f"slow: 2 buffers on {known.name}, in 4000000000 bytes"] * times


def test_random_weights_can_be_packed_too(command: Any) -> None:
    """They are not kept, so nothing is written to the cache."""
    result = command("--model", "facebook/opt-125m", "--dummy-weights", "--compress-weight", "8", *IN_MEMORY, "--dry-run")
    assert result.status == 0 and result.json["bytes_to_pack"] == 0
    assert result.json["plan"]["weight_codec"] == "group8"


def test_a_limit_that_was_missed_is_said(command: Any, opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that is far slower than the one that the plan was found for."""
    fast = replace(find_machine("cpu-2core"), flops_per_s={"bfloat16": ((1, 1e15),), "float32": ((1, 1e15),)}, visit_seconds={})
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: replace(fast, task_seconds=0.0, head_seconds=0.0))
    flags = ("--prompt-len", 7, "--gen-len", 5, "--num-prompts", 2, "--latency-limit", 0.001)
    result = command("--model", opt, *flags)
    assert result.status == 0, result.err
    assert any(re.search(r"a block took .* s, longer than --latency-limit 0.001", line) for line in result.out)


# -- forms of checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_models(checkpoints: Any) -> Any:
    """Checkpoints that are written before any test begins: writing them leaves a thread that shows progress."""
    for kind, stored in (("qwen2", "gguf-q4_0"), ("qwen2", "awq"), ("llama-gqa", "fp8")):
        checkpoints.folder(kind, stored)
    return checkpoints


def test_a_dry_run_says_what_was_found_and_what_will_be_written(
    command: Any, stored_models: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was written yet
    flags = (*SMALL, *DISK_HEAVY, "--dry-run")
    in_place, copied = (command("--model", stored_models.folder("qwen2", form), *flags) for form in ("gguf-q4_0", "awq"))
    assert "found     gguf: q4_0 (4.5 bits, blocks of 32)" in in_place.out and in_place.json["bytes_to_pack"] == 0
    assert in_place.json["stored"]["forms"][0]["form"] == in_place.json["arithmetic"]["matrices"][0] == "q4_0"
    assert copied.json["stored"]["method"] == "awq" and copied.json["bytes_to_pack"] > 0
    assert any(line.startswith("the weights are packed first, once: ") for line in copied.out)


def test_what_would_not_become_smaller_stays_as_it_is_stored(command: Any, stored_models: Any) -> None:
    model, flags = stored_models.folder("qwen2", "gguf-q4_0"), (*SMALL, *DISK_HEAVY, "--dry-run", "--compress-weight")
    for bits in (4, 8):
        result = command("--model", model, *flags, bits)
        line = f"packed    nothing: as group{bits} no matrix would be smaller than it is stored"
        assert line in result.out and result.json["bytes_to_pack"] == 0


def test_products_of_8_bits_are_refused_for_floats_of_8_bits(command: Any, stored_models: Any) -> None:
    error = command("--model", stored_models.folder("llama-gqa", "fp8"), *SMALL, *DISK_HEAVY, "--compute", "int8").error
    assert "--compute int8 is for weights that are packed into whole numbers" in error
