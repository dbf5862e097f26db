"""Pricing: what a task costs on a machine, part by part, and that sums over a step are sums over its tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from h2o_flexgen.core.site import DISK, HOST, AdapterRoom, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing, lane_bounds
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import LOAD, READ, Key, Op, Visit
from h2o_flexgen.schedule.schedule import Schedule
from tests.helpers.inverted import Inverted, registered
from tests.planning.test_machine import SMALL
from tests.planning.worlds import block_of, in_halves, last_block_of, of_unlike_blocks, tiny_spec, with_experts

MACHINE = replace(
    SMALL,
    flops_per_s={"float32": ((2, 7e9), (4, 9e9))},
    attention_flops_per_s={"float32": 3e9, "group4": 1e9},
    unpacked_values_per_s={"group4": 4e8},
    head_seconds=2e-9,
    prompt_flops_per_s={"plain": 4e9, "scored": 2e9},
    decoded_values_per_s={"tiles4": 5e8},
    values_per_s=1e9,
    visit_seconds={"attention": 3e-4, "mlp": 1e-4, "eviction": 7e-4},
    unpinned_to_device_per_s=3e9,
    unpinned_to_host_per_s=2e9,
)
PERCENT = (30, 20, 30, 40, 50, 50)


def planned(block: Block, accelerator: bool = True, format: str = PLAIN, **options: object) -> BlockPlan:
    plan = Plan.create(**{"num_gpu_batches": 3, **options}).with_percent(PERCENT)
    plan = plan.at(Site(accelerator))
    spec = tiny_spec() if format == PLAIN else tiny_spec().packed(format)
    return BlockPlan.of(replace(spec, kv_codec=plan.kv_codec), plan, block, Site(accelerator))


def on(machine: Machine, accelerator: bool) -> Machine:
    return machine if accelerator else replace(machine, device="cpu")


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heavy", [None, 3])
@pytest.mark.parametrize("attend_on", ["device", "host"])
@pytest.mark.parametrize("block", [block_of([[4, 2], [3, 3], [5]]), last_block_of(20, (4, 1, 7))], ids=["new", "lives on"])
def test_the_seconds_of_a_step_are_those_of_its_tasks(
    schedule: str, accelerator: bool, heavy: int | None, attend_on: str, block: Block
) -> None:
    policy = {"kv_policy": "h2o", "heavy": heavy} if heavy else {}
    pricing = Pricing(planned(block, accelerator, schedule=schedule, attend_on=attend_on, **policy), on(MACHINE, accelerator))
    for step in range(block.gen_len):
        total: Counter[str] = Counter()
        for task in pricing.schedule.tasks():
            if task.step == step:
                total[task.lane] += pricing.seconds(task) - pricing.latency(task.op)  # type: ignore[assignment]
        assert pricing.lane_seconds(step) == pytest.approx(dict(total))


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("format", [PLAIN, "group4"])
def test_tasks_that_count_as_alike_cost_the_same(accelerator: bool, format: str) -> None:
    """`seconds` keeps what it found of a kind of task: of each alone it must find the same."""
    of = planned(block_of([[4, 2], [3, 3], [5]]), accelerator, format, kv_codec=format)
    pricing = Pricing(of, on(MACHINE, accelerator))
    for task in pricing.schedule.tasks():
        assert Pricing(of, on(MACHINE, accelerator)).seconds(task) == pricing.seconds(task), task


@pytest.mark.parametrize("percent", [(0, 100, 0, 50, 0, 100), (0, 50, 0, 50, 0, 100)])
def test_a_price_does_not_depend_on_what_was_asked_before(percent: tuple[int, ...]) -> None:
    """Some of alike batches have their KV on disk, where steps choose of it, and others have it in memory."""
    plan = Plan.create(kv_recall=0.25, num_gpu_batches=4, gpu_batch_size=8).with_percent(percent).at(Site())
    of = BlockPlan.of(in_halves(tiny_spec(3, width=64)), plan, block_of([[100] * 8] * 4), Site())
    machine, keys = on(MACHINE, False), [*of.schedule.in_step(1)]
    alone = {key: Pricing(of, machine).seconds(key) for key in keys}
    assert {of.schedule.traffic.chooses(Visit(*key[1:])) for key in keys if key.layer in of.spec.kv_layers} == {False, True}
    for asked in (keys, keys[::-1]):
        pricing = Pricing(of, machine)
        assert {key: pricing.seconds(key) for key in asked} == alone
    by_lane = Counter[str]()
    for key, seconds in alone.items():
        by_lane[key.op.lane] += of.schedule.parts(key.op) * (seconds - pricing.latency(key.op))  # type: ignore[assignment]
    assert Pricing(of, machine).lane_seconds(1) == pytest.approx(dict(by_lane))


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_is_alike_in_a_step_is_priced_once(accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice as many layers no more tasks are looked at. Their seconds are those of all tasks."""
    looked_at = Counter[int]()

    def counted(schedule: Schedule, visit: Visit) -> Iterator[Key]:
        looked_at[schedule.traffic.layers] += 1
        return of_visit(schedule, visit)

    of_visit = Schedule.of_visit
    for blocks in (10, 20):
        spec, plan = (
            of_unlike_blocks(blocks, single=2, slices=4),
            Plan(num_gpu_batches=3).with_percent((0, 100, 0, 100, 0, 100)),
        )
        of = BlockPlan.of(spec, plan.at(Site(accelerator)), block_of([[4, 2]] * 3), Site(accelerator))
        pricing = Pricing(of, on(MACHINE, accelerator))
        each = Counter[str]()
        for key in of.schedule.in_step(1):
            each[key.op.lane] += of.schedule.parts(key.op) * (pricing.seconds(key) - pricing.latency(key.op))  # type: ignore[assignment]
        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "of_visit", counted)
            assert pricing.lane_seconds(1) == pytest.approx(dict(each))
    few, many = looked_at.values()
    assert few == many < 30


