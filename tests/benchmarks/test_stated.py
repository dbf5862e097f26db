"""The estimate of a machine with this engine's kernels: launches are counted, and shares do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import stated
from benchmarks.gpu_kernels import ATTENTION_SHARES, DECODING_SHARE, PRODUCT_SHARES
from h2o_flexgen.core.site import DEVICE, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats.kernel_table import ROWS_OF_TILE_DOTS
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.machine import EVICTION, Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Key, Op
from tests.scripts.loading import PROJECT

H100 = Machine.load(PROJECT / "configs" / "machines" / "h100.yaml")
READ_PER_S = 0.8 * 3350e9  # what its file takes as reachable of its data sheet
COST = stated.LaunchCost("a host", torch_us=2.0, kernel_us=10.0)
LAUNCHES = stated.Launches(attention=(3.0, 7.0), mlp=(4.0, 2.0), eviction=(0.0, 1.0))
ATTENTION, MLP = 1, 2  # layers
STEP, SLOTS = 16, 512 + 16 + 1


def parts(rows: int, **options: object) -> dict[int, dict[str, float]]:
    """The parts of a decode step's visits of OPT-6.7B."""
    plan = Plan.create(gpu_batch_size=rows, num_gpu_batches=1, **options)
    config = known_config("facebook/opt-6.7b")
    assert config is not None
    spec = create_model(config, "float16", True, "opt").spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)
    (block,) = WorkloadPlan(spec, plan, Workload.uniform(rows, 512, 32), Site(accelerator=True)).blocks
    pricing = Pricing(block, stated.with_kernels(H100, LAUNCHES, COST))
    return {layer: pricing.compute_parts(Key(Op.COMPUTE, STEP, layer, 0)) for layer in (ATTENTION, MLP)}


def test_launches_are_those_of_kernels_and_of_torch_between_them() -> None:
    full = stated.counted_launches(PLAIN, PLAIN, "full")
    products_of_attention, appended, attended_and_joined, products_of_mlp = 4, 1, 2, 2
    assert full.attention[1] == products_of_attention + appended + attended_and_joined
    assert full.mlp[1] == products_of_mlp and full.attention[0] > 0 and full.mlp[0] > 0
    assert full.eviction == (0.0, 0.0)
    packed = stated.counted_launches("group4", "group4", "h2o")
    encoded, evicted = 2, 1
    assert packed.attention[1] == full.attention[1] + encoded and packed.eviction == (0.0, evicted)
    assert packed.of_a_block[1] == full.of_a_block[1] + encoded + evicted


def test_launches_stand_in_front_of_the_visits_that_they_belong_to() -> None:
    full, evicting = parts(2), parts(2, kv_policy="h2o", kv_budget=0.2)
    assert full[ATTENTION]["overhead"] == pytest.approx(76e-6) and full[MLP]["overhead"] == pytest.approx(28e-6)
    assert evicting[ATTENTION]["overhead"] == pytest.approx(86e-6) and evicting[MLP] == full[MLP]
    assert stated.with_kernels(H100, LAUNCHES, COST).visit_seconds[EVICTION] == pytest.approx(10e-6)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_few_rows_read_packed_weights_at_their_share_and_decode_nothing(rows: int) -> None:
    found, values = parts(rows, weight_codec="group4")[MLP], 2 * 4096 * 16384
    assert found["decoding"] == 0.0
    assert found["products"] == pytest.approx(values * 0.5625 / (PRODUCT_SHARES[4, rows] * READ_PER_S), rel=0.01)


def test_more_rows_pay_for_decoding_and_for_plain_products() -> None:
    rows = ROWS_OF_TILE_DOTS + 1
    packed, plain = parts(rows, weight_codec="group4")[MLP], parts(rows)[MLP]
    assert packed["products"] == plain["products"]
    assert packed["decoding"] == pytest.approx(2 * 4096 * 16384 * 2.5625 / (DECODING_SHARE * READ_PER_S), rel=0.01)


@pytest.mark.parametrize(("format", "bytes_of_value"), [(PLAIN, 2.0), ("group8", 1.0625), ("group4", 0.5625)])
def test_attention_reads_kv_at_the_share_of_its_codec(format: str, bytes_of_value: float) -> None:
    nbytes = 2 * 2 * 4096 * SLOTS * bytes_of_value  # keys and values of two rows
    assert parts(2, kv_codec=format)[ATTENTION]["attention"] == pytest.approx(
        nbytes / (ATTENTION_SHARES[format] * READ_PER_S), rel=0.03
    )


def test_rates_of_products_and_links_stay_those_of_the_file() -> None:
    made = stated.with_kernels(H100, LAUNCHES, COST)
    same = {
        "flops_per_s",
        "host_to_device_per_s",
        "device_to_host_per_s",
        "disk_read_per_s",
        "task_seconds",
        "prompt_flops_per_s",
    }
    assert {name: getattr(made, name) for name in same} == {name: getattr(H100, name) for name in same}
    assert made.attention_bytes_per_s[DEVICE] == pytest.approx(ATTENTION_SHARES[PLAIN] * READ_PER_S)
    assert replace(made, visit_seconds={}) != made


def test_shares_between_the_stated_ones_fall_with_the_rows() -> None:
    shares = [stated.product_share(4, rows) for rows in (1, 2, 4, 8, 16, 32)]
    assert shares == pytest.approx([0.4, 0.4 - 0.1 / 3, 0.4 - 0.2 / 3, 0.3, 0.275, 0.25])
    assert [stated.product_share(8, rows) for rows in (1, 8)] == [0.5, 0.5]


def test_a_quick_host_launches_in_the_same_proportion() -> None:
    slow, quick = stated.slow_host(), stated.quick_host()
    assert slow.torch_us / quick.torch_us == pytest.approx(slow.kernel_us / quick.kernel_us)
    assert quick.kernel_us < slow.kernel_us
