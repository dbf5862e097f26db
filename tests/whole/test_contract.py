"""The contract: whatever the plan, the tokens are those of the plain resident loop, and its logits bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.kernel_table import BASELINE, EXACT, INT8, TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import matrix, native
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.matrix import PackedMatrix
from h2o_flexgen.kernels.operations import packed_product
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.host import HostTier
from tests.helpers.contract import (
    ALIKE,
    GGUF,
    POLICIES,
    PUBLISHED,
    WEIGHTS,
    Case,
    Checkpoints,
    compare,
    generate_with,
    hold_contract,
    kept_as,
)
from tests.helpers.held_by_hand import HELD
from tests.helpers.pairwise import Name, in_turn, most_of, on_devices
from tests.helpers.resident import resident_generate
from tests.helpers.samples import every_nth, first_of, slow, spread
from tests.kernels.variants import used

RAGGED, EQUAL, MANY = (5, 9, 2, 7, 4), (6, 6, 6, 6), (3, 11, 8, 1, 6, 2, 9)
MIXES = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 30, 20, 50, 40, 30),
    (50, 0, 0, 100, 0, 0),
    (0, 40, 60, 0, 0, 50),
    (0, 0, 100, 0, 100, 0),
    (100, 0, 0, 0, 0, 100),
)
MIXTURES = "mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe", "granite-moe", "minimax"
CHOICES = {
    # those that attend or compute as no other one does; the first of a choice stands in cases that meet nothing new: a plan
    # that offloads and overlaps
    "kind": ("opt", "llama-gqa", "neox-parallel", "mixtral", "gpt-oss", "gemma3", "deepseek-v3"),
    "percent": (MIXES[3], *MIXES[:3], *MIXES[4:]),
    "lengths": (RAGGED, EQUAL, MANY),
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (2, 1, 4),
    "buffers": (2, 1, 3),
    "sep_layer": (True, False),
    "overlap": (True, False),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "policy": POLICIES,
    "prefill_tokens": (1024, 12, 1),
    ("weight_codec", "compute"): WEIGHTS,
    "kv_codec": (PLAIN, "group4", "group8"),
    "attend_on": (DEVICE, HOST),
    "held": ((), HELD),
}
ATTENDING = (
    "opt",
    "llama-gqa",
    "neox-parallel",
    "gpt-oss",
    "gpt-oss-far",
    "gemma3",
    "deepseek-v3",
)  # others attend as one of these does


WITHIN_A_CACHE = {"prefill_tokens", "kv_codec", "device", "attend_on", "prefix_policy", "lengths", "num_gpu_batches"}


def has_code(pair: Mapping[Name, Any]) -> bool:
    """Whether two choices meet anywhere in the code. Policies know no model, but the ways in which models attend, and not what
    matrices are written in; and neither they nor models know more of a mix of tiers than where their own data lies, which the
    first mixes have all of. One that only ranks tokens otherwise than an earlier one meets what ranks them, and what they lie
    in."""
    if pair.keys() == {"policy", ("weight_codec", "compute")}:
        return pair["policy"] in POLICIES[:2]
    if pair.get("policy") in ALIKE and not pair.keys() & WITHIN_A_CACHE:
        return False
    if "percent" in pair and ("kind" in pair or "policy" in pair):
        return pair["percent"] in MIXES[:4]
    return pair.keys() != {"kind", "policy"} or pair["kind"] in ATTENDING or pair["policy"] in POLICIES[:2]


def has_code_elsewhere(pair: Mapping[Name, Any]) -> bool:
    """Whether two choices meet in what stands on the contract: rows that come and go, texts that go on, prefixes, several
    devices. How a policy and a kind of models attend is held here, and there with one kind. A policy of its own meets there
    what lies in a cache: the first two meet the rest of a plan."""
    policy = pair.get("policy", POLICIES[0])
    if policy in POLICIES[:2]:
        return has_code(pair)
    if pair.keys() == {"kind", "policy"}:
        return pair["kind"] == "llama-gqa"
    return bool(pair.keys() & WITHIN_A_CACHE) and has_code(pair)


@pytest.mark.parametrize("values", on_devices(CHOICES, has_code, share=0.9))
def test_tokens_and_logits_equal_the_resident_loop_for_every_pair_of_choices(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(**values), checkpoints, offload)


TIERS = ((100, 0), (0, 100), (0, 0))


FROM_PAGES = {
    ("kind", "stored", "weight_codec", "compute"): [one for one in PUBLISHED if one[1].startswith("gguf-") and one[2] == PLAIN],
    "percent": ((0, 0, 0, 100, 0, 100), (0, 30, 0, 100, 0, 100)),
    "num_gpu_batches": (1, 3),  # of several, each reads a part of a layer
    "buffers": (2, 3),
    "schedule": ("zigzag", "row_by_row"),
}


def is_of_pages(pair: Mapping[Name, Any]) -> bool:
    """Each format lies in its own way in a page, of which several batches read parts. Where it goes then is no matter of it."""
    return "stored" not in str([*pair]) or pair.get("num_gpu_batches") == 3


@pytest.mark.parametrize("values", most_of(FROM_PAGES, needs=is_of_pages))
def test_blocks_keep_their_place_in_a_page(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_flexgen.core.buffer_layout.PAGE_ALIGNED_FROM", 256)  # else tensors of a tiny model are too small
    hold_contract(Case(lengths=RAGGED[:4], gen_len=3, gpu_batch_size=2, **values), checkpoints, offload)


EACH_TIER = {"weights": TIERS, "kv": TIERS, "hidden": TIERS, "attend_on": (DEVICE, HOST)}


@pytest.mark.parametrize("values", in_turn(EACH_TIER, nth=5))
def test_every_tier_for_each_kind_of_data(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    percent = (*values["weights"], *values["kv"], *values["hidden"])
    where = {"device": values["device"], "attend_on": values["attend_on"]}
    hold_contract(Case("llama-gqa", percent, RAGGED, num_gpu_batches=3, **where), checkpoints, offload)


@pytest.mark.parametrize("values", on_devices({"buffers": (1, 2, 3, 5), "num_gpu_batches": (1, 2, 4), "gen_len": (1, 2, 4)}))
def test_every_number_of_slots_batches_and_steps_with_all_on_disk(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(percent=(0, 0, 0, 0, 0, 0), lengths=MANY, gpu_batch_size=3, **values), checkpoints, offload)


TYPES = {
    "stored": ("float32", "float16", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "percent": (MIXES[0], MIXES[2], MIXES[3]),
    ("weight_codec", "compute"): WEIGHTS[:1] + WEIGHTS[-2:],
}


@pytest.mark.parametrize("values", on_devices(TYPES))
def test_every_stored_and_computed_type(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case("neox-parallel", num_gpu_batches=3, **values), checkpoints, offload)


def is_first_of_its_kin(one: tuple[str, ...]) -> bool:
    """Whether no format before it is stored and computed with as this one. Their bytes differ, which decoders alone see."""
    return kin(one) not in map(kin, PUBLISHED[: PUBLISHED.index(one)])


def kin(one: tuple[str, ...]) -> tuple[bool, ...]:
    kind, stored, codec, compute = one
    return stored.startswith(GGUF), kind in (*MIXTURES, "glm4-moe-air"), codec == PLAIN, compute == EXACT


def is_of_formats(pair: Mapping[Name, Any]) -> bool:
    """Whether two choices have to meet: all do where a format stands for its kin, and others are decoded, to either type."""
    one = pair.get(("kind", "stored", "weight_codec", "compute"))
    return one is None or is_first_of_its_kin(one) or pair.get("dtype") == ("float32", "bfloat16")[PUBLISHED.index(one) % 2]


STORED_CASES = {
    ("kind", "stored", "weight_codec", "compute"): PUBLISHED,
    "percent": (MIXES[2], MIXES[3]),  # all weights come from the disk, or some from each tier
    "attend_on": (DEVICE, HOST),
    "kv_codec": (PLAIN, "group4"),
    "dtype": ("float32", "bfloat16"),
}


def is_of_a_second(case: Any) -> bool:
    """Whether the format of a case is another one of its kin."""
    values = case if isinstance(case, dict) else case.values[0]
    return not is_first_of_its_kin(tuple(values[name] for name in ("kind", "stored", "weight_codec", "compute")))


OF_FORMATS = [slow(case) if is_of_a_second(case) else case for case in on_devices(STORED_CASES, is_of_formats)]


@pytest.mark.parametrize("values", OF_FORMATS)
def test_every_format_of_checkpoints(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold_contract(Case(num_gpu_batches=3, **values), checkpoints, offload)


NEAR = {
    "percent": (MIXES[0], MIXES[2], MIXES[3]),
    "gpu_batch_size": (1, 2, 3),
    "sep_layer": (True, False),
    "prefill_tokens": (1024, 12),
    "kv_codec": (PLAIN, "group4"),
    "attend_on": (DEVICE, HOST),
    "gen_len": (4, 9),
}


@pytest.mark.parametrize("values", on_devices(NEAR))
def test_a_window_in_every_layer(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold_contract(Case("mistral-near", lengths=MANY, **values), checkpoints, offload)


LIKE_OTHERS = (  # they attend and compute as kinds that are held to every pair of choices
    "opt-350m",
    "qwen3",
    "neox-sequential",
    "qwen2-wordy",
    *(kind for kind in MIXTURES if kind not in CHOICES["kind"]),
    "deepseek-v2",
    "glm4-lite",
)
OTHERS = (
    *LIKE_OTHERS,
    "phi3",
    "phi3-near",
    "gemma3-capped",
    "gemma2",
    "qwen2-near",
    "gemma4",
    "gemma4-dense",
    "gemma4-unified",
    "falcon-grouped",
    "gpt2",
    "gptj",
    "ernie-moe",
    "bloom",
    "mpt-clipped",
    "hunyuan",
    "hunyuan-moe",
    "llama4",
    "llama4-near",
)  # relatives of kinds that are held to every pair of choices that has code


RELATIVES = [*zip(OTHERS, cycle(MIXES[2:6]), cycle((EXACT, INT8)), cycle((POLICIES[1], POLICIES[0], POLICIES[1])))]


@pytest.mark.parametrize(
    ("kind", "percent", "compute", "policy"), [slow(*one) if one[0] in LIKE_OTHERS else one for one in RELATIVES]
)
def test_relatives_of_other_kinds(
    kind: str,
    percent: tuple[float, ...],
    compute: str,
    policy: tuple[tuple[str, Any], ...],
    checkpoints: Checkpoints,
    offload: Path,
    pretended: None,
) -> None:
    """Packed weights and KV, prompts in pieces, and most with an eviction, where all has to be loaded and stored: they know
    nothing of it. On a CPU the test that records every layer of every family holds them."""
    kept = POLICIES[0] if kind == "phi3-near" else policy  # texts are longer than its windows
    plan = {"policy": kept, "kv_codec": kept_as(kind, "group4"), "sep_layer": False, "prefill_tokens": 5}
    plan |= {"weight_codec": "group4", "compute": compute, "device": "pretended"}
    hold_contract(Case(kind, percent, RAGGED, gpu_batch_size=3, **plan), checkpoints, offload)


def test_a_single_prompt_of_a_single_token(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    hold_contract(Case(percent=MIXES[2], lengths=(1,), gen_len=3, device=any_device), checkpoints, offload)


HELD = {
    "percent": (MIXES[2], MIXES[3], (0, 50, 0, 60, 0, 50)),
    "num_gpu_batches": (1, 3, 4),
    "buffers": (1, 2, 3),
    ("weight_codec", "compute"): WEIGHTS[:1] + WEIGHTS[-2:],
    "attend_on": (DEVICE, HOST),
}


@pytest.mark.parametrize("values", on_devices(HELD))
def test_nothing_depends_on_what_memory_held_before(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions are used again for other things. Here all are full of NaN when they are handed out."""
    for tier in (HostTier, DeviceTier):
        monkeypatch.setattr(tier, "alloc", poisoned(tier.alloc))
    hold_contract(Case("llama-gqa", lengths=MANY, **values), checkpoints, offload)


