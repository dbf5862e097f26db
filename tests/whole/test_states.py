"""States of rows: whatever the plan, the tokens are those of the plain resident loop, and its logits bit for bit. What moves is
what is foreseen; a state that is another one's, or of another step, is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from h2o_flexgen.cli.report import lines_of
from h2o_flexgen.cli.report.plan_report import PlanReport
from h2o_flexgen.core.buffer_layout import region_bytes
from h2o_flexgen.core.option import options_of
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.engine.stores.row_stores import OpenStates, StateStore
from h2o_flexgen.engine.stores.states_of_visits import EchoedStates, StatesInPassing
from h2o_flexgen.formats.kernel_table import EXACT, FLOAT32, INT8
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.models import create_model
from h2o_flexgen.models.new_tokens import RowStates
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.plan import BFLOAT16, STATE_DTYPES, Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Data, Key, Op, Task
from tests.helpers.contract import BY_HEAD, GATED, POLICIES, Case, Checkpoints, compare, generate_with, hold_contract
from tests.helpers.pairwise import ELSEWHERE, in_turn, most_of, on_devices
from tests.helpers.refusals import one_line
from tests.helpers.tiny import tiny_config
from tests.planning.test_cost import assert_moved_as_predicted
from tests.planning.test_pricing import MACHINE
from tests.planning.worlds import block_of
from tests.whole import test_conversation as talks
from tests.whole import test_pipeline as pipelines
from tests.whole import test_stream as stream

KINDS = ("lfm2", "qwen3-5", "qwen3-next", "qwen3-5-moe", "lfm2-short", "falcon-h1", "nemotron-h", "kimi-linear")
ON_DISK, ON_HOST, MIXED, RESIDENT = (0, 0, 0, 0, 0, 0), (0, 100, 0, 100, 0, 100), (30, 30, 20, 50, 40, 30), (100, 0) * 3
RAGGED, EQUAL, MANY = (5, 9, 2, 7, 4), (6, 6, 6, 6), (3, 11, 8, 1, 6, 2, 9, 5)
WITHOUT_MATRICES = ("lfm2", "lfm2-short")  # rows have inputs of convolutions alone, which are not rounded


def case_of(values: Mapping[str, Any]) -> Case:
    """A case with states as they are asked for, where their kind has any that may be kept so."""
    return Case(**values | ({"state_dtype": FLOAT32} if values["kind"] in WITHOUT_MATRICES else {}))


CHOICES = {
    "kind": KINDS,
    "percent": (MIXED, ON_DISK, ON_HOST, RESIDENT),
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (2, 1, 3),
    "num_gpu_batches": (2, 1, 4),
    "buffers": (2, 1, 3),
    "sep_layer": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[5], POLICIES[11], BY_HEAD[0], BY_HEAD[1]),
    "prefill_tokens": (1024, 12, 3),
    ("weight_codec", "compute"): ((PLAIN, EXACT), ("group4", INT8)),
    "kv_codec": (PLAIN, "group4"),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", on_devices(CHOICES))
def test_tokens_and_logits_equal_the_resident_loop(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(case_of(values), checkpoints, offload)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_rows_that_end_leave_the_others_their_states(kind: str, checkpoints: Checkpoints, offload: Path) -> None:
    """Those behind them move up, on every tier."""
    limits = (1, 6, 2, 5, 3, 4, 6)
    for percent in (RESIDENT, ON_DISK):
        case = Case(kind, percent, (5, 3, 8, 2, 6, 4, 7), 6, gpu_batch_size=4)
        with case.open(checkpoints, offload) as llm:
            made = llm.generate(case.prompts, [SamplingParams(limit, ignore_eos=True) for limit in limits])
        for row, (completion, limit) in enumerate(zip(made, limits, strict=True)):
            alone = checkpoints.resident_logits(replace(case, gen_len=limit), (row,))
            assert list(completion.token_ids) == [int(step[0].argmax()) for step in alone], f"row {row}"


PIPED = {
    "kind": ("lfm2-short", "falcon-h1"),  # each device has attention
    "percent": (MIXED, ON_DISK, ON_HOST, RESIDENT),
    "lengths": (RAGGED, MANY),
    "gpu_batch_size": (2, 1),
    "num_gpu_batches": (3, 1, 2),
    "sep_layer": (True, False),
    "policy": (POLICIES[0], POLICIES[1]),
}


@pytest.mark.parametrize("values", most_of(PIPED, share=ELSEWHERE))
def test_each_device_of_a_pipeline_keeps_the_states_of_its_layers(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(pipelines.on(2, **values), checkpoints, offload)


MOVES = {
    "kind": KINDS[:2],
    "percent": (ON_DISK, MIXED),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", in_turn(MOVES, nth=5))
def test_a_run_moves_the_bytes_that_are_predicted(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = replace(case_of(values), lengths=RAGGED, num_gpu_batches=3)
    assert assert_moved_as_predicted(case, checkpoints, offload)["read"] > 0
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, case.params)
        assert llm.stats is not None
        states = llm.stats.moved_by_data["states"]
        assert states["read"] == states["write"] > 0
        assert sum(by_lane.get("read", 0) for by_lane in llm.stats.moved_by_data.values()) == llm.stats.moved_bytes["read"]


RUNNING = {
    "kind": KINDS[:3],
    "percent": (MIXED, ON_DISK, ON_HOST, RESIDENT),
    "gpu_batch_size": (2, 1, 3),
    "num_gpu_batches": (2, 1),
    "schedule": ("zigzag", "flexgen_barrier"),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[11], BY_HEAD[3]),
    "prefill_tokens": (1024, 12, 3),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", on_devices(RUNNING, share=ELSEWHERE))
def test_rows_that_come_and_go_say_what_they_say_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    stream.hold_contract(replace(case_of(values), lengths=stream.LENGTHS[:6]), stream.LITTLE_GROWTH, checkpoints, offload)


TALKS = {
    "kind": KINDS[:2],
    "percent": (MIXED, ON_DISK, RESIDENT),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[11]),
    "prefill_tokens": (1024, 4),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", on_devices(TALKS))
def test_a_text_that_continues_keeps_its_states(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    talks.hold_contract(case_of(values), checkpoints, offload)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_texts_are_scored_alike_in_one_pass_and_token_by_token(kind: str, checkpoints: Checkpoints, offload: Path) -> None:
    """The continuation of a text finds the states behind it."""
    case = Case(kind, ON_DISK, RAGGED)
    pairs = [(prompt, [3, 9, 77, 5]) for prompt in case.prompts]
    with case.open(checkpoints, offload) as llm:
        in_one_pass, by_token = (llm.score(pairs, by=way) for way in ("prefill", "decode"))
    for one, other in zip(in_one_pass, by_token, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5) and one.greedy == other.greedy


# -- faults ----------------------------------------------------------------------------------------------------------------


def once(name: str, change: Callable[[StateStore, Task, Callable[[Task], int]], int]) -> AbstractContextManager[object]:
    """A store with another action in the second step."""
    usual = getattr(StateStore, name)

    def changed(store: StateStore, task: Task, *others: Any) -> Any:
        if task.step != 1:
            return usual(store, task, *others)
        return change(store, task, lambda own: usual(store, own, *others))

    return patch.object(StateStore, name, changed)


def stale() -> AbstractContextManager[object]:
    """What a step makes of the states is not written: the next one finds those before it."""
    return once("write", lambda store, task, write: 0)


def swapped() -> AbstractContextManager[object]:
    """The first two rows have each other's state."""

    def turned(store: StateStore, task: Task, opened: Callable[[Task], OpenStates]) -> OpenStates:
        made = opened(task)
        for one in made.by_name.values():
            one[:2] = one[:2].flip(0)
        return made

    return once("open", turned)  # type: ignore[arg-type]


