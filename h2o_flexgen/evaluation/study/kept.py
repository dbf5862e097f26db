"""The tokens that a policy keeps of a text: runs the real cache token by token and notes when each token goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.evaluation.study.held import Gone, of_layers
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.judges.table import judge_of
from h2o_flexgen.kv.scores import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.base import Rotation
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import KVPolicy


@dataclass
class Keeper:
    """Reads a text under a policy: a prompt, and the rest of it token by token. Layers come one after the other."""

    policy: KVPolicy
    tokens: int
    prompt_len: int
    coding: Coding
    by_layer: list[Tensor] = field(default_factory=list)  # (kv_heads, tokens)

    @property
    def occupancy(self) -> Occupancy:
        """The budget is a share of the whole text."""
        return self.policy.occupancy(Batch((0,), (self.prompt_len,), context=self.tokens), 1 + self.tokens - self.prompt_len)

    @property
    def gone(self) -> Gone:
        return of_layers(self.by_layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None = None, x: Tensor | None = None) -> Tensor:
        """Reads all tokens in the next layer; a models.base.Attend for one row."""
        occupancy, kv_heads, out = self.occupancy, k.shape[2], []
        cache, scores = self._opened(occupancy.capacity, kv_heads, q.device)
        gone = torch.arange(1, self.tokens + 1, device=q.device).clamp(min=self.prompt_len).repeat(kv_heads, 1)
        for step in range(occupancy.gen_len):
            read = self.prompt_len + step
            new = slice(read - 1 if step else 0, read)
            now = KVStep.of(occupancy.at(step), occupancy.capacity, q.device)
            out.append(cache.attend(now, q[:, new], k[:, new], v[:, new], rotation))
            held = scores.positions[0, :, : occupancy.counts(step + 1)[0]].long()
            gone.scatter_(1, held, torch.full_like(held, read + 1))
        self.by_layer.append(gone)
        return torch.cat(out, dim=1)

    def _opened(self, capacity: int, kv_heads: int, device: torch.device) -> tuple[KVCache, SlotScores]:
        shape = (1, kv_heads, capacity)
        image = torch.zeros(2, *shape, self.coding.width, dtype=self.coding.kept_dtype, device=device)
        region = torch.zeros(kv_heads * capacity * self.policy.score_bytes, dtype=torch.uint8, device=device)
        scores = SlotScores.over(region, self.policy, shape)
        return KVCache(image, scores, self.coding, judge=judge_of(self.policy)), scores
