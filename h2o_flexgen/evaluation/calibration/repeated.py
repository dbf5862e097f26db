"""RepeatedText: a text that is read twice, everything kept: which tokens does a model look up to repeat it?

A token's score is the highest attention that any query of the second copy gives it, in any head of the KV head's group (KVzip,
arXiv 2505.23416).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.evaluation.study.text_reading import TextReading
from h2o_flexgen.evaluation.study.whole import turned
from h2o_flexgen.formats.kernel_table import MAX
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.models.new_tokens import NewTokens


class LayerRead(NamedTuple):
    """What was seen of a text and its copy in one layer that attends; queries and keys are rotated."""

    x: Tensor | None  # (2 * tokens, width), what queries, keys and values were made of, where the model tells
    q: Tensor  # (heads, 2 * tokens, dim)
    k: Tensor  # (kv_heads, 2 * tokens, dim)
    v: Tensor
    scores: Tensor  # (kv_heads, tokens), fp32, of the first copy


@dataclass(frozen=True)
class RepeatedText:
    """Reads each layer, and hands on what was seen there. The tensors are valid until the listener returns."""

    ids: Sequence[int]
    on_layer: Callable[[LayerRead], None]

    @property
    def reading(self) -> TextReading:
        return TextReading((*self.ids, *self.ids), self.attend)

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        q, k, v = turned(tokens)
        nothing = torch.zeros(1, dtype=torch.int64, device=q.device)
        x, sinks = tokens.x, tokens.sink_scores
        more = None if sinks is None else More.of_sink_scores(sinks, 1, q.shape[2])
        out, highest = prompt_attention(q, k, v, nothing, self._counted.to(q.device), more, MAX)
        assert highest is not None
        self.on_layer(LayerRead(None if x is None else x[0], q[0], k[0], v[0], highest[0, :, : len(self.ids)]))
        return out

    @cached_property
    def _counted(self) -> Tensor:
        """The queries of the second copy count, and no others."""
        return torch.arange(2 * len(self.ids)).ge(len(self.ids)).float().unsqueeze(0)
