"""A kind of layer that only its model knows is computed, moved, counted and priced as any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.cost import by_lane, predicted_bytes
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.working_space import SLACK
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import Key, Op
from tests.helpers.contract import Case, compare, generate_with
from tests.helpers.side_by_side import KIND, SideBySideCheckpoints, registered
from tests.helpers.tiny import tiny_config

LAYER = 2  # the first of the new kind
MACHINE = Machine("two", "cpu", 0, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, {"float32": ((4, 2.0), (8, 3.0))}, {"host": 1.0}, 0.0)


@pytest.fixture(autouse=True)
def architecture() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def own_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> SideBySideCheckpoints:
    return SideBySideCheckpoints(tmp_path_factory.mktemp("checkpoints"))


def spec_of(sep_layer: bool = True) -> ModelSpec:
    return create_model(tiny_config(KIND), "float32", sep_layer).spec


@pytest.mark.parametrize(
    "case",
    [
        Case(KIND, (0, 0, 0, 0, 100, 0), policy=(("kv_policy", "h2o"), ("heavy", 2), ("recent", 2))),
        Case(KIND, (30, 0, 50, 0, 0, 0), sep_layer=False, schedule="row_by_row", prefill_tokens=8),
        Case(KIND, (0, 0, 100, 0, 100, 0), weight_codec="group4", gpu_batch_size=3),
        Case(KIND, (0, 0, 100, 0, 100, 0), weight_codec="group4", compute="int8"),
    ],
    ids=str,
)
def test_it_is_computed_as_in_a_plain_loop_and_moves_the_bytes_that_are_foreseen(
    case: Case, own_checkpoints: SideBySideCheckpoints, offload: Path
) -> None:
    with case.open(own_checkpoints, offload) as llm:
        assert any("chosen" in layer.functions for layer in llm.spec.layers)
        compare(case, own_checkpoints, *generate_with(llm, case))
        blocks = BlockPlans.of(llm.spec, llm.plan, Workload(case.lengths, case.gen_len), Site())
        foreseen = by_lane(predicted_bytes(blocks))
        assert {lane: nbytes for lane, nbytes in llm.stats.moved_bytes.items() if nbytes} == foreseen


def test_products_count_for_the_tokens_that_come_to_them() -> None:
    spec = spec_of()
    width, ffn, router = spec.width, spec.ffn, 2 * spec.width
    assert spec.layers[LAYER].matmul_values == router + 2 * ffn * width
    assert spec.flops(LAYER, 2, 4, 0) == 2 * 8 * (router + 2 * ffn * width)
    (block,) = Workload.uniform(2, 4, 2).blocks(2, 1)
    parts = Pricing(
        BlockPlan.of(spec, Plan(gpu_batch_size=2), block, Site()), replace(MACHINE, values_per_s=5.0)
    ).compute_parts(Key(Op.COMPUTE, 0, LAYER, 0))
    asked = 1 - 0.5**8  # of the experts; those that no token asks for make those of the others a little wider
    rate = MACHINE.flop_rate("float32", 4 / asked)
    assert parts["products"] == pytest.approx(2 * router * 8 / 3 + 2 * (4 * ffn * width) * 4 / rate)
    assert parts["values"] == pytest.approx(8 * (2 + width + 2 * (ffn + width)) / 5) and parts["attention"] == 0.0


@pytest.mark.parametrize("sep_layer", [True, False])
def test_its_room_and_its_packed_matrices_are_counted(sep_layer: bool) -> None:
    spec, workload = spec_of(sep_layer), Workload.uniform(2, 40, 2)
    wider = replace(spec, layers=tuple(replace(one, passing_width=one.passing_width + 10_000) for one in spec.layers))
    less, more = (
        WorkloadPlan(one, Plan(gpu_batch_size=2), workload, Site()).footprint.parts[HOST]["working space"]
        for one in (spec, wider)
    )
    assert more - less > 0.9 * SLACK * 80 * 10_000 * 4
    codecs = {name: tensor.format for name, tensor in spec.packed("group4").tensors.items() if ".layers.0." in name}
    assert {name.split("layers.0.")[1] for name, format in codecs.items() if format == "plain"} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
