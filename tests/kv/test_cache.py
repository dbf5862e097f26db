"""KVCache: attention over slots equals attention over the whole text, row by row, whatever lies in slots that are empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_table import CPU, HALVES, TORCH, Processor
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.operations import rotate
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.policy import KVPolicy

HEADS, DIM, STEPS = 4, 8, 5
LENGTHS = (5, 1, 3)
Text = tuple[Tensor, Tensor, Tensor]  # q, k and v


def fresh_image(rows: int, kv_heads: int, slots: int, by_token: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """As bad as memory can be: NaN wherever nothing was written."""
    if by_token:
        return torch.full((slots, 2, rows, kv_heads, DIM), torch.nan, dtype=dtype).permute(1, 2, 3, 0, 4)
    return torch.full((2, rows, kv_heads, slots, DIM), torch.nan, dtype=dtype)


def texts(kv_heads: int, lengths: Sequence[int], seed: int = 0) -> list[Text]:
    """q, k and v of every row's whole text."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(length + STEPS, HEADS, DIM, generator=generator),
            torch.randn(length + STEPS, kv_heads, DIM, generator=generator),
            torch.randn(length + STEPS, kv_heads, DIM, generator=generator),
        )
        for length in lengths
    ]


def expected(q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
    """Attention of one token of one row over what stands before it and itself."""
    k, v = (part[: place + 1].repeat_interleave(HEADS // k.shape[1], dim=1) for part in (k, v))
    shares = torch.einsum("hd,thd->ht", q[place], k).mul(DIM**-0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", shares, v).flatten()


def pass_of(lengths: Sequence[int], step: int, capacity: int | None = None) -> KVStep:
    occupancy = Full().occupancy(Batch(tuple(range(len(lengths))), tuple(lengths)), STEPS)
    return KVStep.of(occupancy.at(step), capacity or occupancy.capacity, torch.device("cpu"))


def tokens_of(rows: Sequence[Text], lengths: Sequence[int], step: int) -> NewTokens:
    """q, k and v as a layer hands them over: (rows, tokens, heads, dim), pads with values of their own."""

    def part(which: int) -> Tensor:
        whole = [row[which] for row in rows]
        if step:
            return torch.stack([one[length + step - 1][None] for one, length in zip(whole, lengths)])
        return torch.stack(
            [
                torch.cat([one[:length], 9 * torch.ones_like(one[: max(lengths) - length])])
                for one, length in zip(whole, lengths)
            ]
        )

    return NewTokens(part(0), part(1), part(2))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (4, 4), (1, 1)])
def test_every_token_attends_to_its_own_text_and_nothing_else(kv_heads: int, by_token: bool, lengths: tuple[int, ...]) -> None:
    rows = texts(kv_heads, lengths)
    cache = KVCache(fresh_image(len(lengths), kv_heads, max(lengths) + STEPS - 1, by_token))
    for step in range(STEPS):
        out = cache.attend(pass_of(lengths, step), tokens_of(rows, lengths, step))
        for row, length in enumerate(lengths):
            places = range(length) if step == 0 else [length + step - 1]
            for at, place in enumerate(places):
                torch.testing.assert_close(out[row, at], expected(*rows[row], place), atol=1e-5, rtol=1e-5)


class Growing:
    """A rotation that is easy to follow: pairs become larger with their position."""

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        factor = (1 + positions[:, :, None, None]).to(dtype).expand(-1, -1, -1, DIM // 2)
        return RotationAngles(factor, torch.zeros_like(factor))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, self.turn(positions, x.dtype))


def test_queries_and_keys_are_rotated_to_their_positions_and_values_are_not() -> None:
    rows = texts(2, LENGTHS)
    factors = [1 + torch.arange(length + STEPS)[:, None, None] for length in LENGTHS]
    turned = [(q * factor, k * factor, v) for (q, k, v), factor in zip(rows, factors)]
    cache = KVCache(fresh_image(len(LENGTHS), 2, max(LENGTHS) + STEPS - 1, by_token=False))
    for step in range(STEPS):
        out = cache.attend(pass_of(LENGTHS, step), replace(tokens_of(rows, LENGTHS, step), rotation=Growing()))
        for row, length in enumerate(LENGTHS):
            place = length - 1 + step
            torch.testing.assert_close(out[row, 0 if step else length - 1], expected(*turned[row], place), atol=1e-5, rtol=1e-5)


class OfTwo(Growing):
    """The same of the first two values alone."""

    def turn(self, positions: Tensor, dtype: torch.dtype) -> RotationAngles:
        return RotationAngles(*(each[..., :1] for each in super().turn(positions, dtype)))


KEPT = Full(), Plan.create(kv_policy="h2o", heavy=1, recent=2).policy
ROLLING = Plan.create(kv_policy="h2o", heavy=1, recent=2, positions="rolling").policy


@pytest.mark.parametrize("policy", [*KEPT, ROLLING])
def test_keys_that_have_their_values_in_them_are_stored_once_and_attended_as_two(policy: KVPolicy) -> None:
    rows, batch = texts(1, LENGTHS), Batch(tuple(range(len(LENGTHS))), LENGTHS)
    occupancy, apart = policy.occupancy(batch, STEPS), DIM - 2
    caches = []
    for values_in_keys in (0, apart):
        coding = Coding(PLAIN, torch.float32, DIM, values_in_keys)
        shape = (len(LENGTHS), 1, occupancy.capacity)
        noted = torch.zeros(math.prod(shape) * policy.score_bytes, dtype=torch.uint8)
        scores = SlotScores.over(noted, policy, shape) if policy.score_bytes else None
        caches.append(KVCache(torch.full((coding.sets, *shape, DIM), torch.nan), scores, coding))
    for step in range(STEPS):
        now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"))
        given = tokens_of(rows, LENGTHS, step)
        both, once = (cache.attend(now, replace(given, v=given.k, rotation=OfTwo())) for cache in caches)
        assert torch.equal(both.unflatten(2, (HEADS, DIM))[..., -apart:], once.unflatten(2, (HEADS, DIM))[..., -apart:])
    both, once = (cache.image for cache in caches)
    assert len(once) == 1 and torch.equal(once[0].nan_to_num(), both[0].nan_to_num())


@pytest.mark.parametrize("by_token", [False, True])
def test_rows_that_move_up_take_their_text_with_them(by_token: bool) -> None:
    """Rows 0 and 2 of four have ended; the last row takes the place of the first."""
    lengths = (5, 1, 3, 4)
    rows = texts(2, lengths)
    cache = KVCache(fresh_image(4, 2, max(lengths) + STEPS - 1, by_token))
    for step in range(2):
        cache.attend(pass_of(lengths, step), tokens_of(rows, lengths, step))
    alive = [3, 1]
    cache.keep_rows(alive, slots=6)
    lived, left = [rows[row] for row in alive], [lengths[row] for row in alive]
    for step in range(2, STEPS):
        out = cache.attend(pass_of(left, step, max(lengths) + STEPS - 1), tokens_of(lived, left, step))
        for row, length in enumerate(left):
            torch.testing.assert_close(out[row, 0], expected(*lived[row], length + step - 1), atol=1e-5, rtol=1e-5)


def test_rows_behind_those_that_are_alive_are_left_alone() -> None:
    image = fresh_image(3, 2, 6, by_token=False)
    image[:, 2] = 7
    cache = KVCache(image)
    cache.attend(pass_of((2, 2), 0), tokens_of(texts(2, (2, 2)), (2, 2), 0))
    assert (image[:, 2] == 7).all() and image[:, :2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_16_bits_stay_near_what_fp32_says(dtype: torch.dtype) -> None:
    rows = texts(2, LENGTHS)
    rows16 = [(q.to(dtype), k.to(dtype), v.to(dtype)) for q, k, v in rows]
    cache = KVCache(fresh_image(len(LENGTHS), 2, max(LENGTHS) + STEPS - 1, by_token=False, dtype=dtype))
    for step in range(STEPS):
        out = cache.attend(pass_of(LENGTHS, step), tokens_of(rows16, LENGTHS, step))
        assert out.dtype == dtype
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(out[row, 0].float(), expected(*rows[row], length + STEPS - 2), atol=0.05, rtol=0.05)


def test_the_mask_opens_each_row_up_to_its_newest_slot() -> None:
    mask = pass_of((3, 1), 1, 5).mask
    assert mask.shape == (2, 1, 1, 5)
    assert mask.flatten(1).tolist() == [[0, 0, 0, 0, -torch.inf], [0, 0, -torch.inf, -torch.inf, -torch.inf]]


@pytest.mark.parametrize("build", [None, TORCH])
@pytest.mark.parametrize("by_token", [False, True])
def test_several_tokens_of_a_row_see_each_other_as_in_steps_of_their_own(
    by_token: bool, build: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build is not None:
        monkeypatch.setattr(operations, "processor", lambda _: Processor(CPU, build, HALVES))
    rows, capacity, row = texts(2, LENGTHS), max(LENGTHS) + STEPS - 1, 1
    one_by_one, at_once = (KVCache(fresh_image(len(LENGTHS), 2, capacity, by_token)) for _ in range(2))
    for cache in (one_by_one, at_once):
        cache.attend(pass_of(LENGTHS, 0), tokens_of(rows, LENGTHS, 0))
    own, steps = Full().occupancy(Batch((0,), LENGTHS[row : row + 1]), STEPS), range(1, STEPS)
    given = [tokens_of(rows[row : row + 1], LENGTHS[row : row + 1], step) for step in steps]
    wanted = [
        one_by_one.part(slice(row, row + 1)).attend(KVStep.of(own.at(step), capacity, torch.device("cpu")), each)
        for step, each in zip(steps, given)
    ]
    now = KVStep.of(own.joint_step([(own, step) for step in steps]), capacity, torch.device("cpu"))
    together = NewTokens(*(torch.cat([getattr(each, name) for each in given]) for name in ("q", "k", "v")))
    found = at_once.repeated(row, len(steps)).attend(now, together)
    assert torch.equal(found, torch.cat(wanted))
    assert torch.equal(at_once.image.nan_to_num(7.0), one_by_one.image.nan_to_num(7.0))
