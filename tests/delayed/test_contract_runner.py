"""The runner of the contract, tried without a GPU: with faults of each kind planted on pretended devices, its verdict is right
each time. What needs a GPU is left to scripts/gpu_check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.engine.stores.host_attention_exchange import PartOfPrompts, PartsOnTheWay
from h2o_flexgen.formats.kernel_table import CUDA, TRITON, Processor
from h2o_flexgen.kernels import operations
from tests.clocked.backend import IS_POSSIBLE
from tests.delayed import contract, plans, stand
from tests.delayed import verdict as verdicts
from tests.delayed.child import LEAVING, READY, serve
from tests.delayed.dealing import Child, Dealer, Order, spawned
from tests.delayed.plans import STAYING, of_choosing_steps, of_other_models, of_pipelines, on_a_gpu
from tests.delayed.planted import FAULTS, HANGS, no_device_waits_for_a_pass, no_stream_waits
from tests.delayed.sanitizer import Place, StreamSanitizer
from tests.delayed.spoilt import NAN
from tests.delayed.stand import OnGPU, Pretended
from tests.delayed.trying import Bench
from tests.delayed.verdict import is_sound, more, verdict
from tests.delayed.ways import ALARM, ALL, BAD, CRASH, ERROR, OK, TIMEOUT, A, B, C, D, Result, Way, late
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.pretended import PretendedDevice
from tests.helpers.samples import first_of

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {  # of the plan without graphs, and of that with them
    "nothing": (verdicts.UNTOLD_QUERY, verdicts.UNTOLD_QUERY),
    "no stream waits": (verdicts.RACE, verdicts.RACE),
    "no load waits": (verdicts.NOT_HIT, verdicts.NOT_HIT),
    "a kernel is wrong": (verdicts.NUMERICS_OF_TRITON, verdicts.NUMERICS_OF_TRITON),
    "the engine is wrong": (verdicts.NUMERICS, verdicts.NUMERICS),
    "bits come of chance": (verdicts.ATOMICS, verdicts.ATOMICS),
    "graphs are wrong": (verdicts.UNTOLD_QUERY, "graphs"),
    "it crashes": ("crash in B: SIGABRT", "crash in B: SIGABRT"),
    "it breaks": ("error in A: RuntimeError", "error in A: RuntimeError"),
}
PATIENT = str(10 * PATIENCE_SECONDS)
OPTIONS = ("--children", "1", "--seconds", PATIENT, "--plan-seconds", PATIENT, "--hanging-seconds", "0.5")


SOME = "nothing", "no stream waits"  # which a default run plants
Found = tuple[Path, Mapping[str, dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return judged(tmp_path_factory.mktemp("contract"), *SOME)


@pytest.fixture(scope="module")
def found_of_others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return judged(tmp_path_factory.mktemp("contract"), *(fault for fault in EXPECTED if fault not in SOME), HANGS)


def judged(folder: Path, *faults: str) -> Found:
    """What the runner says of each fault."""
    if not IS_POSSIBLE:
        pytest.skip("this torch takes no device that is written in Python")
    out = folder / "results.jsonl"
    command = [sys.executable, "-m", "tests.delayed.contract", str(out), *OPTIONS, "--pretended", *faults]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20 * PATIENCE_SECONDS, check=False)
    assert run.returncode == 1, run.stderr
    lines = run.stdout.splitlines()
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    return out, {document["fault"]: document for document in documents}, lines


@pytest.mark.parametrize("fault", SOME)
def test_the_verdict_on_a_planted_fault_is_right(fault: str, found: Found) -> None:
    assert_verdict(fault, found[1][fault])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in EXPECTED if fault not in SOME])
def test_so_is_that_on_others(fault: str, found_of_others: Found) -> None:
    assert_verdict(fault, found_of_others[1][fault])


def assert_verdict(fault: str, document: Mapping[str, Any]) -> None:
    each = document["verdicts"]
    assert [each[number].startswith(told) for number, told in zip("01", EXPECTED[fault], strict=True)] == [True, True], each
    assert document["sound"] == (fault == "nothing") and document["plans"] == 2
    failed = [number for number, told in enumerate(EXPECTED[fault]) if told != verdicts.UNTOLD_QUERY]
    assert document["failed"] == failed


def test_the_late_lane_is_named(found: Found) -> None:
    assert all("late lanes: load" in told for told in found[1]["no stream waits"]["verdicts"].values())


def test_each_result_is_a_short_line(found: Found) -> None:
    results = [Result.of_json(json.loads(line)) for line in found[0].read_text().splitlines()]
    assert {way.name for way in (*ALL, late("load"), late("store"))} <= {one.way for one in results}
    assert all(len(line) < 1200 for line in found[0].read_text().splitlines())
    assert all(len(line) < 400 for line in found[2] if not line.startswith("{"))
    wrong = next(one for one in results if one.verdict == BAD)
    assert wrong.step is not None and wrong.row is not None and wrong.difference and wrong.bits
    alarm = next(one for one in results if one.verdict == ALARM)
    assert alarm.pairs and all(" is not behind " in pair for pair in alarm.pairs)


@pytest.mark.slow
def test_what_hangs_is_ended_and_the_next_plan_goes_on(found_of_others: Found) -> None:
    document = found_of_others[1][HANGS]
    assert all(told.startswith("timeout in A") for told in document["verdicts"].values()) and not document["sound"]


def test_each_fault_has_a_verdict_that_is_expected() -> None:
    assert {HANGS, *EXPECTED} == set(FAULTS)


# -- the table -----------------------------------------------------------------------------------------------------------


def results(**said: str) -> dict[str, Result]:
    """By the letters of ways; what stands behind a letter has a word of its own."""
    named = {name.replace("_", " "): each for name, each in said.items()}
    return {name: Result(1, name, each.partition(" ")[0], bits=each.partition(" ")[2]) for name, each in named.items()}


TABLE = (
    (results(A=OK, B=OK, C=OK, D=ALARM), verdicts.UNTOLD_QUERY),
    (results(A=OK, B=OK, C=OK, D=OK), verdicts.SOUND),
    (results(A=OK, B=OK, C=OK), verdicts.SOUND),
    (results(A=OK, B=OK, C=ALARM, D=ALARM), verdicts.NOT_HIT),
    (results(A=OK, B=BAD, B_load=BAD, B_store=OK), "a race; late lanes: load"),
    (results(A=OK, B=BAD, B_load=OK, B_store=OK), "a race; late lanes: not one alone"),
    (results(A=OK, B=ERROR, B_load=ERROR, B_by_torch=OK), "a race in a kernel in Triton; late lanes: load"),
    (results(A=OK, B=BAD, B_without_graphs=OK), "a race in graphs"),
    (results(A=f"{BAD} 1", A_again=f"{BAD} 1", A_by_torch=OK), verdicts.NUMERICS_OF_TRITON),
    (results(A=f"{BAD} 1", A_again=f"{BAD} 1", A_by_torch=BAD), verdicts.NUMERICS),
    (results(A=f"{BAD} 1", A_again=f"{BAD} 2", A_by_torch=OK), verdicts.ATOMICS),
    (results(A=f"{BAD} 1", A_again=OK, A_blocking=OK), "a race, which blocking launches mend"),
    (results(A=f"{BAD} 1", A_again=f"{BAD} 1", A_without_graphs=OK), "graphs"),
    (results(A=TIMEOUT, A_again=OK), "timeout in A; well: A again"),
    (results(A=OK, B=CRASH), "crash in B"),
    (results(A=OK, B=OK, C=ERROR), "error in C"),
    (results(A=OK, B=OK), "not run: C"),
    ({}, "not run: A, B, C"),
)


@pytest.mark.parametrize(("said", "told"), TABLE)
def test_the_table_of_verdicts(said: Mapping[str, Result], told: str) -> None:
    assert verdict(said).startswith(told)
    assert is_sound(said) == (told in (verdicts.SOUND, verdicts.UNTOLD_QUERY))


def test_a_failure_is_tried_further_and_a_sound_plan_is_not() -> None:
    assert [way.name for way in more(results(A=BAD), ("load",), True)] == [
        "A again",
        "A by torch",
        "A without graphs",
        "A blocking",
    ]
    further = [way.name for way in more(results(A=OK, B=ERROR), ("load", "store"), False)]
    assert further == ["B load", "B store", "B by torch", "B blocking"]
    assert not list(more(results(A=OK, B=OK, C=ALARM), ("load",), True))


# -- other models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", first_of(range(3), 1))
def test_models_with_experts_windows_and_caps_are_tried(number: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bench, planned = Bench(Pretended(), checkpoints, tmp_path), of_other_models()[number]
    layers = checkpoints.spec(planned.case).layers
    assert any(layer.window for layer in layers) == (planned.case.kind != "olmoe")
    assert any(layer.expert_of for layer in layers) == (planned.case.kind != "gemma2")
    assert bench.tried(number, planned, B).verdict == OK
    with no_stream_waits(B):
        assert bench.tried(number, planned, B).verdict in ((OK,) if planned.case.percent == STAYING else (BAD, ERROR))


@pytest.mark.parametrize("number", first_of([2, 1, 3, 0], 2))
def test_plans_whose_steps_choose_are_tried(number: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    bench, planned = Bench(Pretended(), checkpoints, tmp_path), of_choosing_steps()[number]
    assert bench.tried(number, planned, B).verdict == OK


# -- what a GPU does -----------------------------------------------------------------------------------------------------


class OnPretendedGPU(OnGPU):
    """All that is done on a GPU, but for CUDA itself: one stream, and accesses of memory of the host."""

    device = "pretended"


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand, "SeveralInOne", PretendedDevice)
    monkeypatch.setattr(stand, "on_a_gpu", lambda whole: Place(lambda: 0, lambda tensor: tensor, whole))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)


@pytest.mark.parametrize("way", [B, *first_of([C, A, D, late("load")], 1)], ids=lambda way: way.name)
def test_what_is_done_on_a_gpu_can_be_done(way: Way, checkpoints: Checkpoints, tmp_path: Path, no_cuda: None) -> None:
    bench, (_, planned) = Bench(OnPretendedGPU(), checkpoints, tmp_path), plans.for_a_trial()
    result = bench.tried(0, planned, way)
    assert (result.verdict, result.words) == (OK, "") and planned.has_graphs


@pytest.mark.slow
def test_what_the_contract_launches_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.delayed.compiled", "--every", "47"]
    run = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " for 2 plans are in " in run.stdout, run.stdout + run.stderr
    assert len([*tmp_path.rglob("*.cubin")]) > 5


def test_a_device_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnGPU, "device", "cpu")
    assert OnGPU().works()
    monkeypatch.setattr(Tensor, "item", Mock(side_effect=RuntimeError("an illegal memory access was encountered")))
    assert not OnGPU().works()


def test_so_can_what_is_told_of_kernels_in_triton(
    checkpoints: Checkpoints, tmp_path: Path, no_cuda: None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, declare = set[str](), StreamSanitizer.declare

    def noted(sanitizer: StreamSanitizer, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        told.add(name)
        declare(sanitizer, name, reads, writes)

    monkeypatch.setattr(StreamSanitizer, "declare", noted)
    monkeypatch.setattr(operations, "processor", lambda _: Processor(CUDA, TRITON))
    case = Case("opt", (0, 100, 0, 100, 0, 100), (4,), 2, 1, 1, weight_codec="group8", kv_codec="group4")
    result = Bench(OnPretendedGPU(), Checkpoints(tmp_path / "own"), tmp_path).tried(0, plans.Planned(case), C)
    assert (result.verdict, result.words) == (OK, "")
    assert {"decode_attention", "tile_product", "append_coded"} <= told


# -- several devices -----------------------------------------------------------------------------------------------------


@contextmanager
def states_between_devices() -> Iterator[list[Tensor]]:
    """Copies of the regions through which states go from device to device, as they are when a block has ended."""
    close, found = HiddenStore.close, list[Tensor]()

    def noted(store: HiddenStore) -> None:
        regions = (*store._left.values(), *store._found.values())
        found.extend(region.clone() for region in regions)
        close(store)

    with patch.object(HiddenStore, "close", noted):
        yield found


@pytest.mark.parametrize("number", first_of([0, 3], 1))
def test_states_that_a_device_leaves_for_the_next_are_spoilt_behind_their_reader(
    number: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    bench, planned = Bench(Pretended(), checkpoints, tmp_path), of_pipelines()[number]
    with states_between_devices() as regions:
        assert bench.tried(number, planned, B).verdict == OK
    assert len(regions) >= 4 and all(bool((region == NAN).all()) for region in regions)
    with no_device_waits_for_a_pass():
        assert bench.tried(number, planned, A).verdict == OK, "what is early finds nothing wrong where no lane is late"
        assert {bench.tried(number, planned, way).verdict for way in (B, late("pass"))} <= {BAD, ERROR}
        assert bench.tried(number, planned, late("load")).verdict == OK


@pytest.mark.slow
def test_the_sanitizer_watches_several_devices(checkpoints: Checkpoints, tmp_path: Path) -> None:
    if not IS_POSSIBLE:
        pytest.skip("this torch takes no device that is written in Python")
    bench, planned = Bench(Pretended(), checkpoints, tmp_path), of_pipelines()[0]
    assert bench.tried(0, planned, C).verdict == OK
    with no_device_waits_for_a_pass():
        early = bench.tried(0, planned, C)
    assert early.verdict == ALARM and all("stores/hidden.py" in pair or "spoilt.py" in pair for pair in early.pairs)


# -- prompts that go home part by part -----------------------------------------------------------------------------------


def test_a_part_of_prompts_may_be_computed_while_another_one_is_read(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in two places of a buffer. In one place it would be a race."""
    bench, planned = Bench(Pretended(), checkpoints, tmp_path), of_choosing_steps()[3]
    assert bench.tried(0, planned, C).verdict == OK
    begin = PartsOnTheWay.begin

    def hurried(parts: PartsOnTheWay, rows: slice) -> PartOfPrompts:
        parts._home = [None] * len(parts._home)
        return begin(parts, rows)

    monkeypatch.setattr(PartsOnTheWay, "begin", hurried)
    early = bench.tried(0, planned, C)
    assert early.verdict == ALARM and all("stores/kv.py" in pair or "spoilt.py" in pair for pair in early.pairs)


