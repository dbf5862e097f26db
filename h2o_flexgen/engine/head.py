"""The head of the model: what happens to a batch after the last layer. Generation picks tokens from the last logits.

The engine gives the hidden states and a function that makes logits; the AtHead given to `Engine.run` chooses which logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from h2o_flexgen.engine.chunked_logits import LogitsOf
from h2o_flexgen.engine.prompt_logprobs import read_prompts
from h2o_flexgen.engine.rows import BatchRows, OnLogits, OnToken
from h2o_flexgen.sampling.sampler import Sampler


class AtHead(Protocol):
    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        """Uses hidden (rows, tokens, width), drops finished rows, and returns the number of tokens picked or scored."""


@dataclass(frozen=True)
class Picker:
    """Generates: picks a token for every row, except where the token is given."""

    sampler: Sampler
    on_token: OnToken | None = None
    on_logits: OnLogits | None = None
    prompt_positions: int = 0  # of which logits are made at once if a prompt's log-probabilities are asked for

    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        if self.prompt_positions and rows.prompt_tokens:
            read_prompts(rows, hidden, logits_of, self.prompt_positions)
        last = rows.last_hidden(hidden)
        growing = rows.growing()
        if not growing:
            rows.drop_finished(step)
            return 0
        logits = logits_of(last if len(growing) == len(last) else rows.at(growing, last))
        return rows.advance(logits, self.sampler, step, self.on_token, self.on_logits)
