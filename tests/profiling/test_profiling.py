"""Profiles: every figure that pricing asks for is there, is of the work that pricing means, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.formats.kernel_sizes import ManyQueries
from h2o_flexgen.formats.kernel_table import (
    CPU,
    PRODUCT,
    PRODUCT_OPS,
    TORCH,
    Kernel,
    Processor,
    choose,
    measured_formats,
    rounds,
)
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.kv import cache, key_index
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.disk import DiskRegion, DiskTier, TokensOnDisk
from h2o_flexgen.memory.host import HostTier, peak_resident_bytes
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import BORROWED, Machine, machine_file, save_machine, saved_machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.profiling import attention_rates, busy_cores, moving, products, profile_cache
from h2o_flexgen.profiling.bench import (
    FULL,
    QUICK,
    Bench,
    BytePool,
    Clock,
    OnSubject,
    ProfileWatch,
    Stopwatch,
    Subject,
    TimeLimit,
)
from h2o_flexgen.profiling.measured_machine import Measurement, RoundsTaken, profile
from h2o_flexgen.profiling.products import small_llama, small_opt
from h2o_flexgen.profiling.profile_cache import profile_apart, profiled
from h2o_flexgen.profiling.visits import Between, visits
from h2o_flexgen.schedule.ops import Task
from tests.helpers.inverted import Inverted, registered
from tests.helpers.pretended import PretendedDevice
from tests.helpers.threads import new_threads
from tests.profiling.profiles import TINY


@dataclass(frozen=True)
class OneSecond(Clock):
    """For it every call takes a second: a rate is then the work of a call."""

    def of(self, action: object) -> float:
        action()  # type: ignore[operator]
        return 1.0


BEFORE, INSIDE = "making ready", (", step ", ", writing ")  # told before the first measurement, and during one


def untouched() -> Bench:
    """Measurements write to its pool: values of one type are none of another."""
    return Bench(OneSecond(Device(), 0.0), BytePool.filled(HostTier(), TINY.pool_bytes, TimeLimit(math.inf)))


BENCH = untouched()


def figures(*subjects: Subject) -> dict[str, float]:
    """At their full sizes."""
    with torch.inference_mode():
        return {name: value for subject in subjects for name, value in subject.measure(subject.sizes[-1]).items()}


def clock_of_steps() -> Callable[[], float]:
    """A millisecond passes with each look at it."""
    count = itertools.count()
    return lambda: next(count) / 1000


# -- the whole -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[tuple[str, int, int]], Path]:
    told: list[tuple[str, int, int]] = []
    folder = tmp_path_factory.mktemp("disk") / "not" / "there"
    machine = profile(Device(), folder, "here", None, TINY, lambda *one: told.append(one), now=clock_of_steps())
    return machine, told, folder


def test_every_field_is_there_finite_and_above_zero(found: tuple[Machine, object, object]) -> None:
    content = asdict(found[0])
    assert content.pop("device_bytes") == 0
    assert content.pop("not_measured") == () and content.pop("measurements") == 1
    content.pop("disturbed")
    assert content.pop("borrowed") == ()
    values = {name: value for name, value in content.items() if not isinstance(value, str)}
    not_figures = {"name", "device", "device_bytes", "not_measured", "disturbed", "measurements", "borrowed"}
    assert set(values) == {one.name for one in fields(Machine)} - not_figures
    for name, value in values.items():
        is_curve = name in ("flops_per_s", "packed_flops_per_s", "latents_flops_per_s")
        curves = [rate for curve in value.values() for _, rate in curve] if is_curve else []
        plain = list(value.values()) if isinstance(value, dict) and not curves else [] if curves else [value]
        for number in [*curves, *plain]:
            assert math.isfinite(number) and number > 0, (name, number)
    assert 1 <= found[0].disk_both <= 2


def test_curves_have_the_rows_that_they_are_asked_for(found: tuple[Machine, object, object]) -> None:
    machine = found[0]
    assert {dtype: [rows for rows, _ in curve] for dtype, curve in machine.flops_per_s.items()} == {
        "bfloat16": products.Curve(PRODUCT, PLAIN, "bfloat16").rows(BENCH, TINY.rows)
    }
    assert set(machine.attention_flops_per_s) == {"bfloat16", "group4", "group8"}
    assert (set(machine.prompt_flops_per_s), set(machine.attention_bytes_per_s)) == ({"plain", "scored"}, {"host"})
    assert (set(machine.visit_seconds), set(machine.decoded_values_per_s)) == ({"attention", "mlp"}, set(measured_formats()))
    heads = {part: tuple(queries for queries, _ in curve) for part, curve in machine.latents_flops_per_s.items()}
    assert heads == dict.fromkeys(("whole", "choosing", "chosen"), attention_rates.query_heads())
    packed = {price: [rows for rows, _ in curve] for price, curve in machine.packed_flops_per_s.items()}
    assert packed == multiplied_here(Site().usual_dtype(), TINY.rows)


def multiplied_here(dtype: str, rows: tuple[int, ...]) -> dict[str, list[int]]:
    """The rows of packed products, by the price of the kernel that there is for them."""
    found = dict[str, list[int]]()
    known = itertools.product(PRODUCT_OPS, measured_formats())
    for op, form in (pair for pair in known if pair[0] == PRODUCT or rounds(pair[1])):
        for count in products.Curve(op, form, dtype).rows(BENCH, products.wanted_rows(form, TINY)):
            if kernel := choose(op, form, dtype, processor(CPU).runs, count):
                found.setdefault(kernel.price, []).append(count)
    return found


def test_a_profile_is_kept_and_loaded_as_it_is(found: tuple[Machine, object, object], tmp_path: Path) -> None:
    found[0].save(tmp_path / "here.yaml", "of a test")
    assert Machine.load(tmp_path / "here.yaml") == found[0]


def test_a_block_can_be_priced_with_it(found: tuple[Machine, object, object]) -> None:
    model = small_opt("bfloat16", 128, 2)
    (block,) = Workload.uniform(4, 8, 3).blocks(4, 1)
    pricing = Pricing(BlockPlan.of(model.spec, Plan().with_percent((0, 50, 0, 100, 100, 0)), block, Site()), found[0])
    assert 0 < pricing.simulated().makespan < 60


def test_progress_counts_every_measurement(found: tuple[object, list[tuple[str, int, int]], object]) -> None:
    told = found[1]
    begun = (one for one in told if not one[0].startswith(BEFORE) and not any(word in one[0] for word in INSIDE))
    steps = [(title, done) for title, done, _ in begun]
    assert [done for _, done in steps] == list(range(len(steps))) and told[-1][2] == len(steps)
    assert len({title for title, _ in steps}) == len(steps) // 2  # one round, and the one that does not count


def test_progress_goes_on_inside_of_what_takes_long(found: tuple[object, list[tuple[str, int, int]], object]) -> None:
    titles = [title for title, *_ in found[1]]
    assert any(title.startswith("disk, writing a file to read from, 0 B of") for title in titles)
    assert "KV on disk, step 4 of 4, batch 2 of 2" in titles


def test_the_folder_is_left_as_it_was_found(found: tuple[object, object, Path], tmp_path: Path) -> None:
    assert list(found[2].parents[1].iterdir()) == []
    (tmp_path / "mine").write_text("x")
    profile(Device(), tmp_path, "here", sizes=TINY)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_folder_is_left_so_when_it_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(moving, "copies", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="in the middle"):
        profile(Device(), tmp_path / "off", "here", sizes=TINY)
    assert list(tmp_path.iterdir()) == [] and not new_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_type_can_be_measured_in(tmp_path: Path, dtype: str) -> None:
    machine = profile(Device(), tmp_path, "here", dtype, TINY)
    assert set(machine.attention_flops_per_s) == {dtype, "group4", "group8"} and set(machine.flops_per_s) == {dtype}


def test_an_accelerator_has_links_and_attends_in_two_places(tmp_path: Path) -> None:
    machine = profile(PretendedDevice(), tmp_path, "pretended", "float32", TINY)
    assert set(machine.attention_bytes_per_s) == {"host", "device"}
    rates = [getattr(machine, name) for pair in moving.LINKS.values() for name in pair]
    assert all(0 < rate < math.inf and rate != machine.host_copy_per_s for rate in rates)


@pytest.mark.cuda
def test_a_gpu_can_be_measured(tmp_path: Path) -> None:
    machine = profile(open_device(), tmp_path, "gpu", sizes=replace(TINY, copied_bytes=16 << 20))
    assert machine.has_accelerator and machine.device_bytes > 0
    assert {dtype: len(curve) for dtype, curve in machine.flops_per_s.items()} == {"float16": 3, "bfloat16": 3}


# -- what figures are of -------------------------------------------------------------------------------------------------


def test_products_are_of_so_many_flops() -> None:
    found = figures(*products.Curve(PRODUCT, PLAIN, "float32").points(BENCH, TINY))
    assert {f"products float32 {rows}": rows * 2 * 64 * 64 for rows in TINY.rows}.items() <= found.items()


def test_weights_take_turns_over_more_than_a_cache_holds() -> None:
    nbytes = FORMATS[PLAIN].nbytes((64, 64), 2)
    turns = BENCH.pool.in_turn(nbytes)
    places = [next(turns).data_ptr() for _ in range(2 * TINY.pool_bytes // nbytes)]
    assert len(set(places)) == TINY.pool_bytes // nbytes == 16 and places[:16] == places[16:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_measured_with_is_a_sound_value_of_every_type(dtype: torch.dtype) -> None:
    sizes = untouched().pool.view((TINY.pool_bytes // dtype.itemsize,), dtype).abs().float()
    assert torch.finfo(dtype).tiny < sizes.min() and sizes.max() < 2 and len(sizes.unique()) > 100


def test_a_pool_has_what_could_be_filled_in_time() -> None:
    seconds = iter(range(100))
    slow = TimeLimit(6.0, lambda: float(next(seconds)))
    assert BytePool.filled(HostTier(), 64 << 20, slow).nbytes == 8 << 20
    assert BytePool.filled(HostTier(), 3 << 20, TimeLimit(math.inf)).nbytes == 3 << 20


def test_packed_products_are_those_that_a_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(Inverted(few_rows=8)) as format:
        monkeypatch.setattr(products, "measured_formats", lambda: (format.name,))
        encoded = torch.empty(format.nbytes((64, 64), 4), dtype=torch.uint8)
        encode(format.name, torch.rand(64, 64), encoded)
        bench = replace(BENCH, pool=BytePool(encoded))
        points = products.curves(bench, (), "float32", TINY)
        found = figures(*points, *products.decoding(bench, "float32", TINY))
    flops = 2 * 64 * 64
    assert TINY.rows == (1, 8, 32) and found == {
        "packed products inverted 1": flops,
        "packed products inverted 8": 8 * flops,
        "decoding inverted": 64 * 64,
    }


def test_without_kernels_only_packed_products_with_a_twin_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Processor(CPU, TORCH)
    monkeypatch.setattr(products, "processor", lambda device: here)
    known = (
        (op, form, rows)
        for op, form in itertools.product(PRODUCT_OPS, measured_formats())
        for rows in products.wanted_rows(form, TINY)
        if op == PRODUCT or rounds(form)
    )
    twins = [kernel.price for op, form, rows in known if (kernel := choose(op, form, "bfloat16", here.runs, rows))]
    found = [one.figure.split()[2:-1] for one in products.curves(BENCH, (), "bfloat16", TINY)]
    assert sorted(" ".join(words) for words in found) == sorted(twins)
    assert set(figures(*products.decoding(BENCH, "bfloat16", TINY))) == {f"decoding {form}" for form in measured_formats()}


def test_where_another_kernel_takes_over_both_sides_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Kernel(PRODUCT, PLAIN, "few", most_rows=4)
    same = Kernel(PRODUCT, PLAIN, "few", most_rows=20, libraries=("of another processor",))
    table = (few, same, Kernel(PRODUCT, PLAIN, "many"))
    monkeypatch.setattr(products, "kernels_of", lambda *_: table)
    monkeypatch.setattr(products, "choose", lambda *asked: few if asked[4] <= 4 else table[-1])
    assert products.Curve(PRODUCT, PLAIN, "float32").rows(BENCH, (1, 8, 32)) == [1, 4, 5, 8, 32]


def test_a_kernel_with_a_price_of_its_own_begins_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first point is measured whatever it takes, for a machine is believed to have only kernels with a rate."""
    few, many = (Kernel(PRODUCT, "tiles4", "some", most_rows=8), Kernel(PRODUCT, "tiles4", "some", priced_as="other"))
    monkeypatch.setattr(products, "kernels_of", lambda *_: (few, many))
    monkeypatch.setattr(products, "choose", lambda *asked: few if asked[4] <= 8 else many)
    points = products.Curve(PRODUCT, "tiles4", "float32").points(BENCH, TINY)
    assert [(one.figure, one.behind) for one in points] == [
        ("packed products tiles4 1", ""),
        ("packed products tiles4 8", "products, tiles4, 1 row"),
        ("packed products other 9", ""),
        ("packed products other 32", "products, other, 9 rows"),
    ]