# -- processes -----------------------------------------------------------------------------------------------------------

ECHO = """
import json, os, sys
orders, results = open(int(sys.argv[1])), open(int(sys.argv[2]), "w", buffering=1)
results.write("ready\\n")
for line in orders:
    order = json.loads(line)
    if order["plan"] == 1:
        import time; time.sleep(3600)
    if order["plan"] == 2:
        os.abort()
    if order["plan"] == 3:
        import time; time.sleep(1.2)  # it is asked where it is after a second of two
        os.abort()
    if order["plan"] == 4:
        results.write("leaving\\n")
    told = {"plan": order["plan"], "way": order["way"]["name"], "verdict": "ok", "words": str(os.getpid())}
    results.write(json.dumps(told) + "\\n")
"""


def echoing(environment: Mapping[str, str], code: str = ECHO) -> Child:
    (orders, ours), (mine, written) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", code, str(orders), str(written)]
    process = subprocess.Popen(command, pass_fds=(orders, written), stderr=subprocess.DEVNULL)
    process.returncode = 0
    os.close(orders)
    os.close(written)
    return Child(process.pid, ours, mine, environment)


def test_processes_that_hang_crash_or_leave_are_replaced(tmp_path: Path) -> None:
    heard = list[Result]()
    dealer = Dealer(echoing, heard.append, tmp_path, children=1, seconds=PATIENCE_SECONDS)
    dealer.deal([Order(0, A), Order(1, A, 1 / PATIENCE_SECONDS), *(Order(number, A) for number in (2, 5, 4, 6))], until=inf)
    dealer.deal([Order(7, A)], until=inf)
    dealer.close()
    assert [one.plan for one in heard] == [0, 1, 2, 5, 4, 6, 7]
    assert [one.verdict for one in heard] == [OK, TIMEOUT, CRASH, OK, OK, OK, OK]
    assert "SIGABRT" in heard[2].words
    pids = [heard[number].words for number in (0, 3, 4, 5, 6)]
    assert pids[0] != pids[1] == pids[2] != pids[3] == pids[4], "what is sound goes on"


