"""Readers of a text: keepers, which keep what a policy keeps, and the onlooker, which keeps everything and observes its
attention, some queries at a time. Statistics of that: the attention that each token got, how alike two policies choose, whether
they find the heaviest tokens, and how long a token stays.

A token is only seen by those after it, so the first ones hold most even if attention is spread evenly. Every figure of
accumulated scores is therefore shown beside this baseline (`even_scores`).

An evicted token never returns, so one number per token tells everything: how many tokens had been read when it was evicted.
One token comes and one goes at each step, so in the long run tokens stay, on average, for as many steps as there are slots,
whatever the policy. The spread differs: a window evicts all at one age; with heavy hitters most go early and some never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_flexgen.calibration.text_reading import turned
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_sizes import SCORED_BYTES
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kernels.prompt_attention import probabilities
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import judge_of
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.policies.policy import PROBE, KVPolicy


class WholeText(NamedTuple):
    """One layer of a text that is read at once, with everything kept. Queries and keys are rotated."""

    q: Tensor  # (heads, tokens, dim)
    k: Tensor  # (kv_heads, tokens, dim)
    sums: Tensor  # (kv_heads, tokens), fp32: the attention that each token got
    out: Tensor  # as models.attention.Attend returns it
    sink_scores: Tensor | None  # (heads,)


def attend_whole(tokens: NewTokens) -> WholeText:
    """Takes the tokens of one row."""
    (q, k, v), sink_scores = turned(tokens), tokens.sink_scores
    nothing, every_query = torch.zeros(1, dtype=torch.int64, device=q.device), torch.ones(1, q.shape[2], device=q.device)
    more = None if sink_scores is None else More.of_sink_scores(sink_scores, 1, q.shape[2])
    out, sums = prompt_attention(q, k, v, nothing, every_query, more)
    assert sums is not None
    return WholeText(q[0], k[0], sums[0], out, sink_scores)


THRESHOLD = 0.01  # of negligible entries, relative to the largest share of a query: the paper's


class Attention(NamedTuple):
    """The attention of some neighbouring queries in one layer."""

    first: int  # the place of the first query in the text
    shares: Tensor  # (kv_heads, group, queries, keys up to the last of the queries), fp32; 0 for keys after a query


def attention_in_blocks(
    q: Tensor, k: Tensor, held_bytes: int = SCORED_BYTES, sink_scores: Tensor | None = None
) -> Iterator[Attention]:
    """q (heads, tokens, dim), k (kv_heads, tokens, dim), both rotated. At most `held_bytes` of shares are held at once."""
    heads, tokens, _ = q.shape
    queries = max(1, held_bytes // (4 * heads * tokens))
    for start in range(0, tokens, queries):
        yield attention_of(q, k, start, min(start + queries, tokens), sink_scores)


def attention_of(q: Tensor, k: Tensor, start: int, end: int, sink_scores: Tensor | None = None) -> Attention:
    """The attention of the queries from `start` on and before `end`; q and k as above."""
    heads, _, dim = q.shape
    part = q[:, start:end].reshape(1, len(k), heads // len(k), end - start, dim)
    shares = probabilities(part, k[:, :end].unsqueeze(0), None, sink_scores)
    return Attention(start, shares.view(len(k), heads // len(k), end - start, end))


def negligible_entries(attention: Attention) -> Tensor:
    """The number of negligible entries per head, among the keys that each query can see. (heads,)"""
    shares = attention.shares.flatten(0, 1)
    queries, keys = shares.shape[1:]
    behind = sum(keys - 1 - query for query in range(attention.first, attention.first + queries))  # zeros no query sees
    return (shares < THRESHOLD * shares.amax(-1, keepdim=True)).sum((1, 2)) - behind


def visible_entries(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def captured(attention: Attention, gone: Tensor, prompt_len: int) -> Tensor:
    """Attention captured from all queries after the prompt (each has 1 to give), averaged over a group's heads. (kv_heads,)"""
    skipped = max(0, prompt_len - attention.first)
    shares = attention.shares[:, :, skipped:].mean(1)  # (kv_heads, queries, keys)
    queries, keys = shares.shape[1:]
    query = torch.arange(keys - queries, keys, device=shares.device)
    is_held = gone[:, None, :keys] > query[:, None]  # before the query's own token comes, which it always sees
    return (shares * is_held).sum((1, 2))


Array = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """score = scale * rank ** -exponent, with ranks from 1."""

    exponent: float
    scale: float
    r_squared: float


def sorted_scores(scores: Array) -> Array:
    """The scores (..., tokens), heaviest first."""
    return -np.sort(-scores, axis=-1)


def fit_power_law(heaviest_first: Array) -> PowerLaw:
    """A least-squares line through the logarithms of ranks and scores. Tokens without any score are left out."""
    got = heaviest_first[heaviest_first > 0]
    if len(got) < 3:
        raise ValueError(f"{len(got)} tokens got any attention, and a power law needs 3; give a longer text")
    rank, score = np.log(np.arange(1, len(got) + 1)), np.log(got)
    slope, start = np.polyfit(rank, score, 1)
    spread = float(((score - score.mean()) ** 2).sum())
    missed = float(((score - start - slope * rank) ** 2).sum())
    return PowerLaw(-float(slope), float(np.exp(start)), 1.0 - missed / spread if spread else 1.0)


def share_of_heaviest(heaviest_first: Array, part: float) -> Array:
    """The share of all attention that the heaviest tokens hold: `part` of the tokens, but at least one. (...,)"""
    count = max(1, round(part * heaviest_first.shape[-1]))
    return np.asarray(heaviest_first[..., :count].sum(-1) / heaviest_first.sum(-1))