def test_hidden_states_of_equal_batches_cost_what_their_own_tier_takes() -> None:
    """Through memory and link; from disk the disk's own time as well."""
    plan = Plan(num_gpu_batches=2).with_percent((100, 0, 100, 0, 0, 50))
    of = BlockPlan.of(tiny_spec(), plan, block_of([[4, 4], [4, 4]]), Site(accelerator=True))
    seconds = {
        tier: Pricing(of, MACHINE).seconds(Key(Op.LOAD_H, 0, 1, batch)) for batch, tier in enumerate(of.placement.hidden)
    }
    pricing = Pricing(of, MACHINE)
    both = [pricing.seconds(Key(Op.LOAD_H, 0, 1, batch)) for batch in (0, 1)]
    assert sorted(of.placement.hidden) == ["disk", "host"] and both == [seconds[tier] for tier in of.placement.hidden]
    assert seconds["disk"] > seconds["host"]


def test_further_parts_of_a_visit_cost_less_than_the_first_where_that_is_known() -> None:
    """Three prompts of unlike lengths, each a part of its own."""
    first = Key(Op.COMPUTE, 0, 1, 0)

    def overhead(machine: Machine, **options: object) -> float:
        return Pricing(planned(block_of([[9, 5, 2]]), False, **options), on(machine, False)).compute_parts(first)["overhead"]

    warm = replace(MACHINE, part_seconds={"attention": 1e-4})
    assert overhead(MACHINE, prefill_tokens=9) == pytest.approx(3 * 3e-4)
    assert overhead(warm, prefill_tokens=9) == pytest.approx(3e-4 + 2 * 1e-4)
    assert overhead(warm, prefill_tokens=1000) == pytest.approx(3e-4), "all in one part"


def test_what_a_read_waits_for_beside_its_bytes_is_no_work_of_its_lane() -> None:
    """Two workers read. A lane with one worker does one task after the other, with all that it costs."""
    pricing = Pricing(planned(block_of([[4, 2]]), False), on(MACHINE, False))
    assert {op for op in Op if pricing.latency(op)} == {op for op in Op if op.lane == READ}
    read = next(task for task in pricing.schedule.tasks() if task.op is Op.READ_W)
    nbytes = pricing.cost.nbytes(read)
    assert pricing.latency(Op.READ_W) == MACHINE.task_seconds
    assert pricing.seconds(read) == pytest.approx(nbytes / MACHINE.disk_read_per_s + MACHINE.task_seconds)