def test_a_process_that_crashes_when_it_is_asked_where_it_is_took_too_long(tmp_path: Path) -> None:
    """Python walks through threads that go on meanwhile."""
    heard = list[Result]()
    dealer = Dealer(echoing, heard.append, tmp_path, children=1, seconds=2.0)
    dealer.deal([Order(3, A)], until=inf)
    assert [one.verdict for one in heard] == [TIMEOUT]


def test_when_all_of_the_time_is_over_what_is_under_way_has_no_result(tmp_path: Path) -> None:
    """Or the stage itself would be ended before it has said what it found."""
    heard = list[Result]()
    dealer = Dealer(echoing, heard.append, tmp_path, children=1, seconds=PATIENCE_SECONDS, ends=time.monotonic() + 1.0)
    dealer.deal([Order(number, A) for number in (1, 0)], until=inf)
    dealer.deal([Order(0, A)], until=inf)
    assert heard == []


def test_a_process_that_does_not_start_is_replaced_and_three_end_the_call(tmp_path: Path) -> None:
    heard, started = list[Result](), count()

    def start(environment: Mapping[str, str]) -> Child:
        return echoing(environment, ECHO if next(started) == 1 else "raise SystemExit(3)")

    dealer = Dealer(start, heard.append, tmp_path, children=1, seconds=PATIENCE_SECONDS)
    dealer.deal([Order(0, A)], until=inf)
    assert [one.verdict for one in heard] == [OK]
    dealer.close()
    with pytest.raises(RuntimeError, match="do not start \\(exit status 3: \\)"):
        dealer.deal([Order(0, A)], until=inf)
    assert next(started) == 5


