"""RowStates: the states of rows in a layer, as an architecture passes tokens through them. It names a state and says what
tokens bring; how the state is kept, and whether these tokens stay, is the engine's affair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from h2o_flexgen.kernels.operations import gated_delta, selective_scan, short_convolution

# what tokens bring, each (rows, tokens, ...); the state; how many tokens of each row are real; whether it stays as it was
Passing = Callable[[Sequence[Tensor], Tensor, "Tensor | None", bool], Tensor]


@dataclass(frozen=True)
class RowStates:
    by_name: Mapping[str, Tensor] = field(default_factory=dict)  # they are changed in place
    lengths: Tensor | None = None  # (rows,): tokens of each row that are no pads; None: all

    def convolve(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, is_activated: bool = True) -> Tensor:
        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            return short_convolution(brought[0], weight, bias, state, lengths, is_activated, is_trial)

        return self.passed(name, (x,), passing)

    def correct(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, is_tiled: bool = False
    ) -> Tensor:
        """What the gated delta rule makes of tokens. Each value of a key may have a decay."""

        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            q, k, v, decay, beta = brought
            return gated_delta(q, k, v, decay, beta, state, lengths, is_tiled, is_trial)

        return self.passed(name, (q, k, v, decay, beta), passing)

    def scan(
        self,
        name: str,
        x: Tensor,
        steps: Tensor,
        rates: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Tensor | None,
        are_logs: bool = False,
    ) -> Tensor:
        """What the scan of Mamba-2 makes of tokens."""

        def passing(brought: Sequence[Tensor], state: Tensor, lengths: Tensor | None, is_trial: bool) -> Tensor:
            x, steps, b, c = brought
            return selective_scan(x, steps, rates, b, c, skip, state, lengths, are_logs, is_trial)

        return self.passed(name, (x, steps, b, c), passing)

    def passed(self, name: str, brought: Sequence[Tensor], passing: Passing) -> Tensor:
        """What tokens make of a state, and find there."""
        return passing(brought, self.by_name[name], self.lengths, False)
