"""The plan command, from its arguments to its last line: what it prints can be pasted into the run command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import plan
from h2o_flexgen.cli import plan_request, plan_work, run_request
from h2o_flexgen.cli.pictures import draw_timelines, two_steps
from h2o_flexgen.kernels import native
from h2o_flexgen.planning import search
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import BORROWED, Machine, find_machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.profiling import profile_cache
from h2o_flexgen.session import machine_source, opened_model
from h2o_flexgen.session.plan_finder import PlanFinder
from tests.helpers.commands import Result, called
from tests.helpers.pretended import PretendedDevice
from tests.helpers.samples import first_of
from tests.helpers.tiny import save_tiny
from tests.planning.test_linear import case_of
from tests.planning.test_pricing import MACHINE, Pricing
from tests.planning.worlds import of_slices, tiny_spec

KEYS = {
    "model", "plan", "predicted", "busiest_lane", "binding_tier", "runners_up", "front", "flags", "machine", "cases",
    "search_seconds", "placed_percent", "needed_bytes", "budget_bytes",
}  # fmt: skip
PREDICTED = {
    "prefill_seconds", "decode_seconds", "total_seconds", "tokens_per_second", "step_seconds_median", "peak_bytes", "lanes",
}  # fmt: skip
WORK = ("--prompt-len", 24, "--gen-len", 6, "--num-prompts", 12)
draws = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-opt"
    save_tiny("opt", folder)
    return folder


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A CPU with a slow disk, and an accelerator behind a slow link."""
    folder = tmp_path_factory.mktemp("machines")
    curve = ((1, 5e9), (64, 2e10))
    slow = replace(MACHINE, flops_per_s=dict.fromkeys(("float32", "float16", "bfloat16"), curve))
    slow = replace(slow, attention_flops_per_s={}, packed_flops_per_s={}, decoded_values_per_s={"tiles4": 5e8})
    slow = replace(slow, host_bytes=10**10, disk_bytes=10**11, device_bytes=10**9, borrowed=BORROWED)
    files = {"cpu": replace(slow, name="slow-cpu", device="cpu"), "accelerator": replace(slow, name="slow-link")}
    for name, machine in files.items():
        machine.save(folder / f"{name}.yaml")
    return {name: folder / f"{name}.yaml" for name in files}


@pytest.fixture(autouse=True)
def few_numbers_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is the point of planning/test_search; here it is what the command says of it."""
    monkeypatch.setattr(search, "NUMBERS_OF_BATCHES", (1, 4))


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests may hold more than a plan is given here."""
    monkeypatch.setattr(opened_model, "process_bytes", lambda: 320 << 20)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], opt: Path, machines: dict[str, Path]) -> Any:
    def call(*argv: object, machine: object = machines["cpu"], model: object = opt) -> Result:
        return called(plan.main, capfd, "--model", model, "--machine", machine, *argv)

    return call


def plan_in(document: dict[str, Any]) -> Plan:
    """As the run command takes the flags that were printed."""
    found = as_run(document["flags"]).plan
    assert isinstance(found, Plan)
    return found


def as_run(flags: list[str]) -> run_request.RunRequest:
    return run_request.request_of(run_request.parse(flags))


# -- what it says --------------------------------------------------------------------------------------------------------


FOUND = (
    ("cpu", "--buffers", 3, "--num-gpu-batches", 2, "--dummy-weights", "--compress-weight", "--compute", "int8"),
    ("accelerator", "--kv-policy", "h2o", "--kv-budget", 0.5),
    ("cpu", "--hh-ratio", 0.25, "--hh-prompt-only", "--sinks", 2, "--schedule", "flexgen_barrier"),
    ("accelerator", "--compress-weight", "--compress-cache", 8, "--sep-layer", 0, "--prefill-tokens", 64),
    ("accelerator", "--overlap", 0, "--pin-weight", 0, "--dtype", "float32", "--gpu-batch-size", 3),
    ("cpu",),
)