def test_values_are_those_around_the_products_of_blocks() -> None:
    calls = 4  # a second each, of attention and mlp of two models
    specs = [make("float32", TINY.width).spec for make in (small_opt, small_llama)]
    counted = sum(layer.values_around_products for spec in specs for layer in spec.layers if layer.block is not None)
    assert figures(products.values(BENCH, "float32", TINY)) == {"values": TINY.prompt_tokens * counted / calls}


_FAST = Machine("fast", "cpu", 0, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, {"float32": ((1, 1.0),)}, {"host": 1.0}, 0.0)


def test_attention_of_a_step_is_what_pricing_takes_it_for() -> None:
    slots, queries = TINY.slots * TINY.kv_rows, 4 * TINY.heads * TINY.head_dim
    read = figures(*attention_rates.decode_reading({"host": BENCH}, "bfloat16", TINY))
    assert read == {"attention_bytes host": slots * 2 * TINY.heads * TINY.head_dim * 2}
    computed = figures(*attention_rates.decode_computing(BENCH, ("float32", "bfloat16"), "bfloat16", TINY))
    assert {name: computed[f"attention_flops {name}"] for name in ("float32", "bfloat16")} == dict.fromkeys(
        ("float32", "bfloat16"), queries * slots
    )


@pytest.mark.parametrize(("kv_rows", "slots", "whole"), [(64, 2, 2 * 32), (64, 16, 88)])
def test_latents_are_attended_whole_and_chosen_for_so_many_heads(kv_rows: int, slots: int, whole: int) -> None:
    """Of what is wanted there are as many slots as have room beside their index."""
    found = figures(*attention_rates.latents(BENCH, "bfloat16", replace(TINY, kv_rows=kv_rows, slots=slots)))
    chosen = 20 * (2 if whole == 64 else 1)  # the first and the newest of each row
    for heads in attention_rates.query_heads():
        work = {part: found[f"latents_flops {part} {heads}"] / (2 * heads * 576) for part in ("whole", "choosing", "chosen")}
        assert work == {"whole": 2 * whole, "choosing": whole, "chosen": 2 * chosen}


