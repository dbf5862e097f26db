"""The 4-bit codes of AWQ, GPTQ and compressed-tensors, brought into one order: of each output all its inputs, two to a byte,
the even one in the low half.

These are pure functions on tensors; none makes values. Words are int32 as the files have them, eight codes each, lowest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8
LOW = 0x0F
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word AWQ has the code of each of eight outputs
ONE_MORE = 0x11111111  # one in every code of a word


# -- codes -----------------------------------------------------------------------------------------------------------------


def awq_codes(words: Tensor) -> Tensor:
    """(inputs, outputs / 8) words along the outputs -> (outputs, inputs / 2) bytes. The number of inputs is even."""
    inputs, outputs = words.shape[0], words.shape[1] * PER_WORD
    pairs = _bytes(words).view(inputs // 2, 2, outputs // 2)  # two neighbouring inputs, which will share bytes
    even, odd = pairs[:, 0], pairs[:, 1]
    both = torch.stack(((even & LOW) | (odd << 4), (even >> 4) | (odd & (LOW << 4))), dim=-1)
    return _awq_order(both.view(inputs // 2, outputs)).T.contiguous()


def gptq_codes(words: Tensor) -> Tensor:
    """(inputs / 8, outputs) words along the inputs -> (outputs, inputs / 2) bytes."""
    return _bytes(words.T)


def in_order(codes: Tensor, order: Tensor) -> Tensor:
    """(outputs, inputs / 2) bytes with their columns in another order: column j becomes the one of input order[j]."""
    taken = halves(codes).index_select(1, order)
    return taken[:, 0::2] | (taken[:, 1::2] << 4)


# -- zero points -----------------------------------------------------------------------------------------------------------


def awq_zeros(words: Tensor) -> Tensor:
    """(groups, outputs / 8) words -> (outputs, groups), a byte each."""
    return _awq_order(halves(_bytes(words))).T.contiguous()


def gptq_zeros(words: Tensor, one_less: bool) -> Tensor:
    """(groups, outputs / 8) words -> (outputs, groups), a byte each. `one_less`: what is written was made by taking one from
    every code of whole words, borrows included, so one is added in the same way."""
    if one_less:
        words = words + ONE_MORE  # wraps as it did when it was written
    return halves(_bytes(words)).T.contiguous()


def compressed_zeros(words: Tensor, outputs: int) -> Tensor:
    """(outputs / 8, groups) words along the outputs, the last ones filled up -> (outputs, groups), a byte each."""
    eights = halves(_bytes(words)).view(*words.shape, PER_WORD)
    return eights.transpose(1, 2).reshape(-1, words.shape[1])[:outputs].contiguous()


# -- the order of inputs ---------------------------------------------------------------------------------------------------


def order_of(groups: Tensor, group: int) -> Tensor | None:
    """The inputs (inputs,) group by group, from the number of each one's group; None where they lie so already. Numbers that
    are all zero, or all -1, were never filled in, and say nothing."""
    count = len(groups)
    is_unfilled = int(groups[0]) in (0, -1) and bool((groups == groups[0]).all())
    if is_unfilled or torch.equal(groups.long(), torch.arange(count) // group):
        return None
    if bool((groups < 0).any()) or bool((groups >= count // group).any()):
        raise ValueError(f"names a group that is not one of {count // group}")
    if bool((torch.bincount(groups.long(), minlength=count // group) != group).any()):
        raise ValueError(f"does not put {group} inputs into every group")
    return torch.argsort(groups.long(), stable=True).to(torch.int32)


# -- bytes -----------------------------------------------------------------------------------------------------------------


def halves(data: Tensor) -> Tensor:
    """The two codes of each byte (..., bytes), the low one first -> (..., 2 * bytes)."""
    return torch.stack((data & LOW, data >> 4), dim=-1).flatten(-2)


def _bytes(words: Tensor) -> Tensor:
    """The bytes of words (..., count) -> (..., 4 * count). Of one column, the strides would not do."""
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)


def _awq_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, PER_WORD)[:, :, AWQ_PLACES].flatten(1)
