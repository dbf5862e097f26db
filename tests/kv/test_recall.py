"""Where decode steps attend a share of what is kept, they attend the slots that NumPy chooses, and these alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.kernels import chosen_slots
from h2o_flexgen.kernels.chosen_slots import Always, choose_slots_twin
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import chosen_attention, decode_attention, encode
from h2o_flexgen.kv import key_index
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.key_index import KeyIndex
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies import recall
from h2o_flexgen.policies.by_attention import H2O
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.policies.recall import INDEX, attended

Array = NDArray[np.float64]
HEADS, KV_HEADS, DIM, STEPS, SHARE = 4, 2, 16, 8, 0.25
LENGTHS = (90, 30, 3, 61)
RECALLS = Full(KVOptions(kv_recall=SHARE))
FIRST, RECENT = 4, 16  # as documented


def in_four_bits(keys: Array) -> Array:
    """Keys (tokens, dim) as the index has them: whole numbers from 0 to 15 of steps from the least value, both in bfloat16."""
    found = np.empty_like(keys)
    for number, key in enumerate(keys):
        codes = torch.empty(1, 36, dtype=torch.uint8)
        encode(INDEX, torch.tensor(key[None], dtype=torch.float32), codes)
        scale, least = (float(codes[0, at : at + 2].view(torch.bfloat16)) for at in (32, 34))
        found[number] = [(int(codes[0, at % 32]) >> (4 if at >= 32 else 0) & 15) * scale + least for at in range(len(key))]
        assert np.abs(found[number] - key).max() <= (key.max() - key.min()) / 15 * 0.6
    return found


def chosen_by(
    q: Array, keys: Array, count: int, sinks: Array | None = None, cap: float | None = None, recent: int = RECENT
) -> set[int]:
    """The tokens that the queries (group, dim) of a KV head choose by an index of keys (tokens, dim)."""
    scores = q @ keys.T / math.sqrt(q.shape[1])
    scores = scores if cap is None else np.tanh(scores / cap) * cap
    beside = np.zeros(len(q)) if sinks is None else np.exp(sinks)
    worth = (np.exp(scores) / (np.exp(scores).sum(1) + beside)[:, None]).sum(0)
    held = len(keys)
    always = {*range(min(FIRST, held)), *range(max(0, held - recent), held)}
    others = sorted(set(range(held)) - always, key=lambda token: (-worth[token], token))
    return always | set(others[: count - len(always)])


def outcome(q: Array, keys: Array, values: Array, chosen: set[int], sinks: Array | None, cap: float | None) -> Array:
    """Attention of the queries (group, dim) of a KV head over the chosen tokens."""
    own = sorted(chosen)
    scores = q @ keys[own].T / math.sqrt(q.shape[1])
    scores = scores if cap is None else np.tanh(scores / cap) * cap
    beside = np.zeros(len(q)) if sinks is None else np.exp(sinks)
    shares = np.exp(scores) / (np.exp(scores).sum(1) + beside)[:, None]
    return shares @ values[own]


def texts(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def made(length: int, heads: int) -> Tensor:
        return 2 * torch.randn(length + STEPS, heads, DIM, generator=generator)

    return [(made(length, HEADS), made(length, KV_HEADS), made(length, KV_HEADS)) for length in LENGTHS]


def tokens_at(rows: Sequence[tuple[Tensor, Tensor, Tensor]], step: int) -> Iterator[Tensor]:
    for which in range(3):
        if step:
            yield torch.stack([row[which][length + step - 1][None] for row, length in zip(rows, LENGTHS)])
        else:
            filled = [row[which][:length] for row, length in zip(rows, LENGTHS)]
            yield torch.nn.utils.rnn.pad_sequence(filled, batch_first=True, padding_value=3.0)


def cache_of(kv_codec: str, capacity: int, cap: float | None = None, policy: KVPolicy | None = None) -> KVCache:
    coding, shape = Coding(kv_codec, torch.float32, DIM), (len(LENGTHS), KV_HEADS, capacity)
    image = torch.full((2, *shape, coding.width), 255 if kv_codec != "plain" else torch.nan).to(coding.kept_dtype)
    region = torch.full((math.prod(shape) * 36,), 255, dtype=torch.uint8)
    index = KeyIndex.over(None if kv_codec == INDEX else region, policy or RECALLS, coding, shape)
    scores = None
    if policy is not None:
        scores = SlotScores.over(torch.zeros(math.prod(shape) * policy.score_bytes, dtype=torch.uint8), policy, shape)
    return KVCache(image, scores, coding, cap=cap, index=index)


def run(kv_codec: str = "plain", sinks: Tensor | None = None, cap: float | None = None) -> None:
    """Compares every decode step of a batch with what NumPy makes of the whole texts."""
    rows, occupancy = texts(1), RECALLS.occupancy(Batch(tuple(range(len(LENGTHS))), LENGTHS), STEPS)
    cache = cache_of(kv_codec, occupancy.capacity, cap)
    coding = Coding(kv_codec, torch.float32, DIM)
    for step in range(STEPS):
        now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"))
        given = NewTokens(*tokens_at(rows, step), sink_scores=sinks)
        out = cache.attend(now, given)
        for row, length in enumerate(LENGTHS if step else ()):
            held = length + step
            q, k, v = (one[:held] for one in rows[row])
            kept_k, kept_v = (coding.decode(coding.encode(one)).double().numpy() for one in (k, v))
            for head in range(KV_HEADS):
                group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
                own, own_sinks = q[-1, group].double().numpy(), None if sinks is None else sinks[group].double().numpy()
                index = in_four_bits(kept_k[:, head])
                count = min(held, max(FIRST + RECENT, ceil(SHARE * held)))
                chosen = chosen_by(own, index, count, own_sinks, cap)
                expected = outcome(own, kept_k[:, head], kept_v[:, head], chosen, own_sinks, cap)
                found = out[row, 0].view(HEADS, DIM)[group].double().numpy()
                np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kv_codec", ["plain", "group8", "group4"])
def test_steps_attend_what_their_queries_choose(kv_codec: str) -> None:
    run(kv_codec)


def test_sinks_and_caps_count_in_what_tokens_are_worth() -> None:
    run(sinks=torch.tensor([3.0, -2.0, 1.0, 5.0]), cap=2.0)


# -- latents ---------------------------------------------------------------------------------------------------------------


def run_latents(heads: int, kv_codec: str = "plain") -> None:
    """The last part of keys are their values, and one choice is that of all query heads."""
    coding, generator = Coding(kv_codec, torch.float32, DIM, values_in_keys=DIM - 4), torch.Generator().manual_seed(heads)
    occupancy = RECALLS.occupancy(Batch(tuple(range(len(LENGTHS))), LENGTHS), STEPS)
    shape = (len(LENGTHS), 1, occupancy.capacity)
    image = torch.full((1, *shape, coding.width), 255 if kv_codec != "plain" else torch.nan).to(coding.kept_dtype)
    region = None if kv_codec == INDEX else torch.full((math.prod(shape) * 36,), 255, dtype=torch.uint8)
    cache = KVCache(image, None, coding, index=KeyIndex.over(region, RECALLS, coding, shape))
    made = [[2 * torch.randn(length + STEPS, own, DIM, generator=generator) for own in (heads, 1, 1)] for length in LENGTHS]
    rows = [(q, k, k) for q, k, _ in made]
    for step in range(STEPS):
        now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"))
        out = cache.attend(now, NewTokens(*tokens_at(rows, step)))
        for row, length in enumerate(LENGTHS if step else ()):
            held = length + step
            q, kept = (one[:held].double().numpy() for one in (rows[row][0], coding.decode(coding.encode(rows[row][1][:, 0]))))
            chosen = chosen_by(q[-1], in_four_bits(kept), min(held, max(FIRST + RECENT, ceil(SHARE * held))))
            expected = outcome(q[-1], kept, kept[:, 4:], chosen, None, None)
            np.testing.assert_allclose(out[row, 0].view(heads, DIM)[:, 4:].numpy(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(("heads", "kv_codec"), [(4, "plain"), (20, "plain"), (4, "group8"), (20, "group4")])
def test_all_heads_of_latents_choose_together(heads: int, kv_codec: str) -> None:
    """Few heads attend chosen slots where they lie, and many take them side by side."""
    run_latents(heads, kv_codec)


def test_a_choice_by_one_of_the_heads_of_latents_is_found() -> None:
    made = chosen_slots.choose_slots_twin
    first = patch.object(key_index, "choose_slots", lambda q, *given: made(q[:, :, :1], *given))
    with first, pytest.raises(AssertionError):
        run_latents(4)


# -- where tokens are evicted, too -----------------------------------------------------------------------------------------


@dataclass
class Head:
    """What a KV head of a row holds under H2O, slot by slot, by its definition."""

    tokens: list[int]
    scores: dict[int, float]
    slots: int
    recent: int

    def step(self, newest: int, q: Array, k: Array, v: Array) -> Array:
        """One decode step with the keys and values of the whole text: the newest token's are at its place."""
        self.tokens.append(newest)
        held, keys, values = len(self.tokens), k[self.tokens], v[self.tokens]
        chosen = chosen_by(q, in_four_bits(keys), min(held, max(FIRST + RECENT, ceil(SHARE * held))), recent=1)
        own = sorted(chosen)
        exponents = np.exp(q @ keys[own].T / math.sqrt(q.shape[1]))
        self.scores[newest] = 0.0
        for slot, share in zip(own, (exponents / exponents.sum(1, keepdims=True)).sum(0)):
            self.scores[self.tokens[slot]] += share
        out = outcome(q, keys, values, chosen, None, None)
        if held > self.slots:
            free = [token for token in self.tokens if token <= newest - self.recent]
            lost = min(free, key=lambda token: (self.scores[token], token))
            self.tokens[self.tokens.index(lost)] = self.tokens.pop()
        return out