def test_the_bounds_of_a_step_are_bytes_over_bandwidth_and_flops_over_their_rate() -> None:
    of = planned(block_of([[4, 2], [3, 3]]), num_gpu_batches=2)
    machine = replace(SMALL, flops_per_s={"float32": ((2, 7e9), (4, 9e9))}, task_seconds=1.0, attention_bytes_per_s={})
    bounds, cost = lane_bounds(of, 1, machine), Pricing(of, machine).cost
    tasks = [task for task in of.schedule.tasks() if task.step == 1]
    for lane in ("read", "load", "store", "write"):
        assert bounds[lane] == pytest.approx(
            sum(cost.nbytes(task) for task in tasks if task.lane == lane) / machine.bandwidth(lane)
        )
    values = sum(layer.matmul_values for layer in of.spec.layers)
    assert bounds["compute"] == pytest.approx(2 * (2 * 2 * values) / 7e9)  # two batches of two rows


def parts_of(of: BlockPlan, step: int, kind: str, batch: int = 0, machine: Machine = MACHINE) -> dict[str, float]:
    layer = next(index for index, layer in enumerate(of.spec.layers) if layer.functions == (kind,))
    return Pricing(of, on(machine, False)).compute_parts(Key(Op.COMPUTE, step, layer, batch))


def test_rows_have_adapters_of_which_all_are_asked_for_alike() -> None:
    room = AdapterRoom((("0.q", 960), ("0.o", 480)), working=10_000, number=2)
    bare = planned(block_of([[4, 2]]), False)
    of = replace(bare, adapters=room)
    prompt, step = parts_of(of, 0, "attention"), parts_of(of, 2, "attention")
    values = (960 + 480) / 4
    assert step["adapters"] == pytest.approx(2 * values * 1 / 7e9)  # two rows: one of each adapter
    assert prompt["adapters"] == pytest.approx(2 * values * 4 / 9e9)
    first, second = (index for index, layer in enumerate(of.spec.layers) if layer.functions == ("attention",))
    priced = Pricing(of, on(MACHINE, False))
    keys = [Key(Op.COMPUTE, 2, layer, 0) for layer in (first, second)]
    assert priced.seconds(keys[0]) == pytest.approx(priced.seconds(keys[1]) + step["adapters"]), "layers are told apart"
    assert priced.memory_bytes(2) == Pricing(bare, on(MACHINE, False)).memory_bytes(2) + 960 + 480
    without = replace(on(MACHINE, False), flops_per_s={"float16": ((2, 7e9), (4, 9e9))})
    half = replace(of, spec=replace(of.spec, dtype="float16"))
    assert parts_of(half, 2, "attention", machine=without)["adapters"] == step["adapters"], "as quick as what is known"


def test_the_parts_of_an_attention_by_hand() -> None:
    of = planned(block_of([[4, 2]]), False)
    prompt, step = parts_of(of, 0, "attention"), parts_of(of, 2, "attention")
    assert prompt["products"] == pytest.approx(2 * 4 * 8 * 8 * 8 / 9e9)  # 2 x 4 tokens
    assert prompt["attention"] == pytest.approx(4 * 8 * 2 * 4 * 2.5 / 4e9)
    assert prompt["values"] == pytest.approx(8 * 4 * 16 / 1e9) and prompt["overhead"] == 3e-4
    assert step["products"] == pytest.approx(2 * 4 * 8 * 8 * 2 / 7e9)
    heads = 2 * 2 * 2e-9  # of each row and KV head
    assert step["attention"] == pytest.approx(
        max(2 * 6 * 2 * 8 * 4 / 20e9, 4 * 8 * 2 * 6 / 3e9) + heads
    )  # 5 held and a new one
    assert step["decoding"] == 0.0


