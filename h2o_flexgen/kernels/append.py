"""The newest token of each row in the cache: query and key are rotated, key and value go behind what the row holds, and its
position is noted with a score of 0, and with what it is worth."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.kernels.newest import Newest, Notes
from h2o_flexgen.kernels.rotate import Turn, rotate_twin


def append_twin(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    if turn is not None:
        q, k = rotate_twin(q, turn), rotate_twin(k, turn)
    keys, values = image
    keys[newest.rows, :, newest.slots] = k[:, 0]
    values[newest.rows, :, newest.slots] = v[:, 0]
    if notes is not None:
        notes.positions[newest.rows, :, newest.slots] = newest.positions.int()
        if notes.scores is not None:
            nothing = notes.scores.new_zeros(())  # a number of Python would come from the host, and wait for the device
            notes.scores[newest.rows, :, newest.slots] = nothing
        if notes.worth is not None:
            assert worth is not None
            notes.worth[newest.rows, :, newest.slots] = worth
    return q
