"""What becomes of a batch at the head of the model: to generate, tokens are picked from the logits of its last positions.

The engine brings the hidden states and a way to make logits of them; whoever is handed to `Engine.run` says of which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from h2o_flexgen.engine.many_positions import LogitsOf
from h2o_flexgen.engine.prompt_logprobs import read_prompts
from h2o_flexgen.engine.rows import BatchRows, OnLogits, OnToken
from h2o_flexgen.sampling.sampler import Sampler


class AtHead(Protocol):
    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        """hidden (rows, tokens, width). Drops the rows that are finished; how many tokens were picked, or scored."""


@dataclass(frozen=True)
class Picker:
    """Generates: a token for every row that is not given one."""

    sampler: Sampler
    on_token: OnToken | None = None
    on_logits: OnLogits | None = None
    prompt_positions: int = 0  # of prompts, that logits are made of at once where their log-probabilities are asked for

    def __call__(self, rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, step: int) -> int:
        if step == 0 and self.prompt_positions:
            read_prompts(rows, hidden, logits_of, self.prompt_positions)
        logits = logits_of(rows.last_hidden(hidden))
        return rows.advance(logits, self.sampler, step, self.on_token, self.on_logits)