def test_what_is_scored_costs_more_only_where_a_token_may_go() -> None:
    options = {"kv_policy": "h2o", "recent": 1}
    assert parts_of(planned(block_of([[4, 2]]), False, heavy=2, **options), 0, "attention")["attention"] == pytest.approx(
        2 * parts_of(planned(block_of([[4, 2]]), False), 0, "attention")["attention"]
    )
    kept = planned(block_of([[4, 2]]), False, heavy=20, **options)
    assert parts_of(kept, 0, "attention") == parts_of(planned(block_of([[4, 2]]), False), 0, "attention")


def test_a_visit_that_evicts_costs_more_than_one_that_does_not() -> None:
    of = planned(block_of([[4, 4]], gen_len=5), False, kv_policy="h2o", heavy=4, recent=2)
    assert [of.kv.occupancies[0][0].evicts_at(step) for step in range(4)] == [False, False, False, True]
    assert [parts_of(of, step, "attention")["overhead"] for step in range(4)] == pytest.approx([3e-4, 3e-4, 3e-4, 1e-3])
    assert parts_of(of, 3, "mlp")["overhead"] == 1e-4
    pruned = planned(block_of([[4, 2], [3]]), False, kv_policy="h2o", heavy=2, recent=1)
    assert parts_of(pruned, 0, "attention")["overhead"] == pytest.approx(1e-3)


def test_packed_weights_are_multiplied_as_they_are_by_few_rows_and_decoded_once_for_more() -> None:
    rows, rates = 17, {"decoded_values_per_s": {"inverted": 5e8}, "packed_flops_per_s": {"inverted": ((1, 2e9), (2, 4e9))}}
    machine = replace(MACHINE, **rates)
    with registered(Inverted(few_rows=rows - 1)) as format:
        few = parts_of(planned(block_of([[4, 2]]), False, format.name), 1, "mlp", machine=machine)
        of = planned(block_of([[4] * rows, [3] * rows]), False, format.name)
        first, second = (parts_of(of, 1, "mlp", batch, machine) for batch in (0, 1))
    assert few["decoding"] == 0.0 and few["products"] == pytest.approx(2 * 2 * 8 * 32 * 2 / 4e9)
    assert first["decoding"] == pytest.approx(2 * 8 * 32 / 5e8) and second["decoding"] == 0.0
    assert first["products"] == second["products"] == pytest.approx(2 * 2 * 8 * 32 * rows / 9e9)


@pytest.mark.parametrize("measured", [{8: 3e8, 4: 5e8}, {8: 3e8}, {}])
def test_a_codec_that_was_not_profiled_is_not_decoded_for_nothing(measured: dict[int, float]) -> None:
    """It is as slow as the slowest that was, or else as its bytes are read and its values written in memory."""
    rates = {
        "decoded_values_per_s": {f"tiles{bits}": rate for bits, rate in measured.items()},
        "unpacked_values_per_s": {f"group{bits}": rate for bits, rate in measured.items()},
    }
    machine = replace(SMALL, flops_per_s=MACHINE.flops_per_s, **rates)
    rate = measured.get(4) or measured.get(8) or 20e9 / (36 / 64 + 4)
    of = planned(block_of([[4, 2]]), False, "group4", kv_codec="group4")
    mlp, attention = (Pricing(of, on(machine, False)).compute_parts(Key(Op.COMPUTE, 1, layer, 0)) for layer in (2, 1))
    assert mlp["decoding"] == pytest.approx(2 * 8 * 32 / rate)
    assert attention["attention"] >= 2 * 5 * 2 * 2 * 4 / rate


