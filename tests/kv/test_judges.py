"""What judges say that compare the tokens of a row, in texts of all lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import UNMEASURED, JudgeOfRows, KeyDifference, KeyNorms, Lag
from h2o_flexgen.kv.slots import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rotary
from h2o_flexgen.planning.plan import Plan
from tests.policies.oracle import Head

SINKS, DIM = 3, 6


def drawn(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one KV head."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, tokens, DIM, generator=generator), torch.randn(1, tokens, DIM, generator=generator)


@pytest.mark.parametrize("tokens", [1, 2, SINKS + 7, SINKS + 8, SINKS + 100, SINKS + 169, SINKS + 2559, SINKS + 2700])
@pytest.mark.parametrize(("policy", "judge"), [("keydiff", KeyDifference()), ("lagkv", Lag(SINKS))])
def test_worth_is_that_of_the_definition_however_long_the_text(policy: str, judge: JudgeOfRows, tokens: int) -> None:
    (keys, values), head = drawn(tokens), Head({"kv_policy": policy, "heavy": 9, "recent": 0, "sinks": SINKS}, tokens, 0, 0)
    head.kept = [*range(tokens)]
    head.keys, head.values = (dict(enumerate(each[0].double().numpy())) for each in (keys, values))
    known, found = np.array([*head._compared().values()]), judge.of_row(keys, values)[0].double().numpy()
    assert (np.isinf(known) == (found == UNMEASURED)).all()
    np.testing.assert_allclose(found[np.isfinite(known)], known[np.isfinite(known)], atol=1e-6, rtol=1e-4)


def test_channels_in_which_the_next_part_is_all_the_same_say_nothing() -> None:
    keys, values = drawn(8)
    keys[:, 4:] = 1.0
    expected = Lag(0).of_row(keys, values)
    keys[:, :4] = 5.0
    torch.testing.assert_close(Lag(0).of_row(keys, values), expected)
    assert expected[0, :4].isfinite().all() and expected[0, :4].unique().numel() == 4


@pytest.mark.parametrize("judge", [KeyDifference(), Lag(0)])
def test_keys_that_are_no_numbers_make_no_numbers(judge: JudgeOfRows) -> None:
    keys, values = drawn(8)
    keys[0, 1, 2] = torch.nan
    assert judge.of_row(keys, values)[0, 1].isnan()


@pytest.mark.parametrize("positions", ["true", "rolling"])
def test_a_key_is_as_long_in_a_step_as_in_a_prompt_where_rotation_stretches_it(positions: str) -> None:
    """YaRN rotates a part of each head, and makes it longer."""
    policy, rotary, tokens = Plan.create(kv_policy="knorm", heavy=9, positions=positions).policy, Rotary(torch.ones(2), 1.5), 5
    (keys, values), worth = drawn(tokens), []
    for prompt in (1, tokens):
        occupancy = policy.occupancy(Batch((0,), (prompt,)), 1 + tokens - prompt)
        noted = SlotScores.over(torch.zeros(8 * occupancy.capacity, dtype=torch.uint8), policy, (1, 1, occupancy.capacity))
        cache = KVCache(torch.zeros(2, 1, 1, occupancy.capacity, DIM), noted, judge=KeyNorms())
        for step in range(1 + tokens - prompt):
            new = slice(0, prompt) if step == 0 else slice(prompt + step - 1, prompt + step)
            k, v = (each[:, new].transpose(0, 1)[None] for each in (keys, values))
            now = KVStep.of(occupancy.at(step), occupancy.capacity, torch.device("cpu"))
            cache.attend(now, NewTokens(k.clone(), k.clone(), v.clone(), rotary))
        assert noted.worth is not None
        worth.append(noted.worth[0, 0, :tokens])
    torch.testing.assert_close(worth[0], worth[1])