def poisoned(alloc: Callable[[Any, int], Tensor]) -> Callable[[Any, int], Tensor]:
    return lambda tier, nbytes: alloc(tier, nbytes).fill_(0xFF)


def test_one_engine_generates_again_with_other_shapes(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    """Buffers are made for the first workload and used again for a larger and a smaller one."""
    for device in ("cpu", "pretended"):
        first = Case(percent=MIXES[3], device=device, lengths=(4, 6))
        others = (Case(percent=MIXES[3], device=device, lengths=MANY, gen_len=6), Case(percent=MIXES[3], device=device))
        with first.open(checkpoints, offload) as llm:
            for case in (first, *others, first):
                compare(case, checkpoints, *generate_with(llm, case))


# -- what the resident loop is held to -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        *((kind, "float32") for kind in CHOICES["kind"]),  # of all others tests/models holds it
        *every_nth(spread(dict.fromkeys((kind, stored) for kind, stored, *_ in PUBLISHED)), 2),
    ],
)
def test_the_resident_loop_equals_the_greedy_generate_of_transformers(kind: str, stored: str, checkpoints: Checkpoints) -> None:
    """Transformers computes with what the writer of a format says that its bytes mean."""
    case = Case(kind, lengths=RAGGED, gen_len=8, stored=stored)
    resident = checkpoints.resident_logits(case, range(len(RAGGED)))
    for row in range(len(RAGGED)):
        tokens, logits = checkpoints.greedy(case, row, 8)
        assert [int(step[row].argmax()) for step in resident] == tokens
        nearest = max(1e-4, 2e-5 * float(logits.abs().max()))  # models of large blocks have logits of 20
        torch.testing.assert_close(torch.stack([step[row] for step in resident]), logits, atol=nearest, rtol=0)


