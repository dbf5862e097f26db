"""Log-probabilities of prompts, from the pass that reads them. There every token sees all tokens before it unchanged, whatever
a policy then keeps of them and in however few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.engine.many_positions import LogitsOf, side_by_side
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.sampling.output import StepLogprobs
from h2o_flexgen.sampling.ranking import logprobs_of


def read_prompts(rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, positions: int) -> None:
    """Gives rows that ask for them the log-probabilities of their prompts, which begin with their first token. `positions`: how
    many have their logits made at once."""
    asking = [(row, own[:-1]) for row, own in rows.prompts(hidden) if row.wants_prompt_logprobs]
    tokens = [token for row, _ in asking for token in row.prompt_ids[1:]]  # each is foretold by the one before it
    counts = [row.params.prompt_logprobs or 0 for row, own in asking for _ in range(len(own))]
    found: list[StepLogprobs] = []
    for piece in side_by_side([own for _, own in asking], positions):
        here = slice(len(found), len(found) + len(piece))
        found += logprobs_of(logits_of(piece), torch.tensor(tokens[here]), counts[here])
    start = 0
    for row, own in asking:
        row.prompt_logprobs = (None, *found[start : start + len(own)])
        start += len(own)