@pytest.mark.parametrize("flags", first_of(FOUND, 3), ids=lambda flags: " ".join(map(str, flags)))
def test_its_flags_make_the_run_command_take_the_plan_that_was_found(
    command: Any, machines: dict[str, Path], flags: tuple[Any, ...]
) -> None:
    kind, *rest = flags
    result = command(*WORK, *rest, machine=machines[kind])
    asked = plan_in(result.json)
    assert json.loads(json.dumps(asked.as_json())) == result.json["plan"]
    line = next(line for line in result.out if line.startswith("run "))
    assert shlex.split(line.partition("h2o_flexgen.run ")[2]) == result.json["flags"]
    asked_again = as_run(result.json["flags"])
    assert (asked_again.prompts, asked_again.gen_len) == (run_request.MadeUpPrompts(12, 24), 6)


def test_the_last_line_is_json_with_every_promised_key(command: Any) -> None:
    document = command(*WORK).json
    predicted = document["predicted"]
    assert document.keys() >= KEYS and predicted.keys() >= PREDICTED
    assert predicted["total_seconds"] == pytest.approx(predicted["prefill_seconds"] + predicted["decode_seconds"], abs=1e-5)
    assert predicted["tokens_per_second"] == pytest.approx(12 * 6 / predicted["total_seconds"], rel=0.01)
    assert predicted["step_seconds_median"] > 0 and set(predicted["peak_bytes"]) == {"device", "host", "disk"}
    assert all(lane["busy_seconds"] >= 0 for lane in predicted["lanes"].values())
    assert document["machine"] == "slow-cpu" and document["cases"] > 0 and document["front"]
    assert {one["slots"] for one in (*document["front"], *document["runners_up"])} == {document["plan"]["slots"]} == {2}


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((), "chosen    of plans within 5% of the most tokens/s, which count as equal, the one with the lowest latency"),
        (
            ("--prefer", "latency"),
            "chosen    of plans with a latency within 5% of the lowest, which count as equal, the one with most tokens/s",
        ),
    ],
)
def test_it_says_by_which_rule_its_plan_was_chosen_and_which_plans_counted_as_equal(
    command: Any, flags: tuple[str, ...], rule: str
) -> None:
    result = command(*WORK, *flags)
    out = list(result.out)
    assert rule in out
    equal, others = (out.index(line) if line in out else len(out) for line in ("counted as equal to it:", "next best:"))
    assert min(equal, others) > out.index(rule) and (equal < others or equal == len(out))
    for title in (line for line in ("counted as equal to it:", "next best:") if line in out):
        assert "all prefills s" in out[out.index(title) + 1] and "one block s" in out[out.index(title) + 1]


def test_seconds_of_all_blocks_are_told_from_those_of_one(command: Any) -> None:
    flags = ("--evaluate", "--percent", 0, 100, 100, 0, 100, 0, "--gpu-batch-size", 4)
    (line,) = (line for line in command(*WORK, *flags).out if line.startswith("expected "))
    assert "s of all 3 blocks together" in line and line.endswith("s until one block is over")
    (line,) = (line for line in command(*WORK, *flags[:-1], 12).out if line.startswith("expected "))
    assert "s of the one block" in line


def test_graphs_are_refused_where_a_run_would_refuse_them(command: Any, machines: dict[str, Path]) -> None:
    flags = (*WORK, "--evaluate", "--cuda-graphs", "on", "--percent")
    refused = command(*flags, 100, 0, 0, 100, 100, 0, machine=machines["accelerator"])
    assert refused.status == 2 and "--graphs on is for plans that keep all KV and activations on the GPU" in refused.err[-1]
    taken = command(*flags, 0, 100, 100, 0, 100, 0, machine=machines["accelerator"])
    assert taken.status == 0 and plan_in(taken.json).graphs == "on"


def test_another_machine_has_kernels_for_its_gpu_whatever_is_installed_here(
    command: Any, machines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*WORK, "--evaluate", "--percent", 0, 100, 0, 100, 100, 0, "--compress-cache")
    found = []
    for is_here in (True, False):
        monkeypatch.setattr(native, "_has_triton", lambda is_here=is_here: is_here)
        document = command(*flags, machine=machines["accelerator"]).json
        found.append((document["kernels"], document["needed_bytes"]["device"]))
    assert found[0] == found[1] and found[0][0] == "triton"


def test_kernels_of_this_machine_are_not_called_those_of_another(command: Any) -> None:
    result = command(*WORK)
    (line,) = (line for line in result.out if line.startswith("kernels "))
    here = native.processor("cpu").kernels
    assert line.endswith(f"was measured with; working space is counted as with those of this machine, {here}")
    assert result.json["kernels"] is None