def not_zeroed() -> AbstractContextManager[object]:
    """Rows begin with whatever lies in a buffer."""
    usual = StateStore.open

    def dirty(store: StateStore, task: Task, rows: BatchRows) -> OpenStates:
        with patch.object(BatchRows, "beginning", None):
            return usual(store, task, rows)

    return patch.object(StateStore, "open", dirty)


def of_another_batch() -> AbstractContextManager[object]:
    """A state is read from where another batch has its own."""

    def read(store: StateStore, task: Task, usual: Callable[[Task], int]) -> int:
        home, region = store._on_disk[task.layer, (task.batch + 1) % 4], store._on_host(task)
        for part in store._cuts(task):
            store._memories.disk.read_into(home, part.start, region[part])
        return store._nbytes(task)

    return once("read", read)


def not_moved_up() -> AbstractContextManager[object]:
    """Rows from the end take the places of those that have ended, but not their states."""

    def stayed(store: StateStore, task: Task, rows: BatchRows, usual: Any = StateStore.open) -> OpenStates:
        store._units[task.layer, task.batch].generation = rows.generation
        opened: OpenStates = usual(store, task, rows)
        return opened

    return patch.object(StateStore, "open", stayed)


SPOILT = [Case(kind, ON_DISK, (6,) * 8, 4, num_gpu_batches=4) for kind in KINDS[:2]]


