"""KV heads that keep different shares of a text: each keeps what the definition says of its own share, and under any plan the
engine says what the resident loop says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.layer_cache import LayerCache, heads_by_layer
from h2o_flexgen.kv.slots import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import JUDGED, PINNED, Plan
from h2o_flexgen.policies.levels import Level
from tests.engine.test_graphs import RESIDENT, is_without_graphs, replayed
from tests.helpers.contract import BY_HEAD, FEW_LOOK_BACK, MIXED_HEADS, WEIGHTS, Case, Checkpoints, head_budgets, hold_contract
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.tiny import BLOCKS
from tests.planning.worlds import tiny_spec
from tests.policies.oracle import Head
from tests.policies.test_policies import DIM, LENGTHS, ROTARY, new_tokens, texts, turn
from tests.whole import test_conversation as talks
from tests.whole import test_pipeline as pipeline
from tests.whole import test_shared_prefixes as prefixes
from tests.whole import test_stream as stream
from tests.whole.test_contract import MANY, MIXES, poisoned

CPU, STEPS = torch.device("cpu"), 12

# -- each head by its definition -------------------------------------------------------------------------------------------


def spec_of(heads: int) -> ModelSpec:
    """A model with KV heads, of which only the number of heads and layers is of interest."""
    return replace(tiny_spec(blocks=3), heads=heads, kv_heads=heads)


def caches_of(levels: Sequence[Level], place: int, batch: Batch) -> tuple[LayerCache, list[tuple[int, SlotScores | None]]]:
    """The cache of a layer, and what each of its levels notes."""
    caches, noted = [], []
    for number, level in enumerate(levels):
        if own := level.heads[place]:
            shape = (batch.size, len(own), level.policy.occupancy(batch, STEPS).capacity)
            region = torch.full((8 * shape[0] * shape[1] * shape[2],), 0xFF, dtype=torch.uint8)
            scores = SlotScores.over(region, level.policy, shape) if level.policy.score_bytes else None
            caches.append(KVCache(torch.full((2, *shape, DIM), torch.nan), scores))
            noted.append((number, scores))
    return LayerCache(heads_by_layer(levels, CPU)[place], caches), noted


@pytest.mark.parametrize(
    ("kept", "shares"),
    [("h2o", FEW_LOOK_BACK), ("tova", FEW_LOOK_BACK), ("random", MIXED_HEADS), ("h2o rolling", MIXED_HEADS)],
    ids=["h2o", "tova", "random", "h2o rolling"],
)
def test_each_head_keeps_what_the_definition_says_of_its_share(kept: str, shares: tuple[tuple[float, ...], ...]) -> None:
    policy, *rolling = kept.split()
    budgets, heads, group = head_budgets(shares, 4), 4, 2
    options = {"kv_policy": policy, "kv_budget": budgets.budgets[0]} | ({"positions": "rolling"} if rolling else {})
    levels = Plan.create(**options, head_budgets=budgets).levels(spec_of(heads))
    batch, rows = Batch(tuple(range(len(LENGTHS))), LENGTHS), texts(heads, group)
    each = [level.policy.occupancy(batch, STEPS) for level in levels]
    for place in range(len(shares)):
        cache, noted = caches_of(levels, place, batch)
        oracle = oracles(levels, options, place)
        for step in range(STEPS):
            now = [KVStep.of(own.at(step), own.capacity, CPU) for own in each]
            out = cache.attend(now, NewTokens(*new_tokens(rows, step, False), ROTARY))
            for row, length in enumerate(LENGTHS):
                new = slice(length + step - 1, length + step) if step else slice(0, length)
                q, k, v = (part[new].double().numpy() for part in rows[row])
                for head, judge in oracle[row].items():
                    expected = judge.attend(q[:, head * group : (head + 1) * group], k[:, head], v[:, head])
                    got = out[row, : len(q)].view(-1, heads, group, DIM)[:, head]
                    np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)
            for level, scores in noted:
                check_kept(scores, levels[level].heads[place], each[level].counts(step + 1), oracle)


def oracles(levels: Sequence[Level], options: dict[str, Any], place: int) -> list[dict[int, Head]]:
    """The heads of each row, by their number in the layer. Chance knows a head by its number among those of its level."""
    asked = [
        (
            head,
            number,
            {"kv_policy": "full"} if level.policy.keeps_all else {**options, "kv_budget": level.policy.options.kv_budget},
        )
        for level in levels
        for number, head in enumerate(level.heads[place])
    ]
    return [{head: Head(own, length, STEPS, number, turn) for head, number, own in asked} for length in LENGTHS]


def check_kept(
    scores: SlotScores | None, heads: Sequence[int], counts: Sequence[int], oracle: Sequence[dict[int, Head]]
) -> None:
    for row, count in enumerate(counts):
        for number, head in enumerate(heads):
            judge = oracle[row][head]
            assert len(judge.kept) == count
            if scores is not None:
                assert sorted(scores.positions[row, number, :count].tolist()) == judge.kept, f"row {row}, head {head}"


def test_layers_differ_in_the_levels_that_they_have_heads_of() -> None:
    """Otherwise the other tests here would not test what they are for."""
    levels = Plan.create(kv_policy="h2o", head_budgets=head_budgets(MIXED_HEADS, 4), kv_budget=6.3 / 12).levels(spec_of(4))
    assert levels[0].policy.keeps_all and 3 <= len(levels) <= 4
    of_layers = [sum(bool(level.heads[place]) for level in levels) for place in range(3)]
    assert min(of_layers) == 1 and max(of_layers) >= 3


# -- the engine ------------------------------------------------------------------------------------------------------------

TEXTS = (5, 9, 4, 7, 12)
CHOICES = {
    "kind": ("opt", "llama-gqa", "gpt-oss", "deepseek-v2"),
    "percent": MIXES[:4],
    "policy": BY_HEAD,
    "kv_codec": (PLAIN, "group4"),
    "attend_on": (DEVICE, HOST),
    "schedule": ("zigzag", "flexgen_barrier", "row_by_row"),
    "num_gpu_batches": (1, 3),
    "prefill_tokens": (1024, 12),
    "buffers": (1, 2),
}


@pytest.mark.parametrize("values", on_devices(CHOICES, share=ELSEWHERE))
def test_tokens_and_logits_equal_the_resident_loop(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(lengths=TEXTS, gen_len=6, **values), checkpoints, offload)


@pytest.mark.parametrize("kind", ["opt", "llama-gqa"])
def test_the_host_gets_the_worth_that_every_head_says_of_a_token(
    kind: str, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """Heads of several levels say it, and all of it crosses together."""
    kept_at_home: dict[str, Any] = {"percent": (100, 0, 0, 100, 100, 0), "attend_on": HOST, "device": "pretended"}
    hold_contract(Case(kind, lengths=TEXTS, gen_len=6, policy=BY_HEAD[5], **kept_at_home), checkpoints, offload)


RUNNING = {
    "kind": ("opt", "llama-gqa"),
    "percent": (stream.MIXES[1], stream.MIXES[3]),
    "policy": BY_HEAD[:2],
    ("weight_codec", "compute", "kv_codec"): ((*WEIGHTS[0], PLAIN), (*WEIGHTS[1], "group4")),
    "attend_on": (DEVICE, HOST),
    "prefill_tokens": (1024, 12),
}


@pytest.mark.parametrize("values", on_devices(RUNNING))
def test_rows_that_come_and_go(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    lengths, growth = tuple(length + 3 for length in stream.LENGTHS[:6]), stream.GROWTH[:6]
    stream.hold_contract(Case(lengths=lengths, **values), growth, checkpoints, offload)


ASIDE, COPIED = ("prefix_policy", PINNED), ("prefix_policy", JUDGED)
SHARING = {
    "kind": ("opt", "llama-gqa"),
    "percent": (stream.MIXES[0], stream.MIXES[3]),
    "policy": tuple((how, *BY_HEAD[place]) for how, place in ((COPIED, 0), (ASIDE, 1), (ASIDE, 0), (COPIED, 3))),
    "kv_codec": (PLAIN, "group4"),
}


@pytest.mark.parametrize("values", on_devices(SHARING, share=ELSEWHERE))
def test_prefixes_that_rows_share(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = prefixes.SharedCase(own=prefixes.OWN[:7], gpu_batch_size=3, least_own=4, **values)
    prefixes.hold_contract(case, checkpoints, offload)


TALKS = {
    "kind": ("opt", "llama-gqa"),
    "percent": (MIXES[2], MIXES[3]),
    "policy": (BY_HEAD[0], BY_HEAD[3]),
    "kv_codec": (PLAIN, "group4"),
}


@pytest.mark.parametrize("values", on_devices(TALKS))
def test_turns_of_a_conversation(values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    talks.hold_contract(Case(**values), checkpoints, offload)


def test_a_conversation_counts_the_slots_of_every_head(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", policy=BY_HEAD[0])
    with case.open(checkpoints, offload) as llm, llm.converse(20) as talk:
        talk.reply(list(range(1, 16)), talks.GREEDY)
        levels, seen = case.levels(llm.spec), talk.seen
        slots = [20 if level.policy.keeps_all else int((level.policy.options.kv_budget or 0) * 20) for level in levels]
        held = sum(min(seen, own) * sum(map(len, level.heads)) for own, level in zip(slots, levels, strict=True))
        assert talk.kv_bytes == held * llm.spec.kv_bytes_per_head and talk.held == seen > min(slots)


@pytest.mark.parametrize("kind", ["opt", "llama-gqa"])
def test_steps_are_replayed_where_a_device_captures_them(
    kind: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case(kind, RESIDENT, (5, 9, 4, 7), 8, device=any_device, policy=BY_HEAD[0])
    assert replayed(case, checkpoints, offload) > 0 or is_without_graphs(any_device)


def test_nothing_depends_on_what_memory_held_before(
    checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tier in (HostTier, DeviceTier):
        monkeypatch.setattr(tier, "alloc", poisoned(tier.alloc))
    for device, percent in (("cpu", MIXES[2]), ("pretended", MIXES[3])):
        hold_contract(Case("llama-gqa", percent, MANY, 8, device=device, policy=BY_HEAD[0]), checkpoints, offload)


@pytest.mark.parametrize("devices", [2, BLOCKS])
def test_a_pipeline_of_devices_that_have_some_of_the_layers(
    devices: int, checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = pipeline.on(devices, percent=MIXES[3], lengths=TEXTS, num_gpu_batches=3, gen_len=6)
    hold_contract(replace(case, policy=(*case.policy, *BY_HEAD[0])), checkpoints, offload)
