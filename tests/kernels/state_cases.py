"""Tokens that pass states of rows: by the gated delta rule, by the scan of Mamba-2, and by short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.states import gated_delta_twin, selective_scan_twin, short_convolution_twin

CPU = torch.device("cpu")
LAST_BITS = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}


Passed = Callable[[Sequence[Tensor], Tensor, "Tensor | None", bool], Tensor]  # tokens, state, lengths, whether it is a trial


@dataclass(frozen=True)
class Case:
    """One call, as `function(tokens, state, lengths)`."""

    function: Passed
    twin: Passed
    tokens: Sequence[Tensor]  # (rows, tokens, ...) each
    state: Tensor
    of_heads: Sequence[Tensor] = ()  # rates, and skips where there are; weights of a convolution, and biases

    def again(self) -> Case:
        """The same with a state of its own."""
        return replace(self, state=self.state.clone())

    def part(self, first: int, behind: int) -> Case:
        """Some of the tokens, which pass the same state."""
        return replace(self, tokens=[each[:, first:behind] for each in self.tokens])

    def row(self, row: int, tokens: int) -> Case:
        """The first tokens of a row, alone, with a state of its own."""
        given = [each[row : row + 1, :tokens].contiguous() for each in self.tokens]
        return replace(self, tokens=given, state=self.state[row : row + 1].clone())

    def filled_up(self, lengths: Sequence[int], value: float) -> Case:
        """The same with another value behind each row's last token, and a state of its own."""
        there = (torch.arange(self.tokens[0].shape[1]) < torch.tensor(lengths)[:, None]).to(self.state.device)
        filled = [torch.where(there.view(*there.shape, *[1] * (each.dim() - 2)), each, value) for each in self.tokens]
        return replace(self.again(), tokens=filled)

    @property
    def in_bf16(self) -> Case:
        """The same with a state of its own that is kept in bfloat16."""
        return replace(self, state=self.state.bfloat16())

    def __call__(self, lengths: Tensor | None = None, is_trial: bool = False) -> Tensor:
        return self.function(self.tokens, self.state, lengths, is_trial)

    def by_twin(self, lengths: Tensor | None = None, is_trial: bool = False) -> Tensor:
        return self.twin(self.tokens, self.state, lengths, is_trial)


def delta_case(
    rows: int,
    tokens: int,
    heads: tuple[int, int] = (2, 4),
    widths: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    is_tiled: bool = False,
    device: torch.device = CPU,
    by_value: bool = False,
) -> Case:
    """`heads`: of keys and of values. Keys, queries and values are parts of what a convolution makes. `by_value`: each value of
    a key fades by itself."""
    draw = torch.Generator().manual_seed(rows * 1000 + tokens)
    parts = [heads[0] * widths[0]] * 2 + [heads[1] * widths[1]]
    together = torch.randn(rows, tokens, sum(parts), generator=draw).to(device, dtype)
    q, k, v = together.split(parts, dim=-1)
    of_heads = [q.unflatten(-1, (heads[0], -1)), k.unflatten(-1, (heads[0], -1)), v.unflatten(-1, (heads[1], -1))]
    decay = -2 * torch.rand(rows, tokens, heads[1], *([widths[0]] if by_value else []), generator=draw).to(device) ** 3
    beta = torch.rand(rows, tokens, heads[1], generator=draw).to(device, dtype)
    state = torch.randn(rows, heads[1], *widths, generator=draw).to(device)

    def by(function: Callable[..., Tensor]) -> Passed:
        return lambda tokens, state, lengths, is_trial: function(*tokens, state, lengths, is_tiled, is_trial)

    return Case(by(operations.gated_delta), by(gated_delta_twin), [*of_heads, decay, beta], state)


def value_case(rows: int, tokens: int, *sizes: tuple[int, int], **others: Any) -> Case:
    """The delta rule by which each value of a key fades by itself."""
    return delta_case(rows, tokens, *sizes, **others, by_value=True)


def scan_case(
    rows: int,
    tokens: int,
    heads: tuple[int, int] = (2, 4),
    widths: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
    are_logs: bool = False,
    skips: bool = True,
    device: torch.device = CPU,
) -> Case:
    """`heads`: groups, and heads; `widths`: of a state, and of a head."""
    draw = torch.Generator().manual_seed(rows * 1000 + tokens)
    x = torch.randn(rows, tokens, heads[1], widths[1], generator=draw).to(device, dtype)
    b, c = (torch.randn(rows, tokens, heads[0], widths[0], generator=draw).to(device, dtype) for _ in range(2))
    steps = torch.rand(rows, tokens, heads[1], generator=draw).to(device)
    rates = 3 * torch.rand(heads[1], generator=draw).to(device)
    given = rates.log() if are_logs else -rates
    skip = torch.randn(heads[1], generator=draw).to(device, dtype) if skips else None
    state = torch.randn(rows, heads[1], *widths, generator=draw).to(device)

    def by(function: Callable[..., Tensor]) -> Passed:
        def passed(tokens: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            x, steps, b, c = tokens
            return function(x, steps, given, b, c, skip, state, lengths, are_logs, is_trial)

        return passed

    of_heads = [-rates] if skip is None else [-rates, skip]
    return Case(by(operations.selective_scan), by(selective_scan_twin), [x, steps, b, c], state, of_heads)


def convolution_case(
    rows: int,
    tokens: int,
    channels: int = 36,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
    is_activated: bool = True,
    device: torch.device = CPU,
) -> Case:
    draw = torch.Generator().manual_seed(rows * 1000 + tokens)
    x = torch.randn(rows, tokens, 2 * channels, generator=draw).to(device, dtype)[..., channels:]
    weight = torch.randn(channels, 1, width, generator=draw).to(device, dtype)
    bias = torch.randn(channels, generator=draw).to(device, dtype) if has_bias else None
    state = torch.randn(rows, width - 1, channels, generator=draw).to(device)

    def by(function: Callable[..., Tensor]) -> Passed:
        return lambda tokens, state, lengths, is_trial: function(
            tokens[0], weight, bias, state, lengths, is_activated, is_trial
        )

    weights = [weight] if bias is None else [weight, bias]
    return Case(by(operations.short_convolution), by(short_convolution_twin), [x], state, weights)


DELTA_CASES: Sequence[Callable[..., Case]] = (delta_case, value_case)
CASES: Sequence[Callable[..., Case]] = (*DELTA_CASES, scan_case, convolution_case)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """They differ by no more than last bits, of the largest value."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=LAST_BITS[dtype] * max(1.0, largest))