PIECES = [  # each policy with two kinds; the last one attends as the first does
    *product(("llama-gqa",), POLICIES),
    *product(("gemma2",), (POLICIES[0], *POLICIES[1::2])),
    *product(("gpt-oss",), POLICIES[::2]),
    ("mixtral", POLICIES[1]),
]


@pytest.mark.parametrize(("kind", "policy"), PIECES)
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(
    kind: str, policy: tuple[tuple[str, Any], ...], checkpoints: Checkpoints
) -> None:
    """So what is kept is chosen by all of the prompt, and not piece by piece."""
    at_once = Case(kind, lengths=(9, 4, 13), gen_len=4, policy=policy)
    expected, *others = (
        torch.stack(checkpoints.resident_logits(replace(at_once, prefill_tokens=most), range(3))) for most in (1024, 5, 1)
    )
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_layout_of_a_cache_changes_no_token_of_the_resident_loop(checkpoints: Checkpoints) -> None:
    model, weights = checkpoints.model("llama-gqa", "float32", "float32")
    prompts = Case(lengths=RAGGED).prompts
    by_head, by_token = (torch.stack(resident_generate(model, weights, prompts, 6, layout)) for layout in (False, True))
    torch.testing.assert_close(by_head, by_token, atol=1e-5, rtol=0)