def even_scores(tokens: int) -> Array:
    """The accumulated scores if every query attended equally to every key that it sees."""
    return np.cumsum(1.0 / np.arange(tokens, 0, -1))[::-1]


Gone = NDArray[np.int32]  # (layers, kv_heads, tokens): tokens read when this one was evicted
Held = NDArray[np.bool_]  # (layers, kv_heads, tokens)


def of_layers(gone: Sequence[torch.Tensor]) -> Gone:
    """The layers' tensors (kv_heads, tokens) in one array."""
    return np.asarray(torch.stack([*gone]).cpu().numpy(), dtype=np.int32)


def held_after(gone: Gone, read: int) -> NDArray[np.bool_]:
    """Marks the tokens that are held when `read` tokens have been read, in the same shape."""
    tokens = gone.shape[-1]
    return (gone > read) & (np.arange(tokens) < read)


def jaccard(one: Held, other: Held) -> Array:
    """The tokens that both hold over those that either holds, averaged over the heads of each layer. (layers,)"""
    either = (one | other).sum(-1)
    return np.asarray(((one & other).sum(-1) / np.maximum(either, 1)).mean(-1))


def heaviest_found(held: Held, scores: Array, count: int) -> Array:
    """The share held of the `count` tokens that got most attention in the whole text, averaged over the heads of each layer.
    scores (layers, kv_heads, tokens); result (layers,)

    Unlike the overlap, this ignores what else is held, such as the newest tokens, which had no time to get much attention."""
    heaviest = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    return np.asarray(np.take_along_axis(held, heaviest, -1).mean(-1).mean(-1))


def survival(gone: Gone, prompt_len: int) -> Array:
    """The share of tokens after the prompt that is still held at each age in tokens, over all layers and heads.
    (tokens after the prompt,)

    The text ends before all tokens are evicted, so each age counts only the tokens observed at that age (Kaplan and Meier): the
    share of them that stays, multiplied by the shares of all earlier ages."""
    tokens = gone.shape[-1]
    behind, place = gone[..., prompt_len:].reshape(-1, tokens - prompt_len), np.arange(prompt_len, tokens)
    ages = len(place)
    went = np.bincount((behind - 1 - place)[behind <= tokens], minlength=ages)
    seen_last = np.bincount((np.minimum(behind, tokens) - 1 - place).ravel(), minlength=ages)
    could_go = behind.size - (np.cumsum(seen_last) - seen_last)
    return np.asarray(np.cumprod(1.0 - went / np.maximum(could_go, 1)))


def still_held(gone: Gone, prompt_len: int, later: int) -> Array:
    """The share of the tokens held at one time that is also held `later` tokens afterwards. (layers,)"""
    tokens = gone.shape[-1]
    last = tokens - later  # the last time that can be compared with a later one
    first = np.maximum(prompt_len, np.arange(tokens) + 1)
    at_one_time = np.maximum(0, np.minimum(gone - 1, last) - first + 1).sum((1, 2))
    also_later = np.maximum(0, np.minimum(gone - 1 - later, last) - first + 1).sum((1, 2))
    return np.asarray(also_later / at_one_time)


def studied_policies(names: Sequence[str], budget: float) -> Mapping[str, KVPolicy]:
    """Each policy with the share `budget` of a text; a policy that cannot be studied is refused."""
    policies: dict[str, KVPolicy] = {}
    for name in names:
        if name in POLICIES and POLICIES[name].ranks_by == PROBE:
            raise ValueError(f"kv_policy {name!r} asks a probe, which a study does not do; leave it out")
        policy = Plan.create(kv_policy=name, kv_budget=None if name == "full" else budget).policy
        if policy.keeps_all:
            raise ValueError(f"kv_policy {name!r} keeps everything, and there is nothing to study; name policies that evict")
        if policy.echoes:
            raise ValueError(f"kv_policy {name!r} judges a prompt by an echo that a study does not compute; leave it out")
        if name in policies:
            raise ValueError(f"kv_policy {name!r} is named twice; name it once")
        policies[name] = policy
    if not policies:
        raise ValueError("no KV policy to study was named; name one or more")
    return policies


def coding_of(llm: LLM) -> Coding:
    """How the plan of `llm` stores keys and values, in all layers alike."""
    llm.spec.refuse_unlike_heads("a study", widths=True)
    return Coding.of(llm.spec)


@dataclass
class Keeper:
    """Finds the tokens that a policy keeps of a text: runs the real cache and notes when each token goes. A prompt is read, and
    the rest of it token by token. Layers come one after the other."""

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
    image = torch.zeros(coding.sets, *shape, coding.width, dtype=coding.kept_dtype, device=k.device)
    region = torch.zeros(k.shape[2] * capacity * policy.score_bytes, dtype=torch.uint8, device=k.device)
    scores = SlotScores.over(region, policy, shape)
    return KVCache(image, scores, coding, judge=judge_of(policy)), scores


ORACLE = "oracle"  # keeps the tokens that get most attention in the whole text, as only a reader that knows it all could


@dataclass(frozen=True)
class LayerSeen:
    sparsity: Tensor  # (heads,)
    scores: Tensor  # (kv_heads, tokens): sums over all queries and over the query heads of a group
    foreseen: Tensor  # (kv_heads, tokens): when each token leaves the oracle
    captured: Mapping[str, Tensor]  # by every keeper and by the oracle: (kv_heads,), 0 to 1


@dataclass
class Onlooker:
    """Keeps everything and observes its attention, while keepers read the same text. It reads each layer after them, since it
    asks which tokens they hold."""

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