def test_rates_of_small_reads_that_were_not_measured_are_said_where_they_count(command: Any) -> None:
    flags = (*WORK, "--evaluate", "--kv-recall", 0.5, "--percent", 0, 100, 0)
    said = "assumed   92,000 small reads and 50,000 small writes a second of the disk, as one machine has: "
    for on_host, is_said in ((0, True), (100, False)):
        assert any(line.startswith(said) for line in command(*flags, on_host, 0, 100).out) is is_said


@pytest.mark.parametrize(("lacking", "said"), [(BORROWED[:1], "92,000 small reads"), (BORROWED[1:], "50,000 small writes")])
def test_only_rates_that_were_not_measured_are_said_to_be_another_machines(
    command: Any, machines: dict[str, Path], tmp_path: Path, lacking: tuple[str, ...], said: str
) -> None:
    replace(Machine.load(machines["cpu"]), borrowed=lacking).save(tmp_path / "machine.yaml")
    flags = (*WORK, "--evaluate", "--kv-recall", 0.5, "--percent", 0, 100, 0, 0, 0, 100)
    told = command(*flags, machine=tmp_path / "machine.yaml").out
    line = f"assumed   {said} a second of the disk, as one machine has: slow-cpu has no figure of its own"
    assert [one for one in told if one.startswith("assumed")] == [line]


def test_a_rate_that_no_machine_has_is_said_where_it_counts(command: Any, machines: dict[str, Path]) -> None:
    said = "assumed   chosen KV crosses the link at 0.5 of its rate: no machine has figures of that"
    for recall, on_gpu, beside, is_said in (
        (0.5, 0, (), True),
        (0.5, 100, (), False),
        (0.5, 0, ("--cpu-cache-compute",), False),
        (1, 0, (), False),
    ):
        flags = (*WORK, "--evaluate", "--kv-recall", recall, "--percent", 100, 0, on_gpu, 100 - on_gpu, 100, 0, *beside)
        assert (said in command(*flags, machine=machines["accelerator"]).out) is is_said


def test_what_fits_is_not_offloaded_and_it_says_so(command: Any) -> None:
    result = command(*WORK)
    assert result.json["plan"]["weights"]["host"] == result.json["plan"]["kv"]["host"] == 1
    assert any("everything fits, nothing is offloaded" in line for line in result.out)
    assert result.json["busiest_lane"] == "compute"


def test_with_little_memory_it_says_which_lane_is_busy_and_which_memory_is_full(command: Any) -> None:
    flags = ("--prompt-len", 64, "--gen-len", 4, "--num-prompts", 64)
    result = command(*flags, "--cpu-mem", "1.2GB", model="facebook/opt-1.3b")
    document = result.json
    assert document["busiest_lane"] in ("read", "write", "load", "store", "compute")
    assert document["needed_bytes"]["host"] <= document["budget_bytes"]["host"] == 1_200_000_000
    assert document["plan"]["weights"]["host"] < 1 and not any("everything fits" in line for line in result.out)
    assert any(re.search(r"is the busiest lane: .* s of a decode step's .* s \(\d+ %\)", line) for line in result.out)
    assert any(re.search(r"(CPU memory|the disk) is fullest: ", line) for line in result.out)


@pytest.mark.parametrize(("seconds", "is_said"), [(1.0, True), (0.0, False)])
def test_where_visits_take_most_of_the_busiest_lane_it_says_so(
    command: Any, machines: dict[str, Path], seconds: float, is_said: bool
) -> None:
    visits = dict.fromkeys(("attention", "mlp"), seconds)
    replace(Machine.load(machines["cpu"]), visit_seconds=visits).save(file := machines["cpu"].with_name("visits.yaml"))
    (line,) = (line for line in command(*WORK, machine=file).out if line.startswith("why "))
    said = r"compute is the busiest lane: .* \(\d+ %\); (9\d|100) % of it is the cost of visits \(a layer for a batch\)"
    assert bool(re.search(said, line)) is is_said and ("visits" in line) is is_said


@pytest.mark.parametrize(("gen_len", "is_said"), [(4, True), (400, False)])
def test_it_says_so_where_most_of_the_time_is_for_prompts(command: Any, gen_len: int, is_said: bool) -> None:
    flags = ("--prompt-len", 400, "--gen-len", gen_len, "--num-prompts", 4, "--gpu-batch-size", 4)
    result = command(*flags, model="facebook/opt-1.3b", machine="cpu-2core")
    said = [
        line for line in result.out if re.search(r"prompts take .* of all .* s, and compute is the busiest lane there", line)
    ]
    assert len(said) == is_said


