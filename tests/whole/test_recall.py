"""Plans under which decode steps attend a share of what is kept: each says what the resident loop says with the same choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from h2o_flexgen.cli.report.kept_by_policy import KeptByPolicy
from h2o_flexgen.core.buffer_layout import ALIGNMENT, region_bytes
from h2o_flexgen.core.site import DISK, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.rows import RowRange
from h2o_flexgen.engine.scoring import way_of
from h2o_flexgen.engine.stores import kv_pages
from h2o_flexgen.engine.stores.kv_pages import Brought, KVPages
from h2o_flexgen.formats.kernel_table import INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kv.key_index import ChosenSlots, KeyIndex, SlotsRead
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.disk import DiskRegion, DiskTier, TokensOnDisk
from h2o_flexgen.models.base import MadeProducts
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.machine import find_machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.schedule.check import ScheduleError, check
from h2o_flexgen.schedule.ops import Key, Op
from h2o_flexgen.schedule.traffic import Traffic
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.helpers import tiny
from tests.helpers.contract import Case, Checkpoints, compare, generate_with, hold_contract
from tests.helpers.held_by_hand import HELD
from tests.helpers.samples import every_nth
from tests.kernels.variants import used
from tests.planning.test_cost import assert_moved_as_predicted, cost_of
from tests.whole import test_conversation, test_stream
from tests.whole.test_shared_prefixes import LITTLE_GROWTH, OWN, SharedCase
from tests.whole.test_shared_prefixes import hold_contract as hold_contract_of_prefixes

KEEPING_SOME = (("kv_policy", "h2o"), ("kv_budget", 0.7), ("value_norms", True), ("kv_recall", 0.5))
LENGTHS, HALF = (45, 62, 30, 51), (("kv_recall", 0.5),)
IN_MEMORY = (0, 40, 100, 0, 0, 50)  # KV alone, which is attended where it lies
USUAL = Case("llama-gqa", lengths=LENGTHS, gen_len=5, policy=HALF)
ON_DISK, ALL_ON_DISK, MIXED = (100, 0, 0, 0, 100, 0), (0, 0, 0, 0, 0, 0), (0, 40, 50, 0, 0, 50)
# texts of several units of whole pages, of which a step leaves some on disk
LONG = replace(USUAL, lengths=(118, 60, 90, 101), gen_len=6, policy=(("kv_recall", 0.18),), percent=ON_DISK)
SOME_ON_DISK = replace(LONG, policy=(("kv_policy", "h2o"), ("heavy", 42), ("recent", 20), ("kv_recall", 0.3)))
HEADS_APART = (("kv_policy", "h2o"), ("head_shares", ((0.5, 1.0), (0.6, 1.0), (0.9, 0.7))), ("kv_recall", 0.2))
REUSING = (("kv_recall", 0.18), ("kv_recall_reuse", True))
ALIKE = (("kv_recall", 0.3), ("kv_recall_together", True))
FROM_DISK = (
    LONG,
    replace(LONG, percent=ALL_ON_DISK, gpu_batch_size=1, num_gpu_batches=4, sep_layer=False),
    replace(LONG, kind="qwen3", percent=MIXED, gpu_batch_size=4, num_gpu_batches=1, kv_codec="group8", schedule="row_by_row"),
    replace(LONG, percent=MIXED, gpu_batch_size=1, num_gpu_batches=3, dtype="bfloat16", schedule="flexgen_barrier"),
    replace(LONG, kind="gpt-oss-far", percent=MIXED, buffers=1, weight_codec="group4", compute=INT8),
    replace(LONG, kind="gemma2", percent=ON_DISK, buffers=3, prefill_tokens=32, dtype="bfloat16"),
    replace(LONG, kind="opt", gpu_batch_size=4, num_gpu_batches=1, kv_codec="group4", percent=MIXED),
    replace(LONG, policy=REUSING, gen_len=10),
    replace(LONG, policy=(*REUSING, ALIKE[1]), kind="mistral4", percent=MIXED, kv_codec="group8", dtype="bfloat16", gen_len=8),
    SOME_ON_DISK,
    replace(LONG, policy=HEADS_APART, percent=MIXED, sep_layer=False),
    replace(
        SOME_ON_DISK, kind="qwen3", percent=MIXED, kv_codec="group4", gpu_batch_size=1, num_gpu_batches=3, dtype="bfloat16"
    ),
    replace(LONG, policy=(("kv_policy", "kvzip"), ("kv_budget", 0.6), ("hh_prompt_only", True), ("kv_recall", 0.3))),
    replace(LONG, policy=(("kv_policy", "knorm"), ("kv_budget", 0.7), ("kv_recall", 0.3)), kind="gpt-oss-far", buffers=1),
    replace(LONG, kind="deepseek-v2", percent=MIXED),
    replace(LONG, kind="kimi-linear", percent=MIXED, gpu_batch_size=3),
    replace(SOME_ON_DISK, kind="mistral4", kv_codec="group4", dtype="bfloat16", gpu_batch_size=1, num_gpu_batches=3),
    replace(LONG, policy=ALIKE),
    replace(LONG, policy=ALIKE, percent=MIXED, dtype="bfloat16", gpu_batch_size=1, sep_layer=False),
)
CASES = (
    USUAL,
    replace(USUAL, kind="opt", percent=IN_MEMORY, gpu_batch_size=4, num_gpu_batches=1, prefill_tokens=12),
    replace(USUAL, kind="qwen3", kv_codec="group4", weight_codec="group4", compute=INT8, sep_layer=False),
    replace(USUAL, kind="llama-gqa", kv_codec="group8", percent=IN_MEMORY, schedule="row_by_row", dtype="bfloat16"),
    replace(USUAL, kind="gpt-oss-far", buffers=1),
    replace(USUAL, kind="gemma2", gpu_batch_size=1, num_gpu_batches=4),
    replace(USUAL, kind="deepseek-v3", percent=IN_MEMORY, prefill_tokens=24),
    replace(USUAL, kind="glm4-lite", kv_codec="group8", dtype="bfloat16", policy=KEEPING_SOME),
    replace(USUAL, kind="mistral4", sep_layer=False, weight_codec="group8", compute=INT8),
    replace(USUAL, kind="kimi-linear", percent=IN_MEMORY, prefill_tokens=24, weight_codec="group4"),
    replace(USUAL, policy=KEEPING_SOME),
    replace(USUAL, policy=KEEPING_SOME, kind="qwen3", kv_codec="group8", percent=IN_MEMORY, sep_layer=False),
    replace(USUAL, policy=(("kv_policy", "knorm"), ("kv_budget", 0.8), *HALF), kv_codec="group4", percent=IN_MEMORY),
    replace(USUAL, policy=(("kv_policy", "h2o"), ("head_shares", ((0.5, 1.0), (0.6, 1.0), (0.9, 0.7))), *HALF)),
)


@pytest.mark.parametrize("case", every_nth((*CASES, *FROM_DISK), 2), ids=str)
def test_plans_equal_the_resident_loop_with_the_same_choice(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    hold_contract(case, checkpoints, offload)


@pytest.mark.parametrize("kind", [USUAL.kind, "deepseek-v3"])
def test_the_choice_matters_and_all_of_it_is_the_full_cache_bit_for_bit(
    kind: str, checkpoints: Checkpoints, offload: Path
) -> None:
    some = replace(USUAL, kind=kind)
    full = replace(some, policy=())
    whole = replace(some, policy=(("kv_recall", 1.0),))
    with whole.open(checkpoints, offload) as llm, patch.object(KeyIndex, "over", side_effect=AssertionError):
        compare(full, checkpoints, *generate_with(llm, full))
    chosen, every = (checkpoints.resident_logits(case, case.batches()[0]) for case in (some, full))
    assert torch.equal(chosen[0], every[0]), "prompts are attended whole"
    assert not torch.equal(chosen[1], every[1])


@pytest.mark.parametrize("case", [USUAL, LONG], ids=str)
@pytest.mark.parametrize("kind", ["qwen3-5", "bamba"])
def test_layers_with_attention_choose_where_others_have_states(
    kind: str, case: Case, checkpoints: Checkpoints, offload: Path
) -> None:
    hold_contract(replace(case, kind=kind), checkpoints, offload)


def test_torch_does_without_kernels_what_they_do(checkpoints: Checkpoints, offload: Path) -> None:
    with USUAL.open(checkpoints, offload) as llm:
        wanted, _ = generate_with(llm, USUAL)
    with used(TORCH), USUAL.open(checkpoints, offload) as llm:
        assert [one.token_ids for one in generate_with(llm, USUAL)[0]] == [one.token_ids for one in wanted]


# -- rows that come and go, texts that live on, prefixes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "percent"), [("h2o", USUAL.percent), ("tova", USUAL.percent), ("keydiff", USUAL.percent), ("h2o", MIXED)]
)
def test_rows_that_come_and_go_choose_of_what_they_keep(
    policy: str, percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    kept = (("kv_policy", policy), ("kv_budget", 0.8), *HALF)
    test_stream.hold_contract(replace(COMING, policy=kept, percent=percent), GROWTH, checkpoints, offload)


COMING = replace(USUAL, lengths=(45, 30, 62, 25, 38, 51, 28, 33), gpu_batch_size=2)
GROWTH = (4, 1, 6, 3, 5, 2, 3, 1)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize(("held", "percent"), [((), USUAL.percent), (HELD, USUAL.percent), (HELD, MIXED)])
def test_rows_that_come_and_go_choose_as_they_do_alone(
    held: tuple[str, ...], percent: tuple[int, ...], reuses: bool, checkpoints: Checkpoints, offload: Path
) -> None:
    """Also where several tokens of a row must come, and share a pass if nothing moves."""
    policy = (*HALF, ("kv_recall_reuse", reuses))
    test_stream.hold_contract(replace(COMING, held=held, percent=percent, policy=policy), GROWTH, checkpoints, offload)


@pytest.mark.parametrize(
    ("kept", "percent"),
    [
        ((), USUAL.percent),
        ((), ON_DISK),
        ((("kv_recall_reuse", True),), ON_DISK),
        ((("kv_policy", "h2o"), ("heavy", 10), ("recent", 12)), ON_DISK),
    ],
)
def test_turns_of_a_conversation_choose_of_all_before_them(
    kept: tuple[tuple[str, object], ...], percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", policy=(*kept, ("kv_recall", 0.7)), prefill_tokens=4, percent=percent)
    with patch.object(test_conversation, "TURNS", [[*turn, *turn[::-1]] for turn in test_conversation.TURNS]):
        test_conversation.hold_contract(case, checkpoints, offload)


@dataclass(frozen=True)
class LongBehind(SharedCase):
    @cached_property
    def prompts(self) -> list[list[int]]:
        random = Random(5)
        return [[*prompt, *(random.randrange(tiny.VOCAB) for _ in range(30))] for prompt in super().prompts]


@pytest.mark.parametrize("percent", [USUAL.percent, ON_DISK])
def test_rows_attend_what_they_share_whole_and_choose_of_their_own(
    percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    case = LongBehind("llama-gqa", own=OWN[:8], growth=LITTLE_GROWTH, policy=HALF, percent=percent)
    assert case.plan.answers_depend_on_prefixes
    hold_contract_of_prefixes(case, checkpoints, offload)


# -- what is brought from disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, percent=MIXED, buffers=1, gpu_batch_size=1),
        replace(COMING, percent=ON_DISK),
        replace(COMING, percent=ON_DISK, policy=(*HALF, REUSING[1])),
        SOME_ON_DISK,
        replace(LONG, policy=HEADS_APART),
    ],
)
def test_only_chosen_tokens_come_from_disk(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    """Those that several heads choose come once; with these it would be as much as is predicted."""
    moved = assert_moved_as_predicted(case, checkpoints, offload)
    of_all = tuple(one for one in case.policy if not one[0].startswith("kv_recall"))
    full = assert_moved_as_predicted(replace(case, policy=of_all), checkpoints, offload)
    assert 0 < moved["read"] < full["read"]


def test_heads_that_choose_together_bring_as_much_as_is_predicted(checkpoints: Checkpoints, offload: Path) -> None:
    case, apart = replace(LONG, policy=ALIKE), replace(LONG, policy=ALIKE[:1])
    with case.open(checkpoints, offload) as llm:
        generate_with(llm, case)
        assert llm.stats is not None and not llm.stats.skipped_bytes
    moved, more = (assert_moved_as_predicted(each, checkpoints, offload)["read"] for each in (case, apart))
    assert moved < more
    one, other = (checkpoints.resident_logits(each, each.batches()[0]) for each in (case, apart))
    assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])


def test_what_steps_have_read_is_there_for_later_ones(checkpoints: Checkpoints, offload: Path) -> None:
    once, again = replace(LONG, policy=REUSING), replace(LONG, policy=REUSING[:1])
    fewer, more = (assert_moved_as_predicted(each, checkpoints, offload)["read"] for each in (once, again))
    assert fewer < more
    with once.open(checkpoints, offload) as llm:
        generate_with(llm, once)
        made = WorkloadPlan(llm.spec, llm.plan, Workload(once.lengths, once.gen_len), Site())
        layers = len(llm.spec.kv_layers)
    promised = 0
    for layout in (made.blocks.first.kv.layouts(llm.spec.kv_layers[0], batch)[0] for batch in range(2)):
        assert layout is not None
        chosen = max(20, ceil(0.18 * layout.slots))
        # A step's own token is not on disk, and all heads choose the first and the newest.
        wanted = chosen - 1 + (layout.heads - 1) * (chosen - 20) / 3
        of_row = min(layout.slots, ceil(2 * wanted) + 1)
        promised += layers * region_bytes(2 * of_row * (layout.row_bytes + 8))
    assert made.footprint.parts[HOST]["KV read before"] == promised


@pytest.mark.parametrize(("kind", "products"), [("llama-gqa", 1), ("deepseek-v2", 2)])
def test_a_layer_makes_its_queries_once(kind: str, products: int, checkpoints: Checkpoints, offload: Path) -> None:
    """For the choice. What attends finds them: of latents those of heads, too."""
    case = replace(LONG, kind=kind)
    made, asked = Counter[str](), [MadeProducts.add, MadeProducts.pop]

    def counted(kept: MadeProducts, *given: Any) -> Any:
        (name, own) = ("made", asked[0]) if len(given) == 2 else ("found", asked[1])
        outcome = own(kept, *given)
        made[name] += outcome is not None
        return outcome

    with case.open(checkpoints, offload) as llm, patch.multiple(MadeProducts, add=counted, pop=counted):
        generate_with(llm, case)
        visits = (case.gen_len - 1) * case.num_gpu_batches * len(llm.spec.kv_layers)
    assert made == {"made": products * visits, "found": products * visits}


def test_what_steps_choose_is_fetched_beside_other_batches(checkpoints: Checkpoints) -> None:
    plan = Plan.create(kv_recall=0.5, gpu_batch_size=1, num_gpu_batches=3).with_percent(ON_DISK).at(Site())
    made = WorkloadPlan(checkpoints.opened("llama-gqa", "float32", "float32").spec(plan), plan, Workload((90,) * 3, 3), Site())
    schedule = made.blocks.first.schedule
    check(schedule)
    layer = min(schedule.traffic.choosing)
    of_step = [task.key for task in schedule.tasks() if task.step == 1 and task.layer == layer]
    ops = [(key.op, key.batch) for key in of_step if key.op is not Op.WRITE_KV]
    first, *others = [[(Op.CHOOSE, batch), (Op.READ_KV, batch)] for batch in range(3)]
    assert ops == [*first, *others[0], *others[1], (Op.COMPUTE, 0), (Op.COMPUTE, 1), (Op.COMPUTE, 2)]
    machine = find_machine("cpu-2core")
    priced = Pricing(made.blocks.first, machine)
    full = replace(made, plan=replace(plan, kv_options=replace(plan.kv_options, kv_recall=None)))
    of_all = Pricing(full.blocks.first, machine)
    compute, whole = (each.compute_parts(Key(Op.COMPUTE, 1, layer, 1))["products"] for each in (priced, of_all))
    assert 0 < compute < whole  # its choice has made the queries
    read = Key(Op.READ_KV, 1, layer, 0)
    assert 0 < priced.seconds(Key(Op.CHOOSE, 1, layer, 0)) < priced.seconds(Key(Op.COMPUTE, 1, layer, 0))
    assert priced.cost.nbytes(read) < of_all.cost.nbytes(read)
    slow = Pricing(made.blocks.first, replace(machine, small_reads_per_s=1e3, small_writes_per_s=2e3))
    tokens = priced.cost.moved_pages(read).pieces
    assert slow.seconds(read) == pytest.approx(tokens / 1e3 + machine.task_seconds) and slow.seconds(read) > priced.seconds(
        read
    )
    assert slow.seconds(read._replace(op=Op.WRITE_KV)) == pytest.approx(1 / 2e3 + machine.task_seconds)


@pytest.mark.parametrize(
    "case",
    [LONG, replace(LONG, gpu_batch_size=1, dtype="bfloat16", prefill_tokens=32), replace(LONG, policy=ALIKE), SOME_ON_DISK],
)
def test_what_is_priced_are_the_pages_that_a_disk_reads_and_writes(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    """Of a prompt, part of a page group more for each row; of what steps choose, what is usual."""
    moved = dict.fromkeys(("write", "read"), 0)
    written, gathered, read_again = DiskTier.write_from, DiskTier.gather, DiskTier.read_into

    def write(tier: DiskTier, region: DiskRegion, start: int, source: torch.Tensor) -> None:
        moved["write"] += source.nbytes
        written(tier, region, start, source)

    def gather(tier: DiskTier, region: DiskRegion, wanted: TokensOnDisk, image: np.ndarray, *given: np.ndarray) -> None:
        moved["read"] += len(wanted.groups) * wanted.group_bytes
        gathered(tier, region, wanted, image, *given)

    def read(tier: DiskTier, region: DiskRegion, start: int, out: torch.Tensor) -> None:
        moved["write"] += out.nbytes  # what is written beside
        read_again(tier, region, start, out)

    watched = (
        patch.object(DiskTier, name, own) for name, own in (("write_from", write), ("gather", gather), ("read_into", read))
    )
    with ExitStack() as watching, case.open(checkpoints, offload) as llm:
        for one in watched:
            watching.enter_context(one)
        generate_with(llm, case)
        costs = [cost_of(llm, block) for block in Workload(case.lengths, case.gen_len).blocks(case.gpu_batch_size, 2)]
    priced = {
        lane: sum(cost.moved_pages(task).nbytes for cost in costs for task in cost.schedule.tasks() if task.op is op)
        for lane, op in (("write", Op.WRITE_KV), ("read", Op.READ_KV))
    }
    more = len(case.lengths) * len(costs[0].spec.kv_layers) * ALIGNMENT
    alike = 0.5 if case is SOME_ON_DISK else 0  # heads often let go of the same token here, and few page groups are theirs
    assert moved["write"] <= priced["write"] <= moved["write"] * (1 + alike) + more
    assert moved["read"] * 0.8 < priced["read"] < moved["read"] * 1.25


# -- plans -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "bloom"}, "with ALiBi; leave kv_recall out"),
        ({"kind": "falcon-h1"}, "with attention beside a scan; leave kv_recall out"),
        ({"kind": "mistral-near"}, "with a window in every layer; leave kv_recall out"),
        (
            {"device": "pretended", "percent": MIXED, "attend_on": HOST},
            "with a GPU, KV on disk and attend_on='host'; leave attend_on='host' out, keep KV in memory, or leave",
        ),
        (
            {"device": "pretended", "percent": MIXED, "policy": (*HALF, REUSING[1])},
            "with a GPU, KV on disk and kv_recall_reuse; leave kv_recall_reuse out, keep KV in memory, or leave",
        ),
    ],
)
def test_what_is_not_done_yet_is_refused_in_one_line(
    options: dict[str, object], said: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = replace(USUAL, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as refused, case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts)
    assert said in str(refused.value) and "kv_recall 0.5" in str(refused.value) and "\n" not in str(refused.value)


def planned(
    checkpoints: Checkpoints,
    share: float,
    kv_codec: str = PLAIN,
    percent: tuple[int, ...] = USUAL.percent,
    has_gpu: bool = False,
) -> WorkloadPlan:
    site = Site(accelerator=has_gpu)
    plan = Plan.create(kv_recall=share, kv_codec=kv_codec).with_percent(percent).at(site)
    return WorkloadPlan(checkpoints.opened("llama-gqa", "float32", "float32").spec(plan), plan, Workload((400,) * 4, 9), site)


def test_the_index_is_promised_and_what_is_read_is_priced(checkpoints: Checkpoints) -> None:
    all_of_it, chosen = planned(checkpoints, 1), planned(checkpoints, 0.1)
    spec, slots = all_of_it.spec, 4 * 408
    kept, index = (own.footprint.parts[HOST].get("KV notes", 0) for own in (all_of_it, chosen))
    of_layer = region_bytes(slots * spec.kv_heads * 36)  # a group of 64 values in 4 bits, though a head has fewer
    assert (kept, index) == (0, len(spec.kv_layers) * of_layer)
    assert not planned(checkpoints, 0.1, "group4").footprint.parts[HOST].get("KV notes", 0), "keys are their own index"
    on_disk = planned(checkpoints, 0.1, "group4", ON_DISK).footprint.parts
    assert on_disk[HOST]["KV notes"] == index and on_disk[DISK]["KV"] > on_disk[HOST]["KV buffers"] > 0
    each = [Cost(own.blocks.first) for own in (all_of_it, chosen)]
    (layer, *_), held = spec.kv_layers, 4 * 401
    full, read = (cost.bytes_to_read(cost.by_level(Key(Op.COMPUTE, 1, layer, 0))[0]) for cost in each)
    assert full == held * spec.kv_bytes_per_slot
    assert read == 4 * 41 * spec.kv_bytes_per_slot + held * spec.kv_heads * 36
    assert each[1].op_bytes() == each[0].op_bytes()


def test_a_report_says_what_steps_attend(checkpoints: Checkpoints) -> None:
    line = KeptByPolicy(planned(checkpoints, 0.1))._line()
    assert line.startswith(
        "full (--kv-recall 0.1) keeps all 408 tokens of a row; a step attends 41 of them, which its query chooses"
    )
    assert "by an index of keys" in line
    fewest = KeptByPolicy(planned(checkpoints, 0.04))._line()
    assert "a step attends 20 of them (20 is the least), which" in fewest and "least" not in line
    packed = KeptByPolicy(planned(checkpoints, 0.1, "group4"))._line()
    assert packed.endswith("which its query chooses by their keys, which are packed")
    beside = KeptByPolicy(planned(checkpoints, 0.1, "group4", (100, 0, 0, 100, 100, 0), has_gpu=True))
    assert "by an index of keys" in beside._line() and beside._beside == "; from outside the GPU only these are fetched"
    assert not KeptByPolicy(planned(checkpoints, 0.1, percent=ON_DISK))._beside


def test_texts_are_not_scored_in_one_pass_where_steps_choose() -> None:
    plan = Plan.create(kv_recall=0.1)
    assert way_of(plan, None) == "decode" and way_of(Plan.create(kv_recall=1), None) == "prefill"
    with pytest.raises(ValueError, match=r"kv_recall 0\.1 cannot be scored by 'prefill'"):
        way_of(plan, "prefill")


# -- faults that these tests find ------------------------------------------------------------------------------------------


@contextmanager
def rows_leave_their_index_behind() -> Iterator[None]:
    with patch.object(KeyIndex, "copy_row", lambda *_: None):
        yield


@contextmanager
def one_index_for_all_layers() -> Iterator[None]:
    made, known = KeyIndex.over, dict[object, KeyIndex]()

    def over(region: torch.Tensor | None, *given: object) -> KeyIndex:
        return known.setdefault(given, made(region, *given))  # type: ignore[arg-type]

    with patch.object(KeyIndex, "over", over):
        yield


@contextmanager
def counts_of_the_step_before() -> Iterator[None]:
    with patch.object(KVStep, "attended", property(lambda now: (now.counts // 2).clamp(min=1))):
        yield


@contextmanager
def rows_leave_their_places_behind() -> Iterator[None]:
    with patch.object(KVPages, "keep_rows", lambda *_: None):
        yield


@pytest.mark.parametrize(
    ("fault", "percent"),
    [
        (rows_leave_their_index_behind, USUAL.percent),
        (rows_leave_their_index_behind, MIXED),
        (one_index_for_all_layers, USUAL.percent),
        (counts_of_the_step_before, USUAL.percent),
        (rows_leave_their_places_behind, ON_DISK),
    ],
)
def test_what_goes_wrong_in_the_engine_is_found(
    fault: Callable[[], object], percent: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    case = replace(COMING, percent=percent)
    for row, grown in enumerate(GROWTH):  # before the fault is there
        checkpoints.resident_logits(replace(case, gen_len=grown), (row,))
    with case.open(checkpoints, offload) as llm, fault():  # type: ignore[attr-defined]
        completions = test_stream.streamed(llm, test_stream.requests_of(case, GROWTH))
    with pytest.raises(AssertionError):
        test_stream.compare_each_alone(case, GROWTH, checkpoints, completions)


@contextmanager
def tokens_of_the_row_before() -> Iterator[None]:
    made = kv_pages._wanted
    with patch.object(kv_pages, "_wanted", lambda chosen, *given: made(np.roll(chosen, 1, 0), *given)):
        yield


@contextmanager
def tokens_of_one_head() -> Iterator[None]:
    made = kv_pages._wanted
    with patch.object(kv_pages, "_wanted", lambda chosen, *given: made(chosen[:, :1], *given)):
        yield


@contextmanager
def fetched_before_it_is_chosen() -> Iterator[None]:
    """What comes is what the step before has chosen."""
    made, known = KVPages.bring, dict[KVPages, torch.Tensor]()

    def early(pages: KVPages, image: np.ndarray, choice: ChosenSlots, policy: KVPolicy) -> Brought:
        assert choice.slots is not None
        slots, known[pages] = known.get(pages, choice.slots[..., :20]), choice.slots
        return made(pages, image, ChosenSlots(choice.now, slots), policy)

    with patch.object(KVPages, "bring", early):
        yield


@contextmanager
def what_lies_beside_is_taken_for_what_was_read() -> Iterator[None]:
    made = KVPages._read_in_place

    def beside(pages: KVPages, tokens: torch.Tensor, *given: Any) -> SlotsRead:
        read = made(pages, tokens, *given)
        return read._replace(entries=(read.entries + 1) % tokens.shape[3])

    with patch.object(KVPages, "_read_in_place", beside):
        yield


@contextmanager
def newest_tokens_are_not_with_those_that_were_read() -> Iterator[None]:
    with patch.object(SlotsRead, "put_newest", lambda *_: None):
        yield


@contextmanager
def products_of_the_row_before() -> Iterator[None]:
    found = MadeProducts.pop

    def rolled(kept: MadeProducts, names: tuple[str, ...]) -> Sequence[torch.Tensor] | None:
        made = found(kept, names)
        return None if made is None else [each.roll(1, 0) for each in made]

    with patch.object(MadeProducts, "pop", rolled):
        yield


@contextmanager
def index_one_token_behind() -> Iterator[None]:
    with patch.object(KeyIndex, "_with_newest", lambda index, now, keys, codes: codes[: len(keys)]):
        yield


@contextmanager
def newest_tokens_are_not_written() -> Iterator[None]:
    made = KVPages.write

    def prompts_alone(pages: KVPages, image: np.ndarray, changed: Sequence[RowRange]) -> int:
        return made(pages, image, [one for one in changed if not one.first])

    with patch.object(KVPages, "write", prompts_alone):
        yield


@contextmanager
def what_the_newest_take_over_is_not_written() -> Iterator[None]:
    with patch.object(KVPages, "change", lambda pages, image, slots: 0):
        yield


@contextmanager
def what_lies_beside_is_lost() -> Iterator[None]:
    with patch.object(DiskTier, "read_into", lambda tier, region, start, out: out.zero_()):
        yield


TOGETHER = replace(LONG, gpu_batch_size=4, num_gpu_batches=1)
GROWN = replace(TOGETHER, lengths=LENGTHS, gen_len=26, policy=HALF)  # until new tokens are no more among the newest


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (tokens_of_the_row_before, TOGETHER),
        (tokens_of_one_head, TOGETHER),
        (fetched_before_it_is_chosen, TOGETHER),
        (products_of_the_row_before, TOGETHER),
        (index_one_token_behind, GROWN),
        (newest_tokens_are_not_written, TOGETHER),
        (what_lies_beside_is_taken_for_what_was_read, replace(TOGETHER, policy=REUSING)),
        (newest_tokens_are_not_with_those_that_were_read, replace(TOGETHER, policy=REUSING)),
        (what_the_newest_take_over_is_not_written, SOME_ON_DISK),
        (what_lies_beside_is_lost, SOME_ON_DISK),
    ],
)
def test_what_is_wrongly_brought_from_disk_is_found(
    fault: Callable[[], object], case: Case, checkpoints: Checkpoints, offload: Path
) -> None:
    checkpoints.resident_logits(case, case.batches()[0])  # before the fault is there
    with case.open(checkpoints, offload) as llm, fault():  # type: ignore[attr-defined]
        made = generate_with(llm, case)
    with pytest.raises(AssertionError):
        compare(case, checkpoints, *made)


@pytest.mark.parametrize(("op", "need"), [(Op.READ_KV, Op.CHOOSE), (Op.CHOOSE, Op.WRITE_KV), (Op.COMPUTE, Op.READ_KV)])
def test_a_fetch_that_may_be_too_early_is_refused(op: Op, need: Op) -> None:
    kv = {(1, batch): DISK for batch in range(3)}
    schedule = Zigzag(Traffic(steps=4, layers=3, batches=3, kv=kv, choosing=frozenset({1})))
    check(schedule)
    tasks = [
        task._replace(needs=tuple(one for one in task.needs if one.op is not need)) if task.op is op else task
        for task in schedule.tasks()
    ]
    with patch.object(Zigzag, "tasks", lambda _: iter(tasks)), pytest.raises(ScheduleError, match=f"{op} .* may start"):
        check(schedule)
