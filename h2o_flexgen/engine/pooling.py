"""Embeddings at the head: the states of a prompt become one vector, in the pass that reads it. In that pass every token sees
all tokens before it unchanged, whatever a policy keeps of them afterwards and in however few bits.

Each row is pooled by itself, in products of sizes that depend on it alone, so that no vector depends on the rows beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.sampling.classifying import ClassifyParams
from h2o_flexgen.sampling.pooling import CLS, MEAN, PoolingParams
from h2o_flexgen.sampling.sampler import NoTokenLeft

StatesOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> the same behind the last norm of the model
ScoresOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> (positions, labels)
STATES_AT_ONCE = 256  # tokens of a row that pass the norm together
SHORTEST = 1e-12  # as torch normalises: a vector that is shorter is divided by this


def pool_prompts(rows: BatchRows, hidden: Tensor, states_of: StatesOf, scores_of: ScoresOf) -> None:
    """Gives rows that ask for it the vector of their prompts, or the scores of labels. What they share with others is kept with
    its states."""
    for row, own in rows.prompts(hidden):
        asked = row.pooling
        if asked is None or row.embedding is not None:
            continue
        states = _states(rows, row, own)
        if isinstance(asked, ClassifyParams):
            assert asked.labels is not None, "they are known when a row is made"
            one = _state_at(states, asked.labels.last_place(row.prompt_ids))
            row.embedding = _checked(row, "classification", scores_of(one)[0])
        else:
            row.embedding = _checked(row, "embedding", _pooled(asked, states, states_of))


def _state_at(states: Sequence[Tensor], place: int) -> Tensor:
    """The state of one token, (1, width)."""
    for each in states:
        if place < len(each):
            return each[place : place + 1]
        place -= len(each)
    raise AssertionError("there is a state for each token of a prompt")


def _states(rows: BatchRows, row: RowState, own: Tensor) -> Sequence[Tensor]:
    """The states of all tokens of a prompt."""
    shared = rows.prefix_of(row)
    if shared is None:
        return [own]
    assert shared.prefix.hidden is not None, "states of prefixes are kept where a row may ask for those of its prompt"
    return [shared.prefix.hidden[: shared.tokens], own]


def _pooled(asked: PoolingParams, states: Sequence[Tensor], states_of: StatesOf) -> Tensor:
    """One vector of states (tokens, width). They are added in fp64."""
    if asked.pooling == MEAN:
        pieces = [piece for each in states for piece in each.split(STATES_AT_ONCE)]
        sums = [states_of(piece).double().sum(dim=0) for piece in pieces]
        vector = torch.stack(sums).sum(dim=0) / sum(map(len, states))
    else:
        one = states[0][:1] if asked.pooling == CLS else states[-1][-1:]
        vector = states_of(one)[0].double()
    return vector / vector.norm().clamp_min(SHORTEST) if asked.normalize else vector


def _checked(row: RowState, what: str, vector: Tensor) -> array[float]:
    values = vector.float().cpu()
    if not bool(values.isfinite().all()):
        broken = NoTokenLeft(
            0,
            row.index,
            f"the {what} of prompt {row.index} is not finite; "
            "the checkpoint is broken or overflows its dtype: try bfloat16 or float32",
        )
        broken.row = row.row
        raise broken
    return array("f", values.tolist())
