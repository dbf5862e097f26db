"""Every policy keeps exactly the tokens that its definition says, head by head and step by step, and attends to those alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.prompt_attention import column_sums
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import Judge, Linear
from h2o_flexgen.kv.judges import judge_of as judge_that_needs_no_file
from h2o_flexgen.kv.slots import NO_TOKEN, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rotary
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import PROBE, KVPolicy
from tests.helpers.contract import Case, Checkpoints, generate_with
from tests.helpers.pairwise import in_turn
from tests.helpers.probes import OF_NO_MODEL, made_up_probe
from tests.helpers.samples import every_nth
from tests.policies.oracle import Array, Head

DIM, LENGTHS = 8, (40, 7, 23, 1)
STEPS = 48  # so many that a text of one token outgrows the largest budget below, which is 46
POSITIONS = 47  # of a model, as an echo sees them: that of the longest text comes in parts
ASKED: tuple[dict[str, Any], ...] = (
    {"kv_policy": "h2o", "heavy": 6, "recent": 5},
    {"kv_policy": "h2o", "heavy": 11, "recent": 0},
    {"kv_policy": "h2o", "heavy": 0, "recent": 11},
    {"kv_policy": "h2o", "heavy": 1, "recent": 0},
    {"kv_policy": "h2o", "kv_budget": 0.3},
    {"kv_policy": "h2o", "kv_budget": 0.3, "recent": 4},
    {"kv_policy": "h2o"},
    {"kv_policy": "h2o", "hh_ratio": 1.0},
    {"kv_policy": "h2o", "heavy": 6, "recent": 5, "sinks": 3, "grace": 7, "score_decay": 0.9},
    {"kv_policy": "h2o", "heavy": 6, "recent": 5, "hh_prompt_only": True},
    {"kv_policy": "h2o", "heavy": 6, "recent": 5, "positions": "rolling"},
    {"kv_policy": "h2o-flexgen", "heavy": 6, "recent": 6},
    {"kv_policy": "h2o-flexgen", "heavy": 1, "recent": 1},
    {"kv_policy": "local", "recent": 9},
    {"kv_policy": "local", "kv_budget": 0.2, "positions": "rolling"},
    {"kv_policy": "streaming", "recent": 5},
    {"kv_policy": "streaming", "kv_budget": 0.3, "sinks": 2, "positions": "rolling"},
    {"kv_policy": "heavy", "heavy": 9},
    {"kv_policy": "heavy", "kv_budget": 0.2, "grace": 2},
    {"kv_policy": "random", "heavy": 4, "recent": 5},
    {"kv_policy": "random", "kv_budget": 0.2, "hh_prompt_only": True},
    {"kv_policy": "snapkv", "heavy": 6, "recent": 5},
    {"kv_policy": "snapkv", "heavy": 6, "recent": 40, "sinks": 1},
    {"kv_policy": "kvzip", "heavy": 6, "recent": 5},
    {"kv_policy": "kvzip", "kv_budget": 0.45, "recent": 0, "sinks": 2, "grace": 3},
    {"kv_policy": "kvzip", "heavy": 9, "hh_prompt_only": True},
    {"kv_policy": "tova", "heavy": 9},
    {"kv_policy": "tova", "heavy": 9, "sinks": 2, "grace": 3, "positions": "rolling"},
    {"kv_policy": "h2o", "heavy": 6, "recent": 5, "value_norms": True},
    {"kv_policy": "h2o", "kv_budget": 0.3, "value_norms": True, "sinks": 1, "score_decay": 0.9, "positions": "rolling"},
    {"kv_policy": "snapkv", "heavy": 7, "recent": 4, "value_norms": True},
    {"kv_policy": "tova", "heavy": 9, "value_norms": True, "hh_prompt_only": True},
    {"kv_policy": "kvzap", "heavy": 6, "recent": 5, "probe": OF_NO_MODEL},
    {"kv_policy": "kvzap", "kv_budget": 0.3, "recent": 0, "sinks": 1, "positions": "rolling", "probe": OF_NO_MODEL},
    {"kv_policy": "keydiff", "heavy": 6, "recent": 5},
    {"kv_policy": "keydiff", "kv_budget": 0.3, "recent": 0, "sinks": 1, "grace": 2, "positions": "rolling"},
    {"kv_policy": "lagkv", "heavy": 9, "recent": 5},
    {"kv_policy": "knorm", "heavy": 6, "recent": 5},
    {"kv_policy": "knorm", "kv_budget": 0.3, "recent": 0, "sinks": 1, "grace": 2, "positions": "rolling"},
)


def name_of(asked: Mapping[str, Any]) -> str:
    return "-".join(str(value) for name, value in asked.items() if name != "probe")


def turn(x: Array, positions: Array) -> Array:
    """Rotary positions over the whole head, as the paper of RoPE has them."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10000.0 ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


