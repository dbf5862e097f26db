"""Shows how many prompts are done while a call generates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import OnToken
from h2o_flexgen.engine.stage import MADE_AGAIN, OnStage, Stage, how_far, made_again
from h2o_flexgen.sampling.completion import Completion

OnCompletion: TypeAlias = Callable[[Completion], object]
UseTqdm: TypeAlias = "bool | Callable[..., Any]"  # True: on stderr; or a function that makes a bar like tqdm's
Listeners: TypeAlias = "tuple[OnToken | None, OnStage | None]"
DESCRIPTION = "prompts"


class _Bar(Protocol):
    def update(self, count: int) -> object: ...

    def close(self) -> object: ...


@contextmanager
def shown_progress(use_tqdm: UseTqdm, rows: Sequence[RowState], told: Listeners) -> Iterator[Listeners]:
    """The given listeners; if `use_tqdm` is set, they also show how many prompts are done."""
    if not use_tqdm:
        yield told
    elif use_tqdm is True:
        with Progress(len({row.index for row in rows}), DESCRIPTION) as progress:
            yield _on_stderr(progress, rows, told)
    else:
        bar: _Bar = use_tqdm(total=len({row.index for row in rows}), desc=DESCRIPTION, unit="prompt")
        try:
            yield _counting(rows, told[0], lambda done, tokens: bar.update(1) if done else None), told[1]
        finally:
            bar.close()


def _on_stderr(progress: Progress, rows: Sequence[RowState], told: Listeners) -> Listeners:
    on_token, on_stage = told
    begun, count = time.monotonic(), 0

    def show(done: int, tokens: int) -> None:
        nonlocal count
        count += done
        progress.update(f"{tokens / max(time.monotonic() - begun, 1e-9):.2f} tokens/s", count)

    def show_stage(stage: Stage, done_bytes: int, total_bytes: int) -> None:
        nonlocal begun
        begun = time.monotonic()  # tokens come after the last stage
        if stage in MADE_AGAIN:
            progress.note(made_again(stage, cache_folder("")))
        progress.stage(str(stage), how_far(done_bytes, total_bytes))
        if on_stage is not None:
            on_stage(stage, done_bytes, total_bytes)

    return _counting(rows, on_token, show), show_stage


def _counting(rows: Sequence[RowState], on_token: OnToken | None, show: Callable[[int, int], object]) -> OnToken:
    """Calls `show` for each token with whether it ended its prompt, and with the number of tokens so far."""
    waiting, tokens = Counter(row.index for row in rows), 0

    def count(place: int, token: int, text: str | None) -> None:
        nonlocal tokens
        tokens += 1
        row = rows[place]
        waiting[row.index] -= row.finished
        show(int(row.finished and not waiting[row.index]), tokens)
        if on_token is not None:
            on_token(place, token, text)

    return count
