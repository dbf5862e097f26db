"""The tokens that a policy keeps of a text: runs the real cache token by token and notes when each token goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.evaluation.study.held_tokens import Gone, of_layers
from h2o_flexgen.evaluation.study.whole import attend_whole
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.judges import judge_of
from h2o_flexgen.kv.slot_scores import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies.levels import Level
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

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        k, device = tokens.k, tokens.k.device
        gone = torch.arange(1, self.tokens + 1, device=device).clamp(min=self.prompt_len).repeat(k.shape[2], 1)
        self.by_layer.append(gone)
        if self.policy.keeps_all:
            gone.fill_(self.tokens + 1)
            return attend_whole(tokens).out
        occupancy, out = self.occupancy, []
        cache, scores = opened(self.policy, occupancy.capacity, self.coding, k)
        for step in range(occupancy.gen_len):
            read = self.prompt_len + step
            new = slice(read - 1 if step else 0, read)
            now = KVStep.of(occupancy.at(step), occupancy.capacity, device)
            out.append(cache.attend(now, tokens.part(new)))
            held = scores.positions[0, :, : occupancy.counts(step + 1)[0]].long()
            gone.scatter_(1, held, torch.full_like(held, read + 1))
        return torch.cat(out, dim=1)


@dataclass
class LevelKeeper:
    """Reads a text where some heads keep more than others: each level's heads have a keeper of their own."""

    levels: Sequence[Level]
    tokens: int
    prompt_len: int
    coding: Coding
    by_layer: list[Tensor] = field(default_factory=list)  # (kv_heads, tokens)

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """New ones, level by level."""
        return tuple(Keeper(level.policy, self.tokens, self.prompt_len, self.coding) for level in self.levels)

    @property
    def gone(self) -> Gone:
        return of_layers(self.by_layer)

    def attend(self, tokens: NewTokens) -> Tensor:
        """Reads all tokens in the next layer; a models.attention.Attend for one row."""
        q, kv_heads = tokens.q, tokens.k.shape[2]
        out = q.new_empty(1, self.tokens, kv_heads, q.shape[2] * q.shape[3] // kv_heads)
        gone = torch.empty(kv_heads, self.tokens, dtype=torch.int64, device=q.device)
        for level, keeper in zip(self.levels, self.keepers):
            heads = [*level.heads[len(self.by_layer)]]
            if heads:
                done = keeper.attend(tokens.of_heads(torch.tensor(heads, device=q.device)))
                out[:, :, heads] = done.view(1, self.tokens, len(heads), -1)
                gone[heads] = keeper.by_layer[-1]
        self.by_layer.append(gone)
        return out.flatten(2)


def ranks(reader: Keeper, text: NewTokens) -> Tensor:
    """The place that the reader's policy gives each token of a prompt, 0 for what it would keep longest, without regard to
    protected tokens. (kv_heads, tokens)"""
    k, tokens, budget = text.k, text.k.shape[1], reader.occupancy.budgets[0]
    occupancy = Occupancy(Batch((0,), (tokens,), context=tokens), (replace(budget, slots=tokens),), 1)
    cache, scores = opened(reader.policy, occupancy.capacity, reader.coding, k)
    cache.attend(KVStep.of(occupancy.at(0), occupancy.capacity, k.device), text)
    return scores.best_first()[0, :, :tokens].argsort(-1)


def opened(policy: KVPolicy, capacity: int, coding: Coding, k: Tensor) -> tuple[KVCache, SlotScores]:
    """An empty cache for keys like `k`, and what the policy will know of its slots."""
    shape = (1, k.shape[2], capacity)
    image = torch.zeros(2, *shape, coding.width, dtype=coding.kept_dtype, device=k.device)
    region = torch.zeros(k.shape[2] * capacity * policy.score_bytes, dtype=torch.uint8, device=k.device)
    scores = SlotScores.over(region, policy, shape)
    return KVCache(image, scores, coding, judge=judge_of(policy)), scores