ROTARY = Rotary(1.0 / 10000.0 ** (torch.arange(DIM // 2) / (DIM // 2)))


Row = tuple[Tensor, Tensor, Tensor]


def texts(kv_heads: int, group: int) -> list[Row]:
    """Queries, keys and values of each text, and behind it those of the echo of its prompt."""
    generator = torch.Generator().manual_seed(kv_heads)
    return [
        (
            2 * torch.randn(2 * length + STEPS, kv_heads * group, DIM, generator=generator),
            torch.randn(2 * length + STEPS, kv_heads, DIM, generator=generator),
            torch.randn(2 * length + STEPS, kv_heads, DIM, generator=generator),
        )
        for length in LENGTHS
    ]


def new_tokens(rows: Sequence[Row], step: int, echoes: bool) -> list[Tensor]:
    """Of all rows as a layer hands them over; pads have values that would be seen."""

    def padded(values: Tensor) -> Tensor:
        return torch.cat((values, values.new_full((max(LENGTHS) - len(values), *values.shape[1:]), 9.0)))

    def part(which: int) -> Tensor:
        of_rows = [(row[which], length) for row, length in zip(rows, LENGTHS)]
        if step:
            return torch.stack([values[length + step - 1][None] for values, length in of_rows])
        prompts = torch.stack([padded(values[:length]) for values, length in of_rows])
        echo = [torch.stack([padded(values[length + STEPS :]) for values, length in of_rows])] if echoes else []
        return torch.cat((prompts, *echo), dim=1)

    return [part(0), part(1), part(2)]


def judge_of(policy: KVPolicy, kv_heads: int) -> Judge | None:
    """A probe sees the values of all heads, which stand for the input of a layer."""
    if policy.judge == PROBE:
        probe = made_up_probe(1, kv_heads, kv_heads * DIM)
        return Linear(torch.from_numpy(probe.weights[0]), torch.from_numpy(probe.biases[0]))
    return judge_that_needs_no_file(policy)


def sinks_of(kv_heads: int, group: int) -> tuple[Tensor | None, list[Array | None]]:
    """Scores of sinks for all query heads, as the queries of each KV head have them, too; heads with one query have none."""
    if group == 1:
        return None, [None] * kv_heads
    scores = 2 * torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(group))
    return scores, [*scores.double().view(kv_heads, group).numpy()]


def probe_of(kv_heads: int, head: int) -> tuple[Array, float]:
    """What says it in the definition, for one head."""
    probe = made_up_probe(1, kv_heads, kv_heads * DIM)
    return probe.weights[0, head].astype(np.float64), float(probe.biases[0, head])


def step_of(policy: KVPolicy, occupancy: Occupancy, step: int, positions: int = POSITIONS) -> KVStep:
    within = positions if policy.echoes and step == 0 else None
    return KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"), echoes_within=within)


def attended(heads: Sequence[Head], q: Array, k: Array, v: Array, decodes: bool) -> Array:
    """What the definition says of a row's new tokens: (tokens, kv_heads, group, dim)."""
    queries, x = q.reshape(len(q), len(heads), -1, DIM), v.reshape(len(v), -1)
    return np.stack(
        [head.attend(queries[:, number], k[:, number], v[:, number], decodes, x) for number, head in enumerate(heads)], 1
    )


def held(scores: SlotScores, row: int, count: int) -> list[list[int]]:
    """The positions that each head of a row keeps, ascending."""
    return scores.positions[row, :, :count].sort(-1).values.tolist()


GROUPED, ALONE = (2, 3), (3, 1)  # KV heads, and queries of each: with one there are no sinks, and sums are of one query


def with_heads(asked: Sequence[dict[str, Any]]) -> list[Any]:
    """Each with heads in groups, and every third one with heads of their own."""
    cases = [(kept, GROUPED) for kept in asked] + [(kept, ALONE) for kept in asked[::3]]
    named = [pytest.param(kept, *heads, id=f"{heads[0]}-{heads[1]}-{name_of(kept)}") for kept, heads in cases]
    return every_nth(named, 2)


@pytest.mark.parametrize(("kept", "kv_heads", "group"), with_heads(ASKED))
def test_kept_positions_and_outputs_are_those_of_the_definition(kept: dict[str, Any], kv_heads: int, group: int) -> None:
    policy, batch = Plan.create(**kept).policy, Batch(tuple(range(len(LENGTHS))), LENGTHS)
    if "kv_budget" not in kept and "heavy" not in kept and "recent" not in kept and "hh_ratio" not in kept:
        assert policy.occupancy(batch, STEPS).budgets[0].slots == int(0.2 * (LENGTHS[0] + STEPS))
    occupancy = policy.occupancy(batch, STEPS)
    shape = (len(LENGTHS), kv_heads, occupancy.capacity)
    scores = SlotScores.over(
        torch.full((4 * 12 * len(LENGTHS) * kv_heads * occupancy.capacity,), 0xFF, dtype=torch.uint8), policy, shape
    )
    cache = KVCache(torch.full((2, *shape, DIM), torch.nan), scores, judge=judge_of(policy, kv_heads))
    rows, (sinks, of_heads) = texts(kv_heads, group), sinks_of(kv_heads, group)
    heads = [
        [
            Head(kept, length, STEPS, head, turn, positions=POSITIONS, probe=probe_of(kv_heads, head), sink_scores=own)
            for head, own in enumerate(of_heads)
        ]
        for length in LENGTHS
    ]
    for step in range(STEPS):
        given = new_tokens(rows, step, policy.echoes)
        out = cache.attend(step_of(policy, occupancy, step), NewTokens(*given, ROTARY, given[2].flatten(2), sinks))
        for row, length in enumerate(LENGTHS):
            new = [length + step - 1] if step else [*range(length)]
            echo = [*range(length + STEPS, 2 * length + STEPS)] if policy.echoes and not step else []
            q, k, v = (part[new + echo].double().numpy() for part in rows[row])
            computed = [*range(len(new)), *(max(LENGTHS) + place for place in range(len(echo)))]
            expected = attended(heads[row], q, k, v, step > 0)
            np.testing.assert_allclose(out[row, computed].view(expected.shape).numpy(), expected, atol=2e-5)
            count = occupancy.counts(step + 1)[row]
            kept_now = [head.kept for head in heads[row]]
            assert held(scores, row, count) == kept_now, f"row {row}, step {step}"
            assert all(len(own) == count for own in kept_now)


@pytest.mark.parametrize("kept", ASKED, ids=name_of)
def test_after_every_step_the_budget_is_held_and_protected_tokens_are_there(kept: dict[str, Any]) -> None:
    """Read from the scores alone: no definition of which token is chosen among the others."""
    policy, rows = Plan.create(**kept).policy, texts(2, 2)
    occupancy = policy.occupancy(Batch(tuple(range(len(LENGTHS))), LENGTHS), STEPS)
    shape = (len(LENGTHS), 2, occupancy.capacity)
    scores = SlotScores.over(torch.zeros(12 * shape[0] * shape[1] * shape[2], dtype=torch.uint8), policy, shape)
    cache = KVCache(torch.zeros(2, *shape, DIM), scores, judge=judge_of(policy, 2))
    for step in range(STEPS):
        given = new_tokens(rows, step, policy.echoes)
        cache.attend(step_of(policy, occupancy, step), NewTokens(*given, ROTARY, given[2].flatten(2)))
        for row, (length, budget) in enumerate(zip(LENGTHS, occupancy.budgets)):
            total, generated = length + step, step if occupancy.prompt_only else 0
            window = budget.window if step else budget.prompt_window
            for head in range(2):
                held = scores.positions[row, head, : occupancy.counts(step + 1)[row]].tolist()
                assert len(held) == len(set(held)) == min(total - generated, budget.slots) + generated
                assert set(range(min(budget.sinks, total))) <= set(held)
                assert set(range(max(0, total - window), total)) <= set(held)
                assert min(held) >= 0 and max(held) < total


# rows do not go on side by side: some are new where others have long been full
PASSES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((9, 30, 1, 4), 3),
    ((5, 1, 14, 2), 1),
    ((1, 1, 1, 1), 4),
    ((20, 3, 2, 7), 12),
)
CONTEXT = 90


@pytest.mark.parametrize(
    ("kept", "kv_heads", "group"), with_heads([*(one for one in ASKED if "hh_prompt_only" not in one), {}])
)
def test_a_cache_that_lives_on_keeps_what_the_definition_says(kept: dict[str, Any], kv_heads: int, group: int) -> None:
    """Passes of several tokens over what is held, with decode steps between them."""
    policy, rows, generator = Plan.create(**kept).policy, len(LENGTHS), torch.Generator().manual_seed(group)
    sinks, of_heads = sinks_of(kv_heads, group)
    known = {"context": CONTEXT, "positions": POSITIONS}
    heads = [
        [
            Head(kept, length, 0, head, turn, **known, probe=probe_of(kv_heads, head), sink_scores=own)
            for head, own in enumerate(of_heads)
        ]
        for length in PASSES[0][0]
    ]
    seen, cache = (0,) * rows, None
    for lengths, gen_len in PASSES:
        occupancy = policy.occupancy(Batch(tuple(range(rows)), lengths, seen, CONTEXT), gen_len)
        shape = (rows, kv_heads, occupancy.capacity)
        if cache is None:
            region = torch.full((4 * 12 * rows * kv_heads * occupancy.capacity,), 0xFF, dtype=torch.uint8)
            scores = SlotScores.over(region, policy, shape) if policy.score_bytes else None
            cache = KVCache(torch.full((2, *shape, DIM), torch.nan), scores, judge=judge_of(policy, kv_heads))
        for step in range(gen_len):
            tokens = max(lengths) * (2 if policy.echoes else 1) if step == 0 else 1
            q, k, v = (torch.randn(rows, tokens, n, DIM, generator=generator) for n in (kv_heads * group, kv_heads, kv_heads))
            out = cache.attend(step_of(policy, occupancy, step), NewTokens(2 * q, k, v, ROTARY, v.flatten(2), sinks))
            for row in range(rows):
                computed = [*range(lengths[row] if step == 0 else 1)]
                if policy.echoes and step == 0:
                    computed += [max(lengths) + place for place in computed]
                expected = attended(heads[row], *(x[row, computed].double().numpy() for x in (2 * q, k, v)), step > 0)
                np.testing.assert_allclose(out[row, computed].view(expected.shape).numpy(), expected, atol=2e-5)
                count, kept_now = occupancy.counts(step + 1)[row], [head.kept for head in heads[row]]
                assert all(len(own) == count for own in kept_now)
                if scores is not None:
                    assert held(scores, row, count) == kept_now, f"row {row}, step {step}"
        seen = tuple(before + length + gen_len - 1 for before, length in zip(seen, lengths))


@pytest.mark.parametrize("kept", [one for one in ASKED if one["kv_policy"] in ("h2o", "tova", "snapkv")][6:], ids=name_of)
def test_scores_may_be_the_highest_share_that_a_token_got(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy: how it gathers is one of its facts, beside the others."""
    monkeypatch.setattr(KVPolicy, "gathers", MAX)
    monkeypatch.setattr(Head, "highest", frozenset({kept["kv_policy"]}))
    test_kept_positions_and_outputs_are_those_of_the_definition(kept, 2, 3)
    if "hh_prompt_only" not in kept:
        test_a_cache_that_lives_on_keeps_what_the_definition_says(kept, 2, 3)


def test_what_is_never_filled_is_noted_as_empty() -> None:
    policy, batch = Plan.create(kv_policy="h2o", heavy=3, recent=2).policy, Batch((0, 1), (9, 2))
    occupancy = policy.occupancy(batch, 4)
    scores = SlotScores.over(torch.zeros(2 * 6 * 8, dtype=torch.uint8), policy, (2, 1, occupancy.capacity))
    x = torch.randn(2, 9, 1, DIM)
    KVCache(torch.zeros(2, 2, 1, occupancy.capacity, DIM), scores).attend(
        KVStep.of(occupancy.at(0), 6, torch.device("cpu")), NewTokens(x, x, x)
    )
    assert scores.positions[1, 0].tolist() == [0, 1, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("block", [1 << 8, 1 << 12, 1 << 24])
@pytest.mark.parametrize(("kv_heads", "group"), [(4, 1), (2, 3)])
@pytest.mark.parametrize("held", [0, 30])
def test_column_sums_equal_those_of_the_whole_matrix_however_it_is_cut(
    kv_heads: int, group: int, block: int, held: int
) -> None:
    generator, keys = torch.Generator().manual_seed(0), held + 50
    q = torch.randn(3, kv_heads * group, 50, DIM, generator=generator)
    k = torch.randn(3, kv_heads, keys, DIM, generator=generator)
    weights = (torch.arange(50) < torch.tensor([[50], [13], [1]])).float() * torch.rand(3, 50, generator=generator)
    is_held = torch.arange(held) < torch.tensor([held, 4, 0])[:, None, None]
    sums, highest = (column_sums(q, k, weights, is_held if held else None, block, gathers) for gathers in (SUM, MAX))
    logits = (q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3)) * DIM**-0.5
    hidden = torch.ones(50, keys).triu(held + 1).bool() | torch.cat((~is_held, torch.zeros(3, 1, 50).bool()), -1)
    shares = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1) * weights[:, None, :, None]
    shares = shares.view(3, kv_heads, -1, keys)  # of all queries of a group
    torch.testing.assert_close(sums.double(), shares.sum(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(highest.double(), shares.amax(2), atol=1e-6, rtol=1e-5)


# -- through the engine --------------------------------------------------------------------------------------------------

PLACES = ((100, 0, 100, 0, 100, 0), (0, 0, 0, 0, 0, 0), (30, 30, 20, 50, 40, 30))


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "neox-parallel"])
def test_a_budget_that_holds_all_gives_what_full_gives_bit_for_bit(
    kind: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    full = Case(kind, PLACES[2], (9, 3, 6), gen_len=6, device=any_device)
    for asked in ((("kv_policy", "h2o"), ("heavy", 15)), (("kv_policy", "h2o"), ("kv_budget", 1.0))):
        with full.open(checkpoints, offload, **dict(asked)) as llm:
            _, logits = generate_with(llm, full)
        for rows in full.batches():
            for step, expected in enumerate(checkpoints.resident_logits(full, rows)):
                for place, row in enumerate(rows):
                    assert torch.equal(logits[step, row], expected[place])


# the contract has every policy in every place and on both devices, and rows of streams are held alone for each kind of policy:
# here are every other of the options, of which the one has the place and the device of the next
CACHES = [(tuple(kept.items()), PLACES[number % len(PLACES)]) for number, kept in enumerate(ASKED[:1] + ASKED[8::2])]


@pytest.mark.parametrize("values", in_turn({"cache": CACHES}, nth=3))
def test_a_row_of_a_batch_says_what_it_says_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    policy, percent = values["cache"]
    where = {"percent": percent, "policy": policy, "device": values["device"]}
    batch = Case("llama-gqa", lengths=(30, 9, 12), gen_len=6, gpu_batch_size=3, **where)
    with batch.open(checkpoints, offload) as llm:
        together = [list(one.token_ids) for one in generate_with(llm, batch)[0]]
    with batch.open(checkpoints, offload, gpu_batch_size=1, num_gpu_batches=1) as llm:
        alone = [list(one.token_ids) for one in generate_with(llm, batch)[0]]
    assert together == alone