@pytest.mark.parametrize("case", SPOILT, ids=KINDS[:2])
def test_nothing_is_found_where_nothing_is_planted(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    hold_contract(case, checkpoints, offload)


@pytest.mark.parametrize("fault", [stale, swapped, not_zeroed, of_another_batch])
@pytest.mark.parametrize("case", SPOILT, ids=KINDS[:2])
def test_a_state_that_is_not_the_rows_own_is_found(
    case: Case, fault: Callable[[], AbstractContextManager[object]], checkpoints: Checkpoints, offload: Path
) -> None:
    with fault(), pytest.raises(AssertionError):
        hold_contract(case, checkpoints, offload)


def test_states_that_stay_where_their_rows_were_are_found(checkpoints: Checkpoints, offload: Path) -> None:
    with not_moved_up(), pytest.raises(AssertionError, match="row"):
        test_rows_that_end_leave_the_others_their_states("lfm2", checkpoints, offload)


# -- plans -----------------------------------------------------------------------------------------------------------------


TWICE = Case("qwen3-5", ON_DISK, (14, 9, 12, 3), 5, policy=POLICIES[11])


def echo_leaves_a_trace() -> AbstractContextManager[object]:
    """The states behind an echo are taken for those behind the prompt."""

    def passed(self: EchoedStates, name: str, *given: Any) -> Any:
        return RowStates.passed(self, name, *given)

    return patch.object(EchoedStates, "passed", passed)


def echo_begins_anew() -> AbstractContextManager[object]:
    """An echo finds states of a text that begins."""
    usual = EchoedStates._echoed

    def echoed(self: EchoedStates, name: str, *given: Any) -> Any:
        zeros = {own: one.new_zeros(one.shape) for own, one in self.by_name.items()}
        return usual(EchoedStates(zeros, self.lengths, step=self.step), name, *given)

    return patch.object(EchoedStates, "_echoed", echoed)


@pytest.mark.parametrize("fault", [nullcontext, echo_leaves_a_trace, echo_begins_anew])
def test_states_are_those_behind_a_prompt_that_is_read_twice(
    fault: Callable[[], AbstractContextManager[object]], checkpoints: Checkpoints, offload: Path
) -> None:
    assert TWICE.kv_policy.echoes
    for rows in TWICE.batches():
        checkpoints.resident_logits(TWICE, rows)  # without the fault
    with fault(), nullcontext() if fault is nullcontext else pytest.raises(AssertionError):
        hold_contract(TWICE, checkpoints, offload)


@pytest.mark.parametrize(("kind", "name"), [("lfm2", "conv"), ("qwen3-5", "linear_attention")])
def test_a_model_without_attention_is_refused(kind: str, name: str) -> None:
    """As damaged files say it: each block is of the same kind."""
    spec = create_model(tiny_config(kind, layer_types=[name] * 3), "float32").spec
    assert "has attention" in one_line(lambda: BlockPlans.of(spec, Plan(), Workload((5, 6), 3), Site()))


BESIDE = {
    "kind": (*GATED, "lfm2", "kimi-linear"),
    "percent": (ON_HOST, MIXED, ON_DISK),
    ("gpu_batch_size", "num_gpu_batches"): ((2, 2), (3, 1), (1, 4)),
    "sep_layer": (True, False),
    "policy": (POLICIES[0], POLICIES[1]),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", most_of(BESIDE))
def test_the_host_attends_where_attention_has_a_gate(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """The gate is handed on with the hidden states to where the outcome comes."""
    hold_contract(replace(case_of(values), device="pretended", attend_on=HOST), checkpoints, offload)


def test_attention_beside_a_scan_is_not_for_the_host(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = Case("falcon-h1", ON_HOST, device="pretended", attend_on=HOST)
    assert "attention of" in one_line(lambda: case.open(checkpoints, offload))


@pytest.mark.parametrize(("state", "tiers"), [("0,0", {"disk"}), ((0, 100), {"host"}), (None, {"host", "disk"})])
def test_states_lie_where_they_are_told_to(
    state: Any, tiers: set[str], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """By themselves they follow KV."""
    told = options_of(Plan)["state"].allowed.typed(state) if isinstance(state, str) else state
    case = Case("qwen3-5", (0, 100, 0, 50, 100, 0), device="pretended")
    with case.open(checkpoints, offload, state=told) as llm:
        assert set(llm.planned(Workload(case.lengths, case.gen_len)).blocks.first.placement.state.values()) == tiers
        compare(case, checkpoints, *generate_with(llm, case))


def test_a_model_without_states_has_no_shares_of_them(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt").open(checkpoints, offload, state=(100, 0)) as llm:
        assert "have no state beside their KV" in one_line(lambda: llm.generate("one"))
    assert "state is (60, 60)" in one_line(lambda: Plan.create(state=(60, 60)))


@pytest.mark.parametrize("device", ["cpu", "pretended"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_states_that_no_later_visit_needs_have_one_home(
    kind: str, device: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """They are not moved, and all layers and batches have them in one place after the other."""
    case = Case(kind, ON_DISK, MANY, 1, gpu_batch_size=2, num_gpu_batches=3, prefill_tokens=7, device=device)
    with case.open(checkpoints, offload) as llm:
        planned = llm.planned(Workload(case.lengths, 1))
        assert "states" not in planned.footprint.parts["disk"] and not planned.footprint.parts["host"].get("state buffers")
        tier = "host" if device == "cpu" else "device"
        assert planned.blocks.first.tiers[2] == (tier,) * 6
        one = max(region_bytes(layout.nbytes) for layout in planned.blocks.first.states.values())
        assert planned.footprint.parts[tier]["states"] == one
        compare(case, checkpoints, *generate_with(llm, case))
    stream.hold_contract(replace(case, schedule="zigzag"), (1,) * len(MANY), checkpoints, offload)


def test_what_is_held_on_each_tier_is_what_is_counted(checkpoints: Checkpoints, offload: Path) -> None:
    """States are the same for any length, and follow the shares of KV."""
    counted = []
    for length in (4, 40):
        with Case("qwen3-5", ON_DISK).open(checkpoints, offload) as llm:
            planned = llm.planned(Workload.uniform(4, length, 3))
            counted.append(planned.footprint.parts["disk"]["states"])
            assert planned.footprint.parts["host"]["state buffers"] > 0
    heads, inputs = 4 * 24 * 16 * 4, 3 * (2 * 2 * 24 + 4 * 16) * 4
    assert counted == [2 * 2 * -(-2 * (heads + inputs) // 4096) * 4096] * 2  # two layers, two batches, two rows


@pytest.mark.parametrize("device", ["cpu", "pretended"])
def test_layers_take_no_buffers_for_what_they_have_not(
    device: str, checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight layers two have states, and one has KV. All that is allocated is counted, and no more."""
    case = Case("qwen3-5-moe", ON_DISK, EQUAL, num_gpu_batches=1, buffers=4, device=device)
    made: dict[str, list[int]] = {}

    def noting(name: str, allocate: Callable[..., None]) -> Callable[..., None]:
        def allocate_and_note(store: StateStore | KVStore, *given: Any) -> None:
            allocate(store, *given)
            held = [[ring[place].nbytes for place in range(len(ring))] for ring in (store._host_ring, store._device_ring)]
            staged = getattr(store, "_staging", None)
            made[name] = [len(held[0]), sum(held[0]) + (0 if staged is None else staged.nbytes), len(held[1]), sum(held[1])]

        return allocate_and_note

    monkeypatch.setattr(StateStore, "_allocate_rings", noting("state buffers", StateStore._allocate_rings))
    monkeypatch.setattr(KVStore, "_allocate", noting("KV buffers", KVStore._allocate))
    with case.open(checkpoints, offload) as llm:
        planned = llm.check(Workload(case.lengths, case.gen_len))
        compare(case, checkpoints, *generate_with(llm, case))
        said = lines_of(PlanReport.of(llm.loaded, planned).entries())
    schedule, on_device = planned.blocks.first.schedule, 2 * (device != "cpu")
    assert any(" 4 buffers for weights, 2 for KV and states and 5 for activations," in line for line in said)
    assert [schedule.buffers_of(data) for data in (Data.KV, Data.STATE, Data.HIDDEN)] == [2, 2, 5]
    for name in ("KV buffers", "state buffers"):
        on_host, there = (planned.footprint.parts.get(tier, {}).get(name, 0) for tier in (HOST, DEVICE))
        assert made[name] == [2, on_host, on_device, there]


def test_states_in_bf16_take_half_of_what_is_held_and_moved(checkpoints: Checkpoints, offload: Path) -> None:
    """But for the inputs of convolutions, which stay what they are."""
    found = []
    for dtype in STATE_DTYPES:
        with Case("qwen3-5", ON_DISK, EQUAL, state_dtype=dtype).open(checkpoints, offload) as llm:
            planned = llm.planned(Workload(EQUAL, 3))
            inputs, heads = (own.nbytes for own in llm.spec.layers[llm.spec.state_layers[0]].states)
            states = planned.blocks.first.states
            found.append((heads, inputs, planned.footprint.parts["disk"]["states"], next(iter(states.values())).row_bytes))
    (whole, inputs, held, row), (half, same, less, smaller) = found
    assert whole == 2 * half and inputs == same and row - smaller == half
    assert 0 < held - less <= 8 * half + 4096 * 4


@pytest.mark.parametrize("kind", ["lfm2", "opt"])
def test_rows_without_matrices_have_nothing_to_round(kind: str, checkpoints: Checkpoints, offload: Path) -> None:
    said = one_line(lambda: Case(kind, state_dtype=BFLOAT16).open(checkpoints, offload))
    assert "state_dtype 'bfloat16'" in said and "have none" in said
    assert "state_dtype 'float16'" in one_line(lambda: Plan.create(state_dtype="float16"))


def not_rounded() -> AbstractContextManager[object]:
    """What a prompt leaves is not kept."""
    return patch.object(StatesInPassing, "keep", lambda self: None)


def rounded_in_pieces() -> AbstractContextManager[object]:
    """Each piece of a prompt leaves its states rounded."""
    usual = RowStates.passed

    def rounded(self: RowStates, name: str, *given: Any) -> Any:
        made = usual(self, name, *given)
        if given[0][0].shape[1] > 1 and self.by_name[name].ndim == 4:
            self.by_name[name].copy_(self.by_name[name].bfloat16())
        return made

    return patch.object(RowStates, "passed", rounded)


@pytest.mark.parametrize("fault", [nullcontext, not_rounded, rounded_in_pieces])
def test_states_are_rounded_behind_a_prompt_and_behind_each_step(
    fault: Callable[[], AbstractContextManager[object]], checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("qwen3-5", ON_DISK, (14, 9, 12), 4, prefill_tokens=4, state_dtype=BFLOAT16)
    for rows in case.batches():
        checkpoints.resident_logits(case, rows)  # without the fault
    with fault(), nullcontext() if fault is nullcontext else pytest.raises(AssertionError):
        hold_contract(case, checkpoints, offload)


@pytest.mark.parametrize("percent", [ON_DISK, RESIDENT])
def test_a_report_says_what_states_hold_and_what_of_them_moves(
    percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("qwen3-5", percent, EQUAL)
    with case.open(checkpoints, offload) as llm:
        planned = llm.planned(Workload(case.lengths, case.gen_len))
        report = PlanReport.of(llm.loaded, planned)
    states = planned.blocks.first.states
    found, all_bytes = report.as_json(), sum(layout.nbytes for layout in states.values())
    tier = "disk" if percent == ON_DISK else "host"
    assert found["placed_bytes"]["states"] == {"device": 0, "host": 0, "disk": 0, tier: all_bytes}  # type: ignore[index]
    assert found["state_row_bytes"] == sum(states[layer, 0].row_bytes for layer in llm.spec.state_layers)
    assert found["state_step_bytes"] == (all_bytes if percent == ON_DISK else 0)
    (line,) = (line for line in report.lines() if line.startswith("states  ") and "a row" in line)
    assert ("a step brings" in line) == (percent == ON_DISK)


def test_tokens_of_prompts_pass_states_at_the_rate_of_arithmetic() -> None:
    spec = create_model(tiny_config("qwen3-5"), "float32").spec
    values = sum(prod(state.shape) for state in spec.layers[spec.state_layers[0]].states if state.is_of_heads)
    seconds = []
    for length in (4, 14):
        planned = BlockPlan.of(spec, Plan(), block_of([[length] * 3]), Site())
        pricing = Pricing(planned, replace(MACHINE, device="cpu"))
        seconds.append([pricing.compute_parts(Key(Op.COMPUTE, step, spec.state_layers[0], 0))["states"] for step in (0, 1)])
    (short, step), (long, same_step) = seconds
    assert long - short == pytest.approx(8 * values * 3 * 10 / MACHINE.attention_flops_per_s["float32"])
    assert 0 < step == same_step < short