def test_attention_beside_the_data_moves_no_kv_over_the_link_but_what_is_new() -> None:
    block = block_of([[4, 2], [3, 3], [5]])
    here, there = (planned(block, attend_on=tier) for tier in ("device", "host"))
    crossing = {(task.op, task.step) for task in there.schedule.tasks() if task.op in (Op.LOAD_KV, Op.STORE_KV)}
    assert crossing == {(Op.STORE_KV, 0)}
    (layer, batch), _ = next((place, tier) for place, tier in there.placement.kv.items() if tier == HOST)
    key, priced = Key(Op.COMPUTE, 1, layer, batch), Pricing(there, MACHINE)
    rows, held = block.batches[batch].size, block.batches[batch].prompt_len + 1
    link = rows * 6 * 4 * 4 / 11e9 + rows * 2 * 4 * 4 / 12e9 + 2 * 5e-5
    assert priced.compute_parts(key)["attention"] == pytest.approx(link)
    assert Pricing(here, MACHINE).compute_parts(key)["attention"] < link
    beside = rows * held * 2 * 8 * 4 / 20e9 + rows * 2 * 2e-9 + 5e-5
    assert priced.seconds(key._replace(op=Op.ATTEND)) == pytest.approx(beside)
    prompts = [Pricing(of, MACHINE).compute_parts(Key(Op.COMPUTE, 0, layer, batch))["attention"] for of in (here, there)]
    assert prompts[0] == prompts[1]
    whole_rows = rows * there.kv.occupancies[0][batch].capacity * 2 * 8 * 4
    assert priced.seconds(Key(Op.STORE_KV, 0, layer, batch)) == pytest.approx(whole_rows / 11e9 + 5e-5)


def test_weights_that_are_not_page_locked_take_longer() -> None:
    block = block_of([[4, 2]])
    pinned, unpinned = (Pricing(planned(block, pin_weight=pin), MACHINE).lane_seconds(1) for pin in (True, False))
    assert unpinned["load"] > pinned["load"] and unpinned["store"] == pinned["store"]


def test_packed_kv_is_unpacked_for_all_queries_of_a_key_at_once() -> None:
    of = planned(block_of([[4, 2]]), False, kv_codec="group4")
    slots = 2 * 6
    computed = 4 * 8 * slots / 1e9 + 2 * 8 * slots / 4e8
    assert parts_of(of, 2, "attention")["attention"] == pytest.approx(computed + 2 * 2 * 2e-9)


@pytest.mark.parametrize("kv_codec", ["plain", "group4"])
def test_latents_are_compared_and_attended_at_rates_of_their_own(kv_codec: str) -> None:
    rates = {part: ((1, 9e11), (32, rate)) for part, rate in (("whole", 5e9), ("choosing", 2e9), ("chosen", 3e9))}
    machine = replace(MACHINE, latents_flops_per_s=rates, attention_bytes_per_s={}, head_seconds=0.0)
    spec = replace(tiny_spec(), heads=32, kv_heads=1, head_dim=576, values_in_keys=512, kv_codec=kv_codec)
    held, of_slot, to_unpack = 2 * 102, 32 * 576, 576 / 4e8 if kv_codec == "group4" else 0.0
    found = []
    for share in (1.0, 0.25):
        plan = Plan.create(kv_codec=kv_codec, kv_recall=share, num_gpu_batches=3).at(Site())
        of = BlockPlan.of(spec, plan, block_of([[100, 100]]), Site())
        found.append(parts_of(of, 2, "attention", machine=machine)["attention"])
    chosen = 2 * 26
    assert found[0] == pytest.approx(held * (4 * of_slot / 5e9 + to_unpack))
    assert found[1] == pytest.approx(held * 2 * of_slot / 2e9 + chosen * (4 * of_slot / 3e9 + to_unpack))


def test_the_host_reads_what_steps_choose_of_it_and_its_index() -> None:
    of_share = []
    for share in (1.0, 0.25):
        plan = Plan.create(kv_recall=share, attend_on=HOST, num_gpu_batches=3).with_percent((100, 0, 0, 100, 100, 0))
        of = BlockPlan.of(tiny_spec(), plan, block_of([[100, 100]]), Site(True))
        of_share.append(Pricing(of, MACHINE).seconds(Key(Op.ATTEND, 1, of.spec.kv_layers[0], 0)))
    beside, of_head = 2 * 2 * 2e-9 + 5e-5, 2 * 4 * 4  # bytes of a slot, and 36 of its index
    assert of_share[0] == pytest.approx(2 * 101 * 2 * of_head / 20e9 + beside)
    assert of_share[1] == pytest.approx((2 * 26 * 2 * of_head + 2 * 101 * 2 * 36 / 0.62) / 20e9 + beside)