def run_evicting(kv_codec: str = "plain") -> None:
    """Compares every decode step under H2O with the definition: what a step does not attend gets nothing from it."""
    policy, rows = H2O(KVOptions(heavy=30, recent=8, kv_recall=SHARE)), texts(4)
    occupancy = policy.occupancy(Batch(tuple(range(len(LENGTHS))), LENGTHS), STEPS)
    cache, coding = cache_of(kv_codec, occupancy.capacity, policy=policy), Coding(kv_codec, torch.float32, DIM)
    heads: dict[tuple[int, int], Head] = {}
    for step in range(STEPS):
        now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"))
        out = cache.attend(now, NewTokens(*tokens_at(rows, step)))
        for (row, length), head in product(enumerate(LENGTHS), range(KV_HEADS)):
            if not step:
                heads[row, head] = read_head(cache, row, head, occupancy.counts(1)[row])
                continue
            q, k, v = rows[row]
            kept_k, kept_v = (coding.decode(coding.encode(one[:, head])).double().numpy() for one in (k, v))
            newest, group = length + step - 1, slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            expected = heads[row, head].step(newest, q[newest, group].double().numpy(), kept_k, kept_v)
            found = out[row, 0].view(HEADS, DIM)[group].double().numpy()
            np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-4)


def read_head(cache: KVCache, row: int, head: int, held: int) -> Head:
    """What a head holds behind the prompt, which is attended whole."""
    noted = cache._scores
    assert noted is not None and noted.scores is not None
    tokens, scores = noted.positions[row, head, :held].tolist(), noted.scores[row, head, :held].tolist()
    return Head(tokens, dict(zip(tokens, scores)), slots=38, recent=8)