def test_four_bits_are_taken_only_where_they_are_allowed(command: Any) -> None:
    flags = ("--prompt-len", 16, "--gen-len", 64, "--num-prompts", 4, "--cpu-mem", "1.2GB", "--gpu-batch-size", 4)
    asked = ((*flags, *more) for more in ((), ("--allow-4bit",)))
    plain, free = (command(*one, model="facebook/opt-1.3b", machine="cpu-2core").json for one in asked)
    assert plain["plan"]["weight_codec"] == plain["plan"]["kv_codec"] == "plain"
    assert free["plan"]["weight_codec"] == "group4" and "--compress-weight" in free["flags"]
    assert free["predicted"]["tokens_per_second"] > plain["predicted"]["tokens_per_second"]


def test_products_of_8_bits_are_taken_where_they_are_allowed_and_faster(command: Any, machines: dict[str, Path]) -> None:
    fast = replace(Machine.load(machines["cpu"]), packed_flops_per_s={"int8 tiles4": ((1, 1e12),)}, visit_seconds={})
    fast.save(file := machines["cpu"].with_name("fast-int8.yaml"))
    exact, free, unmeasured = (
        command(*WORK, "--compress-weight", *more, machine=machine)
        for more, machine in (((), file), (("--allow-int8",), file), (("--allow-int8",), machines["cpu"]))
    )
    assert [one.json["plan"]["compute"] for one in (exact, free, unmeasured)] == ["exact", "int8", "exact"]
    assert "--compute" not in exact.json["flags"] and free.json["flags"][-2:] == ["--compute", "int8"]
    assert {one["compute"] for one in (*free.json["runners_up"], *free.json["front"])} >= {"int8"}
    assert "numbers   weights in 4 bits, products in int8, of activations rounded to 8 bits; " in "\n".join(free.out)
    gain = exact.json["predicted"]["total_seconds"] / free.json["predicted"]["total_seconds"]
    (reason,) = [line for line in exact.err if "--compute int8 would be" in line]
    assert gain > 1.3 and reason.startswith("slow: products are exact") and not any("--compute" in line for line in free.err)


def test_a_latency_limit_is_kept_and_latency_may_be_preferred(command: Any) -> None:
    by_rate, by_latency = command(*WORK).json, command(*WORK, "--prefer", "latency").json
    soonest, most = (one["predicted"]["block_seconds"] for one in (by_latency, by_rate))
    assert soonest <= most
    limit = (soonest + most) / 2
    assert command(*WORK, "--latency-limit", limit).json["predicted"]["block_seconds"] <= limit


def test_attention_beside_the_data_is_a_flag_of_the_run_command(command: Any, machines: dict[str, Path]) -> None:
    result = command(*WORK, "--cpu-cache-compute", machine=machines["accelerator"])
    assert result.json["plan"]["attend_on"] == "host"
    assert any(line.startswith("run ") and "--cpu-cache-compute" in line for line in result.out)


def test_every_row_of_its_tables_can_be_typed_and_is_priced_as_it_says(command: Any, machines: dict[str, Path]) -> None:
    """Some rows attend on the host, which no share says."""
    slow = replace(Machine.load(machines["accelerator"]), host_to_device_per_s=2e7, device_to_host_per_s=2e7)
    slow.save(file := machines["accelerator"].with_name("slower-link.yaml"))
    work = ("--prompt-len", 64, "--gen-len", 4, "--gpu-batch-size", 8, "--gpu-mem", "1.5GB")
    found = command(*work, model="facebook/opt-1.3b", machine=file)
    rows = [*found.json["runners_up"], *found.json["front"]]
    lines = [line for line in found.out if "--percent" in line and not line.startswith(("run ", "{"))]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows):
        assert line[line.index("--percent") :] in shlex.join(row["flags"])
    row = next(one for one in rows if one["attend_on"] == "host")
    again = command("--evaluate", *row["flags"][2:], model="facebook/opt-1.3b", machine=file).json
    assert again["predicted"]["tokens_per_second"] == pytest.approx(row["tokens_per_second"], abs=1e-3)
    assert plan_in(again) == plan_in(row)


