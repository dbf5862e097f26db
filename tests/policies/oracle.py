"""Every policy from its definition in docs/policies.md, with no code of the package: one KV head of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Turn = Callable[[Array, Array], Array]  # (x (tokens, heads, dim), positions (tokens,)) -> the same, rotated


class Head:
    highest: frozenset[str] = frozenset({"kvzip"})  # policies whose scores are the highest share that a token got, and no sum
    by_worth = ("kvzap", "keydiff", "lagkv", "knorm")

    def __init__(
        self,
        asked: Mapping[str, Any],
        prompt: int,
        generated: int,
        head: int,
        turn: Turn | None = None,
        context: int = 0,
        pinned: int = 0,
        positions: int = 1 << 30,
        probe: tuple[Array, float] = (np.zeros(0), 0.0),
        sink_scores: Array | None = None,
    ) -> None:
        """`context`: of a text that lives on, of which the prompt is only the beginning. `pinned`: the first tokens of the
        text, which are not evicted, and which neither the prompt nor the tokens that the policy counts include: it sees what
        is behind them, from 0 on. `positions`: those of the model, which an echo must not exceed. `probe`: the weight and
        the bias of this head, which says what a token is worth whose layer has an input. `sink_scores` (group,): of what takes
        part in every softmax of a query and is let go."""
        self.sink_scores = sink_scores
        self.probe = probe
        self.positions = positions
        self.pinned = pinned
        self.policy, self.head, self.turn, self.prompt = asked.get("kv_policy", "full"), head, turn, prompt
        self.rolling, self.once = asked.get("positions") == "rolling", bool(asked.get("hh_prompt_only"))
        self.decay = 0.0 if self.policy == "tova" else asked.get("score_decay", 1.0)
        heavy, self.recent = self._slots(asked, context or prompt, 0 if context else generated)
        self.budget = heavy + self.recent
        self.sinks, self.grace = asked.get("sinks", 4 if self.policy in ("streaming", "lagkv") else 0), asked.get("grace", 0)
        if self.policy == "streaming" and "recent" in asked and "kv_budget" not in asked:
            self.budget += self.sinks
        if self.policy == "h2o-flexgen":
            self.budget -= 1
        if self.policy == "full":
            self.budget = context or prompt + generated
        self.seen = 0
        self.kept: list[int] = []  # of those that are judged
        self.keys: dict[int, Array] = {}
        self.values: dict[int, Array] = {}
        self.score: dict[int, float] = {}
        self.weighs = bool(asked.get("value_norms"))
        self.worth: dict[int, float] = {}

    @staticmethod
    def _slots(asked: Mapping[str, Any], prompt: int, generated: int) -> tuple[int, int]:
        if "hh_ratio" in asked:
            return int(asked["hh_ratio"] * prompt), int(asked["hh_ratio"] * prompt)
        if "kv_budget" in asked or not {"heavy", "recent"} & set(asked):
            total = int(asked.get("kv_budget", 0.2) * (prompt + generated))
            recent = asked.get("recent", total // (5 if asked.get("kv_policy") == "kvzip" else 2))
            return total - recent, recent
        return asked.get("heavy", 0), asked.get("recent", 0)

    def attend(self, q: Array, k: Array, v: Array, decodes: bool = False, x: Array | None = None) -> Array:
        """One pass over new tokens: q (tokens, group, dim), k and v (tokens, dim), unrotated -> (tokens, group, dim). A pass
        `decodes` if its only token is generated. Under kvzip all tokens of any other pass come once more behind them. x:
        (tokens, width), the input of their layer, where a probe asks for it."""
        if self.policy == "kvzip" and not decodes:
            return self._echoed(q, k, v)
        new = list(range(self.seen, self.seen + len(q)))
        self._remember(new, k, v)
        for token, value in zip(new, v):
            self.kept.append(token)
            self.score[token] = 0.0
            self.worth[token] = float(np.sqrt((value**2).sum()))
        if self.policy == "kvzap" and x is not None:
            weight, bias = self.probe
            self.worth |= dict(zip(new, (x @ weight + bias).tolist()))
        if self.policy == "knorm":
            self.worth |= {token: -float(np.sqrt((self.keys[token] ** 2).sum())) for token in new}
        if self.policy in ("keydiff", "lagkv"):
            self.worth |= dict.fromkeys(new, -np.inf) if decodes else self._compared()
        return self._attended(q, new, decodes)

    def _compared(self) -> dict[int, float]:
        """What all tokens are worth that are held and new, beside each other."""
        keys, values = (np.stack([known[token] for token in self.kept]) for known in (self.keys, self.values))
        if self.policy == "keydiff":
            directions = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            mean = directions.mean(0)
            return dict(zip(self.kept, (-directions @ mean / np.linalg.norm(mean)).tolist()))
        worth, count = dict.fromkeys(self.kept, np.inf), max(0, len(self.kept) - self.sinks)
        length = min(128, max(4, count // 20))
        for start in range(self.sinks, self.sinks + (count // length - 1) * length, length):
            part, following = slice(start, start + length), slice(start + length, start + 2 * length)
            shares = np.zeros(length)
            for x in (keys, values):
                least, most = x[following].min(0), x[following].max(0)
                spread = np.exp(((x[part] - least) / (most - least)).std(-1, ddof=1))
                shares += spread / spread.sum()
            worth |= dict(zip(self.kept[part], shares.tolist()))
        return worth

    def begin(self, q: Array, k: Array, v: Array) -> Array:
        """The pass over the pinned tokens. They stand before position 0."""
        pinned = list(range(-self.pinned, 0))
        self._remember(pinned, k, v)
        return self._outcome(q, pinned, pinned)[0]

    def _attended(self, q: Array, new: list[int], decodes: bool) -> Array:
        out, got = self._outcome(q, new, [*range(-self.pinned, 0), *self.kept])
        self.seen += len(new)
        if decodes and self.policy in self.highest:
            got[0][:, -1] = 0.0  # what a token gives itself
        self._note([shares[:, self.pinned :] for shares in got])
        self._evict(first=len(new) == self.prompt and new[0] == 0)
        return out

    def _echoed(self, q: Array, k: Array, v: Array) -> Array:
        """A pass whose tokens are repeated. A part of the echo stands behind the text by itself, and only what is looked at
        from there counts."""
        count = len(q) // 2
        new, text = list(range(self.seen, self.seen + count)), self.pinned + self.seen + count
        before = list(range(-self.pinned, 0))
        self._remember(new, k[:count], v[:count])
        self.kept += new
        self.score |= dict.fromkeys(new, 0.0)
        out, part = [self._outcome(q[:count], new, [*before, *self.kept])[0]], min(2048, self.positions - text)
        highest = np.zeros(len(self.kept))
        for start in range(0, count, part):
            places = range(start, min(start + part, count))
            echo = [self.seen + count + place - start for place in places]
            repeated = slice(count + start, count + places.stop)
            self._remember(echo, k[repeated], v[repeated])
            attended, got = self._outcome(q[repeated], echo, [*before, *self.kept, *echo])
            out.append(attended)
            highest = np.maximum(highest, np.max([shares[:, self.pinned : -len(echo)].max(0) for shares in got], axis=0))
            for token in echo:
                del self.keys[token], self.values[token]
        self.seen += count
        for token, share in zip(self.kept, highest):
            self.score[token] = max(self.score[token], share)
        self._evict(first=count == self.prompt and new[0] == 0)
        return np.concatenate(out)

    def _outcome(self, q: Array, new: list[int], all_kept: list[int]) -> tuple[Array, list[Array]]:
        keys, values = (np.stack([known[token] for token in all_kept]) for known in (self.keys, self.values))
        if self.rolling:  # all stand where they are among those that are kept
            keys = self._turned(keys[:, None], range(len(all_kept)))[:, 0]
        queries = self._turned(q, [all_kept.index(token) if self.rolling else token + self.pinned for token in new])
        out, got, tokens = np.zeros_like(q), [], np.array(all_kept)
        for at, token in enumerate(new):
            logits = np.where(tokens <= token, queries[at] @ keys.T / np.sqrt(q.shape[-1]), -np.inf)  # (group, kept)
            sinks = np.full(len(logits), -np.inf) if self.sink_scores is None else self.sink_scores
            top = np.maximum(logits.max(-1), sinks)[:, None]
            shares = np.exp(logits - top)
            shares /= shares.sum(-1, keepdims=True) + np.exp(sinks[:, None] - top)
            out[at] = shares @ values
            got.append(shares)
        return out, got

    def _remember(self, tokens: list[int], k: Array, v: Array) -> None:
        """Keys are kept turned, unless their positions change."""
        if not self.rolling:
            k = self._turned(k[:, None], [token + self.pinned for token in tokens])[:, 0]
        self.keys |= dict(zip(tokens, k))
        self.values |= dict(zip(tokens, v))

    def _turned(self, x: Array, positions: Sequence[int]) -> Array:
        return x if self.turn is None else self.turn(x, np.array(positions, dtype=np.float64))

    def _note(self, got: list[Array]) -> None:
        queries, is_prompt = len(got), self.seen == self.prompt
        if is_prompt and self.policy == "snapkv":
            queries = min(32, self.recent, self.prompt)
        for shares in got[-queries:]:
            takes_highest = self.policy in self.highest
            for token, share in zip(self.kept, (shares.max(0) if takes_highest else shares.sum(0)).tolist()):
                faded = self.decay * self.score[token]
                self.score[token] = max(faded, share) if takes_highest else faded + share
        if is_prompt and self.policy == "snapkv":
            raw = dict(self.score)
            self.score = {token: sum(raw.get(token + step, 0.0) for step in range(-2, 3)) / 5 for token in raw}

    def _evict(self, first: bool) -> None:
        protected = dict.fromkeys(("h2o", "snapkv", "kvzip", *self.by_worth), self.recent)
        protected["h2o-flexgen"] = self.recent - first
        window = protected.get(self.policy, 0)
        window = max(window, self.grace)
        surest = self._surest(window) if first and self.weighs else []
        while len(self.kept) > self.budget and (first or not self.once):
            free = [token for token in self.kept if self.sinks <= token < self.seen - window and token not in surest]
            lost = min(free, key=lambda token: (self._rank(token), token))
            self.kept.remove(lost)
            del self.keys[lost], self.values[lost], self.score[lost]

    def _surest(self, window: int) -> list[int]:
        """Those that stay by their score alone: half of those that a prompt leaves to choose."""
        free = [token for token in self.kept if self.sinks <= token < self.seen - window]
        room = max(0, self.budget - (len(self.kept) - len(free)))
        return sorted(free, key=lambda token: (self.score[token], token))[len(free) - room // 2 :]

    def _rank(self, token: int) -> float:
        if self.policy in ("local", "streaming"):
            return token
        if self.policy in self.by_worth:
            return self.worth[token]
        if self.weighs:
            return (self.score[token] + 1e-4) * self.worth[token]
        return self._hash(token) if self.policy == "random" else self.score[token]

    def _hash(self, token: int) -> int:
        x = (token * 2654435761 + self.head * 2246822519 + 374761393) % 2**32
        x = (x ^ (x >> 15)) * 2246822519 % 2**32
        x = (x ^ (x >> 13)) * 3266489917 % 2**32
        return (x ^ (x >> 16)) >> 8