TRACE = """it said something
Timeout (0:00:11)!
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/somewhere/h2o_flexgen/engine/executor.py", line 210 in _next

Thread 0x00007e (most recent call first):
  File "/somewhere/h2o_flexgen/memory/device.py", line 281 in synchronize
  File "/somewhere/tests/delayed/child.py", line 33 in serve
"""


def test_where_a_plan_hangs_is_said_in_few_words(tmp_path: Path) -> None:
    heard = list[Result]()

    def start(environment: Mapping[str, str]) -> Child:
        child = echoing(environment)
        (tmp_path / str(child.pid)).mkdir()
        (tmp_path / str(child.pid) / "said").write_text(TRACE)
        return child

    dealer = Dealer(start, heard.append, tmp_path, children=1, seconds=1.0)
    dealer.deal([Order(1, A)], until=inf)
    assert heard[0].words == "in python3.12/threading.py:355, memory/device.py:281"


class Lost:
    """A bench whose device refuses all after an error."""

    stand = SimpleNamespace(plans=lambda: [None, None], works=lambda: False)

    def tried(self, number: int, planned: object, way: Way) -> Result:
        return Result(number, way.name, BAD if number else ERROR)


def test_a_process_leaves_when_its_device_is_lost(tmp_path: Path) -> None:
    """So that other plans do not fail for the reason of one."""
    given = [json.dumps({"plan": number, "way": asdict(A), "seconds": PATIENCE_SECONDS}) for number in (1, 0, 1)]
    (tmp_path / "orders").write_text("\n".join(given))
    orders, results = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("orders", "results"))
    serve(Lost(), "nothing", orders, results)  # type: ignore[arg-type]
    said = (tmp_path / "results").read_text().splitlines()
    assert [said[0], said[2]] == [READY, LEAVING] and [json.loads(said[place])["plan"] for place in (1, 3)] == [1, 0]
    assert len(said) == 4


