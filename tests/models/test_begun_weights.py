"""The products that a layer begins with are made once where it is computed up to its attention, and then once more."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.models import tensor_ops
from h2o_flexgen.models.base import BegunWeights, MadeProducts

NAMES = ("q", "k", "v")


def made(weights: BegunWeights, x: Tensor, *names: str) -> list[Tensor]:
    return list(tensor_ops.linears(x, weights, *names))


def test_products_are_made_once_and_found_in_the_order_in_which_they_were_made() -> None:
    plain = {f"{name}.weight": torch.randn(3, 4) for name in NAMES}
    x, y, kept = torch.randn(2, 4), torch.randn(2, 4), MadeProducts()
    begun = BegunWeights(plain, kept, is_again=False)
    first = [*made(begun, x, *NAMES), *made(begun, x, "q"), *made(begun, y, "q")]
    for one in first:
        one.zero_()  # what comes behind products may write into them
    nothing = {name: torch.zeros(3, 4) for name in plain}
    again = BegunWeights(nothing, kept, is_again=True)
    found = [*made(again, x, *NAMES), *made(again, x, "q"), *made(again, y, "q")]
    expected = [*(x @ plain[f"{name}.weight"].T for name in NAMES), x @ plain["q.weight"].T, y @ plain["q.weight"].T]
    assert len(found) == 5 and all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected))
    assert not made(again, x, "q")[0].any()  # that one was not made before


def test_products_of_heads_are_found_again_as_well() -> None:
    x, matrix, kept = torch.randn(2, 1, 3, 4), torch.randn(3 * 5, 4), MadeProducts()
    first = tensor_ops.linear_of_heads(x, BegunWeights({"k.weight": matrix}, kept, is_again=False), "k")
    made_once = first.clone()
    first.zero_()
    again = BegunWeights({"k.weight": torch.zeros_like(matrix)}, kept, is_again=True)
    assert torch.equal(tensor_ops.linear_of_heads(x, again, "k"), made_once) and made_once.any()
    assert not tensor_ops.linear_of_heads(x, again, "k").any(), "that one was not made before"
