"""RowState: one row of a generation: its prompt, the tokens generated so far, whether and why it is finished."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from h2o_flexgen.core.prefix_groups import under
from h2o_flexgen.sampling.completion import Completion, Output, StepLogprobs
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.pooling import Classification, ClassifyParams, Embedding, PoolingParams
from h2o_flexgen.sampling.sampler import History
from h2o_flexgen.sampling.structured_outputs import Constraint, ConstraintBroken
from h2o_flexgen.text.row_text import RowText, TextDecoder, WithSpecials, decode_new
from h2o_flexgen.text.tokenizer import Tokenizer


class RowState:
    """One sequence of a generation. Its text is decoded token by token only if it has stop strings or is streamed."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: str | None = None,
        streamed: bool = False,
        forced: Sequence[int] = (),
        number: int = 0,
        row: int | None = None,
        adapter: int = 0,
    ) -> None:
        assert params.max_tokens is not None, "the caller replaces None by the positions left"
        if params.stop_strings and not tokenizer.reads_texts:
            raise ValueError("stop is a text, but this model has no tokenizer; give stop_token_ids, or choose a tokenizer")
        self.index = index  # index of the prompt in the input
        self.number = number  # number of the row among the completions of its prompt
        self.row = index if row is None else row  # index among all rows of the workload
        self.params = params
        self.adapter = adapter  # its number; 0: none
        self.max_tokens = params.max_tokens
        self.prompt = prompt
        self.seen = list(prompt_ids)  # prompt and generated ids
        self.prompt_len = len(self.seen)
        self.logprobs: list[StepLogprobs] = []
        self.shared_tokens = 0  # of its prompt, already computed for requests that had arrived before
        self.prompt_logprobs: tuple[StepLogprobs | None, ...] | None = None  # kept when the row starts again
        self.embedding: array[float] | None = None
        self.truncated_tokens = 0  # of a longer prompt, that are not read
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._ends_with_token = False  # which belongs to no text
        self._streamed = streamed
        self.forced = tuple(forced)  # its first tokens, given instead of picked; they never end it
        self.ahead = 0  # its newest tokens that were taken without asking the model, and are not computed yet but for the first
        self._known: list[tuple[int, StepLogprobs | None]] = []  # tokens generated before the row started again
        self._tokenizer = tokenizer
        self._decoder: TextDecoder = tokenizer if params.skip_special_tokens else WithSpecials(tokenizer)
        self._stop_ids = frozenset(params.stop_ids)
        self._ends = self._stop_ids | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self.history = History(self.seen, self.prompt_len, self._stop_ids | tokenizer.eos_ids, number)
        self._refuse_if_nothing_is_left()
        self.constraint = self._new_constraint()
        self._text = self._new_text()

    def _refuse_if_nothing_is_left(self) -> None:
        allowed = self.params.allowed_token_ids
        if self.params.min_tokens and allowed is not None and frozenset(self.history.ends).issuperset(allowed):
            raise ValueError(
                f"min_tokens of prompt {self.index} forbids to end, but every one of its allowed_token_ids would; allow others"
            )

    def _new_constraint(self) -> Constraint | None:
        """What the text is held to."""
        if self.params.held_to is None:
            return None
        made = self._tokenizer.grammars.constraint(self.params.held_to, self._ends)
        try:
            for token in self.forced:
                made.take(token)
        except ConstraintBroken as error:
            raise ValueError(f"row {self.row} is forced to take tokens that structured_outputs forbids: {error}") from error
        made.restart()
        return made

    def _new_text(self) -> RowText | None:
        needs_text = self._streamed or bool(self.params.stop_strings)
        if not needs_text or not self._tokenizer.reads_texts:
            return None
        params, is_whole = self.params, None if self.constraint is None else self.constraint.holds
        return RowText(self._decoder, self.prompt_ids, params.stop_strings, params.include_stop_str_in_output, is_whole)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_ids(self) -> list[int]:
        return self.seen[: self.prompt_len]

    @property
    def compared_ids(self) -> Sequence[int]:
        """Its prompt as it is compared with those of others."""
        return under(self.adapter, self.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.seen[self.prompt_len :]

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len

    def push(self, token: int, logprobs: StepLogprobs | None = None) -> str | None:
        """Takes a generated token. Returns the new piece of text if the row's text is decoded as it comes, else None. A text
        that is held to something ends where it is whole, and only there; otherwise it reaches the most tokens."""
        assert not self.finished, f"row {self.index} is finished"
        self.seen.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        count = self.num_generated
        is_forced = count <= len(self.forced)
        if token in self._ends and not is_forced and (self.constraint is None or self.constraint.is_whole):
            self.stop_reason = token if token in self._stop_ids else None
            self._ends_with_token = True
            return self._finish("stop", self._piece_of_end(token))
        if self.constraint is not None:
            self.constraint.take(token)
        piece = None
        if self._text is not None:
            piece = self._text.add(token, may_stop=not is_forced and count > self.params.min_tokens)
            if self._text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
                return piece
        if self.constraint is not None and self.constraint.is_over:
            return self._finish("stop", piece)
        return self._finish("length", piece) if count == self.max_tokens else piece

    def _piece_of_end(self, token: int) -> str:
        shown = self._text if self.params.include_stop_str_in_output else None
        return "" if shown is None else shown.add(token, may_stop=False)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Only the first completion computes them, for all completions of its prompt."""
        return self.params.prompt_logprobs is not None and self.number == 0 and self.prompt_logprobs is None

    @property
    def pooling(self) -> PoolingParams | None:
        """How its prompt is embedded; None if it is not."""
        return self.params if isinstance(self.params, PoolingParams) else None

    @property
    def known(self) -> tuple[int, StepLogprobs | None] | None:
        """The next token, if the row had generated it before it started again."""
        return self._known[self.num_generated] if self._known and self.num_generated < len(self._known) else None

    @property
    def given(self) -> int | None:
        """The next token, if it is known and not to be picked."""
        if not (self._known or self.forced):
            return None
        if self.known is not None:
            return self.known[0]
        return self.forced[self.num_generated] if self.num_generated < len(self.forced) else None

    @property
    def only_token(self) -> int | None:
        """The next token, where the model need not be asked: no other may come, and none of its numbers are to be told."""
        if self.constraint is None or self.finished or self.params.logprobs is not None:
            return None
        if self.params.may_forbid_any:
            return None  # perhaps it may not come either, which is an error
        token = self.constraint.only_token
        if self.given not in (None, token):
            return None  # the same text may be written with other tokens than those that a grammar makes of it
        return None if token in self.history.ends else token

    def start_anew(self) -> None:
        """Starts again at the prompt, when the row's cache is lost. The tokens generated so far are replayed, not picked again:
        beside other rows the last bits of logits differ, and could give other tokens."""
        assert not self.finished, f"row {self.index} is finished"
        silent: list[StepLogprobs | None] = [None] * self.num_generated
        self._known[: self.num_generated] = zip(self.token_ids, self.logprobs or silent, strict=True)
        del self.seen[self.prompt_len :]
        self.ahead = 0
        self.logprobs = []
        if self.constraint is not None:
            self.constraint.restart()
        self._text = self._new_text()

    def stop(self, reason: str) -> str | None:
        """Ends the row here. Returns the text held back so far if its text is decoded as it comes."""
        return None if self.finished else self._finish(reason)

    def output(self) -> Output:
        assert self.finish_reason is not None, f"row {self.row} is not finished"
        return Output(
            index=self.number,
            text=self._whole_text(),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def embedded(self) -> Embedding:
        assert self.embedding is not None, f"row {self.row} was not embedded"
        return Embedding(self.index, self.prompt, tuple(self.prompt_ids), self.embedding, self.truncated_tokens)

    def classified(self) -> Classification:
        asked = self.params
        assert isinstance(asked, ClassifyParams) and asked.labels is not None, f"row {self.row} was not to be classified"
        assert self.embedding is not None, f"row {self.row} was not classified"
        told = self.index, self.prompt, tuple(self.prompt_ids), asked.labels, self.embedding, self.truncated_tokens
        return Classification(*told)

    def completion(self, others: Sequence[RowState] = ()) -> Completion:
        """The completion of a prompt, from its first row and its others."""
        own = self.output()
        return Completion(
            index=self.index,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            text=own.text,
            token_ids=own.token_ids,
            logprobs=own.logprobs,
            finish_reason=own.finish_reason,
            stop_reason=own.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
            embedding=self.embedding,
            truncated_tokens=self.truncated_tokens,
            others=tuple(row.output() for row in others),
        )

    def _finish(self, reason: str, piece: str | None = "") -> str | None:
        self.finish_reason = reason
        if self._text is None:
            return None
        rest = self._text.finish()
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        return (piece or "") + rest

    def _whole_text(self) -> str:
        if self._text is not None:
            return self._text.text
        ids = self.token_ids
        hides_last = self._ends_with_token and not self.params.include_stop_str_in_output
        return decode_new(self._decoder, self.prompt_ids, ids[:-1] if hides_last else ids)


def completion_of(rows: Sequence[RowState]) -> Completion:
    """The completion of a prompt when all its rows have ended."""
    first, *others = rows
    return first.completion(others)
