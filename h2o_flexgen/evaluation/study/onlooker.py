"""The reader that keeps everything and observes its attention, while others read the same text under their policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.evaluation.study.kept_tokens import Keeper
from h2o_flexgen.evaluation.study.text_attention import attention_in_blocks, captured, negligible_entries, visible_entries
from h2o_flexgen.evaluation.study.whole import WholeText, attend_whole
from h2o_flexgen.models.new_tokens import NewTokens

ORACLE = "oracle"  # keeps the tokens that get most attention in the whole text, as only a reader that knows it all could


@dataclass(frozen=True)
class LayerSeen:
    sparsity: Tensor  # (heads,)
    scores: Tensor  # (kv_heads, tokens): sums over all queries and over the query heads of a group
    foreseen: Tensor  # (kv_heads, tokens): when each token leaves the oracle
    captured: Mapping[str, Tensor]  # by every keeper and by the oracle: (kv_heads,), 0 to 1


@dataclass
class Onlooker:
    """Reads each layer after the keepers, since it asks which tokens they hold."""

    keepers: Mapping[str, Keeper]
    slots: int  # of the oracle
    prompt_len: int
    by_layer: list[LayerSeen] = field(default_factory=list)

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        read = attend_whole(tokens)
        self.by_layer.append(self._seen(read))
        return read.out

    def _seen(self, read: WholeText) -> LayerSeen:
        q, k, scores = read.q, read.k, read.sums
        tokens = q.shape[1]
        foreseen = gone_with_foresight(scores, self.slots, self.prompt_len)
        gone = {ORACLE: foreseen, **{name: keeper.by_layer[-1] for name, keeper in self.keepers.items()}}
        small = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        held = {name: torch.zeros(len(k), dtype=torch.float64, device=q.device) for name in gone}
        for attention in attention_in_blocks(q, k, sink_scores=read.sink_scores):
            small += negligible_entries(attention)
            if attention.shares.shape[-1] > self.prompt_len:
                for name, own in gone.items():
                    held[name] += captured(attention, own, self.prompt_len)
        shares = {name: each / (tokens - self.prompt_len) for name, each in held.items()}
        return LayerSeen(small / visible_entries(tokens), scores, foreseen, shares)


def gone_with_foresight(sums: Tensor, slots: int, prompt_len: int) -> Tensor:
    """sums (kv_heads, tokens): the heaviest tokens are held from the start, all others leave as soon as any token may."""
    kv_heads, tokens = sums.shape
    gone = torch.arange(1, tokens + 1, device=sums.device).clamp(min=prompt_len).repeat(kv_heads, 1)
    return gone.scatter_(1, sums.topk(min(slots, tokens), dim=1).indices, tokens + 1)
