"""Footprint: what it predicts is enough for what the tiers really hold, and not much more; what does not fit is refused with a
suggestion that fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import StateLayout, aligned, decoded_arena, region_bytes
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec, TensorSpec
from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site, on_tier
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Batch, Block, Workload
from h2o_flexgen.engine.drafts import Drafts
from h2o_flexgen.engine.generate import Stream, job_of
from h2o_flexgen.engine.head import OfHead, read_prompts
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.scoring import Scorer
from h2o_flexgen.engine.stores.states_of_visits import StatesInPassing, states_over
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.grouped import Tiled
from h2o_flexgen.formats.kernel_sizes import DOT_OUTPUTS, DOT_PROGRAMS, FLOAT_BYTES, PromptRoom
from h2o_flexgen.formats.kernel_table import (
    CUDA,
    EXACT,
    HALVES,
    LIBRARIES,
    ROWS_BEFORE_DOTS,
    ROWS_OF_TILE_DOTS,
    TORCH,
    TRITON,
    Processor,
)
from h2o_flexgen.formats.mxfp4 import Fp4
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import judge_of
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.memory.pack import Layout, Pack, PackEntry
from h2o_flexgen.models import create_model
from h2o_flexgen.models.base import Given, Model, computed, logits
from h2o_flexgen.models.mixture import ExpertGroup, MixtureOfExperts
from h2o_flexgen.models.new_tokens import RowStates
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import Footprint, MemoryLimits, views_and_pieces
from h2o_flexgen.planning.placement import HeldKV, place_weights
from h2o_flexgen.planning.plan import DRAFTS, OFF, PINNED, PREFIX_POLICIES, STATE_DTYPES, Plan
from h2o_flexgen.planning.working_space import (
    SLACK,
    LevelHeads,
    _decode_bytes,
    _decoding_bytes_per_slot,
    picking_bytes,
    working_bytes,
)
from h2o_flexgen.planning.workload_plan import UNLIKE_BYTES, WorkloadPlan, what_would_fit
from h2o_flexgen.policies.occupancy import Occupancy, StepSlots
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import History, Sampler
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Data, Op, Visit
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.helpers.contract import WEIGHTS, Case, Checkpoints, encoded_with
from tests.helpers.pairwise import most_of
from tests.helpers.resident import index_of
from tests.helpers.tiny import tiny_config
from tests.kernels.stored import random_matrix
from tests.kernels.variants import used
from tests.planning.allocations import peak_allocated
from tests.planning.worlds import block_of, in_halves, tiny_spec

MIXTURES = (
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "glm4-moe",
    "granite-moe",
    "deepseek-v3",
)  # one of each architecture with experts
SEEDS = [(seed, ("cpu", "pretended")[seed % 2]) for seed in range(10)]
NOT_IN_ARENAS = ("working space", "disk buffers", "loading", "libraries", "places of weights")
PAGE = 4096


def random_case(random: Random) -> Case:
    def pair() -> tuple[int, int]:
        device = random.choice([0, 0, 30, 50, 100])
        return device, random.choice([0, 40, 100 - device]) if device < 60 else 0

    weight_codec, compute = random.choice(WEIGHTS)
    return Case(
        kind=random.choice(["opt", "llama-gqa", "neox-parallel", "opt-350m", "qwen2", "qwen2-wordy", *MIXTURES]),
        percent=(*pair(), *pair(), *pair()),
        lengths=tuple(random.randint(1, 60) for _ in range(random.randint(1, 14))),
        gen_len=random.randint(1, 5),
        gpu_batch_size=random.randint(1, 5),
        num_gpu_batches=random.randint(1, 4),
        buffers=random.randint(1, 3),
        sep_layer=random.random() < 0.7,
        schedule=random.choice(list(SCHEDULES)),
        dtype=random.choice(["float32", "bfloat16"]),
        weight_codec=weight_codec,
        compute=compute,
        attend_on=random.choice([DEVICE, HOST]),
    )


def arena_parts(footprint: Footprint, tier: str, accelerator: bool) -> dict[str, int]:
    """What lies in arenas. Hidden states that rest where they are computed with are tensors of torch's own."""
    parts = {name: nbytes for name, nbytes in footprint.parts[tier].items() if name not in NOT_IN_ARENAS}
    if tier == (DEVICE if accelerator else HOST):
        parts.pop("activations", None)
    return parts