@pytest.mark.parametrize("kv_codec", ["plain", "group8", "group4"])
def test_steps_choose_of_what_a_policy_keeps_and_evict_by_what_they_attended(kv_codec: str) -> None:
    run_evicting(kv_codec)


# -- faults that these tests find ------------------------------------------------------------------------------------------

Fault = Callable[..., object]


@contextmanager
def of_the_wrong_row() -> Iterator[None]:
    made = chosen_slots.choose_slots_twin

    def choose(*given: object) -> Tensor:
        return made(*given).roll(1, 0)  # type: ignore[arg-type]

    with patch.object(key_index, "choose_slots", choose):
        yield


@contextmanager
def of_the_wrong_head() -> Iterator[None]:
    made = chosen_slots.choose_slots_twin
    with patch.object(key_index, "choose_slots", lambda *given: made(*given).flip(1)):
        yield


@contextmanager
def index_one_token_behind() -> Iterator[None]:
    def behind(index: KeyIndex, now: KVStep, keys: Tensor, codes: Tensor) -> Tensor:
        return codes[: len(keys)]

    with patch.object(KeyIndex, "_with_newest", behind):
        yield


@contextmanager
def no_recent_tokens() -> Iterator[None]:
    with patch.object(key_index, "ALWAYS", Always(FIRST, 0)):
        yield


@contextmanager
def one_token_fewer() -> Iterator[None]:
    fewer = property(lambda now: (now._lines.attended - 1).clamp(min=1))
    with patch.object(KVStep, "attended", fewer):
        yield


@pytest.mark.parametrize(
    "fault", [of_the_wrong_row, of_the_wrong_head, index_one_token_behind, no_recent_tokens, one_token_fewer]
)
def test_a_wrong_choice_is_found(fault: Callable[[], object]) -> None:
    with fault(), pytest.raises(AssertionError):  # type: ignore[attr-defined]
        run()


@contextmanager
def index_of_what_was_evicted() -> Iterator[None]:
    with patch.object(KeyIndex, "follow", lambda *_: None):
        yield


@contextmanager
def scores_of_other_slots() -> Iterator[None]:
    with patch.object(key_index, "by_slot", lambda got, chosen, slots: chosen_slots.by_slot(got, chosen, slots).roll(1, -1)):
        yield