# -- products of 8 bits --------------------------------------------------------------------------------------------------

IN_8_BITS = [values for values in WEIGHTS if values[1] == INT8]
FUSED = [library for library in native.variants() if library != BASELINE]  # exact sums have one order in them for any rows
needs_kernels = pytest.mark.skipif(native.in_use() == TORCH, reason="no kernels were built")
BY_KERNELS = [pytest.param(*values, marks=needs_kernels) for values in WEIGHTS if values[0] != PLAIN and values[1] == EXACT]
NAMES = ("weight_codec", "compute")


@pytest.mark.parametrize(NAMES, IN_8_BITS)
def test_a_plan_that_asks_for_them_gets_them(weight_codec: str, compute: str, checkpoints: Checkpoints) -> None:
    """They are near exact ones, and none of them is exact."""
    rough, exact = (Case("llama-gqa", weight_codec=weight_codec, compute=each) for each in (compute, EXACT))
    one, other = (checkpoints.resident_logits(case, range(5))[0] for case in (rough, exact))
    assert 0.0005 < (one - other).norm() / other.norm() < 0.1 and (one != other).all()


@contextmanager
def products_by(library: str) -> Iterator[None]:
    """A context in which products on packed bytes are done by a library, and all else by the one that is always used."""

    def multiplied(*given: Any) -> Tensor | None:
        with used(library):
            return packed_product(*given)

    with patch.object(matrix, "packed_product", multiplied):
        yield