def test_a_device_brings_what_steps_choose_at_half_the_pace_of_a_copy() -> None:
    plan = Plan.create(kv_recall=0.25, num_gpu_batches=3).with_percent((100, 0, 0, 100, 100, 0))
    of = BlockPlan.of(tiny_spec(), plan, block_of([[100, 90]]), Site(True))
    place, of_head = of.spec.kv_layers[0], 2 * 4 * 4  # bytes of a slot
    load, store = (Key(op, 1, place, 0) for op in (Op.LOAD_KV, Op.STORE_KV))
    priced = Pricing(of, MACHINE)
    assert priced.cost.nbytes(load) == (26 - 1 + 23 - 1) * 2 * of_head
    assert priced.cost.nbytes(store) == 2 * 2 * of_head
    assert priced.seconds(load) == pytest.approx(priced.cost.nbytes(load) / (MACHINE.bandwidth(LOAD) / 2) + 5e-5)
    assert 0 < priced.seconds(Key(Op.CHOOSE, 1, place, 0)) < priced.seconds(Key(Op.COMPUTE, 1, place, 0))


def test_of_a_disk_beside_a_device_the_processor_reads_what_it_reads_alone_and_the_link_has_what_it_has_of_the_host() -> None:
    plan = Plan.create(kv_recall=0.25, num_gpu_batches=3)
    block, read, load = block_of([[100, 90]]), *(Key(op, 1, tiny_spec().kv_layers[0], 0) for op in (Op.READ_KV, Op.LOAD_KV))

    def priced(of_host: int, site: Site) -> Pricing:
        return Pricing(BlockPlan.of(tiny_spec(), plan.with_percent((100, 0, 0, of_host, 100, 0)), block, site), MACHINE)

    both, of_disk, of_host = priced(0, Site(True)), priced(0, Site()), priced(100, Site(True))
    assert (both.cost.nbytes(read), both.cost.nbytes(load)) == (of_disk.cost.nbytes(read), of_host.cost.nbytes(load))
    assert both.seconds(read) == of_disk.seconds(read) and both.seconds(load) == of_host.seconds(load)


def test_on_average_a_journal_moves_as_much_as_step_by_step() -> None:
    of = planned(block_of([[6, 6]], gen_len=40), False, kv_policy="h2o", heavy=6, recent=2)
    exact, averaged = (Pricing(of, on(MACHINE, False), averaged=averaged) for averaged in (False, True))
    (place,) = (place for place, tier in of.placement.kv.items() if tier == DISK)
    steps = range(of.kv.occupancies[0][0].first_evicting_step, 40)
    for op in (Op.READ_KV, Op.WRITE_KV):
        each, same = ([one.seconds(Key(op, step, *place)) for step in steps] for one in (exact, averaged))
        assert max(each) > min(each) and set(same) == {same[0]} and sum(same) == pytest.approx(sum(each))


@pytest.mark.parametrize(("rows", "asked"), [(1, 1 / 8), (2, 15 / 64), (64, 1 - (7 / 8) ** 64)])
def test_few_rows_are_multiplied_with_the_experts_that_they_ask_for(rows: int, asked: float) -> None:
    """Each of these meets so many rows as the others leave it, and what is decoded or read from memory are these alone."""
    spec, block = with_experts(1 / 8), block_of([[4] * rows])
    of = BlockPlan.of(spec, Plan(gpu_batch_size=rows), block, Site())
    step = parts_of(of, 1, "mlp")
    values, met = 2 * 4 * 8 * 8, rows / 8 / asked
    rate = on(MACHINE, False).flop_rate("float32", met)
    assert step["products"] == pytest.approx(asked * 2 * values * met / rate)
    packed = BlockPlan.of(spec.packed("group4"), Plan(gpu_batch_size=rows), block, Site())
    assert parts_of(packed, 1, "mlp")["decoding"] == pytest.approx(asked * values / 5e8)
    dense = BlockPlan.of(tiny_spec(), Plan(gpu_batch_size=rows), block, Site())
    read = [Pricing(one, on(MACHINE, False)).bounds(1)["memory"] for one in (of, dense)]
    assert read[1] - read[0] == pytest.approx((1 - asked) * 2 * values * 4 / MACHINE.host_read_per_s)