# -- a plan that is given ------------------------------------------------------------------------------------------------

GIVEN = ("--evaluate", "--percent", 20, 30, 0, 50, 100, 0, "--gpu-batch-size", 3, "--num-gpu-batches", 2)


@pytest.mark.parametrize(
    "flags", [(), ("--cpu-cache-compute",), ("--schedule", "flexgen_barrier", "--pin-weight", 0), ("--compress-cache",)]
)
def test_a_given_plan_is_priced_as_it_is(command: Any, machines: dict[str, Path], flags: tuple[object, ...]) -> None:
    result = command(*WORK, *GIVEN, *flags, machine=machines["accelerator"])
    document = result.json
    assert document["requested_percent"] == [20, 30, 0, 50, 100, 0] and document["runners_up"] == []
    assert (document["plan"]["gpu_batch_size"], document["plan"]["num_gpu_batches"]) == (3, 2)
    assert document["predicted"]["total_seconds"] > 0 and not any("next best" in line for line in result.out)


def test_without_an_accelerator_a_given_plan_is_folded(command: Any) -> None:
    result = command(*WORK, *GIVEN)
    assert result.json["plan"]["weights"] == {"device": 0, "host": 0.5}
    assert "no GPU: what was meant for it lives in CPU memory" in result.out


def test_what_a_search_found_is_priced_the_same_when_it_is_given(command: Any) -> None:
    found = command(*WORK, "--num-gpu-batches", 2).json
    keep = found["flags"][2:]
    again = command("--evaluate", *keep).json
    assert again["predicted"] == found["predicted"]


