"""Reasons for a slow run: each comes of facts, names what mends it, and is said once, beside the output."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from h2o_flexgen.cli import slow
from h2o_flexgen.cli.report.arithmetic import Arithmetic
from h2o_flexgen.cli.slow import (
    NO_KERNELS,
    NO_TRITON,
    buffers_reason,
    compute_reason,
    experts_reason,
    kernel_reasons,
    say_slow,
    unguessed_reason,
    unread_reason,
)
from h2o_flexgen.core.site import HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats import kernel_table
from h2o_flexgen.formats.kernel_table import Processor
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from tests.cli.test_arithmetic import TABLE
from tests.helpers.inverted import rows_of
from tests.planning.test_pricing import MACHINE
from tests.planning.test_search import LARGE, WAITING
from tests.planning.worlds import block_of, of_slices, tiny_spec, with_experts

BUILT = ("avx512vnni", "avx512", "avx2", "baseline")


@pytest.fixture(autouse=True)
def pretended_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "kernels_of", partial(rows_of, TABLE))


def reasons(
    processor: Processor | None, libraries: tuple[str, ...] = BUILT, dtype: str = "bfloat16", launches: str | None = None
) -> list[str]:
    own = Arithmetic(Plan(), dtype, processor)
    return list(kernel_reasons(own, lambda _: libraries, lambda: None, lambda: launches))


def test_where_nothing_can_be_mended_nothing_is_said() -> None:
    for processor in (Processor("cpu", BUILT[0], ("bfloat16",)), None):
        assert reasons(processor) == []
    assert reasons(Processor("cuda", "triton", ("float16", "bfloat16")), libraries=("triton",)) == []


def test_a_gpu_without_triton_says_how_to_get_it() -> None:
    assert reasons(Processor("cuda"), libraries=(), dtype="float16") == [NO_TRITON]
    assert "pip install triton" in NO_TRITON


def test_a_triton_whose_launches_are_not_known_is_said() -> None:
    gpu, why = Processor("cuda", "triton", ("float16",)), "Triton 4 launches kernels in another way"
    (line,) = reasons(gpu, ("triton",), "float16", why)
    assert line.startswith(f"{why}, so that each launch") and "install a Triton" in line
    assert reasons(Processor("cpu", BUILT[0]), dtype="float32", launches=why) == []


def test_a_gpu_without_instructions_for_a_type_names_the_one_it_has() -> None:
    (line,) = reasons(Processor("cuda", "triton", ("float16",)), libraries=("triton",))
    assert line.startswith("a GPU here has no instructions for products of bfloat16; with --dtype float16")


def test_kernels_for_a_gpu_that_are_turned_off_are_named_with_their_switch() -> None:
    (line,) = reasons(Processor("cuda"), libraries=("triton",), dtype="float16")
    assert line == "H2O_FLEXGEN_KERNELS=torch asks for less than this processor can do (triton); unset it"


def test_without_kernels_it_says_how_to_get_a_compiler() -> None:
    assert "apt install gcc" in NO_KERNELS
    for dtype in ("bfloat16", "float32"):
        assert reasons(Processor("cpu"), libraries=(), dtype=dtype) == [NO_KERNELS]


def test_products_of_8_bits_without_kernels_are_slower_than_exact_ones() -> None:
    plan = Plan(weight_codec="group4", compute="int8")
    each = [Arithmetic(plan, "float32", Processor("cpu", build), formats=("tiles4",)) for build in ("torch", BUILT[0])]
    found = [list(kernel_reasons(arithmetic, lambda _: BUILT, lambda: None)) for arithmetic in each]
    assert found[0][1:] == ["--compute int8 is slower than exact products where there are no kernels in C; leave it out"]
    assert found[1] == []


@pytest.mark.parametrize("forced", ["torch", "avx2"])
def test_a_library_that_is_forced_to_less_is_named_with_its_switch(forced: str) -> None:
    (line,) = reasons(Processor("cpu", forced), dtype="float32")
    assert line == f"H2O_FLEXGEN_KERNELS={forced} asks for less than this processor can do (avx512vnni); unset it"


def test_a_processor_whose_library_was_not_built_is_told_so() -> None:
    own = Arithmetic(Plan(), "float32", Processor("cpu", "avx2"))
    (line,) = kernel_reasons(own, lambda _: BUILT[2:], lambda: "avx512vnni")
    assert line == (
        "the kernels here were built for another processor (avx2), and those for this one (avx512vnni) are faster; "
        "in the checkout, `pip install -e .` builds them"
    )


# -- exact products --------------------------------------------------------------------------------------------------------


def machine(rate: float) -> Machine:
    """A machine that does nothing but multiply, exactly at one rate and rounded at another."""
    free = {"attention_flops_per_s": {}, "unpacked_values_per_s": {}, "prompt_flops_per_s": {}, "visit_seconds": {}}
    curves = {"flops_per_s": {"float32": ((1, 1e6),)}, "packed_flops_per_s": {"int8 tiles4": ((1, rate),)}}
    own = replace(MACHINE, name="this one", device="cpu", decoded_values_per_s={"tiles4": 1e15}, values_per_s=1e15)
    return replace(own, task_seconds=0.0, head_seconds=0.0, **free, **curves)


def block(format: str = "group4", compute: str = "exact") -> BlockPlan:
    plan = Plan(weight_codec=format, compute=compute).at(Site())
    return BlockPlan.of(tiny_spec().written_as(format, "plain", compute), plan, block_of([[4] * 4]), Site())


def test_exact_products_are_named_where_rounded_ones_are_much_faster() -> None:
    (line,) = compute_reason(block(), machine(2e6))
    assert line == (
        "products are exact; --compute int8 would be 2.0 times as fast, says the profile of this one; "
        "it rounds activations to 8 bits"
    )


def test_rounded_products_are_named_where_exact_ones_are_faster() -> None:
    (line,) = compute_reason(
        block(compute="int8"), replace(machine(1e6), packed_flops_per_s={"int8 tiles4": ((1, 1e6),), "tiles4": ((1, 1.2e6),)})
    )
    gain = "exact ones would be 1.2 times as fast, says the profile of this one"
    assert line == f"products are in 8 bits; {gain}; leave --compute int8 out"


@pytest.mark.parametrize(
    ("planned", "known"),
    [
        (block(), machine(1.2e6)),
        (
            block(compute="int8"),
            replace(machine(1e6), packed_flops_per_s={"int8 tiles4": ((1, 1e6),), "tiles4": ((1, 1.05e6),)}),
        ),
        (block(compute="int8"), machine(9e6)),
        (block("plain"), machine(9e6)),
        (block(), replace(machine(9e6), packed_flops_per_s={})),
        (block(), replace(machine(9e6), packed_flops_per_s={"tiles4": ((1, 1e3),)})),
    ],
    ids=[
        "a little faster",
        "exact ones a little faster",
        "rounded already",
        "not packed",
        "not measured",
        "only exact ones measured",
    ],
)
def test_otherwise_nothing_is_said_of_products(planned: BlockPlan, known: Machine) -> None:
    assert list(compute_reason(planned, known)) == []


def streamed(percent: tuple[float, ...] = (0, 10, 0, 100, 0, 100), **changes: Any) -> WorkloadPlan:
    """A mixture of which several slices are read while an attention is computed."""
    plan = Plan.create(gpu_batch_size=8, **changes).with_percent(percent).at(Site())
    return WorkloadPlan(of_slices(LARGE, 8), plan, Workload.uniform(8, 20, 10), Site())


def test_more_buffers_are_named_where_lanes_wait_for_them_and_there_is_room() -> None:
    given = streamed()
    (line,) = buffers_reason(given, WAITING, MemoryLimits())
    said = (
        r"the plan has 2 buffers, and lanes wait for them; --buffers (\d) would be (.+) times as fast, says the profile of .+"
    )
    match = re.match(said, line)
    assert match, line
    more = streamed(buffers=int(match[1]))
    gain = predict(given, WAITING).total_seconds / predict(more, WAITING).total_seconds
    assert gain > 1.1 and float(match[2]) == pytest.approx(gain, abs=0.1)
    room = streamed(buffers=3).footprint.total(HOST)
    (line,) = buffers_reason(given, WAITING, MemoryLimits(host=room))
    assert "--buffers 3 would be" in line
    assert list(buffers_reason(given, WAITING, MemoryLimits(host=room - 1))) == []


@pytest.mark.parametrize(
    "planned",
    [
        streamed(buffers=8),
        streamed(buffers=1),
        streamed(schedule="flexgen_barrier"),
        streamed((0, 100, 0, 100, 0, 100)),
    ],
    ids=["as many as help", "no overlap", "of the schedule", "nothing moves"],
)
def test_otherwise_nothing_is_said_of_buffers(planned: WorkloadPlan) -> None:
    assert list(buffers_reason(planned, WAITING, MemoryLimits())) == []


def experts(
    rows: int, percent: int = 0, gen_len: int = 3, batches: int = 1, schedule: str = "zigzag", is_talk: bool = False
) -> list[str]:
    plan = Plan.create(schedule=schedule, gpu_batch_size=rows, num_gpu_batches=batches).with_percent(
        (percent, 0, 100, 0, 100, 0)
    )
    block = block_of([[4] * rows] * batches, gen_len)
    return list(experts_reason(BlockPlan.of(with_experts(1 / 8), plan.at(Site()), block, Site()), is_talk))


def test_experts_that_are_brought_for_few_rows_are_named_with_the_rows_that_would_ask_for_them() -> None:
    assert experts(3) == [
        "3 rows ask for 33% of the experts of a layer, and a step brings these and others; take 30 rows at once, which ask for "
        "98%, or better several times as many, or keep all in memory"
    ]
    assert "1 row asks for 12% of the experts" in experts(1)[0]
    assert "15 rows ask" in experts(15, batches=2, schedule="row_by_row")[0]  # weights come anew for each batch


def test_a_talk_is_not_told_to_take_rows_that_it_cannot_have() -> None:
    assert experts(1, is_talk=True) == [
        "1 row asks for 12% of the experts of a layer, and a step brings these and others; a talk has no other rows, so "
        "keep all in memory"
    ]


@pytest.mark.parametrize("changes", [{"percent": 100}, {"gen_len": 1}, {"rows": 30}, {"rows": 15, "batches": 2}], ids=str)
def test_otherwise_nothing_is_said_of_experts(changes: dict[str, int]) -> None:
    assert experts(**{"rows": 3, **changes}) == []  # type: ignore[arg-type]


def unguessed(percent: tuple[float, ...], draft: str = "ngram") -> list[str]:
    plan = Plan.create(draft=draft).with_percent(percent).at(Site())
    return list(unguessed_reason(BlockPlan.of(tiny_spec(), plan, block_of([[4] * 3]), Site())))


def test_drafts_where_nothing_is_guessed_are_named() -> None:
    assert unguessed((0, 0, 0, 0, 0, 100)) == [
        "--draft ngram guesses nothing: keys and values move, so that guesses would move more; keep all KV in memory, or "
        "leave it out"
    ]
    assert unguessed((0, 0, 0, 100, 0, 100)) == unguessed((0, 100, 0, 100, 0, 100)) == []
    assert unguessed((0, 0, 0, 0, 0, 100), "off") == []


def unread(percent: tuple[float, ...], **options: object) -> list[str]:
    plan = Plan.create(**{"kv_recall": 0.1, "kv_recall_reuse": True, **options}).with_percent(percent).at(Site())
    return list(unread_reason(BlockPlan.of(tiny_spec(), plan, block_of([[40] * 3]), Site())))


def test_a_reuse_where_nothing_is_read_from_disk_is_named() -> None:
    assert unread((0, 100, 0, 100, 0, 100)) == [
        "--kv-recall-reuse keeps nothing: no KV is on disk, and only what is read there stays; leave it out"
    ]
    assert unread((0, 0, 0, 0, 0, 100), kv_recall=1.0) == [
        "--kv-recall-reuse keeps nothing: --kv-recall 1 reads all; give a smaller share"
    ]
    assert unread((0, 0, 0, 0, 0, 100)) == unread((0, 100, 0, 100, 0, 100), kv_recall_reuse=False) == []


def test_reasons_go_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    say_slow(["one", "two"])
    assert capsys.readouterr() == ("", f"{slow.SLOW}: one\n{slow.SLOW}: two\n")