@pytest.mark.parametrize("of_kv", [(0, 0), (40, 20)])
def test_what_a_device_has_chosen_of_a_disk_is_predicted_on_its_way(
    of_kv: tuple[int, int], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """Buffers of the host have room for the numbers by which it reads."""
    case = Case("llama-gqa", (50, 50, *of_kv, 100, 0), (50, 31, 27, 40), policy=(("kv_recall", 0.5),), device="pretended")
    with case.open(checkpoints, offload) as llm:
        footprint = llm.check(Workload(case.lengths, case.gen_len)).footprint
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        held, planned = held_by(llm), llm.stats.last_block.planned if llm.stats is not None else None
        regions = len(llm.spec.tensors) + len(llm.spec.layers) * (case.num_gpu_batches + 8)
    assert planned is not None
    moved = [(planned.kv.layouts(*place)[0], tier) for place, tier in planned.placement.kv.items() if tier != DEVICE]
    numbered = max(region_bytes(one.image_bytes + 8 * prod(one.shape)) for one, tier in moved if one and tier == DISK)
    staged, buffers = max(region_bytes(one.staged_bytes) for one, _ in moved if one), planned.schedule.buffers_of(Data.KV)
    assert footprint.parts[HOST]["KV buffers"] == buffers * numbered + staged
    assert footprint.parts[HOST]["working space"] > 0
    for tier, peak in held.items():
        predicted = sum(arena_parts(footprint, tier, accelerator=True).values())
        assert peak <= predicted <= 1.3 * peak + PAGE * regions, f"{tier}: {footprint.parts[tier]}, {case}"


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 40, 100, 0, 100, 0), (0, 0, 0, 100, 0, 100)])
def test_no_more_places_of_weights_are_kept_than_are_counted(
    percent: tuple[float, ...], schedule: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("olmoe", percent, (5, 9, 2, 7), 7, gpu_batch_size=2, num_gpu_batches=2, buffers=3, schedule=schedule)
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.stats is not None and llm.loaded._engine is not None
        views, pieces = views_and_pieces(llm.stats.last_block.planned)
        (store,) = llm.loaded._engine._weights
        kept = sum(map(len, store._views.values())), sum(len(cut) for each in store._pieces.values() for _, cut in each)
    assert views / 4 <= kept[0] <= views and kept[1] <= pieces and (kept[1] > 0) == (percent[1] < 100 > percent[0])


def held_by(llm: LLM) -> dict[str, int]:
    memories = llm.loaded._memories
    assert memories is not None
    peaks = {HOST: memories.host.meter.peak_bytes, DISK: memories.disk.meter.peak_bytes}
    return peaks | ({DEVICE: memories.compute.meter.peak_bytes} if memories.device.accelerator else {})


@pytest.mark.parametrize(("seed", "device"), SEEDS)
def test_arenas_stay_within_what_is_predicted_and_near_it(
    seed: int, device: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = replace(random_case(Random(seed)), device=device)
    accelerator = device == "pretended"
    with case.open(checkpoints, offload) as llm:
        footprint = llm.check(Workload(case.lengths, case.gen_len)).footprint
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        held = held_by(llm)
        regions = len(llm.spec.tensors) + len(llm.spec.layers) * (case.num_gpu_batches + 8)
    for tier, peak in held.items():
        predicted = sum(arena_parts(footprint, tier, accelerator).values())
        assert peak <= predicted, f"{tier}: {footprint.parts[tier]}, {case}"
        assert predicted <= 1.3 * peak + PAGE * regions, f"{tier}: {footprint.parts[tier]}, {case}"


@pytest.mark.parametrize(("of_kv", "attend_on"), [((0, 100), HOST), ((40, 60), HOST), ((100, 0), DEVICE), ((40, 60), DEVICE)])
@pytest.mark.parametrize("prefill_tokens", [1024, 40])
def test_an_index_is_predicted_where_steps_attend(
    prefill_tokens: int, of_kv: tuple[int, int], attend_on: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """And where the prompts are read of which it is made."""
    how: Any = {"device": "pretended", "attend_on": attend_on, "prefill_tokens": prefill_tokens}
    case = Case("llama-gqa", (50, 50, *of_kv, 100, 0), (50, 31, 27, 40), policy=(("kv_recall", 0.5),), **how)
    whole = replace(case, policy=())
    with case.open(checkpoints, offload) as llm, whole.open(checkpoints, offload) as other:
        footprint, of_all = (one.check(Workload(case.lengths, case.gen_len)).footprint for one in (llm, other))
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        held = held_by(llm)
        regions = len(llm.spec.tensors) + len(llm.spec.layers) * (case.num_gpu_batches + 8)
    noted = {tier: parts.get("KV notes", 0) for tier, parts in footprint.parts.items()}
    assert noted[DEVICE] > 0 and (noted[HOST] > 0) == (attend_on == HOST) == ("working space" in footprint.parts[HOST])
    for tier, peak in held.items():
        predicted = sum(arena_parts(footprint, tier, accelerator=True).values())
        assert peak <= predicted <= 1.3 * peak + PAGE * regions, f"{tier}: {footprint.parts[tier]}, {case}"
        assert predicted - sum(arena_parts(of_all, tier, accelerator=True).values()) == noted[tier]


@pytest.mark.parametrize("device", ["cpu", "pretended"])
def test_buffers_are_as_large_as_is_predicted_where_blocks_keep_their_place(
    device: str, checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_flexgen.core.buffer_layout.PAGE_ALIGNED_FROM", 256)  # else tensors of a tiny model are too small
    case = Case("olmoe", (0, 0, 0, 100, 0, 100), stored="gguf-q4_0", buffers=3, device=device)
    with case.open(checkpoints, offload) as llm:
        predicted = llm.check(Workload(case.lengths, case.gen_len)).footprint.parts[HOST]["weight buffers"]
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert llm.loaded._engine is not None
        (weights,) = llm.loaded._engine._weights
        rings = weights._host_ring
        assert len(rings) >= 3 and sum(rings[at].nbytes for at in range(len(rings))) == predicted


def test_where_hidden_states_move_slices_of_experts_are_promised_two_wide_ones() -> None:
    spec, batch = create_model(tiny_config("olmoe"), "bfloat16").spec, Batch((0, 1, 2), (9, 9, 9))
    held, plan, site = HeldKV.of(spec, Plan(), Block((batch,), 4)), Plan(), own_site("cpu", False)
    moving, resting = (working_bytes(held, 0, plan, site, moves_hidden=moves) for moves in (True, False))
    assert moving - resting == 27 * (spec.widest - spec.width) * spec.itemsize > 0


@pytest.mark.parametrize(("seed", "device"), SEEDS)
def test_no_pass_holds_more_than_is_predicted_while_rows_come_and_go(
    seed: int, device: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """Sampled after every visit, in arenas and of what torch allocates."""
    random = Random(seed)
    case = replace(random_case(random), device=device, schedule="zigzag", prefill_tokens=random.choice([16, 64, 1024]))
    requests = [Request(ids, SamplingParams(max_tokens=random.choice([1, 2, 12]), ignore_eos=True)) for ids in case.prompts]
    samples: list[dict[str, int]] = []

    def sample(*_: object) -> None:
        memories = llm.loaded._memories
        assert memories is not None
        samples.append({HOST: memories.host.meter.used_bytes, DISK: memories.disk.meter.used_bytes})
        if memories.device.accelerator:
            samples[-1][DEVICE] = memories.compute.meter.used_bytes

    with case.open(checkpoints, offload) as llm:
        footprint = llm.planned(Stream(job_of(requests, llm.row_maker), llm.row_maker, False).workload).footprint
        llm.loaded._load()
        passing = peak_allocated(lambda: list(llm.generate_stream(requests, on_visit=sample)), ())
    compute = DEVICE if device == "pretended" else HOST
    assert len(samples) >= len(llm.spec.layers)
    for tier in samples[0]:
        predicted = sum(arena_parts(footprint, tier, device == "pretended").values())
        assert max(one[tier] for one in samples) <= predicted, f"{tier}: {footprint.parts[tier]}, {case}"
    assert passing <= footprint.total(compute) + footprint.total(HOST), f"{footprint.parts[compute]}, {case}"


@pytest.mark.parametrize("kind", ["opt", "llama-gqa"])
def test_weights_alone_stay_within_what_is_predicted_for_them(kind: str, checkpoints: Checkpoints, offload: Path) -> None:
    """Tensors start at whole lines or pages of their arena, and that costs some bytes for each."""
    case = Case(kind, (0, 100, 0, 100, 0, 100))
    with case.open(checkpoints, offload) as llm:
        footprint = llm.check(Workload(case.lengths, case.gen_len)).footprint
        llm.loaded._load()
        assert llm.spec.weight_bytes < held_by(llm)[HOST] <= footprint.parts[HOST]["weights"]


def test_what_steps_before_have_read_is_counted_where_it_stays() -> None:
    """Steps that attend all read whole ranges, and keep none of them."""

    def kept(share: float) -> int:
        plan = Plan.create(kv_recall=share, kv_recall_reuse=True).with_percent((100, 0, 0, 0, 100, 0)).at(Site())
        return (
            WorkloadPlan(tiny_spec(), plan, Workload((60, 70, 55), 12), Site()).footprint.parts[HOST].get("KV read before", 0)
        )

    assert kept(0.5) > kept(1.0) == 0


@pytest.mark.parametrize(("batches", "buffers"), [(3, 2), (6, 4)])
def test_what_begun_layers_keep_is_counted_for_as_many_as_may_be_begun(batches: int, buffers: int) -> None:
    plan = Plan.create(kv_recall=0.5, num_gpu_batches=batches, buffers=buffers).with_percent((100, 0, 0, 0, 100, 0)).at(Site())
    block, spec = block_of([[60, 60]] * batches), in_halves(tiny_spec())
    whole, begun = (BlockPlan.of(one, plan, block, Site()) for one in (tiny_spec(), spec))
    alive = most = 0
    for task in begun.schedule.tasks():
        is_used = task.op is Op.COMPUTE and begun.schedule.traffic.chooses(Visit(*task.key[1:]))
        alive += (task.op is Op.CHOOSE) - is_used
        most = max(most, alive)
    counted = [_decode_bytes(of.spec, plan, LevelHeads.of(of.kv, 0), Site()) for of in (begun, whole)]
    of_queries_keys_and_values = 2 * 3 * spec.width * FLOAT_BYTES
    assert counted[0] - counted[1] == most * of_queries_keys_and_values


def test_what_visits_keep_of_their_choice_is_counted_only_where_they_bring_it_from_elsewhere() -> None:
    block, spec = block_of([[60, 60]] * 2), in_halves(tiny_spec())

    def counted(on_host: int, buffers: int, reuse: bool = False, on_device: int = 0, beside: bool = False) -> int:
        site = Site(accelerator=beside)
        plan = Plan.create(kv_recall=0.5, kv_recall_reuse=reuse, num_gpu_batches=2, buffers=buffers)
        of = BlockPlan.of(spec, plan.with_percent((0, 100, on_device, on_host, 0, 100)).at(site), block, site)
        return _decode_bytes(spec, of.plan, LevelHeads.of(of.kv, 0), site)

    assert counted(100, 2) == counted(100, 4) == counted(100, 4, reuse=True)
    assert counted(100, 2) < counted(50, 2) < counted(50, 4) < counted(50, 4, reuse=True)
    assert counted(0, 4, on_device=100, beside=True) < counted(100, 4, beside=True) == counted(100, 4, reuse=True, beside=True)


def test_the_disk_share_is_predicted_to_the_byte(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", (0, 0, 0, 0, 0, 0), (50, 31, 17, 3), gpu_batch_size=2, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm:
        footprint = llm.check(Workload(case.lengths, case.gen_len)).footprint
        llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len))
        assert held_by(llm)[DISK] == footprint.total(DISK) > 0


@pytest.mark.parametrize("percent", [(0, 50, 0, 50, 0, 50), (37, 20, 0, 0, 0, 0), (100, 0, 0, 0, 0, 0), (1, 98, 0, 0, 0, 0)])
def test_weights_are_placed_within_one_tensor_of_the_request(percent: tuple[float, ...], checkpoints: Checkpoints) -> None:
    for kind in ("opt", "llama-gqa", "neox-parallel", "qwen2"):
        spec = checkpoints.model(kind, "float32", "float32")[0].spec
        plan = Plan().with_percent(percent)
        placed: Counter[str] = Counter()
        for name, tier in place_weights(spec, plan).items():
            placed[tier] += spec.tensors[name].nbytes
        largest = max(tensor.nbytes for tensor in spec.tensors.values())
        for tier in TIERS:
            assert abs(placed[tier] - plan.weights.of(tier) * spec.weight_bytes) <= largest


# -- working space -----------------------------------------------------------------------------------------------------------

KEPT: tuple[dict[str, Any], ...] = (
    {},
    {"kv_policy": "h2o", "kv_budget": 0.3},
    {"kv_policy": "snapkv", "kv_budget": 1.0, "positions": "rolling"},
    {"kv_policy": "random", "kv_budget": 0.5},
    {"kv_policy": "kvzip", "kv_budget": 0.3},
    {"kv_policy": "keydiff", "kv_budget": 0.3},
    {"kv_policy": "lagkv", "kv_budget": 0.3},
)
LARGER = {"hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 512}
WIDER = {
    "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 256},
    "llama-gqa": {"intermediate_size": 688, "head_dim": 32},
    "gpt-oss-far": {"intermediate_size": 344, "head_dim": 32},
    "qwen3": {"intermediate_size": 688, "head_dim": 32},
    "gemma2": {"intermediate_size": 688, "head_dim": 32},
    "mistral-near": {"intermediate_size": 688, "head_dim": 32, "sliding_window": 64},
    "deepseek-v3": {"intermediate_size": 688, "kv_lora_rank": 128, "first_k_dense_replace": 3, "qk_nope_head_dim": 32},
    "neox-parallel": {"intermediate_size": 1024},
    "neox-sequential": {"intermediate_size": 1024},
}
OF_EXPERTS = {"num_experts": 6, "head_dim": 32, "moe_intermediate_size": 344}
MIXED: dict[str, Any] = {  # all of their blocks have experts
    "mixtral": {"intermediate_size": 344, "head_dim": 32},
    "olmoe": {"intermediate_size": 344},
    "qwen2-moe": {**OF_EXPERTS, "shared_expert_intermediate_size": 600, "mlp_only_layers": []},
    "qwen3-moe": {**OF_EXPERTS, "decoder_sparse_step": 1},
    "gpt-oss-far": {"intermediate_size": 344, "head_dim": 32},
    "glm4-moe": {"n_routed_experts": 6, "head_dim": 32, "moe_intermediate_size": 344, "first_k_dense_replace": 0},
}


PASSING = {
    "kind": tuple(kind for kind in WIDER if kind != "gemma2"),  # which is one of those in pieces, below
    "sizes": ((8, 64, 8), (64, 4, 200), (3, 200, 4)),  # rows, tokens of a prompt, tokens to generate
    "kept": range(len(KEPT)),
    "computed": tuple(product(("float32", "bfloat16"), (*variants()[:1], TORCH))),
    "weights": WEIGHTS,
}


def is_of_room(pair: Mapping[Any, Any]) -> bool:
    """Whether two choices meet in what is held in passing: a policy knows of a model how it attends, which three kinds show."""
    return pair.keys() != {"kind", "kept"} or pair["kept"] < 3 or pair["kind"] in ("opt", "llama-gqa", "deepseek-v3")


@pytest.mark.parametrize("values", most_of(PASSING, needs=is_of_room))
def test_a_visit_allocates_no_more_in_passing_than_is_estimated(values: dict[str, Any]) -> None:
    kind, (rows, tokens, gen_len), (dtype, variant) = values["kind"], values["sizes"], values["computed"]
    config: Any = tiny_config(kind, **LARGER, **WIDER[kind])
    model, (weight_codec, compute) = create_model(config, dtype, sep_layer=False), values["weights"]
    model.spec = model.spec.written_as(weight_codec, PLAIN, compute)
    options = {name: value for name, value in KEPT[values["kept"]].items() if name != "positions" or model.spec.rotary}
    policy = Plan.create(**options).policy
    within = model.spec.max_positions if policy.echoes else None
    batch = Batch(tuple(range(rows)), (tokens,) * rows, echoes_within=within)
    plan = Plan.create(prefill_tokens=rows * tokens * batch.readings, **options)
    with used(variant):
        most = max(passing_bytes(model, plan, batch, gen_len, step) for step in (0, 1, gen_len - 1))
        estimate = SLACK * working_bytes(HeldKV.of(model.spec, plan, Block((batch,), gen_len)), 0, plan, own_site("cpu", False))
    assert 0.18 * estimate < most <= estimate


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("variant", [*variants()[:1], TORCH])
def test_many_tokens_ahead_of_one_row_allocate_no_more_in_passing_than_is_estimated(variant: str, draft: str) -> None:
    """A literal of a regex may be far longer than a block has rows."""
    config: Any = tiny_config("llama-gqa", **{**LARGER, "max_position_embeddings": 2048}, **WIDER["llama-gqa"])
    model, cpu, gen_len = create_model(config, "float32", sep_layer=False), torch.device("cpu"), 1500
    spec, plan, batch = model.spec, Plan.create(draft=draft), Batch((0,), (4,))
    state = RowState(0, [1] * 4, SamplingParams(max_tokens=gen_len), ByteTokenizer(spec.vocab))
    drafts = None if draft == OFF else Drafts(100)
    rows = BatchRows(batch, [state], plan, [plan.policy], gen_len, cpu, drafts=drafts)
    groups = rows._grouped([60])
    assert [token for group in groups for token in group.tokens] == [(0, turn) for turn in range(60)]
    times, occupancy = max(len(group.tokens) for group in groups), plan.policy.occupancy(batch, gen_len)
    last = [(occupancy, step) for step in range(gen_len - times, gen_len)]
    now, coding = KVStep.of(Occupancy.joint_step(last), occupancy.capacity, cpu), Coding.of(spec)
    image = torch.zeros(coding.sets, 1, spec.kv_heads, now.capacity, coding.width)
    attend = partial(KVCache(image).repeated(0, times).attend, now)
    weights = {name: torch.randn(tensor.shape) for name, tensor in spec.layers[1].tensors}
    hidden, given = torch.randn(times, 1, spec.width), Given(now.text_positions, attend)
    there = [hidden, image, now.counts, now.positions, now.text_positions, *weights.values()]
    with used(variant):
        most = peak_allocated(lambda: computed(model, spec.layers[1], hidden, weights, given), there)
        held = HeldKV.of(spec, plan, Block((batch,), gen_len))
        estimate = SLACK * working_bytes(held, 0, plan, own_site("cpu", False), guesses=draft != OFF)
    assert 0.1 * estimate < most <= estimate


@pytest.mark.parametrize("kv_codec", [PLAIN, "group4", "group8"])
@pytest.mark.parametrize(("rows", "tokens", "gen_len"), [(8, 64, 8), (3, 200, 4)])
@pytest.mark.parametrize("variant", [*variants()[:1], TORCH])
def test_choosing_what_a_step_attends_allocates_no_more_in_passing_than_is_estimated(
    rows: int, tokens: int, gen_len: int, kv_codec: str, variant: str
) -> None:
    config: Any = tiny_config("llama-gqa", **LARGER, **WIDER["llama-gqa"])
    model = create_model(config, "bfloat16", sep_layer=False)
    model.spec = model.spec.written_as(PLAIN, kv_codec, EXACT)
    batch = Batch(tuple(range(rows)), (tokens,) * rows)
    plan = Plan.create(prefill_tokens=rows * tokens, kv_recall=0.5, kv_codec=kv_codec)
    with used(variant):
        most = [passing_bytes(model, plan, batch, gen_len, step) for step in (0, 1)]
        kv, site = HeldKV.of(model.spec, plan, Block((batch,), gen_len)), own_site("cpu", False)
        estimate = SLACK * working_bytes(kv, 0, plan, site)
        assert most[1] <= SLACK * _decode_bytes(model.spec, plan, LevelHeads.of(kv, 0), site) < 8 * most[1]
    assert 0.18 * estimate < max(most) <= estimate


LONG: dict[Any, Any] = {
    "kind": ("opt", "llama-gqa", "gemma2", "mistral-near", "gpt-oss-far", "deepseek-v3"),
    ("tokens", "at_once"): ((400, 64), (100, 1)),  # of a prompt, and of them in a piece
    "kept": range(len(KEPT)),
    "computed": tuple(product(("float32", "bfloat16"), (*variants()[:1], TORCH))),
    "kv_codec": (PLAIN, "group4"),
}


# where hardly anything but the keys and values of the pieces is held
BARE = {"kind": "opt", "tokens": 100, "at_once": 1, "kept": 0, "computed": LONG["computed"][0], "kv_codec": PLAIN}


@pytest.mark.parametrize("values", [*most_of(LONG, needs=is_of_room), BARE])
def test_a_prompt_in_pieces_allocates_no_more_in_passing_than_is_estimated(values: dict[str, Any]) -> None:
    """And what is estimated does not grow with the prompt by what its layers work in."""
    kind, (dtype, variant), tokens = values["kind"], values["computed"], values["tokens"]
    config: Any = tiny_config(kind, **LARGER, **WIDER[kind])
    model = create_model(config, dtype, sep_layer=False)
    model.spec = model.spec.written_as(PLAIN, values["kv_codec"], EXACT)
    options = {name: value for name, value in KEPT[values["kept"]].items() if name != "positions" or model.spec.rotary}
    within = model.spec.max_positions if Plan.create(**options).policy.echoes else None
    batch = Batch((0,), (tokens,), echoes_within=within)
    in_pieces, whole = (Plan.create(prefill_tokens=most, **options) for most in (values["at_once"], 2 * tokens))
    with used(variant):
        most = passing_bytes(model, in_pieces, batch, 4, 0)
        held = HeldKV.of(model.spec, in_pieces, Block((batch,), 4))
        estimate, at_once_estimate = (
            SLACK * working_bytes(held, 0, plan, own_site("cpu", False)) for plan in (in_pieces, whole)
        )
    assert 0.1 * estimate < most <= estimate < 0.9 * at_once_estimate


@pytest.mark.parametrize("variant", variants()[:1])
def test_each_thread_that_attends_keys_of_heads_has_a_room_in_the_estimate(variant: str) -> None:
    """Latents have one KV head for all, and so one room for a row; heads that are made of them have one each."""
    model = create_model(tiny_config("deepseek-v3", **LARGER, **WIDER["deepseek-v3"]), "float32", sep_layer=False)
    own, plan, block = model.spec.prompt_heads, Plan(), Block((Batch((0,), (400,)),), 4)
    assert own is not None and model.spec.heads >= 4
    with used(variant):
        alone, together = (
            working_bytes(HeldKV.of(model.spec, plan, block), 0, plan, replace(own_site("cpu", False), threads=threads))
            for threads in (1, 4)
        )
    room = FLOAT_BYTES * PromptRoom.of(400, own.width).end
    of_latents = FLOAT_BYTES * PromptRoom.of(400, model.spec.head_dim).end
    assert together - alone == 4 * room - max(room, of_latents)


@pytest.mark.parametrize("kind", ["gpt-oss-far", "mistral-near", "gemma2"])
def test_on_a_gpu_scores_are_held_only_where_no_kernel_attends(kind: str) -> None:
    model = create_model(tiny_config(kind, **LARGER, **WIDER[kind]), "bfloat16", sep_layer=False)
    plan, block = Plan(), Block((Batch((0,), (400,)),), 4)
    with_kernels, in_torch = (
        working_bytes(HeldKV.of(model.spec, plan, block), 0, plan, Site(True, processor=Processor(CUDA, build, HALVES)))
        for build in (TRITON, TORCH)
    )
    assert with_kernels < 0.5 * in_torch


@pytest.mark.parametrize("rows", [1, ROWS_BEFORE_DOTS + 1, ROWS_OF_TILE_DOTS, ROWS_OF_TILE_DOTS + 1])
def test_sums_of_parts_of_a_product_on_tensor_cores_are_held(rows: int) -> None:
    """A GPU that is older has none; no matrix has more programs than these, or each has a part to itself."""
    plan, block = Plan(weight_codec="group4"), Block((Batch(tuple(range(rows)), (1,) * rows),), 4)
    spec = create_model(tiny_config("opt"), "float16").spec.written_as("group4", PLAIN, EXACT, "float32", False)
    with_dots, without = (
        working_bytes(HeldKV.of(spec, plan, block), 0, plan, Site(True, processor=Processor(CUDA, TRITON, own)))
        for own in (HALVES, ())
    )
    meeting = min(rows, ROWS_OF_TILE_DOTS)  # rows leave
    sums = (rows > ROWS_BEFORE_DOTS) * meeting * DOT_PROGRAMS * DOT_OUTPUTS * FLOAT_BYTES
    assert 0.9 * sums <= with_dots - without <= sums, "logits of the tiny model need little when there are no sums"


@pytest.mark.parametrize("variant", [*variants()[:1], TORCH])
@pytest.mark.parametrize("kind", ["gemma3", "phi3-near", "gpt-oss-far", "gpt-oss-far apart", "llama-gqa"])
def test_an_mlp_far_wider_than_its_model_allocates_no_more_in_passing_than_is_estimated(kind: str, variant: str) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 2, "intermediate_size": 2048}
    config: Any = tiny_config(kind.partition(" ")[0], **sizes, experts_apart=kind.endswith("apart"))
    model, plan, batch = create_model(config, "float32", sep_layer=False), Plan(prefill_tokens=512), Batch((0, 1), (64,) * 2)
    with used(variant):
        most = passing_bytes(model, plan, batch, 4, 0)
        estimate = SLACK * working_bytes(HeldKV.of(model.spec, plan, Block((batch,), 4)), 0, plan, own_site("cpu", False))
    assert 0.4 * estimate < most <= estimate


EXPERTS = {
    "kind": ("gpt-oss-far", "gpt-oss-far apart", "olmoe"),
    "counts": ((512,), (384, 384), (1, 511, 256), (8, 496, 8, 240, 16), (100, 200, 300, 50, 118)),  # of 512 tokens, by expert
    "computed": tuple(product(("float32", "bfloat16"), (*variants()[:1], TORCH))),
    "form": (PLAIN, "tiles4", "tiles8", "fp4-32", "q8_0"),
}


# Rows in 16 bits in two runs, which a kernel without products in these widens. A library for any processor has it.
WIDENED = [
    {"kind": kind, "counts": (8, 496, 8, 240, 16), "computed": ("bfloat16", variants()[-1]), "form": form}
    for kind, form in (("gpt-oss-far", "fp4-32"), ("olmoe", "q8_0"))
]


@pytest.mark.parametrize("values", [*most_of(EXPERTS), *WIDENED])
def test_experts_allocate_no_more_in_passing_than_their_slice_says(values: dict[str, Any]) -> None:
    """Without any slack, and hardly less than they say, where a matrix has both ways in."""
    kind, counts, (dtype, variant) = values["kind"], values["counts"], values["computed"]
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 2, "intermediate_size": 1024}
    model = create_model(tiny_config(kind.partition(" ")[0], **sizes, experts_apart=kind.endswith("apart")), dtype)
    assert isinstance(model, MixtureOfExperts)
    slices = [layer for layer in model.spec.layers if layer.experts]
    pairs = [pair for layer in slices if layer.block == 0 for pair in layer.tensors if ".experts." in pair[0]]
    weights = {name: in_form(values["form"], tensor, getattr(torch, dtype)) for name, tensor in pairs}
    x = torch.randn(sum(counts), model.spec.width, dtype=getattr(torch, dtype))
    there = [x, *(one for weight in weights.values() for one in tensors_of(weight))]
    asked = ExpertGroup([*range(len(counts))], [*counts], x, torch.ones(len(x)), torch.arange(len(x)))
    with used(variant):
        most = peak_allocated(lambda: model.made_by(asked, weights), there)
    said = 512 * slices[0].passing_width * x.itemsize
    assert most <= said
    assert kind != "gpt-oss-far" or len(counts) == 1 or most > 0.8 * said


PIECES = {
    "kind": (*MIXED,),
    ("tokens", "at_once"): ((300, 64), (300, 512)),  # of a prompt, and of them in a piece
    "computed": tuple(product(("float32", "bfloat16"), (*variants()[:1], TORCH))),
    "weights": WEIGHTS,
}


@pytest.mark.parametrize("values", most_of(PIECES))
def test_slices_of_experts_allocate_no_more_in_passing_than_is_estimated(values: dict[str, Any]) -> None:
    """One after the other, each over all pieces of a prompt, with the wide states that lie between them."""
    kind, (dtype, variant), (weight_codec, compute) = values["kind"], values["computed"], values["weights"]
    config: Any = tiny_config(kind, **{**LARGER, **MIXED[kind]})
    model, tokens = create_model(config, dtype), values["tokens"]
    model.spec = spec = model.spec.written_as(weight_codec, PLAIN, compute)
    plan, batch = Plan(prefill_tokens=values["at_once"]), Batch((0,), (tokens,))
    slices = [layer for layer in spec.layers if layer.block == 0 and layer.experts]
    weights = [{name: weight_of(spec, layer, name) for name, _ in layer.tensors} for layer in slices]
    hidden = torch.randn(1, tokens, spec.width, dtype=getattr(torch, dtype))
    there = [hidden, *(one for layer in weights for weight in layer.values() for one in tensors_of(weight))]
    pieces = [slice(at, at + plan.prefill_tokens) for at in range(0, tokens, plan.prefill_tokens)]
    given = Given(torch.arange(tokens)[None], may_overwrite=True)

    def through_slices() -> None:
        states = hidden
        for layer, own in zip(slices, weights):
            made = states if layer.overwrites else states.new_empty(1, tokens, layer.out_width)
            for piece in pieces:
                of_piece = computed(model, layer, states[:, piece], own, given)
                if not layer.overwrites:
                    made[:, piece] = of_piece
            states = made

    with used(variant):
        most = peak_allocated(through_slices, there)
        held = HeldKV.of(spec, plan, Block((batch,), 4))
        estimate = SLACK * working_bytes(held, 0, plan, own_site("cpu", False), moves_hidden=False)
    assert len(slices) > 2 and 0.2 * estimate < most <= estimate


OF_STATES = {
    ("kind", "sizes"): (
        ("qwen3-5", {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}),
        ("qwen3-5", {"linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 96}),
        ("kimi-linear", {"linear_num_heads": 8, "linear_head_dim": 64}),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_state": 128, "mamba_expand": 8}),
        ("nemotron-h-dense", {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128}),
    ),
    ("rows", "tokens", "together"): ((32, 1, 32), (6, 30, 6), (1, 300, 1), (40, 100, 1)),  # rows that are read at once
    "dtype": ("float32", "bfloat16"),
    "variant": (TORCH, *variants()[:1]),
    "state_dtype": STATE_DTYPES,
}


@pytest.mark.parametrize("values", most_of(OF_STATES))
def test_states_are_passed_in_no_more_room_than_is_estimated(values: dict[str, Any]) -> None:
    """In torch, what is held of many rows in passing is more than all else of a layer."""
    config: Any = tiny_config(values["kind"], **LARGER, intermediate_size=256, **values["sizes"])
    model, dtype = create_model(config, values["dtype"]), getattr(torch, values["dtype"])
    model.spec = model.spec.written_as(PLAIN, PLAIN, EXACT, values["state_dtype"])
    spec, rows, tokens = model.spec, values["rows"], values["tokens"]
    layer = next(one for one in spec.layers if one.states)
    weights = {name: weight_of(spec, layer, name) for name, _ in layer.tensors}

    def passed(rows: int, tokens: int) -> int:
        layout, hidden = StateLayout(rows, layer.states), torch.randn(rows, tokens, spec.width, dtype=dtype)
        region, lengths = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.full((rows,), tokens)
        given, kept = Given(torch.arange(tokens)[None]), states_over(region, layout)

        def run() -> None:
            passed = StatesInPassing.of(kept) if tokens > 1 else StatesInPassing(kept, kept)
            computed(model, layer, hidden, weights, replace(given, states=RowStates(passed.in_full, lengths)))
            passed.keep()

        return peak_allocated(run, [hidden, region, lengths, given.positions, *weights.values()])  # type: ignore[list-item]

    with used(values["variant"]):
        held = HeldKV.of(spec, Plan(), Block((Batch(tuple(range(rows)), (tokens,) * rows),), 4))
        plan = Plan(prefill_tokens=tokens * values["together"])
        estimate = SLACK * working_bytes(held, 0, plan, own_site("cpu", False), moves_hidden=False)
        most = max(passed(values["together"], tokens), passed(rows, 1))
    assert 0.1 * estimate < most <= estimate


def in_form(form: str, tensor: TensorSpec, dtype: torch.dtype) -> Tensor | PackedMatrix:
    values = torch.randn(tensor.shape, dtype=dtype)
    if form == PLAIN or len(tensor.shape) == 1:
        return values
    format = FORMATS[form]
    if isinstance(format, Tiled):
        data = encoded_with(form, values).view(-1, format.tile_bytes(values.shape[1]))
    else:
        assert isinstance(format, (Blocked, Fp4))
        data = random_matrix(format, *tensor.shape)
    return PackedMatrix(data, form, len(values), DecodeBuffer(values))


def tensors_of(weight: Tensor | PackedMatrix) -> Sequence[Tensor]:
    return (weight,) if isinstance(weight, Tensor) else (weight.data, weight.values())


def passing_bytes(model: Model, plan: Plan, batch: Batch, gen_len: int, step: int) -> int:
    """Of the visit of prefill (0) or of a decode step that allocates most, with a block that has heads of each level."""
    levels = [(level.policy, [bool(heads) for heads in level.heads].index(True)) for level in plan.levels(model.spec)]
    return max(_passing_bytes(model, plan, batch, gen_len, step, *level) for level in levels)


def _passing_bytes(model: Model, plan: Plan, batch: Batch, gen_len: int, step: int, policy: KVPolicy, place: int) -> int:
    rows, tokens = batch.size, batch.prompt_len
    spec, dtype, new = model.spec, getattr(torch, model.spec.dtype), 1 if step else tokens * batch.readings
    occupancy = policy.occupancy(batch, gen_len)
    within = None if step else batch.echoes_within
    now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"), echoes_within=within)
    coding = replace(Coding.of(spec), dtype=dtype)
    image = torch.zeros(coding.sets, rows, spec.kv_heads, now.capacity, coding.width, dtype=coding.kept_dtype)
    noted = torch.zeros(rows * spec.kv_heads * now.capacity * policy.score_bytes, dtype=torch.uint8)
    scores = SlotScores.over(noted, policy, (rows, spec.kv_heads, now.capacity)) if policy.score_bytes else None
    weights = [{name: weight_of(spec, layer, name) for name, _ in layer.tensors} for layer in spec.layers]
    ids, hidden = torch.zeros(rows, new, dtype=torch.long), torch.randn(rows, new, spec.width, dtype=dtype)
    embed, *blocks, head = spec.layers
    index = index_of(policy, coding, (rows, spec.kv_heads, now.capacity), torch.device("cpu"))
    cache = KVCache(image, scores, coding, judge=judge_of(policy), cap=spec.attention_cap, index=index)
    codes = () if index is None or index.codes is None else (index.codes,)
    out = torch.zeros_like(hidden)
    given = Given(now.text_positions, partial(cache.attend, now), in_heads=now.is_prefill)

    def through_block() -> Tensor:
        for piece in (pieces := now.pieces(plan.prefill_tokens)):
            own = replace(given, positions=given.positions[:, piece])
            out[:, piece] = computed(model, blocks[place], hidden[:, piece], weights[1 + place], own)
        return out if pieces else computed(model, blocks[place], hidden, weights[1 + place], given)

    visits = (
        lambda: computed(model, embed, ids, weights[0], given),
        through_block,
        lambda: logits(model, head, hidden[:, -1], weights[-1:]),
    )
    there = [ids, hidden, out, image, noted, now.counts, now.text_positions, *codes]
    for weight in (weight for layer in weights for weight in layer.values()):
        there += [weight] if isinstance(weight, Tensor) else [weight.data, weight.values()]
    return max(peak_allocated(visit, there) for visit in visits)


BEHIND_PREFIXES: dict[Any, Any] = {
    ("prefix_policy", "kept"): (*product(PREFIX_POLICIES, (0, 1)), (PINNED, 4)),
    "sizes": ((8, 40, 200), (64, 4, 90), (40, 1, 300)),  # rows, tokens of their own, tokens that they share
    "computed": tuple(product(("float32", "bfloat16"), (*variants()[:1], TORCH))),
}


@pytest.mark.parametrize("values", most_of(BEHIND_PREFIXES))
def test_rows_behind_shared_prefixes_allocate_no_more_in_passing_than_is_estimated(values: dict[str, Any]) -> None:
    (rows, own, shared), (dtype, variant), kept = values["sizes"], values["computed"], KEPT[values["kept"]]
    config: Any = tiny_config("llama-gqa", **LARGER, **WIDER["llama-gqa"])
    model, prefix_policy = create_model(config, dtype, sep_layer=False), values["prefix_policy"]
    plan = Plan.create(prefill_tokens=rows * own, prefix_policy=prefix_policy, **kept)
    prefixes = [SharedPrefix(row % 2, shared) for row in range(rows)]
    workload = Workload.running([SeatNeed(shared + own, 20)] * rows, prefixes, plan.copies_prefixes)
    ((block, _),) = workload.alike_blocks(rows, 1)
    block = block.echoed(model.spec.max_positions) if plan.policy.echoes else block
    occupancy = plan.policy.occupancy(block.batches[0], block.gen_len)
    with used(variant):
        most = bytes_behind_prefixes(model, plan, workload.needs, occupancy.capacity)
        estimate = SLACK * working_bytes(HeldKV.of(model.spec, plan, block), 0, plan, own_site("cpu", False))
    assert 0.08 * estimate < most <= estimate


def bytes_behind_prefixes(model: Model, plan: Plan, needs: Sequence[SeatNeed], capacity: int) -> int:
    """Of a prefix, of prompts behind two of them, and of a step, the one that allocates most in a layer."""
    spec, policy, dtype, cpu = model.spec, plan.policy, getattr(torch, model.spec.dtype), torch.device("cpu")
    alone, scored_by = [policy.alone(need) for need in needs], policy if policy.score_bytes else None

    def cache_of(rows: int, slots: int, scored: KVPolicy | None) -> KVCache:
        shape = (rows, spec.kv_heads, slots)
        region = torch.zeros(prod(shape) * (0 if scored is None else scored.score_bytes), dtype=torch.uint8)
        scores = None if scored is None else SlotScores.over(region, scored, shape)
        return KVCache(torch.zeros(2, *shape, spec.head_dim, dtype=dtype), scores, cap=spec.attention_cap)

    longest = max(need.prefix.tokens for need in needs if need.prefix is not None)
    cache = cache_of(len(needs), capacity, scored_by)
    cache.prefixes = {group: cache_of(1, longest, scored_by if plan.copies_prefixes else None) for group in range(2)}
    prefixes = [need.prefix for need in needs]
    first = [one.at(0).behind(need.spared) if need.spared else one.at(0) for one, need in zip(alone, needs)]
    within = spec.max_positions if policy.echoes else None
    reading = KVStep.of(StepSlots.of_rows(first), capacity, cpu, prefixes, echoes_within=within)
    stepping = KVStep.of(
        StepSlots.of_rows([one.at(1) for one in alone]), capacity, cpu, () if plan.copies_prefixes else prefixes
    )
    beginning, block = KVStep.of(policy.whole(longest), longest, cpu), spec.layers[1]
    weights = {name: torch.randn(tensor.shape, dtype=dtype) for name, tensor in block.tensors}

    def visit(now: KVStep, own: KVCache) -> int:
        hidden = torch.randn(*now.text_positions.shape, spec.width, dtype=dtype)
        attend = partial(own.attend, now)
        pieces = now.pieces(plan.prefill_tokens) or (slice(None),)

        def through_block() -> None:
            for piece in pieces:
                computed(model, block, hidden[:, piece], weights, Given(now.text_positions[:, piece], attend))

        caches = (cache, *cache.prefixes.values())
        noted = [notes.positions for one in caches if (notes := one._scores) is not None]
        there = [
            hidden,
            now.counts,
            now.positions,
            now.text_positions,
            *weights.values(),
            *(one.image for one in caches),
            *noted,
        ]
        return peak_allocated(through_block, there)

    return max(
        visit(beginning, cache.prefixes[0]), visit(beginning, cache.prefixes[1]), visit(reading, cache), visit(stepping, cache)
    )


def weight_of(spec: ModelSpec, layer: LayerSpec, name: str) -> Tensor | PackedMatrix:
    tensor = dict(layer.tensors)[name]
    values = torch.randn(tensor.shape, dtype=torch.float32 if tensor.itemsize == FLOAT_BYTES else getattr(torch, spec.dtype))
    if tensor.format == PLAIN or name == layer.token_table:
        return values
    data = encoded_with(tensor.format, values).view(-(-len(values) // FORMATS[tensor.format].rows_together), -1)
    return PackedMatrix(data, tensor.format, len(values), DecodeBuffer(values), spec.product)


LOOKED_UP: dict[Any, Any] = {
    "kind": ("opt", "opt-350m", "llama-gqa"),
    ("rows", "tokens"): ((8, 64), (64, 1)),
    "dtype": ("float32", "bfloat16"),
    "format": ("group4", "group8"),
}


@pytest.mark.parametrize("values", most_of(LOOKED_UP))
def test_looking_up_rows_and_a_head_in_parts_allocate_no_more_than_is_estimated(values: dict[str, Any]) -> None:
    kind, rows, tokens, dtype, format = (values[name] for name in ("kind", "rows", "tokens", "dtype", "format"))
    config: Any = tiny_config(kind, **LARGER, **WIDER.get(kind, {"word_embed_proj_dim": 256}), vocab_size=4000)
    model, value_type = create_model(config, dtype), getattr(torch, dtype)
    spec = model.spec.packed(format)
    embed, *_, head = spec.layers
    batch, table = Batch(tuple(range(rows)), (tokens,) * rows), embed.packed_tensor(embed.token_table)
    assert table is not None and embed.token_table is not None and head.logit_matrix is not None
    layout = Layout.pack({table.name: PackEntry(0, table.shape, value_type, table.format)})
    pack = Pack(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
    ids, positions = torch.zeros(rows * tokens, dtype=torch.long), torch.arange(tokens).repeat(rows, 1)
    first, last = (
        {name: torch.randn(tensor.shape, dtype=value_type) for name, tensor in layer.tensors} for layer in (embed, head)
    )
    parts = [{**last, head.logit_matrix: last[head.logit_matrix][part]} for part in head.logit_parts]
    hidden = torch.randn(rows, spec.width, dtype=value_type)

    def look_up() -> None:
        found = torch.empty(rows * tokens, table.shape[1], dtype=value_type)
        pack.decode_rows(table.name, ids, found)
        places = torch.arange(len(found)).view(rows, tokens)
        computed(model, embed, places, {**first, embed.token_table: found}, Given(positions))

    there = [pack.buffer, ids, positions, hidden, *first.values(), *last.values()]
    most = max(peak_allocated(look_up, there), peak_allocated(lambda: logits(model, head, hidden, parts), there))
    plan = Plan.create(prefill_tokens=rows * tokens)
    assert len(parts) == 16 and most <= SLACK * working_bytes(HeldKV.of(spec, plan, Block((batch,), 2)), 0, plan, Site())


PICKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "plain": {"temperature": 1.0},
    "nucleus": {"temperature": 30.0, "top_p": 0.99, "top_k": 40, "logprobs": 20},
    "penalised": {"temperature": 0.9, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "vocab"), [(3, 500), (64, 4000), (300, 4000), (20, 50_000)])
def test_picking_tokens_allocates_no_more_than_is_estimated_and_half_of_it_at_least(rows: int, vocab: int, dtype: str) -> None:
    spec = create_model(tiny_config("opt", vocab_size=vocab), dtype).spec
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    histories, estimate = [History([1, 2, 3], 2)] * rows, picking_bytes(spec, rows)
    sample = partial(Sampler(3).sample, logits)
    asked = ([SamplingParams(**options)] * rows for options in PICKED.values())
    calls = [partial(sample, params, range(rows), 1, histories) for params in asked]
    assert logits.nbytes + max(peak_allocated(call, [logits]) for call in calls) <= estimate
    with used(TORCH):  # which makes more temporaries than C
        most = logits.nbytes + max(peak_allocated(call, [logits]) for call in calls)
    assert 0.5 * estimate < most <= estimate


SCORED: dict[Any, Any] = {
    "kind": ("opt", "llama-gqa", "neox-parallel"),
    ("tokens", "vocab", "at_once"): ((100, 4000, 64), (100, 4000, 1000), (200, 300, 50)),
    "dtype": ("float32", "bfloat16"),
}


@pytest.mark.parametrize("values", most_of(SCORED))
def test_scoring_allocates_no_more_in_passing_than_is_estimated(values: dict[str, Any]) -> None:
    kind, tokens, vocab, at_once, dtype = (values[name] for name in ("kind", "tokens", "vocab", "at_once", "dtype"))
    config: Any = tiny_config(kind, **LARGER, **WIDER[kind], vocab_size=vocab)
    model, value_type, batch = create_model(config, dtype), getattr(torch, dtype), Batch((0, 1), (tokens,) * 2)
    states = [RowState(row, [1] * tokens, SamplingParams(max_tokens=1), ByteTokenizer(vocab)) for row in batch.rows]
    plan = Plan(prefill_tokens=tokens)
    rows = BatchRows(batch, states, plan, [plan.policy], 1, torch.device("cpu"))
    weights = {name: torch.randn(tensor.shape, dtype=value_type) for name, tensor in model.spec.layers[-1].tensors}
    hidden = torch.randn(2 * tokens, model.spec.width, dtype=value_type)
    params, tokenizer, after = SamplingParams(max_tokens=tokens - 5), ByteTokenizer(vocab), [1] * (tokens - 5)
    asked = [RowState(row, [row] * 6, params, tokenizer, forced=after) for row in batch.rows]
    scorer = Scorer(asked, tokenizer, at_once)
    made = OfHead(partial(model.head, weights=weights), partial(model.last_states, weights=weights))
    most = peak_allocated(lambda: scorer(rows, hidden, made, 0), [hidden, *weights.values()])
    estimate = SLACK * working_bytes(HeldKV.of(model.spec, plan, Block((batch,), 1)), 0, plan, own_site("cpu", False), at_once)
    assert rows.is_done and len(scorer.scored) == 2 and most <= estimate
    assert most > 0.2 * estimate or vocab < 1000, "layers need more than a small head"


@pytest.mark.parametrize(
    ("tokens", "vocab", "at_once", "count"), [(100, 4000, 64, 5), (100, 40_000, 104, 0), (200, 300, 50, 3)]
)
def test_log_probabilities_of_prompts_allocate_no_more_in_passing_than_is_estimated(
    tokens: int, vocab: int, at_once: int, count: int
) -> None:
    config: Any = tiny_config("llama-gqa", **LARGER, **WIDER["llama-gqa"], vocab_size=vocab)
    model, batch, params = (
        create_model(config, "float32"),
        Batch((0, 1), (tokens,) * 2),
        SamplingParams(1, prompt_logprobs=count),
    )
    states = [RowState(row, [1] * tokens, params, ByteTokenizer(vocab)) for row in batch.rows]
    plan = Plan(prefill_tokens=tokens)
    rows = BatchRows(batch, states, plan, [plan.policy], 1, torch.device("cpu"))
    weights = {name: torch.randn(tensor.shape) for name, tensor in model.spec.layers[-1].tensors}
    hidden = torch.randn(2 * tokens, model.spec.width)
    logits_of = partial(model.head, weights=weights)
    most = peak_allocated(lambda: read_prompts(rows, hidden, logits_of, at_once), [hidden, *weights.values()])
    estimate = SLACK * working_bytes(HeldKV.of(model.spec, plan, Block((batch,), 1)), 0, plan, own_site("cpu", False), at_once)
    assert all(len(row.prompt_logprobs or ()) == tokens for row in states) and most <= estimate


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1024, 1025, 50_272, 151_936])
def test_parts_of_a_packed_head_are_every_row_once_and_at_most_sixteen(rows: int) -> None:
    head, embedding = (tiny_spec(vocab=rows, tied=tied).packed("group4").layers[-1] for tied in (True, False))
    assert head.logit_parts == embedding.logit_parts and 1 <= len(head.logit_parts) <= 16
    assert [row for part in head.logit_parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(part.start % 64 == 0 for part in head.logit_parts), "or else rows would not be aligned"
    assert decoded_arena(head).nbytes == aligned(4 * 8 * head.logit_parts[0].stop) <= 4 * 8 * (rows / 16 + 64) + PAGE


def test_an_embedding_needs_no_room_for_values_and_plain_layers_none_at_all() -> None:
    plain, packed = tiny_spec(vocab=20_000), tiny_spec(vocab=20_000).packed("group4")
    assert [decoded_arena(layer).nbytes for layer in packed.layers[:2]] == [0, PAGE]
    assert all(decoded_arena(layer).nbytes == 0 and layer.logit_parts == () for layer in plain.layers)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_table_makes_slots_and_room_small(tied: bool) -> None:
    """By hand: 64 values in 36 bytes, and a page for the head's norm; of the head a sixteenth is held as values, so that the
    mlp has more of them."""
    spec = tiny_spec(blocks=2, width=512, vocab=20_480, tied=tied).packed("group4")
    plan = Plan(buffers=3).with_percent((0, 0, 100, 0, 100, 0)).folded()
    held = WorkloadPlan(spec, plan, Workload.uniform(4, 8, 4), Site()).footprint.parts[HOST]
    assert held["weight buffers"] == 3 * (20_480 * 512 * 36 // 64 + PAGE)
    assert held["decoded weights"] == max(2 * 4 * 512 * 512 * 4, 20_480 // 16 * 512 * 4)


# -- what does not fit ---------------------------------------------------------------------------------------------------


def large_spec() -> ModelSpec:
    return tiny_spec(blocks=8, width=512, vocab=20_000)


def request_of(percent: tuple[float, ...], accelerator: bool, batch_size: int = 16, prompts: int = 64) -> WorkloadPlan:
    plan = Plan(gpu_batch_size=batch_size, num_gpu_batches=2).with_percent(percent)
    return WorkloadPlan(large_spec(), plan.at(Site(accelerator)), Workload.uniform(prompts, 60, 4), Site(accelerator))


def suggested(message: str, request: WorkloadPlan) -> list[WorkloadPlan]:
    """The plans that a message says would fit."""
    if both := re.search(r"gpu_batch_size (\d+) with percent ([\d. ]+)", message):
        plan = replace(request.plan, gpu_batch_size=int(both[1])).with_percent([float(value) for value in both[2].split()])
        return [replace(request, plan=plan.at(request.site))]
    found = []
    if " graphs='off'" in message:
        found.append(replace(request, plan=replace(request.plan, graphs="off")))
    if size := re.search(r"gpu_batch_size (\d+)", message):
        found.append(replace(request, plan=replace(request.plan, gpu_batch_size=int(size[1]))))
    if percent := re.search(r"percent ([\d. ]+?)(?: or |$)", message):
        plan = request.plan.with_percent([float(value) for value in percent[1].split()])
        found.append(replace(request, plan=plan.at(request.site)))
    return found


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("tier", [DEVICE, HOST, DISK])
@pytest.mark.parametrize("share", [0.95, 0.7, 0.4, 0.1])
def test_a_refusal_names_tier_need_and_budget_and_what_it_suggests_fits(tier: str, accelerator: bool, share: float) -> None:
    percent = {DEVICE: (100, 0, 100, 0, 100, 0), HOST: (0, 100, 0, 100, 0, 100), DISK: (0, 50, 0, 30, 0, 50)}[tier]
    request = request_of(percent, accelerator)
    needed = request.footprint
    tier = HOST if tier == DEVICE and not accelerator else tier
    limits = MemoryLimits(**{tier: int(share * needed.total(tier))})
    with pytest.raises(ValueError) as caught:
        request.refuse_what_does_not_fit(limits)
    message = str(caught.value)
    assert "\n" not in message and f" {on_tier(tier)} (" in message and "the limit is" in message
    plans = suggested(message.partition("would fit: ")[2], request)
    assert bool(plans) == ("would fit: " in message)
    for each in plans:
        each.refuse_what_does_not_fit(limits)
    if share >= 0.7:
        assert plans, message


def recording(schedule: str, prompt_len: int = 60) -> WorkloadPlan:
    """Two batches of a block whose decode steps are recorded."""
    request, site = request_of((0, 100, 0, 100, 0, 100), accelerator=False), Site(processor=Processor(build="avx2"))
    plan, prompts = replace(request.plan, schedule=schedule), Workload.uniform(64, prompt_len, 4)
    return replace(request, site=site, plan=plan, workload=prompts)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_recorded_steps_have_what_prompts_need_where_these_are_over_before(schedule: str) -> None:
    """Row by row a batch has its steps before the next one reads its prompts. Prompts of two tokens need little."""
    more = []
    for length in (2, 60):
        request = recording(schedule, length)
        without = replace(request, plan=replace(request.plan, graphs="off"))
        more.append(request.footprint.total(HOST) - without.footprint.total(HOST))
    of_short, of_long = more
    assert of_short > 0
    assert (of_long > 0) == (schedule == "row_by_row")


def test_a_refusal_says_where_a_plan_that_keeps_nothing_of_what_was_read_would_fit() -> None:
    plan = Plan.create(kv_recall=0.1, kv_recall_reuse=True, gpu_batch_size=1).with_percent((0, 100, 0, 0, 0, 100)).at(Site())
    request = WorkloadPlan(tiny_spec(8, 64), plan, Workload((2000,), 12), Site())
    without = replace(request, plan=plan.without_reuse()).footprint.total(HOST)
    for least, is_named in ((without, True), (without - 1, False)):
        told = what_would_fit(request, MemoryLimits(host=least))
        assert ("no kv_recall_reuse" in told) is is_named


def test_a_refusal_says_where_a_plan_without_graphs_would_fit() -> None:
    request = recording("row_by_row")
    without = replace(request, plan=replace(request.plan, graphs="off"))
    assert without.footprint.total(HOST) < request.footprint.total(HOST)
    for least, is_named in ((without.footprint.total(HOST), True), (without.footprint.total(HOST) - 1, False)):
        with pytest.raises(ValueError, match="would fit: ") as caught:
            request.refuse_what_does_not_fit(MemoryLimits(host=least))
        assert ("graphs='off'" in str(caught.value)) == is_named


@pytest.mark.parametrize(("tier", "option"), [(DEVICE, "gpu_mem"), (HOST, "cpu_mem")])
def test_where_nothing_fits_it_is_said_with_how_much_something_would(tier: str, option: str) -> None:
    request = request_of((30, 30, 30, 30, 30, 30), accelerator=True)
    with pytest.raises(ValueError, match=rf"{on_tier(tier)} .*no smaller batch or share fits: the smallest needs ") as told:
        request.refuse_what_does_not_fit(MemoryLimits(**{tier: 1}))
    said = rf"the smallest needs (.*?) {on_tier(tier)}; give (.*?) more {on_tier(tier)} \({option}='(\d+)MB', rounded up\)(.*)$"
    need, more, enough, smaller_by = re.findall(said, str(told.value))[0]
    needed, given = (parse_bytes(one.replace(" ", "")) for one in (need, more))
    assert given == pytest.approx(1e6 * int(enough), abs=1), "the limit is a byte"
    assert needed + UNLIKE_BYTES - 10_000 <= 1e6 * int(enough) <= needed + UNLIKE_BYTES + 1e6 + 10_000
    assert "would fit: " in what_would_fit(request, MemoryLimits(**{tier: 1_000_000 * int(enough)}))
    assert "the smallest needs" in what_would_fit(request, MemoryLimits(**{tier: 1_000_000 * (int(enough) - 2)}))
    shares = {DEVICE: "", HOST: " and percent 30 0 30 0 30 30"}[tier]
    assert smaller_by == f", with gpu_batch_size 1{shares}"
    named = replace(request.plan, gpu_batch_size=1).with_percent(tuple(map(float, shares.split()[2:])) or request.plan.percent)
    replace(request, plan=named).refuse_what_does_not_fit(MemoryLimits(**{tier: 1_000_000 * int(enough)}))


@pytest.mark.parametrize(
    ("folder", "larger"),
    [
        (Path("/data"), "free (.*) more in /data, or give an offload_dir on a larger disk"),
        (None, r"give (.*) more on disk \(disk_mem='\d+MB', rounded up\)"),
    ],
    ids=["a folder", "a limit alone"],
)
def test_a_full_disk_is_to_be_larger_by_what_is_said(folder: Path | None, larger: str) -> None:
    request = request_of((0, 30, 0, 30, 0, 30), accelerator=False)
    limits = MemoryLimits(host=request.footprint.total(HOST), disk=1, folder=folder)
    said = rf"the smallest needs (.*) on disk; {larger}, with gpu_batch_size 1 and percent 0 65 0 65 0 65$"
    need, more = re.findall(said, what_would_fit(request, limits))[0]
    sizes = [parse_bytes(size.replace(" ", "")) for size in (need, more)]
    assert sizes[0] == sizes[1] if folder else sizes[0] <= sizes[1], "the limit is a byte"
    enough = int(1.01 * parse_bytes(need.replace(" ", "")))  # two decimals are shown
    assert "would fit: " in what_would_fit(request, replace(limits, disk=enough))


def test_too_small_a_disk_is_named_by_its_folder() -> None:
    request = request_of((0, 50, 0, 50, 0, 50), accelerator=False)
    limits = MemoryLimits(disk=request.footprint.total(DISK) - 1, folder=Path("/data/of me"))
    with pytest.raises(ValueError, match=r"on disk .*, /data/of me has room for .*; would fit: .* or an offload_dir with more"):
        request.refuse_what_does_not_fit(limits)
    assert what_would_fit(request, replace(limits, folder=None)).endswith(" or a larger disk_mem")


def test_the_exact_need_fits_and_a_byte_less_does_not() -> None:
    request = request_of((0, 50, 0, 50, 0, 50), accelerator=False)
    need = request.footprint.total(HOST)
    request.refuse_what_does_not_fit(MemoryLimits(host=need))
    with pytest.raises(ValueError, match=r"plan needs .* in CPU memory"):
        request.refuse_what_does_not_fit(MemoryLimits(host=need - 1))


def test_what_the_process_holds_already_counts() -> None:
    request = request_of((0, 50, 0, 50, 0, 50), accelerator=False)
    need = request.footprint.total(HOST)
    request.refuse_what_does_not_fit(MemoryLimits(host=need + 10_000_000, host_base=10_000_000))
    with pytest.raises(ValueError, match=r"process 10\.00 MB"):
        request.refuse_what_does_not_fit(MemoryLimits(host=need, host_base=10_000_000))


def test_blocks_of_a_workload_are_met_at_their_largest() -> None:
    """They run one after the other, so the workload needs what its largest block needs and no more."""
    one = request_of((0, 50, 0, 50, 0, 50), accelerator=False, prompts=32)
    assert request_of((0, 50, 0, 50, 0, 50), accelerator=False, prompts=320).footprint == one.footprint


def test_dummy_weights_on_disk_count_where_they_are_written() -> None:
    request = request_of((0, 0, 0, 100, 0, 100), accelerator=False)
    assert request.footprint.total(DISK) == 0
    written = replace(request, site=replace(request.site, writes_weights=True)).footprint.total(DISK)
    assert written >= sum(tensor.stored_nbytes for tensor in request.spec.tensors.values())


@pytest.mark.parametrize("option", [{"cpu_mem": "1MB"}, {"cpu_mem": 10**6}])
def test_an_engine_refuses_before_it_makes_or_loads_anything(
    option: dict[str, object], checkpoints: Checkpoints, offload: Path
) -> None:
    with (
        Case(percent=(0, 0, 0, 0, 0, 0)).open(checkpoints, offload, **option) as llm,
        pytest.raises(ValueError, match=r"plan needs .* in CPU memory .* the limit is 1\.00 MB"),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert not offload.exists()


def test_packed_slots_that_are_read_where_they_lie_are_not_decoded() -> None:
    """But for keys that are to be rotated."""
    spec = replace(tiny_spec(), kv_codec="group4")
    plain, evicting = Plan().policy, Plan.create(kv_policy="h2o", heavy=3, recent=3, positions="rolling").policy
    both = spec.kv_decoded_bytes_per_slot + spec.kv_bytes_per_slot
    assert spec.kv_bytes_per_slot == 2 * spec.kv_heads * 36
    in_torch, in_c = Site(), Site(processor=Processor(build=LIBRARIES[-1]))
    assert _decoding_bytes_per_slot(spec, plain, in_torch) == _decoding_bytes_per_slot(spec, evicting, in_torch) == both
    assert _decoding_bytes_per_slot(spec, plain, in_c) == 0
    assert _decoding_bytes_per_slot(spec, evicting, in_c) == both // 2
    assert _decoding_bytes_per_slot(tiny_spec(), plain, in_torch) == 0


def test_where_neither_is_enough_a_smaller_batch_with_a_smaller_share_is_offered() -> None:
    request = request_of((0, 100, 0, 100, 0, 100), accelerator=False, prompts=320)
    both = replace(request, plan=replace(request.plan, gpu_batch_size=1).with_percent((0, 0, 0, 0, 0, 0)))
    limits = MemoryLimits(host=int(1.02 * both.footprint.total(HOST)))
    with pytest.raises(ValueError, match=r"would fit: gpu_batch_size \d+ with percent") as told:
        request.refuse_what_does_not_fit(limits)
    size, *percent = map(int, re.findall(r"-?\d+", str(told.value).partition("would fit")[2]))
    offered = replace(request, plan=replace(request.plan, gpu_batch_size=size).with_percent(percent))
    assert limits.first_exceeded(offered.footprint) is None