@contextmanager
def no_scores_at_all() -> Iterator[None]:
    with patch.object(key_index, "by_slot", lambda got, chosen, slots: torch.zeros(*got.shape[:2], slots)):
        yield


@contextmanager
def slots_taken_for_an_order() -> Iterator[None]:
    with patch.object(key_index, "OUT_OF_ORDER", key_index.ALWAYS):
        yield


@pytest.mark.parametrize(
    "fault", [index_of_what_was_evicted, scores_of_other_slots, no_scores_at_all, slots_taken_for_an_order, of_the_wrong_head]
)
def test_a_wrong_choice_of_what_is_kept_is_found(fault: Callable[[], object]) -> None:
    with fault(), pytest.raises(AssertionError):  # type: ignore[attr-defined]
        run_evicting()


# -- the choice itself -----------------------------------------------------------------------------------------------------


def test_of_equals_the_older_are_chosen_and_what_is_behind_is_0() -> None:
    q, keys = torch.ones(1, 1, 2, DIM), torch.ones(1, 1, 50, DIM)
    codes = torch.empty(1, 1, 50, 36, dtype=torch.uint8)
    encode(INDEX, keys, codes)
    found = choose_slots_twin(q, KVSlots(codes, INDEX), torch.tensor([40]), torch.tensor([23]), 30, Always(FIRST, RECENT))
    assert found[0, 0].tolist() == [*range(7), *range(24, 40), *[0] * 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_chosen_slots_is_that_of_the_slots_side_by_side(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, KV_HEADS, 3, DIM, generator=generator).to(dtype)
    k, v = (torch.randn(2, KV_HEADS, 40, DIM, generator=generator).to(dtype) for _ in range(2))
    slots = torch.stack([torch.randperm(40, generator=generator)[:9].sort().values for _ in range(2 * KV_HEADS)])
    slots, counts = slots.view(2, KV_HEADS, 9), torch.tensor([9, 5])
    mask = torch.where(torch.arange(9) < counts[:, None], 0.0, -torch.inf)[:, None, None]
    more = More(torch.randn(2, 1, 3 * KV_HEADS, generator=generator), None)
    taken = [KVSlots(one.gather(2, slots[..., None].expand(-1, -1, -1, DIM))) for one in (k, v)]
    expected, _ = decode_attention(q, *taken, counts, mask, more, None, 5.0)
    assert torch.equal(chosen_attention(q, KVSlots(k), KVSlots(v), slots, counts, more, None, 5.0)[0], expected)


def test_a_share_is_rounded_up_and_never_less_than_the_tokens_that_always_count() -> None:
    assert [attended(0.1, held) for held in (1, 20, 21, 200, 201, 290, 291, 300)] == [1, 20, 20, 20, 21, 29, 30, 30]
    assert [attended(0.07, held) for held in (100, 300, 1000)] == [20, 21, 70]
    assert (recall.FIRST, recall.RECENT, attended(1, 777)) == (FIRST, RECENT, 777)


def test_rows_that_move_up_take_their_index_along() -> None:
    rows = texts(2)
    batch = Batch(tuple(range(len(LENGTHS))), LENGTHS)
    occupancy = RECALLS.occupancy(batch, STEPS)
    cache = cache_of("plain", occupancy.capacity)
    cache.attend(KVStep.of(occupancy.at(0), occupancy.capacity, torch.device("cpu")), NewTokens(*tokens_at(rows, 0)))
    kept = [3, 1]
    assert cache._index is not None and cache._index.codes is not None
    before = cache._index.codes[:, :, :30].clone()
    cache.keep_rows(kept, max(LENGTHS))
    assert torch.equal(cache._index.codes[:2, :, :30], before[kept])
    part = cache.part(slice(1, 2))
    assert part._index is not None and part._index.codes is not None
    assert torch.equal(part._index.codes[0, :, :30], before[1])
    assert replace(part._index, codes=None).kind != part._index.kind


def test_ranges_of_the_index_are_noted_where_their_slots_are_and_moved_whole() -> None:
    stored, shape = Coding("plain", torch.float32, DIM), (2, KV_HEADS, 7)
    keys = torch.randn(*shape, DIM)
    whole, in_ranges = (KeyIndex.over(torch.zeros(1 << 16, dtype=torch.uint8), RECALLS, stored, shape) for _ in range(2))
    whole.note(keys, 0, 7)
    for first, end in ((3, 7), (0, 3)):
        in_ranges.note(keys, first, end)
    assert whole.codes is not None and in_ranges.codes is not None and torch.equal(in_ranges.codes, whole.codes)
    in_ranges.copy_row(0, 1, 7)
    assert torch.equal(in_ranges.codes[0], whole.codes[1]) and not torch.equal(whole.codes[0], whole.codes[1])