@pytest.mark.parametrize(NAMES, IN_8_BITS)
@pytest.mark.parametrize("kind", first_of(CHOICES["kind"][:3], 1))
def test_logits_have_the_same_bits_in_every_library_and_in_torch(
    kind: str, weight_codec: str, compute: str, checkpoints: Checkpoints
) -> None:
    case = Case(kind, weight_codec=weight_codec, compute=compute)
    expected = checkpoints.resident_logits(case, range(5))
    for library in (*native.variants(), TORCH):
        with products_by(library):
            found = replace(checkpoints, resident={}).resident_logits(case, range(5))
        assert torch.equal(torch.stack(found), torch.stack(expected)), library


PACKED_HEADS = [(kind, "float32", "group4") for kind in ("gemma3", "neox-sequential", "neox-parallel", "opt", *MIXTURES)]
# most heads are plain
OF_CHECKPOINTS = [(kind, stored, format) for kind, stored, format, compute in PUBLISHED if compute == INT8]


@needs_kernels
@pytest.mark.parametrize(("kind", "stored", "weight_codec"), [*PACKED_HEADS, *OF_CHECKPOINTS])
@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float32"], 1))
def test_logits_of_a_row_have_the_same_bits_in_any_company(
    kind: str, stored: str, weight_codec: str, dtype: str, checkpoints: Checkpoints
) -> None:
    """So plans whose batches have other shapes give them too. The longest prompt has more rows than torch is asked for."""
    case = Case(kind, lengths=(5, 37, 2, 7, 4), gen_len=3, stored=stored, dtype=dtype, weight_codec=weight_codec, compute=INT8)
    together = checkpoints.resident_logits(case, range(5))
    for row in range(5):
        alone = checkpoints.resident_logits(case, [row])
        assert all(torch.equal(one[0], of_all[row]) for one, of_all in zip(alone, together, strict=True)), row


@pytest.mark.parametrize(NAMES, [*IN_8_BITS, *BY_KERNELS])
@pytest.mark.parametrize("threads", [5])  # which share no number of rows here evenly
def test_no_number_of_threads_changes_a_bit(
    threads: int, weight_codec: str, compute: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case, before = Case("llama-gqa", MIXES[3], weight_codec=weight_codec, compute=compute), torch.get_num_threads()
    for rows in case.batches():
        checkpoints.resident_logits(case, rows)
    torch.set_num_threads(threads)
    try:
        hold_contract(case, checkpoints, offload)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("library", *NAMES),
    [
        (library, *values)
        for library in (*native.variants(), TORCH)
        for values in WEIGHTS[1:]
        if library in FUSED or values[1] == INT8
    ],
)
def test_a_row_of_a_product_comes_out_the_same_in_any_company(
    weight_codec: str, compute: str, library: str, checkpoints: Checkpoints
) -> None:
    _, weights = checkpoints.model("llama-gqa", "float32", "float32", format=weight_codec, compute=compute)
    one = next(each for each in weights[1].values() if isinstance(each, PackedMatrix))
    assert one.room is not None
    x = torch.randn(40, one.room.values.shape[1], generator=torch.Generator().manual_seed(1))
    with used(library):
        together = one.linear(Factor(x), None)
        for rows in (1, 2, 7, 16, 17, 33):
            assert torch.equal(one.linear(Factor(x[:rows]), None), together[:rows]), rows
