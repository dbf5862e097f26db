"""What becomes of a batch at the head of the model: to generate, tokens are picked from the logits of its last positions.

The engine brings the hidden states and a way to make logits of them; whoever is handed to `Engine.run` says of which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from h2o_flexgen.runtime.rows import BatchRows, OnLogits, OnToken
from h2o_flexgen.runtime.sampling import Sampler

LogitsOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> (positions, vocab), in the dtype of the model


class AtHead(Protocol):
    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        """hidden (rows, tokens, width). Drops the rows that are finished; how many tokens were generated."""


@dataclass(frozen=True)
class Picker:
    """Generates: a token for every row."""

    sampler: Sampler
    on_token: OnToken | None = None
    on_logits: OnLogits | None = None

    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        logits = logits_of(rows.last_hidden(hidden))
        return rows.advance(logits, self.sampler, step, self.on_token, self.on_logits)