def test_latents_are_measured_on_both_sides_of_where_their_kernel_changes() -> None:
    few, many, _ = attention_rates.query_heads()
    of = [ManyQueries.of(heads, 64, attention_rates.LATENT) for heads in (few, many)]
    assert of[0] is None and of[1] is not None and many == few + 1


def test_what_attends_chosen_latents_does_not_choose_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counted(name: str, of: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            calls[name] += 1
            return of(*given)

        return call

    for module, name in ((cache, "decode_attention"), (key_index, "choose_slots"), (key_index, "chosen_attention")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    subject, *_ = attention_rates.latents(BENCH, "bfloat16", TINY)
    figures(subject)
    assert calls == {"decode_attention": 1, "choose_slots": 2, "chosen_attention": 1}


@dataclass(frozen=True)
class Counting(Clock):
    """For it a step takes a second for so many flops, and for so many values to unpack."""

    flops_per_s: float = 1000.0
    values_per_s: float = 300.0

    def of(self, action: object) -> float:
        assert isinstance(action, attention_rates.Step)
        _, rows, keys, slots = action.cache.image.shape[:4]
        queries, dim = action.given.q.shape[2:]
        return 4.0 * queries * dim * slots * rows / self.flops_per_s + 2.0 * keys * dim * slots * rows / self.values_per_s


def test_unpacking_is_told_from_computing() -> None:
    found = figures(*attention_rates.decode_computing(replace(BENCH, clock=Counting(Device(), 0.0)), (), "bfloat16", TINY))
    for format in ("group4", "group8"):
        assert found[f"attention_flops {format}"] == pytest.approx(1000.0)
        assert found[f"unpacked_values {format}"] == pytest.approx(300.0)


def test_a_step_attends_all_slots_and_goes_on_for_ever() -> None:
    bench = untouched()
    (subject,) = attention_rates.decode_reading({"host": bench}, "float32", TINY)
    heads = attention_rates.HeadSizes(4, 4, 16)
    coding = attention_rates.Coding("plain", torch.float32, 16)
    step = attention_rates.Step.of(bench, heads, coding, TINY.kv_rows, TINY.slots)
    assert step.now.with_newest.tolist() == [TINY.slots] * TINY.kv_rows and step.cache.image.shape[3] == TINY.slots
    assert torch.equal(step(), step()) and subject.measure(1)  # type: ignore[arg-type]


def test_attention_of_prompts_is_causal_and_one_kind_evicts() -> None:
    pairs = 2 * sum(range(1, TINY.prompt_len + 1))
    found = figures(*attention_rates.prompts(BENCH, "float32", TINY))
    assert found == {f"prompt_flops {kind}": 4 * TINY.heads * TINY.head_dim * pairs for kind in ("plain", "scored")}


def test_visits_are_of_tasks_of_a_run(tmp_path: Path) -> None:
    found = figures(*visits(BENCH, BENCH, tmp_path, "float32", TINY))
    rates = {found.pop("kv_read_per_s"), found.pop("kv_write_per_s")}
    kinds = {f"{what} {kind}" for what in ("visit_seconds", "part_seconds") for kind in ("attention", "mlp")}
    assert set(found) == {*kinds, "task_seconds"}
    assert all(0 < one < math.inf for one in (*found.values(), *rates))
    assert list(tmp_path.iterdir()) == []


def test_what_empties_the_caches_between_visits_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep: list[object] = []
    clock = time.perf_counter

    def sleep(self: Between, task: Task, tokens: int) -> None:
        """An hour, on a clock that is set forward."""
        asleep.append(task.key)
        self.seconds[task.key] = 3600.0

    monkeypatch.setattr(Between, "__call__", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600.0 * len(asleep))
    found = figures(visits(BENCH, BENCH, tmp_path, "float32", TINY)[0])
    assert all(0 < seconds < 1800 for seconds in found.values())
    assert len(asleep) == TINY.steps * 10  # embedding, attention and mlp of four blocks, head


# -- the disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [8 << 20, 4 << 20])
def test_no_more_is_written_than_a_quarter_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(moving.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with closing(Memories(Device(), tmp_path)) as memories:
        with moving.disk(memories, TINY) as subject:
            assert memories.disk.meter.used_bytes == 0
            subject.measure(subject.sizes[-1])
            assert free // 16 < memories.disk.meter.used_bytes <= free // 4
        assert memories.disk.meter.used_bytes == 0


def test_a_disk_that_is_full_is_met_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(ValueError, match=r"has 100\.00 kB free; a profile needs 4\.19 MB: make room or give another"):
        profile(Device(), tmp_path, "here", sizes=TINY)


def test_reads_and_writes_at_once_share_what_the_disk_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        moving.DiskTrial, "_rate", lambda self, way, seconds: taken.append(way) or (100.0 if len(taken) < 3 else 70.0)
    )
    with closing(Memories(Device(), tmp_path)) as memories:
        rates = moving.DiskTrial(memories, 0.0, time.perf_counter, ProfileWatch()).rates(1 << 20)
    assert rates.pop(moving.SMALL_READS) > 0 and rates.pop(moving.SMALL_WRITES) > 0
    assert rates == {moving.READ: 100.0, moving.WRITE: 100.0, moving.BOTH: 1.4}
    assert sorted(taken) == sorted([moving.READ, moving.WRITE] * 2)


@pytest.mark.parametrize(("page", "seconds", "count"), [(1e-5, 0.021, 64 + 2048), (1e-4, 0.05005, 64 + 500), (0.01, 0.05, 64)])
def test_single_pages_are_read_and_written_where_they_lie(
    page: float, seconds: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes so long on the clock. Of a slow disk fewer are asked for, so that none takes much longer than it is to."""
    read, written = list[int](), list[int]()
    gather, write = DiskTier.gather, DiskTier.write_from

    def gathered(tier: DiskTier, region: DiskRegion, wanted: TokensOnDisk, image: numpy.ndarray) -> None:
        gather(tier, region, wanted, image)
        read.extend(begins + number * wanted.group_bytes for _, begins, number in wanted.groups.tolist())
        assert (image == 7).all()

    def noted(tier: DiskTier, region: DiskRegion, start: int, source: torch.Tensor) -> None:
        write(tier, region, start, source.fill_(7))
        written.extend([start] * (source.nbytes == ALIGNMENT))

    monkeypatch.setattr(DiskTier, "gather", gathered)
    monkeypatch.setattr(DiskTier, "write_from", noted)
    with closing(Memories(Device(), tmp_path)) as memories:
        trial = moving.DiskTrial(memories, 0.0, lambda: page * (len(read) + len(written)), ProfileWatch())
        trial._take(1 << 24)
        written.clear()
        found = trial._small(seconds)
    assert sorted(read) == sorted(written) and len(read) == count
    assert max(read) < 1 << 24 and len({*read}) > count / 2
    assert found == {moving.SMALL_READS: pytest.approx(1 / page), moving.SMALL_WRITES: pytest.approx(1 / page)}


@pytest.mark.parametrize(
    ("rates", "shares"), [((80.0, 9.0), (0.8, 0.9)), ((120.0, 11.0), (1.0, 1.0)), ((30.0, 2.0), (0.6, 0.4))]
)
def test_reads_and_products_at_once_share_what_the_processor_can_do(
    rates: tuple[float, float], shares: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is faster than alone, and together they have no less than if they took turns."""
    monkeypatch.setattr(moving.DiskTrial, "_rate", lambda self, way, seconds: rates[0])
    products = iter((10.0, rates[1]))
    monkeypatch.setattr(moving.DiskTrial, "_per_second", lambda self, action, ended: next(products))
    with closing(Memories(Device(), tmp_path)) as memories:
        trial = moving.DiskTrial(memories, 0.0, time.perf_counter, ProfileWatch(), compute=lambda: None)
        found = trial._beside(lambda: None, 100.0, 0.0)
    assert (found[moving.READS_BESIDE], found[moving.COMPUTING_BESIDE]) == pytest.approx(shares)


# -- sizes and time ------------------------------------------------------------------------------------------------------


def test_sizes_shrink_where_memory_is_short() -> None:
    assert FULL.within(FULL.memory_bytes) is FULL
    small = FULL.within(FULL.memory_bytes // 5)
    assert small.memory_bytes <= FULL.memory_bytes // 5 and small.rows == FULL.rows
    with pytest.raises(ValueError, match=r"a profile needs .* of memory, but 1\.00 MB may be taken"):
        FULL.within(10**6)
    assert QUICK.rounds < FULL.rounds and QUICK.disk_bytes < FULL.disk_bytes


def test_a_profile_holds_no_more_than_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(TINY, pool_bytes=2 << 20, copied_bytes=2 << 20, side=256, kv_rows=8, slots=128, heads=8)
    tiers, held, alloc = weakref.WeakSet[HostTier](), [0], HostTier.alloc

    def counted(self: HostTier, nbytes: int) -> torch.Tensor:
        region = alloc(self, nbytes)
        tiers.add(self)
        held[0] = max(held[0], sum(tier.meter.used_bytes for tier in tiers))
        return region

    monkeypatch.setattr(HostTier, "alloc", counted)
    profile(Device(), tmp_path, "here", sizes=sizes, now=clock_of_steps())
    assert sizes.memory_bytes / 4 < held[0] < sizes.memory_bytes


def test_a_clock_takes_the_median_and_waits_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert Clock(Device(), 0.0).of(lambda: calls.append(1)) < 1 and len(calls) == 1
    settled: list[int] = []
    monkeypatch.setattr(PretendedDevice, "settle", lambda self: settled.append(len(calls)))
    Clock(PretendedDevice(), 0.0).of(lambda: calls.append(1))
    assert settled == [2, 2, 10]


def test_what_a_first_call_on_an_accelerator_takes_does_not_count() -> None:
    """It may compile kernels for seconds."""
    now, calls = [0.0], list[int]()

    def action() -> None:
        calls.append(1)
        now[0] += 0.5 if len(calls) > 1 else 30.0

    stopwatch = Stopwatch(lambda: now[0])
    limit = TimeLimit(100.0, stopwatch)
    assert Clock(PretendedDevice(), 1.0, stopwatch).of(action) == 0.5
    assert limit.left == 100.0 - 4.0 and len(calls) == 9


# -- profiles that are kept ----------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of machines that were really measured; a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("_busy_seconds", "_own_seconds", "_moved_bytes"):  # nothing works and nothing moves, at whatever moment
        monkeypatch.setattr(busy_cores, name, lambda *_: 0)
    monkeypatch.setattr(profile_cache, "available_bytes", lambda: _FAST.host_bytes)
    names: list[str] = []
    monkeypatch.setattr(
        profile_cache, "profile_apart", lambda device, folder, name, *_: names.append(name) or replace(_FAST, name=name)
    )
    return names


def test_while_a_machine_is_measured_for_a_plan_progress_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(*_: object, on_subject: OnSubject, **how: object) -> Machine:
        on_subject("attention of latents", 3, 9)
        return _FAST

    class Recorded(Progress):
        def stage(self, name: str, text: str = "") -> None:
            said.append((name, text))

    said: list[tuple[str, str]] = []
    monkeypatch.setattr(profile_cache, "profiled", measured)
    assert profile_cache.this_machine(Device(), tmp_path, None, Recorded(0, "planning for a model", late=True)) == _FAST
    assert said == [("measuring this machine, once", ""), ("measuring: attention of latents", "3/9")]


def test_a_machine_is_measured_once(counted: list[str], tmp_path: Path) -> None:
    notes: list[str] = []
    first = profiled(Device(), tmp_path, on_note=notes.append)
    assert profiled(Device(), tmp_path, on_note=notes.append) == first
    (name,) = counted
    assert notes[0] == "this machine was not measured yet; that takes 25 s at most, once"
    assert len(notes) == 2 and str(machine_file(name)) in notes[1]
    assert machine_file(name).read_text().startswith("# Measured 20")
    profiled(Device(), tmp_path, "float32")
    assert len(set(counted)) == 2


def test_want_of_memory_where_it_is_measured_comes_over_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch's own error, too."""

    def lacking(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. Error code 12")

    monkeypatch.setattr(profile_cache, "profile", lacking)
    monkeypatch.setattr(profile_cache.signal, "signal", lambda *_: None)
    asked = ("cpu", str(tmp_path), "here", "float32", asdict(TINY), torch.get_num_threads(), None)
    stdout = sys.stdout
    try:
        assert profile_cache.answer(*asked) == profile_cache.STOPPED
    finally:
        sys.stdout = stdout
    kind, name, reason = json.loads(capsys.readouterr().out)
    assert (kind, name) == ("error", "MemoryError") and "memory" in reason


def test_what_measuring_holds_is_not_of_the_process_that_asks_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither its memory, nor its threads, nor its child when all is over; and the machine comes back as it was measured."""
    large, told = replace(TINY, pool_bytes=96 << 20), list[tuple[str, int, int]]()
    threads, children, before = set(threading.enumerate()), psutil.Process().children(), peak_resident_bytes()
    machine = profile_apart(Device(), tmp_path / "off", "here", "float32", large, lambda *one: told.append(one))
    assert peak_resident_bytes() - before < 32 << 20, "96 MiB were held elsewhere"
    assert machine == Machine.create(machine.as_plain()) and machine.name == "here" and told[-1][1] == told[-1][2] - 1
    assert not (tmp_path / "off").exists() and not new_threads(threads)
    assert {*psutil.Process().children()} <= {*children}
    assert capfd.readouterr().err == "", "it is ended quietly"


def test_an_error_of_the_process_that_measures_is_the_callers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a profile needs .* of memory"):
        profile_apart(Device(), tmp_path, "here", None, replace(TINY, copied_bytes=1 << 60))


def test_a_profile_that_is_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    """The other process ends with the call and leaves nothing but what it has measured."""

    def interrupt(title: str, done: int, total: int) -> None:
        if total and done == total - 3:
            raise KeyboardInterrupt

    partial, rest = tmp_path / "here.partial", list[int]()
    with pytest.raises(KeyboardInterrupt):
        profile_apart(Device(), tmp_path / "off", "here", "float32", TINY, interrupt, partial)
    assert not psutil.Process().children() and [file.name for file in tmp_path.iterdir()] == ["here.partial"]
    with partial.open("a") as file:
        file.write('["cut o')
    machine = profile(
        Device(), tmp_path / "off", "here", "float32", TINY, lambda title, done, total: rest.append(done), partial
    )
    assert len(set(rest)) < 12 and machine.has_accelerator is False and not partial.exists()


def test_a_profile_that_an_earlier_version_began_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knew no small reads of a disk. What it has measured counts."""
    partial, new = tmp_path / "here.partial", (moving.SMALL_READS, moving.SMALL_WRITES)
    monkeypatch.setattr(RoundsTaken, "forget", lambda self: None)
    profile(Device(), tmp_path, "here", "float32", TINY, partial=partial, now=clock_of_steps())
    lines = [json.loads(line) for line in partial.read_text().splitlines()]
    rates = [found["figures"].pop(name) for *_, found in lines for name in new if name in found["figures"]]
    assert rates
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = profile(Device(), tmp_path, "here", "float32", TINY, partial=partial, now=clock_of_steps())
    assert (machine.small_reads_per_s, machine.small_writes_per_s) == (Machine.small_reads_per_s, Machine.small_writes_per_s)
    assert machine.borrowed == BORROWED


def test_rounds_of_two_versions_are_compared_by_what_both_have_measured() -> None:
    taken = RoundsTaken()
    for number, figures in enumerate(({"a": 1.0}, {"a": 2.0, "b": 5.0}, {"a": 3.0})):
        taken.add(number, "disk", Measurement(figures, 1, 1.0))
    assert taken.unsteadiness(["disk"]) == 1.5


def test_what_was_measured_in_other_sizes_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "here.partial"
    one = Measurement({"a": 1.0}, 4, 2.0)
    RoundsTaken.kept_in(file, "of this kind").add(1, "a", one)
    assert RoundsTaken.kept_in(file, "of another").known == {} and RoundsTaken.kept_in(file, "of this kind").known == {
        (1, "a"): one
    }


def test_a_damaged_profile_is_told_of_and_measured_anew(counted: list[str], tmp_path: Path) -> None:
    machine, notes = profiled(Device(), tmp_path), []
    file = save_machine(machine.name, machine)
    file.write_text("name: 3\n")
    assert profiled(Device(), tmp_path, on_note=notes.append) == machine == Machine.load(file)
    assert len(counted) == 2 and str(file) in notes[0] and "measured anew" in notes[0]


BUSY = "other processes kept 1.2 cores busy meanwhile"


def measured_as(monkeypatch: pytest.MonkeyPatch, *machines: Machine) -> None:
    """The next measurements find these machines."""
    left = iter(machines)
    monkeypatch.setattr(profile_cache, "profile_apart", lambda device, folder, name, *_: replace(next(left), name=name))


def test_a_user_of_a_profile_is_told_that_it_was_disturbed_and_what_mends_it(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "is_quiet", lambda folder: False)
    mark = profile_cache.fingerprint_of(Device(), tmp_path, None)
    mends = "`python -m h2o_flexgen.profile` measures again, and the better figures count"
    told = f"this machine's profile may be off: {BUSY}; {mends}"
    for disturbed, measurements, expected in (((), 1, []), ((BUSY,), 1, [told]), ((BUSY,), 2, [told]), ((BUSY,), 3, [])):
        machine_file(mark.name).unlink(missing_ok=True)
        profile_cache.keep(replace(_FAST, name=mark.name, disturbed=disturbed, measurements=measurements), mark)
        notes: list[str] = []
        assert profiled(Device(), tmp_path, on_note=notes.append).name == mark.name and notes == expected
    assert counted == [], "a disturbed profile serves while others are busy"


def test_a_disturbed_profile_is_measured_again_when_others_are_quiet(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = replace(_FAST, disk_both=1.5)
    busy = replace(quiet, disturbed=(BUSY,), disk_both=2.0, host_copy_per_s=quiet.host_copy_per_s / 9, disk_read_per_s=9e9)
    measured_as(monkeypatch, busy, quiet)
    looks, notes = [False, True], list[str]()
    monkeypatch.setattr(profile_cache, "is_quiet", lambda folder: looks.pop(0))
    found = [profiled(Device(), tmp_path, on_note=notes.append) for _ in range(4)]
    assert found[0] == found[1] and found[2] == found[3] and looks == [], "at rest nothing looks, and nothing is measured again"
    assert found[0].disturbed == (BUSY,) and found[2].disturbed == ()
    better = found[2].host_copy_per_s, found[2].disk_read_per_s, found[2].disk_both, found[2].measurements
    assert better == (quiet.host_copy_per_s, 9e9, 1.5, 2), "what is better of both; ratios are those at rest"
    assert sum(note.startswith("this machine is quiet now, but was not when it was measured; to repeat") for note in notes) == 1


def test_a_machine_that_is_never_at_rest_is_not_measured_for_ever(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = (3e9, 5e9, 4e9)
    measured_as(monkeypatch, *(replace(_FAST, disturbed=(BUSY,), host_copy_per_s=rate) for rate in rates))
    monkeypatch.setattr(profile_cache, "is_quiet", lambda folder: True)
    found = [profiled(Device(), tmp_path).host_copy_per_s for _ in range(5)]
    assert found == [3e9, 5e9, 5e9, 5e9, 5e9] and len(rates) == profile_cache.MOST_MEASUREMENTS


def test_a_disturbed_measurement_does_not_spoil_what_was_measured_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mark = profile_cache.fingerprint_of(Device(), tmp_path, None)
    slow = {"host_copy_per_s": _FAST.host_copy_per_s / 2, "task_seconds": 9.0, "host_bytes": 7}
    assert profile_cache.keep(_FAST, mark) == _FAST
    assert profile_cache.keep(replace(_FAST, **slow, disturbed=(BUSY,)), mark) == replace(_FAST, host_bytes=7, measurements=2)
    assert profile_cache.keep(replace(_FAST, **slow), mark) == replace(_FAST, **slow), (
        "of two at rest the later one: machines change"
    )


def test_a_repetition_that_fails_leaves_the_profile_that_is_kept(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_as(monkeypatch, replace(_FAST, disturbed=(BUSY,)))
    first, notes = profiled(Device(), tmp_path), list[str]()

    def fails(*_: object) -> Machine:
        raise MemoryError("it takes 3 GB")

    monkeypatch.setattr(profile_cache, "profile_apart", fails)
    monkeypatch.setattr(profile_cache, "is_quiet", lambda folder: True)
    assert profiled(Device(), tmp_path, on_note=notes.append) == first == saved_machine(first.name)
    assert notes[-1] == "it takes 3 GB; the profile that is kept is used"


@pytest.mark.parametrize(
    ("seconds", "busy", "moved", "told"),
    [
        (10.0, 10.0, 3 * 10**9, ["other processes kept 0.8 cores busy", "other processes moved 200 MB/s to and from the disk"]),
        (10.0, 90.0, 0, ["other processes kept 2.0 cores busy"]),  # of a machine of two
        (0.0003, 2.01, 10**9 + 10**6, []),  # one hundredth that the system has counted in a moment, and one write
    ],
)
def test_others_are_told_by_what_they_take_of_the_processor_and_of_the_disk(
    seconds: float, busy: float, moved: int, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up counters: the processor and the disk of both sides, read at the beginning and at the end. 2 s of the processor
    and a gigabyte are this process's own."""
    counts = {
        "_busy_seconds": [5.0, 5.0 + busy], "_own_seconds": [1.0, 3.0],
        "_moved_bytes": [10**9, 10**9 + moved], "_own_moved_bytes": [0, 10**9],
    }  # fmt: skip
    clock = iter((0.0, seconds, seconds))
    monkeypatch.setattr(busy_cores, "cores", lambda: 2)
    monkeypatch.setattr(busy_cores.time, "perf_counter", lambda: next(clock))
    for name, values in counts.items():
        left = iter(values)
        monkeypatch.setattr(busy_cores, name, lambda *_, left=left: next(left))
    assert busy_cores.Others(tmp_path / "not there").disturbances() == tuple(f"{each} meanwhile" for each in told)
