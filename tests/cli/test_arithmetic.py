"""Arithmetic: what values are kept in and what they are multiplied in, by processor; told in one line and as JSON."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from h2o_flexgen.cli.report.arithmetic import Arithmetic
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats import kernel_table
from h2o_flexgen.formats.kernel_table import CPU, INT8_PRODUCT, LIBRARIES, PRODUCT, Kernel, Processor
from h2o_flexgen.formats.table import PLAIN, matrix_format
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from tests.helpers.inverted import rows_of
from tests.planning.worlds import tiny_spec

BF16, OURS = "bfloat16", "ours"
TABLE = (
    Kernel(PRODUCT, PLAIN, "torch's", dtypes=(BF16,), instructions=BF16),
    Kernel(PRODUCT, PLAIN, OURS, CPU, LIBRARIES, (BF16, "float16"), within="float32"),
    Kernel(PRODUCT, PLAIN, "torch's"),
    Kernel(PRODUCT, "tiles4", OURS, CPU, LIBRARIES, most_rows=16, within="float32"),
    Kernel(INT8_PRODUCT, "tiles4", OURS, CPU, LIBRARIES, priced_as="int8 tiles4", within="int8"),
    Kernel(INT8_PRODUCT, "tiles4", "its twin in torch", priced_as="int8 tiles4", within="int8"),
)
OLD = Processor("cpu", "avx2")
NEW = Processor("cpu", "avx512vnni", ("bfloat16",))
GPU = Processor("cuda", "avx2")
BARE = Processor("cpu")
KEPT = "activations and KV in bfloat16"


@pytest.fixture(autouse=True)
def pretended_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_table, "kernels_of", partial(rows_of, TABLE))


def arithmetic(processor: Processor | None = OLD, dtype: str = "bfloat16", **options: object) -> Arithmetic:
    plan = Plan.create(**options)
    return Arithmetic(plan, dtype, processor, formats=(matrix_format(plan.weight_codec),))


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (arithmetic(NEW), f"weights in bfloat16, products exact in bfloat16; {KEPT}"),
        (arithmetic(OLD), f"weights in bfloat16, products exact in float32; {KEPT}"),
        (arithmetic(OLD, "float32"), "weights in float32, products exact in float32; activations and KV in float32"),
        (arithmetic(GPU, "float16"), "weights in float16, products exact in float16; activations and KV in float16"),
        (arithmetic(None, weight_codec="group8"), f"weights in 8 bits, products exact; {KEPT}"),
        (
            arithmetic(NEW, weight_codec="group4", kv_codec="group4", compute="int8"),
            "weights in 4 bits, products in int8, of activations rounded to 8 bits; activations in bfloat16, KV in 4 bits",
        ),
    ],
    ids=["with instructions", "without", "float32", "an accelerator", "another machine", "of 8 bits"],
)
def test_one_line_says_what_is_kept_in_what_and_multiplied_in_what(own: Arithmetic, line: str) -> None:
    assert own.line() == line


def test_its_document_has_the_same_facts() -> None:
    own = arithmetic(NEW, weight_codec="group4", compute="int8")
    kept = {"weights": "group4", "matrices": ["group4"], "kv": "plain", "states": "float32", "activations": "bfloat16"}
    assert own.as_json() == {**kept, "compute": "int8", "products": ["int8"]}
    assert arithmetic(None).as_json()["products"] == []


def test_states_are_told_where_they_are_rounded() -> None:
    own = arithmetic(NEW, state_dtype=BF16)
    assert own.line().endswith(f", states in {BF16}") and own.as_json()["states"] == BF16


def test_prompts_may_be_multiplied_otherwise() -> None:
    """Packed weights may be decoded first where there are many rows."""
    own = Arithmetic(Plan(weight_codec="group4"), BF16, NEW, decode_rows=4, prompt_rows=90, formats=("tiles4",))
    assert own.products == ("float32", BF16)
    assert own.line() == f"weights in 4 bits, products exact in float32 (of prompts in bfloat16); {KEPT}"
    assert replace(own, processor=OLD).products == ("float32",)


def test_rows_are_those_of_the_largest_block() -> None:
    planned = WorkloadPlan(tiny_spec(), Plan(gpu_batch_size=3, prefill_tokens=20), Workload((7, 9, 2, 9), 4), Site())
    own = Arithmetic.of(planned, OLD)
    assert (own.dtype, own.decode_rows, own.prompt_rows, own.formats) == ("float32", 3, 18, (PLAIN,))


def test_forms_of_a_checkpoint_are_named_and_those_that_stay_exact() -> None:
    exact = Arithmetic(Plan(), BF16, OLD, formats=("q4_K", "q6_K"))
    assert exact.line() == f"weights in q4_K and q6_K, products exact in float32; {KEPT}"
    mixed = replace(exact, plan=Plan(compute="int8"), formats=("tiles4", "fp8-128x128-float32", PLAIN))
    assert mixed.line() == (
        "weights in 4 bits and fp8-128x128-float32 and bfloat16, products in int8, of activations rounded to 8 bits "
        f"(exact with fp8-128x128-float32 and bfloat16); {KEPT}"
    )
    assert mixed.products == ("int8",) and replace(mixed, formats=("fp8-128x128-float32",)).products == ("float32",)


@pytest.mark.parametrize(
    ("own", "plain", "packed"),
    [
        (Processor("cpu", "avx512bf16", (BF16,)), (BF16,), ("float32", BF16)),
        (Processor("cpu", "avx512vnni", (BF16,)), ("float32", BF16), ("float32",)),
        (Processor("cpu", "avx2"), ("float32",), ("float32",)),
        (Processor("cpu"), ("float32",), ("float32",)),
        (Processor("cuda", "avx2"), (BF16,), (BF16,)),
    ],
    ids=lambda value: f"{value.device} {value.build}" if isinstance(value, Processor) else "",
)
def test_the_kernels_of_the_package_say_what_they_multiply_in(
    monkeypatch: pytest.MonkeyPatch, own: Processor, plain: tuple[str, ...], packed: tuple[str, ...]
) -> None:
    monkeypatch.undo()
    as_they_are, in_4_bits, rounded = (
        Arithmetic(Plan.create(**options), BF16, own, 1, 1000, (form,))
        for form, options in ((PLAIN, {}), ("tiles4", {}), ("tiles4", {"compute": "int8"}))
    )
    assert (as_they_are.products, in_4_bits.products, rounded.products) == (plain, packed, ("int8",))


def test_kernels_in_c_share_work_out_and_torch_does_not() -> None:
    """With instructions of its own torch multiplies plain matrices in bfloat16, and on a GPU no thread of the CPU computes."""
    packed = {"weight_codec": "group4"}
    assert [arithmetic(own).shares_work for own in (OLD, NEW, GPU, BARE, None)] == [True, False, False, False, False]
    assert arithmetic(NEW, **packed, compute="int8").shares_work and arithmetic(NEW, **packed).shares_work
    assert not replace(arithmetic(NEW, **packed), decode_rows=17).shares_work, "so many rows meet decoded weights"
    assert not replace(arithmetic(NEW, **packed), formats=("tiles4", PLAIN)).shares_work
