"""The rows of one batch while they are generated: which are alive, what is computed next, and which replace finished ones.

A finished row leaves at once: from the next layer on it is no longer computed. The caches follow when they are next opened:
living rows from behind fill the gaps, so that the living always stand in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.sampler import Sampler

# a row's number is its place among all rows of the input: that of its prompt, if every prompt has one completion
OnToken = Callable[[int, int, str | None], object]  # row, token, new text if the row's text is followed
OnLogits = Callable[[int, int, Tensor], None]  # row, number of the token, a copy of its logits (vocab,)


@dataclass(frozen=True)
class Part:
    """Rows that a layer computes at once: all in a decode step, a few at a time for long prompts."""

    rows: slice
    now: KVStep
    tokens: Tensor  # (rows, tokens)


class BatchRows:
    def __init__(self, batch: Batch, rows: Sequence[RowState], plan: Plan, gen_len: int, device: torch.device) -> None:
        self.batch = batch  # the living rows
        self.generation = 0  # how often the living rows have moved up
        self.places_before: list[int] = list(range(batch.size))  # for each place, the one before the rows last moved up
        self.last_step: int | None = None  # known once all rows are finished
        self._rows = list(rows)
        self._policy = plan.policy
        self._gen_len = gen_len
        self._capacity = plan.policy.occupancy(batch, gen_len).capacity
        self._device = device
        self.parts = self._prompts(plan.prefill_tokens)

    @property
    def is_done(self) -> bool:
        return not self._rows

    @property
    def alive(self) -> Sequence[RowState]:
        return self._rows

    def _prompts(self, tokens: int) -> tuple[Part, ...]:
        parts, start = [], 0
        for batch in self.batch.parts(tokens):
            rows = slice(start, start + batch.size)
            parts.append(Part(rows, self._kv_step(batch, 0), self._padded(batch, self._rows[rows])))
            start += batch.size
        return tuple(parts)

    def _padded(self, batch: Batch, rows: Sequence[RowState]) -> Tensor:
        """Tokens (rows, tokens), padded on the right with 0. Pads are computed, but nothing attends to them."""
        tokens = torch.zeros(batch.size, batch.prompt_len, dtype=torch.long)
        for place, (row, length) in enumerate(zip(rows, batch.lengths)):
            tokens[place, :length] = torch.tensor(row.prompt_ids[-length:])  # earlier ones are in the cache
        return tokens.to(self._device)

    def _kv_step(self, batch: Batch, step: int) -> KVStep:
        return KVStep.of(self._policy.occupancy(batch, self._gen_len), step, self._capacity, self._device)

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden states of each row's last token, for logits: (rows, tokens, width) -> (rows, width)."""
        if hidden.shape[1] == 1:
            return hidden[:, 0]
        last = torch.tensor(self.batch.lengths, device=hidden.device) - 1
        return hidden[torch.arange(len(self._rows), device=hidden.device), last]

    def advance(
        self,
        logits: Tensor,
        sampler: Sampler,
        step: int,
        on_token: OnToken | None = None,
        on_logits: OnLogits | None = None,
    ) -> int:
        """Picks a token for every row that is not given one, drops the rows that it finishes, and returns the number of tokens.
        A row that starts anew is given the tokens it had, and listeners do not hear of them again."""
        rows = self._rows
        params, indices, histories = zip(*((row.params, row.index, row.history) for row in rows))
        picked = sampler.sample(logits, params, indices, step, histories, [row.given for row in rows])
        for place, (row, token, logprobs) in enumerate(zip(rows, picked.tokens.tolist(), picked.logprobs)):
            known = row.known
            if known is None and on_logits is not None:
                on_logits(row.row, row.num_generated, logits[place].float().cpu())
            text = row.push(token, logprobs if known is None else known[1])
            if known is None and on_token is not None:
                on_token(row.row, token, text)
        self.drop_finished(step)
        if self._rows:
            tokens = picked.tokens[self.places_before].unsqueeze(1).to(self._device)
            self.parts = (Part(slice(None), self._kv_step(self.batch, step + 1), tokens),)
        return len(rows)

    def drop_finished(self, step: int) -> None:
        self._move_up([place for place, row in enumerate(self._rows) if not row.finished])
        if not self._rows:
            self.last_step = step

    def _move_up(self, alive: list[int]) -> None:
        """Fills the gaps among the first rows with living ones from behind."""
        count = len(alive)
        from_behind = [place for place in reversed(alive) if place >= count]
        in_front = set(alive)
        kept = [place if place in in_front else from_behind.pop(0) for place in range(count)]
        if count < len(self._rows):
            self.generation += 1
            self._rows = [self._rows[place] for place in kept]
            self.batch = self.batch.only(kept)
        self.places_before = kept
