"""Policies behind a prefix that rows share: where it is pinned it stands beside what a policy counts, and where it is judged
all is as if nothing were shared. Both are held to the definition, head by head and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy, StepSlots
from h2o_flexgen.policies.policy import KVPolicy
from tests.helpers.samples import every_nth
from tests.policies.oracle import Head
from tests.policies.test_policies import ASKED, DIM, POSITIONS, ROTARY, judge_of, name_of, probe_of, sinks_of, turn

STEPS, KV_HEADS, GROUP, CPU = 25, 2, 3, torch.device("cpu")
PREFIXES = (SharedPrefix(0, 5), None, SharedPrefix(1, 12), SharedPrefix(0, 5))  # of each row
OWN = (35, 7, 1, 34)  # tokens of each row's prompt behind its prefix
Text = tuple[Tensor, Tensor, Tensor]  # q, k and v, a token each


def text(tokens: int, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    return tuple(torch.randn(tokens, count, DIM, generator=generator) for count in heads)  # type: ignore[return-value]


def padded(parts: Sequence[Text]) -> list[Tensor]:
    """Tokens of several rows as a layer hands them over; pads have values that would be seen."""
    longest = max(len(part[0]) for part in parts)
    return [
        torch.stack(
            [torch.cat([part[i], part[i].new_full((longest - len(part[i]), *part[i].shape[1:]), 9.0)]) for part in parts]
        )
        for i in range(3)
    ]


def cache_of(policy: KVPolicy | None, rows: int, slots: int) -> KVCache:
    """As bad as memory can be: NaN, and notes that were never written."""
    image = torch.full((2, rows, KV_HEADS, slots, DIM), torch.nan)
    if policy is None or not policy.score_bytes:
        return KVCache(image)
    notes = torch.full((rows * KV_HEADS * slots * policy.score_bytes,), 0xFF, dtype=torch.uint8)
    return KVCache(image, SlotScores.over(notes, policy, (rows, KV_HEADS, slots)), judge=judge_of(policy, KV_HEADS))


def shared_caches(policy: KVPolicy, copies: bool, shared: dict[SharedPrefix, Text], sinks: Tensor | None) -> dict[int, KVCache]:
    caches = {}
    for prefix, own in shared.items():
        caches[prefix.group] = cache_of(policy if copies else None, 1, prefix.tokens)
        q, k, v = (each[None] for each in own)
        now = KVStep.of(policy.whole(prefix.tokens), prefix.tokens, CPU)
        caches[prefix.group].attend(now, NewTokens(q, k, v, ROTARY, v.flatten(2), sinks))
    return caches


def step_of(
    occupancies: Sequence[Occupancy], step: int, needs: Sequence[SeatNeed], capacity: int, within: int | None = None
) -> KVStep:
    slots = [occupancy.at(step) for occupancy in occupancies]
    if step == 0:
        slots = [one.behind(need.spared) if need.spared else one for one, need in zip(slots, needs)]
    is_behind = step == 0 or not any(need.copies for need in needs)
    prefixes = [need.prefix for need in needs] if is_behind else ()
    return KVStep.of(StepSlots.of_rows(slots), capacity, CPU, prefixes, echoes_within=None if step else within)


def head_of(
    kept: dict[str, Any], own: int, prefix: SharedPrefix | None, copies: bool, number: int, sinks: np.ndarray | None
) -> Head:
    shared, known = 0 if prefix is None else prefix.tokens, {"probe": probe_of(KV_HEADS, number), "sink_scores": sinks}
    if copies:
        return Head(kept, own + shared, STEPS, number, turn, **known)  # type: ignore[arg-type]
    return Head(kept, own, STEPS, number, turn, pinned=shared, positions=POSITIONS, **known)  # type: ignore[arg-type]


FIRST = {one.get("kv_policy"): one for one in ({}, *reversed(ASKED))}  # options of each policy
BOTH_WAYS = [  # with the first options of a policy; with others one way and the other in turn
    pytest.param(kept, copies, id=f"{'judged' if copies else 'pinned'}-{name_of(kept)}")
    for copies in (False, True)
    for number, kept in enumerate(({}, *ASKED))
    if kept == FIRST[kept.get("kv_policy")] or number % 2 == copies or kept["kv_policy"] == "kvzip"
    if not (copies and kept.get("kv_policy") == "kvzip")  # its plans refuse that
]


@pytest.mark.parametrize(("kept", "copies"), every_nth(BOTH_WAYS, 2))
def test_kept_tokens_and_outputs_are_those_of_the_definition(kept: dict[str, Any], copies: bool) -> None:
    policy = Plan.create(**kept).policy
    own = [33 if copies and policy.last_queries else length for length in OWN]  # all queries that count are behind the prefix
    shared = {prefix: text(prefix.tokens, prefix.group) for prefix in PREFIXES if prefix is not None}
    rows = [text(2 * length + STEPS, 10 + row) for row, length in enumerate(own)]  # the echo of a prompt comes last
    needs = [
        SeatNeed.behind(prefix, length + (0 if prefix is None else prefix.tokens), STEPS, copies)
        for prefix, length in zip(PREFIXES, own)
    ]
    occupancies = [policy.alone(need) for need in needs]
    capacity = max(occupancy.capacity for occupancy in occupancies)
    cache = cache_of(policy, len(rows), capacity)
    sinks, of_heads = sinks_of(KV_HEADS, GROUP if ({}, *ASKED).index(kept) % 2 else 1)  # every other policy has some
    cache.prefixes = shared_caches(policy, copies, shared, sinks)
    heads = [
        [head_of(kept, length, prefix, copies, head, sink) for head, sink in enumerate(of_heads)]
        for prefix, length in zip(PREFIXES, own)
    ]
    for step in range(STEPS):
        new = [tuple(x[:length] if step == 0 else x[length + step - 1 :][:1] for x in row) for row, length in zip(rows, own)]
        given, within = padded(new), POSITIONS if policy.echoes else None  # type: ignore[arg-type]
        is_echoed = policy.echoes and step == 0
        echo = [tuple(x[length + STEPS :] for x in row) for row, length in zip(rows, own)] if is_echoed else []
        if is_echoed:
            given = [torch.cat(both, dim=1) for both in zip(given, padded(echo))]  # type: ignore[arg-type]
        tokens = NewTokens(*given, ROTARY, given[2].flatten(2), sinks)
        out = cache.attend(step_of(occupancies, step, needs, capacity, within), tokens)
        for row, prefix in enumerate(PREFIXES):
            for number, head in enumerate(heads[row]):
                beginning = shared[prefix] if prefix is not None and step == 0 else None
                asked = tuple(torch.cat(both) for both in zip(new[row], echo[row])) if echo else new[row]
                expected = attended(head, asked, beginning, copies, number, step > 0)  # type: ignore[arg-type]
                computed = [*range(len(new[row][0]))]
                computed += [max(own) + place for place in computed] if echo else []
                got = out[row, computed].view(-1, KV_HEADS, GROUP, DIM)[:, number]
                np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)
                if cache._scores is not None:
                    count = occupancies[row].counts(step + 1)[0]
                    assert sorted(cache._scores.positions[row, number, :count].tolist()) == head.kept, f"row {row}, step {step}"


def attended(head: Head, new: Text, beginning: Text | None, copies: bool, number: int, decodes: bool) -> np.ndarray:
    """What the definition says of new tokens, behind their prefix if this is their first pass."""
    q, k, v, x = _of_head(new, number)
    if beginning is None:
        return head.attend(q, k, v, decodes, x)
    before = _of_head(beginning, number)
    if copies:
        q, k, v, x = (np.concatenate(both) for both in zip(before, (q, k, v, x)))
        return head.attend(q, k, v, x=x)[len(before[0]) :]
    head.begin(*before[:3])
    return head.attend(q, k, v, x=x)


def _of_head(tokens: Text, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of a head, and what stands for the input of the layer."""
    q, k, v = (x.double().numpy() for x in tokens)
    return q[:, number * GROUP : (number + 1) * GROUP], k[:, number], v[:, number], v.reshape(len(v), -1)
