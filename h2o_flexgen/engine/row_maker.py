"""Requests to a model as rows: prompts with their tokens, and what to generate after each of them. What the model cannot do is
refused here, before anything is planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from h2o_flexgen.core.allowed_values import check_tokens
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.job import Request, RequestSize, prompt_of
from h2o_flexgen.engine.row_adapters import RowAdapters
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.positions import check_positions, longest_text, most_tokens
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.sampling.params import SamplingParams, one_params
from h2o_flexgen.sampling.pooling import ClassifyParams, PoolingParams
from h2o_flexgen.text.prompts import Prompt, token_ids
from h2o_flexgen.text.tokenizer import Tokenizer

Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"  # one for all prompts, or one for each
Forced: TypeAlias = "Sequence[Sequence[int]] | None"  # the first tokens of each prompt's rows, given instead of picked


@dataclass(frozen=True)
class RowMaker:
    spec: ModelSpec
    plan: Plan
    tokenizer: Tokenizer
    adapters: RowAdapters = field(default_factory=RowAdapters)  # that rows may ask for

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        return self.plan.levels(self.spec)

    def rows(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        streamed: bool = False,
        forced: Forced = None,
        numbers: Sequence[int] | None = None,
    ) -> list[RowState]:
        """The rows of all prompts: one for each completion. `streamed`: their texts are decoded token by token. `numbers`:
        those of the prompts in the input, which seed random draws (default: their places)."""
        each = for_each(params, len(prompts))
        forced = [()] * len(prompts) if forced is None else forced
        if len(forced) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with forced tokens for {len(forced)}; give some, or none, for each")
        rows: list[RowState] = []
        indices = range(len(prompts)) if numbers is None else numbers
        for index, prompt, asked, forced_ids in zip(indices, prompts, each, forced, strict=True):
            rows += self._rows(index, prompt, asked, streamed, forced_ids, len(rows))
        return rows

    def rows_of(self, index: int, request: Request, streamed: bool, first: int) -> list[RowState]:
        """The rows of one request; `index`: its number; `first`: the place of its first row among all rows."""
        return self._rows(index, prompt_of(request), one_params(request.params), streamed, (), first)

    @property
    def longest_prompt(self) -> int:
        return longest_text(self.spec, self.plan.policy)

    def size(self, index: int, request: Request) -> RequestSize:
        """What a request may need."""
        prompt = prompt_of(request)
        self._check_prompt(index, prompt.ids)
        params = self._checked(one_params(request.params), index, len(prompt.ids), ())
        assert params.max_tokens is not None
        for level in self._levels:
            level.policy.alone(SeatNeed(len(prompt.ids), params.max_tokens))  # refuses a budget without slots
        return RequestSize(
            len(prompt.ids), params.max_tokens, params.n, params.asks_of_prompt, self.adapters.number(params.lora_name)
        )

    def _rows(
        self, index: int, prompt: Prompt, asked: SamplingParams, streamed: bool, forced: Sequence[int], first: int
    ) -> list[RowState]:
        given = token_ids(f"what row {index} is forced to take", forced)
        self._check_prompt(index, prompt.ids)
        own = self._checked(asked, index, len(prompt.ids), given)
        told, adapter = (self.tokenizer, prompt.text, streamed, given), self.adapters.number(own.lora_name)
        rows = [RowState(index, prompt.ids, own, *told, number, first + number, adapter) for number in range(own.n)]
        rows[0].truncated_tokens = prompt.left_out
        return rows

    def _checked(self, params: SamplingParams, index: int, prompt_len: int, forced: Sequence[int]) -> SamplingParams:
        """The parameters with the number of tokens that may come. What this model cannot do after this prompt is refused."""
        if isinstance(params, ClassifyParams):
            params = params.under(self.spec.labels, self.spec.name)
        elif self.spec.labels is not None and not isinstance(params, PoolingParams):
            raise ValueError(f"{self.spec.name} scores texts by labels and picks no tokens; use classify, rank or embed")
        params.check_vocabulary(self.spec.vocab, self.spec.name)
        if params.held_to is not None:
            self.tokenizer.grammars.check(params.held_to)
        wanted = params.max_tokens
        most = most_tokens(self.spec, self.plan, index, prompt_len) if wanted is None else wanted
        self._check_forced(index, forced, most)
        check_positions(self.spec, self.plan, index, prompt_len, most)
        if params.min_tokens > most:
            raise ValueError(f"min_tokens is {params.min_tokens}, but after prompt {index} there is room for {most} tokens")
        return params.up_to(most)

    def _check_prompt(self, index: int, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError(f"prompt {index} is empty; every prompt needs at least one token")
        self._check_tokens(f"prompt {index} has", ids)

    def _check_forced(self, index: int, forced: Sequence[int], max_tokens: int) -> None:
        if len(forced) > max_tokens:
            raise ValueError(
                f"row {index} has {len(forced)} forced tokens, but max_tokens is {max_tokens}, and they count in it"
            )
        self._check_tokens(f"row {index} is forced to take", forced)

    def _check_tokens(self, subject: str, ids: Sequence[int]) -> None:
        check_tokens(subject, ids, self.spec.vocab, self.spec.name)


def for_each(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, str, bytes, Mapping)) or not isinstance(params, Iterable):
        return [one_params(params)] * count
    each = [one_params(one) for one in params]
    if len(each) != count:
        raise ValueError(f"{count} prompts came with {len(each)} sampling params; give one for all or one for each")
    return each


def workload_of(rows: Sequence[RowState]) -> Workload:
    return Workload(tuple(row.prompt_len for row in rows), max((1, *(row.max_tokens for row in rows))))