# -- calls that go on ----------------------------------------------------------------------------------------------------


def test_a_call_goes_on_where_one_of_the_same_code_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "contract.jsonl"
    first = contract.Found.of_earlier_calls(file, "this code")
    for result in (Result(0, "A", OK), Result(0, "B", TIMEOUT), Result(1, "A", BAD, bits="1")):
        first.heard(result)
    with file.open("a") as lines:
        lines.write('{"plan": 1, "way": "A aga')  # it was ended while it wrote
    again = contract.Found.of_earlier_calls(file, "this code")
    assert again.by_plan == first.by_plan and file.read_text().count("\n") == 4
    assert [again.is_known(*one) for one in ((0, A), (0, B), (0, C), (1, A))] == [True, False, False, True]
    again.heard(Result(0, "B", TIMEOUT))
    assert not again.is_known(0, B), "what took too long is tried twice"
    again.heard(Result(0, "B", TIMEOUT))
    assert again.is_known(0, B)
    assert not contract.Found.of_earlier_calls(file, "other code").by_plan and file.read_text().count("\n") == 1


def test_results_depend_on_python_and_on_kernels_in_c() -> None:
    files = {str(file.relative_to(contract.ROOT)) for file in contract.sources()}
    own = "h2o_flexgen/memory/device.py", "tests/whole/test_contract.py", "tests/delayed/ways.py"
    assert files >= {*own, "h2o_flexgen/kernels/evict.c", "h2o_flexgen/kernels/sizes.h"}


