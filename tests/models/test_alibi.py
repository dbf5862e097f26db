"""ALiBi by values of keys: positions are exact in every type, slopes are those of transformers, and judges see heads alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.operations import rotate
from h2o_flexgen.kv import judges
from h2o_flexgen.kv.judges import Written
from h2o_flexgen.models import create_model
from h2o_flexgen.models.bloom import MOST_POSITIONS, ROOM, Alibi, Distances, slopes_of
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from tests.helpers.refusals import one_line
from tests.helpers.resident import resident_generate, weights_by_layer
from tests.helpers.tiny import checkpoint_tensors, tiny_config, tiny_hf_model

FAR = torch.tensor([[0, 1, 255, 256, 2047, 2049, 40_001, MOST_POSITIONS - 1]])
WIDTH = 72  # of hidden states: the root of the width of their 6 heads is no power of two, and slopes are rounded
DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = [[5, 17, 99, 3, 8, 61, 2, 40, 7], [4, 4, 90]]


def attended(dtype: str) -> tuple[Alibi, NewTokens]:
    """What a layer attends of random hidden states at far positions: queries, keys and values, rotated."""
    model = create_model(tiny_config("bloom-between", hidden_size=WIDTH), dtype)
    assert isinstance(model, Alibi)
    tensors = checkpoint_tensors(tiny_hf_model("bloom-between", seed=3, hidden_size=WIDTH))
    weights = next(own for own in weights_by_layer(model, tensors) if "self_attn.qkv_proj.weight" in own)
    hidden = torch.randn(1, FAR.shape[1], model.spec.width, generator=torch.Generator().manual_seed(1))
    return model, model.new_tokens(Distances(), hidden.to(getattr(torch, dtype)), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_has_its_position_exactly(dtype: str) -> None:
    _, tokens = attended(dtype)
    assert tokens.rotation is not None
    keys = rotate(tokens.k, tokens.rotation.turn(FAR, tokens.k.dtype))[0].double()  # (tokens, heads, values)
    high, low, again_high, again_low = keys[..., ROOM // 2 : ROOM].unbind(-1)
    assert torch.equal(high + low, FAR[0, :, None].double().expand(high.shape))
    assert torch.equal(high, again_high) and torch.equal(low, again_low)
    assert not tokens.v[..., :ROOM].any() and torch.equal(keys[..., ROOM:], tokens.k[0, ..., ROOM:].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_fall_by_slope_and_distance(dtype: str) -> None:
    """In 16 bits, too, where a slope alone would be off by a share of 2 ** -9."""
    model, tokens = attended(dtype)
    assert tokens.rotation is not None
    turn = tokens.rotation.turn(FAR, tokens.k.dtype)
    q, k = (rotate(each, turn)[0, ..., :ROOM].double() for each in (tokens.q, tokens.k))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(model.spec.head_dim)
    positions, slopes = FAR[0].double(), torch.tensor(slopes_of(model.spec.heads), dtype=torch.float64)
    fall = slopes[:, None, None] * positions
    torch.testing.assert_close(scores - scores[..., :1], fall.expand(scores.shape), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [*range(1, 20), 32, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    torch.testing.assert_close(torch.tensor(slopes_of(heads)), _get_alibi_slopes(heads, torch.device("cpu")), rtol=1e-5, atol=0)
    of_mpt: Tensor = build_mpt_alibi_tensor(heads, 2)
    torch.testing.assert_close(-of_mpt[:, 0, 0], torch.tensor(slopes_of(heads)), rtol=1e-5, atol=0)


def generated(kind: str, policy: Mapping[str, Any]) -> Tensor:
    model, tensors = create_model(tiny_config(kind), "float32"), checkpoint_tensors(tiny_hf_model(kind, seed=3))
    plan = Plan.create(**policy)
    return torch.stack(resident_generate(model, weights_by_layer(model, tensors), PROMPTS, 7, policy=plan.policy))


@pytest.mark.parametrize("policy", ["knorm", "keydiff", "lagkv"])
def test_judges_see_what_heads_have_and_not_where_keys_stand(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()

    def watched(kind: type[Any], name: str) -> None:
        own = getattr(kind, name)

        def looked(self: Any, *given: Any) -> Tensor:
            every = (x for one in given if isinstance(one, tuple) for x in (one[1], one[2]) if isinstance(x, Tensor))
            seen.update(x.shape[-1] for x in every)
            seen.update(x.shape[-1] for x in given if isinstance(x, Tensor))
            return own(self, *given)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, name, looked)

    watched(judges.KeyNorms, "of_new")
    watched(judges.KeyDifference, "of_row")
    watched(judges.Lag, "of_row")
    generated("bloom", {"kv_policy": policy, "heavy": 3, "recent": 2, "sinks": int(policy == "lagkv")})
    assert seen == {8} and Written._fields[1:3] == ("k", "v")


def test_rolling_positions_are_those_of_the_text_until_something_goes() -> None:
    keeping: dict[str, Any] = {"kv_policy": "streaming", "sinks": 1, "positions": "rolling"}
    plain = generated("mpt", {})
    torch.testing.assert_close(generated("mpt", {**keeping, "recent": 30}), plain, atol=2e-5, rtol=0)
    assert not torch.allclose(generated("mpt", {**keeping, "recent": 3}), plain, atol=1e-3)


def test_keys_that_say_where_they_stand_are_not_packed() -> None:
    spec = create_model(tiny_config("bloom"), "float32").spec
    assert "kv_codec 'group4' rounds keys" in one_line(lambda: spec.written_as(PLAIN, "group4", EXACT))
    assert spec.can_keep(PLAIN) and not spec.can_keep("group8")
    assert create_model(tiny_config("llama-gqa"), "float32").spec.can_keep("group8")


def test_texts_that_two_digits_do_not_count_are_refused() -> None:
    config = tiny_config("mpt", max_seq_len=MOST_POSITIONS + 1)
    assert str(MOST_POSITIONS) in one_line(lambda: create_model(config, "float32"))
