"""Exchange: what the thread that computes tells the one client that waits for a body's answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.sampling.completion import Completion, StepLogprobs
from h2o_flexgen.serving.desk import RequestListener
from h2o_flexgen.serving.problems import ApiProblem


@dataclass(frozen=True)
class TokenPiece:
    """A token of a completion, and the text that has become certain with it."""

    place: int  # of its prompt in the body
    number: int  # of the completion among those of its prompt
    token: int
    text: str
    logprobs: StepLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class WholeAnswer:
    """All completions of a prompt, which have ended."""

    place: int
    completion: Completion


Told = TokenPiece | WholeAnswer | ApiProblem


class RequestExchange:
    """Made in the client's loop; told things in any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Told] = asyncio.Queue()

    def listener(self, place: int, is_streamed: bool) -> RequestListener:
        on_piece = partial(self._piece, place) if is_streamed else None
        return RequestListener(
            on_piece, lambda completion: self._put(WholeAnswer(place, completion)), lambda problem, error: self._put(problem)
        )

    async def some(self) -> list[Told]:
        """Everything that was told since the last time, and at least something."""
        told = [await self._told.get()]
        while not self._told.empty():
            told.append(self._told.get_nowait())
        return told

    def _piece(self, place: int, row: RowState, token: int, text: str | None) -> None:
        logprobs = row.logprobs[-1] if row.logprobs else None
        self._put(TokenPiece(place, row.number, token, text or "", logprobs, row.finish_reason, row.stop_reason))

    def _put(self, told: Told) -> None:
        with suppress(RuntimeError):  # the loop has ended, so no client waits
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)