def test_of_a_given_plan_it_is_said_that_lanes_wait_for_buffers(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(planned: WorkloadPlan, machine: Machine, limits: MemoryLimits) -> list[str]:
        return [f"{planned.plan.buffers} buffers on {machine.name}, in {limits.host} bytes"]

    monkeypatch.setattr(plan_work, "buffers_reason", reason)
    given = ("--evaluate", "--percent", 0, 50, 0, 100, 0, 100, "--cpu-mem", 2_000_000_000)
    for flags, times in ((given, 1), (("--cpu-mem", 2_000_000_000), 0)):
        said = [line for line in command(*WORK, *flags).err if "buffers on" in line]
        assert said == ["slow: 2 buffers on slow-cpu, in 2000000000 bytes"] * times


def test_a_given_plan_that_does_not_fit_is_refused(command: Any) -> None:
    flags = ("--evaluate", "--percent", 0, 100, 0, 100, 0, 100, "--cpu-mem", "2GB")
    error = command(*WORK, *flags, model="facebook/opt-1.3b").error
    assert re.search(r"needs \d\.\d\d GB in CPU memory .*, the limit is 2\.00 GB; would fit: ", error), error


ON_DISK = ("--evaluate", "--percent", *(0, 0, 0, 100, 0, 100))  # of weights


def test_a_limit_on_the_disk_says_which_weights_it_does_not_count(command: Any) -> None:
    def said(*flags: object, **asked: object) -> list[str]:
        return [line for line in command(*WORK, *flags, **asked).out if line.startswith("--disk-mem ")]

    limit = ("--disk-mem", "5GB")
    (line,) = said(*ON_DISK, *limit, model="facebook/opt-6.7b")
    assert line == (
        "--disk-mem 5GB does not count 13.32 GB of weights: they are read from the checkpoint's own files, or from a copy in "
        "the cache, which is made once, of .bin files and of weights that no file has as the plan keeps them, and takes room "
        "of its own"
    )
    assert len(said(*ON_DISK, *limit)) == 1
    assert not said(*ON_DISK) and not said("--evaluate", "--percent", *(0, 100) * 3, *limit), "nothing is limited, or there"


def test_random_weights_on_disk_count_for_its_limit(command: Any) -> None:
    given = (*WORK, *ON_DISK, "--dummy-weights", "--disk-mem")
    assert "on disk (weights " in command(*given, "5GB", model="facebook/opt-6.7b").error
    counted = command(*given, "20GB", model="facebook/opt-6.7b")
    assert counted.json["needed_bytes"]["disk"] > 13e9 and not any(line.startswith("--disk-mem") for line in counted.out)
    assert counted.json["flags"][-2:] == ["--disk-mem", "20GB"], "a run has the same limit"


def test_limits_above_what_a_machine_has_are_said(command: Any, machines: dict[str, Path]) -> None:
    given = (*WORK, "--evaluate", "--percent", *(100, 0) * 3)
    result = command(*given, "--gpu-mem", "2GB", "--cpu-mem", "11GB", machine=machines["accelerator"])
    assert [line for line in result.out if line.startswith(("--gpu-mem", "--cpu-mem"))] == [
        "--gpu-mem 2GB is more than there is: the machine has 1.00 GB in GPU memory",
        "--cpu-mem 11GB is more than there is: the machine has 10.00 GB in CPU memory",
    ]
    enough = command(*given, "--gpu-mem", "1GB", "--cpu-mem", "10GB", machine=machines["accelerator"])
    assert enough.status == 0 and not any("more than there is" in line for line in enough.out)


# -- what it refuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--percent", 0, 50, 0, 50, 0, 50), ("--percent", "--evaluate")),
        (("--percent", "auto"), ("six numbers; got 'auto'", "without --percent the plan is searched")),
        (("--evaluate", "--allow-4bit"), ("--allow-4bit is for a search", "without --evaluate")),
        (("--evaluate", "--compress-weight", "--allow-int8"), ("--allow-int8 is for a search", "without --evaluate")),
        (("--allow-int8",), ("--compute int8 is for weights that are packed", "--compress-weight")),
        (("--compute", "int8"), ("--compute int8 is for weights that are packed", "--compress-weight")),
        (("--evaluate", "--latency-limit", 3), ("--latency-limit is for a search", "without --evaluate")),
        (("--evaluate", "--prefer", "latency"), ("--prefer is for a search", "without --evaluate")),
        (("--evaluate", "--plot", "front.png"), ("--plot", "search")),
        (("--hh-all", "--hh-prompt-only"), ("give one of them",)),
        (("--device", "cuda:1"), ("slow-cpu", "computes on cpu, and not on cuda:1", "--device")),
        (("--gpu-batch-size", 0), ("--gpu-batch-size: '0' is not allowed",)),
        (("--num-prompts", -1), ("--num-prompts: '-1' is not allowed",)),
        (("--latency-limit", 0), ("--latency-limit: '0' is not allowed",)),
        (("--latency-limit", "nan"), ("--latency-limit: 'nan' is not allowed",)),
        (("--latency-limit", "1e-9"), ("no plan ends a block within 1e-09 s", "even one row")),
        (("--cpu-mem", "1MB"), ("no plan fits", "in CPU memory", "give")),
        (("--cpu-mem", "lots"), ("'lots'", "16GB")),
        (
            ("--gpu-mem", "16GB"),
            ("--gpu-mem 16GB", "slow-cpu has none; leave it out, or name", "with --machine"),
        ),
        (("--prompt-len", 500), ("128 positions",)),
        (("--positions", "rolling", "--kv-policy", "h2o"), ("rotary",)),
        (("--kv-policy", "nobody"), ("nobody",)),
        (("--schedule", "zigzak"), ("zigzak", "zigzag")),
        (("--plot", "front.gif"), ("front.gif", ".png")),
        (("--timeline", "/nowhere/at/all.png"), ("--timeline", "folder that exists")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) and str(value[0]).startswith("--") else "",
)
def test_bad_flags_get_one_line(command: Any, flags: tuple[object, ...], words: tuple[str, ...]) -> None:
    if flags[0] in ("--plot", "--timeline"):
        pytest.importorskip("matplotlib")
    error = command(*WORK, *flags).error
    assert all(word in error for word in words), error


def test_an_unknown_machine_and_a_damaged_one_are_named(command: Any, tmp_path: Path) -> None:
    assert "machine 'cpu-2cores' is unknown" in command(*WORK, machine="cpu-2cores").error
    file = tmp_path / "damaged.yaml"
    file.write_text("name: half\ndevice: cpu\n")
    assert str(file) in command(*WORK, machine=file).error
    assert "missing.yaml" in command(*WORK, machine=tmp_path / "missing.yaml").error