class Noted:
    """In the place of a dealer: all that is asked for is sound, as far as there is time."""

    ends = inf

    def __init__(self, found: contract.Found, at_most: int = 1000) -> None:
        self.found, self.left, self.asked = found, at_most, list[str]()

    def prepare(self, environment: object) -> None: ...

    def deal(self, orders: Sequence[Order], until: float) -> None:
        for order in orders[: self.left]:
            self.asked.append(f"{order.plan}{order.way.name}")
            self.found.heard(Result(order.plan, order.way.name, OK))
        self.left -= min(self.left, len(orders))


def test_what_had_no_time_is_tried_when_the_others_are_done(tmp_path: Path) -> None:
    found = contract.Found(tmp_path / "found")
    dealer = Noted(found, at_most=1)
    deal = dealer.deal

    def one_at_a_time(orders: Sequence[Order], until: float) -> None:
        dealer.left = 1
        deal(orders, until)

    dealer.deal = one_at_a_time  # type: ignore[method-assign]
    contract.try_all("pretended", [0, 1], found, dealer)  # type: ignore[arg-type]
    assert sorted(dealer.asked) == ["0A", "0B", "0C", "0D", "1A", "1B", "1C", "1D"]
    found.by_plan[1].clear()
    assert contract.summary([0, 1], found, 1.0)["failed"] == [], "what was not tried has not failed"


def test_what_is_known_is_not_tried_again(tmp_path: Path) -> None:
    found = contract.Found(tmp_path / "found")
    for result in (Result(0, "A", OK), Result(0, "B", OK), Result(1, "A", BAD), Result(1, "A again", BAD)):
        found.heard(result)
    dealer = Noted(found)
    contract.try_all("pretended", [0, 1], found, dealer)  # type: ignore[arg-type]
    assert dealer.asked == ["0C", "0D", "1A by torch", "1A without graphs", "1A blocking"]


def test_where_nothing_holds_texts_to_forms_the_plans_hold_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with torch and transformers alone; and the verdict says so."""
    monkeypatch.setattr(plans, "find_spec", lambda name: None)
    monkeypatch.setattr(contract, "find_spec", lambda name: None)
    assert len(on_a_gpu()) == 94 and not any(one.case.held for one in on_a_gpu())
    found = contract.Found(Path("none"))
    assert contract.summary([], found, 1.0)["verdict"].endswith("no text is held to a form: llguidance is not installed")  # type: ignore[attr-defined]


def test_on_a_gpu_it_has_sixty_plans_some_with_graphs_and_some_that_several_devices_compute() -> None:
    plans = on_a_gpu()
    choosing = [one for one in plans if one.case.kv_policy.recall < 1 and not one.has_graphs]
    assert sum(not (one.has_graphs or one.is_pipeline) for one in plans) == 60 + len(choosing) == 68
    assert {one.case.attend_on for one in choosing} == {DEVICE, HOST} and not any(one.streams for one in choosing)
    assert len([one for one in plans if one.is_pipeline]) == 4 and not any(one.is_pipeline and one.has_graphs for one in plans)
    graphs = [one for one in plans if one.has_graphs]
    assert any(one.streams for one in graphs) and any(one.limits and not one.streams for one in graphs) and len(graphs) > 10
    assert all(one.case.percent[2:] == (100, 0, 100, 0) for one in graphs)
    assert sum(one.case.kv_policy.recall < 1 for one in graphs) == 2
    assert callable(spawned) and {B.name, C.name, D.name} <= {way.name for way in ALL}


class Late(Noted):
    """The same, where one plan takes too long unless it has more time."""

    def deal(self, orders: Sequence[Order], until: float) -> None:
        for order in orders:
            is_late = order.plan == 1 and order.patience == 1.0
            self.asked.append(f"{order.plan}{order.way.name}")
            self.found.heard(Result(order.plan, order.way.name, TIMEOUT if is_late else OK, seconds=float(order.plan)))


def test_what_took_too_long_gets_more_time_and_the_longest_come_first(tmp_path: Path) -> None:
    found = contract.Found(tmp_path / "found")
    dealer = Late(found)
    contract.try_all("pretended", [0, 1], found, dealer)  # type: ignore[arg-type]
    assert dealer.asked == ["0A", "1A", "1A", "1B", "0B", "1B", "1C", "0C", "1C", "1D", "0D", "1D"]
