"""RowState: one row of a generation: what it was given, what it has made, whether and why it is finished."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_flexgen.runtime.output import Completion, StepLogprobs
from h2o_flexgen.runtime.sampling_params import SamplingParams
from h2o_flexgen.runtime.text import RowText, decode_new
from h2o_flexgen.runtime.tokenizer import Tokenizer


class RowState:
    """One sequence of a generation. Text is made per token only for rows that need it: with stop strings, or streamed."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: str | None = None,
        streamed: bool = False,
        forced: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.params = params
        self.prompt = prompt
        self.seen = list(prompt_ids)  # prompt and generated ids
        self.prompt_len = len(self.seen)
        self.logprobs: list[StepLogprobs] = []
        self.finish_reason: str | None = None
        self._streamed = streamed
        self.forced = tuple(forced)  # its first tokens, which are given and not picked, and never end it
        self._known: list[tuple[int, StepLogprobs | None]] = []  # what was generated before a new start
        self._tokenizer = tokenizer
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self._text = self._new_text()

    def _new_text(self) -> RowText | None:
        needs_text = self._streamed or bool(self.params.stop_strings)
        return RowText(self._tokenizer, self.prompt_ids, self.params.stop_strings) if needs_text else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_ids(self) -> list[int]:
        return self.seen[: self.prompt_len]

    @property
    def token_ids(self) -> list[int]:
        return self.seen[self.prompt_len :]

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len

    def push(self, token: int, logprobs: StepLogprobs | None = None) -> str | None:
        """Takes the token that was generated. The new piece of text for rows whose text is followed, else None."""
        assert not self.finished, f"row {self.index} is finished"
        self.seen.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        is_forced = self.num_generated <= len(self.forced)
        if token in self._ends and not is_forced:
            return self._finish("stop")
        piece = None if self._text is None else self._text.add(token, may_stop=not is_forced)
        if self._text is not None and self._text.stopped:
            self.finish_reason = "stop"
        elif self.num_generated == self.params.max_tokens:
            return self._finish("length", piece)
        return piece

    @property
    def known(self) -> tuple[int, StepLogprobs | None] | None:
        """The next token, if the row had come further before a new start."""
        return self._known[self.num_generated] if self.num_generated < len(self._known) else None

    @property
    def given(self) -> int | None:
        """The next token, if it is not to be picked."""
        if self.known is not None:
            return self.known[0]
        return self.forced[self.num_generated] if self.num_generated < len(self.forced) else None

    def start_anew(self) -> None:
        """From the prompt on, when what was computed is lost. The tokens that it had are not: they come again as they were,
        even where last bits differ, beside other rows, and another token would be picked."""
        assert not self.finished, f"row {self.index} is finished"
        silent: list[StepLogprobs | None] = [None] * self.num_generated
        self._known[: self.num_generated] = zip(self.token_ids, self.logprobs or silent, strict=True)
        del self.seen[self.prompt_len :]
        self.logprobs = []
        self._text = self._new_text()

    def stop(self, reason: str) -> str | None:
        """Ends the row where it is. What was held back of its text, where it is followed."""
        return None if self.finished else self._finish(reason)

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"row {self.index} is not finished"
        return Completion(
            index=self.index,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            text=self._whole_text(),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
        )

    def _finish(self, reason: str, piece: str | None = "") -> str | None:
        self.finish_reason = reason
        if self._text is None:
            return None
        rest = self._text.finish()
        if self._text.stopped:
            self.finish_reason = "stop"
        return (piece or "") + rest

    def _whole_text(self) -> str:
        if self._text is not None:
            return self._text.text
        ids = self.token_ids
        return decode_new(self._tokenizer, self.prompt_ids, ids[:-1] if self.finish_reason == "stop" else ids)