@pytest.mark.parametrize("flags", [(), ("--path", "_DUMMY_")])
def test_a_model_must_be_named(flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--machine", "cpu-2core", *flags]) == 2
    assert capfd.readouterr().err.startswith("error: the model to plan for is missing")


def test_an_unknown_model_is_named(command: Any, tmp_path: Path) -> None:
    assert "config.json" in command(*WORK, model=tmp_path).error


def test_a_picture_without_matplotlib_is_refused_before_any_work(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = command("--plot", tmp_path / "front.png", machine="no-such-machine").error
    assert "--plot needs matplotlib" in error and "[plot]" in error


def test_help_comes_without_loading_torch() -> None:
    code = "import sys\nfrom h2o_flexgen import plan\nplan.main(['--help'])\nprint('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--latency-limit SECONDS" in output and output.splitlines()[-1] == "False"


# -- pictures ------------------------------------------------------------------------------------------------------------


@draws
def test_pictures_are_written_and_nothing_else(command: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.png" for name in ("plot", "timeline")}
    command(*WORK, "--plot", files["plot"], "--timeline", files["timeline"])
    assert sorted(tmp_path.iterdir()) == sorted(files.values())
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files.values())


@draws
def test_two_traces_are_drawn_below_each_other(tmp_path: Path) -> None:
    case = case_of(True)
    traces = [Pricing(case.planned(case.plan.with_percent((0, 50, 0, 50, 0, 50))), case.machine).simulated() for _ in range(2)]
    for number in (1, 2):
        shown = {name: two_steps(trace) for name, trace in zip(("predicted", "measured")[:number], traces)}
        draw_timelines(shown, tmp_path / f"{number}.svg", "title")
    one, two = ((tmp_path / f"{number}.svg").stat().st_size for number in (1, 2))
    assert two > 1.5 * one


@draws
def test_a_picture_of_a_mixture_tells_experts_from_attention_and_numbers_blocks(tmp_path: Path) -> None:
    from matplotlib import rc_context

    case = case_of(spec=of_slices(tiny_spec(blocks=3), 4))
    trace = two_steps(Pricing(case.planned(case.plan.with_percent((0, 0, 0, 100, 0, 100))), case.machine).simulated())
    words = {}
    for number, names in enumerate(((), case.spec.layer_names)):
        with rc_context({"svg.fonttype": "none"}):
            draw_timelines({"predicted": trace}, tmp_path / f"{number}.svg", "title", names)
        words[number] = set(re.findall(r">([^<>]+)</text>", (tmp_path / f"{number}.svg").read_text()))
    assert words[0] >= {"compute", "weights"} and not any("expert" in word or "block" in word for word in words[0])
    assert words[1] >= {"compute: experts", "compute: attention and others", "weights: experts", "block 0", "block 1"}


def test_what_is_drawn_are_two_steps_of_the_decode_without_the_last() -> None:
    case = case_of(True, gen_len=6)
    trace = Pricing(case.planned(case.plan.with_percent((0, 50, 0, 50, 0, 50))), case.machine).simulated()
    shown = two_steps(trace)
    ends = trace.step_ends()
    visits = [span for span in shown.spans if span.lane == "compute" and span.end > span.start]
    assert {span.key.step for span in visits} <= {3, 4} and len(visits) <= 2 * len(case.spec.layers) * 4
    assert shown.makespan <= ends[4] - ends[2] + 1e-9


def test_threads_are_those_of_this_machine_and_count_from_the_beginning(
    command: Any, opt: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--threads 1 is for plans for this machine, and --machine" in command(*WORK, "--threads", 1).error
    asked = plan_request.request_of(plan_request.parse(["--model", "m", "--threads", "1"]))
    assert as_run(asked.run_flags(Plan())).site.threads == 1
    before = torch.get_num_threads()
    seen: list[int] = []
    monkeypatch.setattr(PlanFinder, "search", lambda *_: seen.append(torch.get_num_threads()) or pytest.fail("asked"))
    torch.set_num_threads(2)
    try:
        with pytest.raises(pytest.fail.Exception):
            plan.main(["--model", str(opt), "--threads", "1"])
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_machines_of_the_package_can_be_planned_for(command: Any) -> None:
    assert command(*WORK, machine="cpu-2core").json["machine"] == find_machine("cpu-2core").name


def test_what_no_machine_could_do_is_refused_before_one_is_measured(
    opt: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: pytest.fail("a machine was measured"))
    for flags, words in (
        (("--prompt-len", "600", "--gen-len", "600"), "positions"),
        (("--prompt-len", "4", "--gen-len", "2", "--cpu-mem", "1MB"), "no plan fits"),
        (("--prompt-len", "4", "--gen-len", "2", "--gpu-mem", "1GB"), "has none"),
        (("--evaluate", "--percent", *("0", "100") * 3, "--prompt-len", "4", "--cpu-mem", "1MB"), "plan needs"),
    ):
        assert plan.main(["--model", str(opt), "--device", "cpu", *flags]) == 2
        assert words in capfd.readouterr().err, flags


def test_memory_that_is_free_now_is_not_held_against_a_plan_for_a_profile_that_is_kept(
    opt: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_source, "profile_at_hand", lambda *_: find_machine("cpu-2core"))
    monkeypatch.setattr(machine_source, "machine_before_profile", lambda *_: pytest.fail("nothing waits for a profile"))
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: find_machine("cpu-2core"))
    flags = ("--evaluate", "--percent", *("0", "100") * 3, "--prompt-len", "4", "--gen-len", "2", "--dtype", "float32")
    assert plan.main(["--model", str(opt), "--device", "cpu", *flags]) == 0, capfd.readouterr().err


def test_of_a_limit_above_what_this_machine_has_its_profile_does_not_decide(
    opt: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the memory that was free when it was made; the machine may have more."""
    own = replace(find_machine("cpu-2core"), host_bytes=10**9)
    monkeypatch.setattr(machine_source, "profile_at_hand", lambda *_: own)
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: own)
    monkeypatch.setattr(machine_source, "whole_bytes", lambda: 25 * 10**9)
    flags = ("--evaluate", "--percent", *(0, 100) * 3, "--prompt-len", 4, "--gen-len", 2, "--dtype", "float32")
    for size, is_said in (("25GB", False), ("900GB", True)):
        out = called(plan.main, capfd, "--model", opt, "--device", "cpu", *flags, "--cpu-mem", size).out
        line = "--cpu-mem 900GB is more than there is: the machine has 25.00 GB in CPU memory"
        assert out and (line in out) is is_said


@pytest.mark.parametrize("kept", [None, 70_000])
def test_a_plan_for_a_gpu_of_this_machine_says_how_it_is_checked_unless_it_was(
    kept: int | None,
    opt: Path,
    machines: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Machine.load(machines["accelerator"])
    monkeypatch.setattr(machine_source, "open_device", lambda name: PretendedDevice())
    monkeypatch.setattr(machine_source, "profile_at_hand", lambda *_: own)
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: own)
    monkeypatch.setattr(opened_model, "kept_graph_bytes", lambda device: kept)
    flags = ("--evaluate", "--percent", *(100, 0) * 3, "--prompt-len", 4, "--gen-len", 2, "--dtype", "float32")
    planned = called(plan.main, capfd, "--model", opt, *flags)
    assert planned.status == 0, planned.err
    assert [line.partition(" GPU;")[0] for line in planned.err if "no check has found" in line] == [
        "slow: graphs would replay decode steps, but no check has found that they hold on this"
    ] * (kept is None)


def test_several_gpus_are_planned_for_with_their_part_of_the_prompts_and_of_the_machine(
    command: Any, opt: Path, machines: dict[str, Path]
) -> None:
    given = ("--model", opt, *WORK, "--evaluate", "--percent", 0, 50, 0, 100, 100, 0, "--gpu-batch-size", 2)
    two = command(*given, "--machine", machines["accelerator"], "--gpus", 2)
    half = command(*given, "--machine", machines["accelerator"], "--num-prompts", 6)
    assert two.status == 0, two.err
    assert two.json["num_prompts"] == 6 and two.json["predicted"]["gpus"] == 2
    assert two.json["flags"][-2:] == ["--gpus", "2"] and run_request.parse(two.json["flags"]).gpus == 2
    together = next(line for line in two.out if line.startswith("together  2 processes: "))
    assert f"{2 * two.json['predicted']['tokens_per_second']:.2f}" in together
    assert two.json["predicted"]["total_seconds"] > half.json["predicted"]["total_seconds"], "the disk is divided"
    host, weights = two.json["needed_bytes"]["host"], two.json["placed_bytes"]["weights"]["host"]
    assert weights + 2 * (half.json["needed_bytes"]["host"] - weights) < host < 3 * half.json["needed_bytes"]["host"]
