"""KVCache: the slots of one (layer, batch): append, attend, evict, and drop finished rows.

The slots are an image (sets, rows, kv_heads, slots, width), in whatever memory it lies during computation: a set of keys and
one of values, or of keys alone that have the values in them. A coding says how a head's values are stored in it. A policy that
evicts has scores beside it. Slots are moved as they are stored, since encoding them again would lose a little each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.formats.kernel_table import SUM
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.evict import Notes
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import (
    append,
    append_coded,
    decode_attention,
    put_rows,
    rotate,
    shared_attention,
    take_rows,
    take_slots,
)
from h2o_flexgen.kv.judges import Held, Judge, Written
from h2o_flexgen.kv.key_index import ChosenSlots, KeyIndex
from h2o_flexgen.kv.prompt_reading import PromptReading, attend_with_echo, attention_of
from h2o_flexgen.kv.slots import Change, Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import InHeads, NewTokens, Rotation


class AttentionInput(NamedTuple):
    """Queries (rows, 1, heads, head_dim), rotated, and keys and values (rows, 1, kv_heads, head_dim) as they will be kept, or
    keys alone; what the queries attend besides keys of their rows; and the worth of the tokens, (rows, kv_heads) in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    more: More | None = None
    worth: Tensor | None = None


class Living(NamedTuple):
    """Views of the living rows, which come first."""

    image: Tensor  # (sets, rows, kv_heads, slots, width)
    keys: Tensor  # (rows, kv_heads, slots, width)
    values: Tensor  # alike, or these keys
    scores: SlotScores | None
    notes: Notes | None
    key_index: KeyIndex | None


class _Old(NamedTuple):
    """The tokens held before a pass of several tokens, oldest first, as stored and as computed with. Stored keys may be
    unrotated."""

    kept: Sequence[Tensor]  # (rows, kv_heads, held, width) of each set
    k: Tensor  # (rows, kv_heads, held, head_dim)
    v: Tensor


class KVCache:
    def __init__(
        self,
        image: Tensor,
        scores: SlotScores | None = None,
        coding: Coding | None = None,
        prefixes: Mapping[int, KVCache] | None = None,
        judge: Judge | None = None,
        cap: float | None = None,
        index: KeyIndex | None = None,
        choice: ChosenSlots | None = None,
    ) -> None:
        """`cap`: the soft limit of attention scores; `index`: by which decode steps choose what they attend; `choice`: of the
        cache that this one is a part of."""
        self.image = image  # (sets, rows, kv_heads, slots, width); more rows than are alive once some are finished
        self.replaced: Tensor | None = None  # (rows, kv_heads): the one slot of each that changed, where it is stored by itself
        self.prefixes = prefixes or {}  # what rows share, each with one row that has all of it
        self.note_change: Callable[[Change], None] | None = None  # of a step that may be taken back
        self._scores = scores
        self._index = index
        self.choice = ChosenSlots() if choice is None else choice
        self._cap = cap
        self._judge = judge  # if the policy uses the worth of tokens
        self._coding = coding or Coding(PLAIN, image.dtype, image.shape[-1])
        self._rolls = scores is not None and scores.policy.rolls  # keys are stored unrotated
        self._living: tuple[int, Living] | None = None  # of this many rows
        self._reading: PromptReading | None = None  # a prompt that is computed in pieces, until its last piece

    def attend(self, now: KVStep, tokens: NewTokens) -> Tensor:
        """Appends the new keys and values, and attends to them and to all tokens held. One prompt may come in pieces, with a
        call for each."""
        return self._prefill(now, tokens) if now.is_prefill else self._decode(now, tokens)

    @property
    def kind(self) -> Hashable:
        """What is done here, apart from what is held: equal for two caches that do the same."""
        judge = None if self._judge is None else id(self._judge)  # it has weights of its own layer
        chosen_by = None if self._index is None else self._index.kind
        return self._coding, self._cap, judge, None if self._scores is None else self._scores.policy, chosen_by

    @property
    def memory(self) -> Sequence[Tensor]:
        """The tensors in which it lies, in the order of `kind`."""
        codes = None if self._index is None else self._index.codes
        return [
            self.image,
            *(() if self._scores is None else self._scores.tensors),
            *(() if codes is None else (codes,)),
        ]

    def living(self, rows: int) -> Living:
        """Views of the first rows; steps with as many rows have the same ones."""
        if self._living is None or self._living[0] != rows:
            image, scores = self.image[:, :rows], None if self._scores is None else self._scores.part(slice(rows))
            index = None if self._index is None else self._index.part(slice(rows))
            self._living = rows, Living(image, image[0], image[-1], scores, None if scores is None else scores.notes, index)
        return self._living[1]

    def part(self, rows: slice) -> KVCache:
        """The cache of some of the rows, for prompts that are computed one part after the other."""
        scores = None if self._scores is None else self._scores.part(rows)
        index = None if self._index is None else self._index.part(rows)
        return KVCache(self.image[:, rows], scores, self._coding, self.prefixes, self._judge, self._cap, index, self.choice)

    def repeated(self, row: int, times: int) -> KVCache:
        """The same slots as those of several rows. Each appends a token of its own, and then each attends to those of the rows
        before it: all append before any attends. Nothing is evicted, for which there would be scores."""
        assert self._scores is None, "rows that share slots cannot judge them"
        assert self._index is None, "rows that share slots do not choose among them"
        image = self.image[:, row : row + 1].expand(-1, times, -1, -1, -1)
        return KVCache(image, None, self._coding, self.prefixes, self._judge, self._cap)

    def keep_rows(self, index: Sequence[int], slots: int) -> None:
        """Moves row `index[dst]` to row `dst`, so that living rows fill the places of finished ones. Where steps choose what
        comes to the image, it has nothing yet of this one."""
        for dst, src in enumerate(index):
            if dst != src:
                if not self.choice.is_needed:
                    self.image[:, dst, :, :slots] = self.image[:, src, :, :slots]
                if self._scores is not None:
                    self._scores.copy_row(dst, src)
                if self._index is not None:
                    self._index.copy_row(dst, src, slots)

    # -- several tokens at once -------------------------------------------------------------------------------------------

    def _prefill(self, now: KVStep, tokens: NewTokens) -> Tensor:
        """Each query attends to all tokens held, oldest first, and to new tokens up to itself; then the budget is enforced. An
        echo may follow the new tokens; it is not kept."""
        if tokens.q.shape[1] < now.tokens:
            return self._read_piece(now, tokens)
        tokens = self._in_heads_or_not(now, tokens)
        q, k, rotation = tokens.q, tokens.k, tokens.rotation
        kept, scores = tokens.part(slice(now.positions.shape[1])), self.living(len(q)).scores
        q = self._turned_queries(now, tokens)
        if rotation is not None:
            k = rotate(k, now.turn(rotation, k.dtype, self._rolls))
        more = self._more(now, q, tokens.sink_scores)
        written = Written(kept.x, kept.k if self._rolls else k[:, : kept.k.shape[1]], kept.v, now.slots.new)
        q, k, v = (each.transpose(1, 2) for each in (q, k, tokens.v))  # (rows, heads, tokens, head_dim)
        old = self._old(now, scores)
        if old is not None:
            k = torch.cat((self._turned(now, old.k, rotation), k), 2)
            v = v if self._coding.values_in_keys else torch.cat((old.v, v), 2)
        out, got = self._outcome(now, scores, q, k, k if self._coding.values_in_keys else v, more, tokens.in_heads)
        self._enforce_budget(now, scores, written, old, got)
        return out

    def _read_piece(self, now: KVStep, tokens: NewTokens) -> Tensor:
        """The same for the next tokens of one row's prompt; the budget is enforced after the last of them."""
        k, rotation, x, scores = tokens.k, tokens.rotation, tokens.x, self.living(1).scores
        if self._reading is None or self._reading.now is not now:  # the one before was interrupted
            seen_by_judge = x if self._judge is not None and self._judge.reads_input else None
            keeps_unrotated, apart = self._rolls and rotation is not None, not self._coding.values_in_keys
            self._reading = PromptReading.of(now, k, keeps_unrotated, seen_by_judge, apart)
            if (old := self._old(now, scores)) is not None:
                self._reading.begin_behind(self._turned(now, old.k, rotation), old.v)
        reading = self._reading
        reading.note(k, x)
        tokens = self._in_heads_or_not(now, tokens)
        piece, v = reading.next(tokens.q.shape[1]), tokens.v
        q = self._turned_queries(now, tokens, piece)
        if rotation is not None:
            k = rotate(k, now.turn(rotation, k.dtype, self._rolls).of(piece))
        more = self._more(now, q, tokens.sink_scores)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = reading.attend(q, k, v, more, *self._asked_of_prompt(now, scores), self._cap, tokens.in_heads)
        if reading.is_over:
            self._reading = None
            self._enforce_budget(now, scores, reading.written, self._old(now, scores), reading.got)
        return out

    def _in_heads_or_not(self, now: KVStep, tokens: NewTokens) -> NewTokens:
        """Tokens of a prompt with queries of heads only where keys are made for these: what is attended elsewhere, and an echo,
        meet keys as they are kept. The whole prompt decides for all its pieces."""
        if tokens.in_heads is None:
            return tokens
        is_alone = not now.echo and (now.slots.copies or not now.groups)
        pays = is_alone and tokens.in_heads.pays(now.tokens, now.held + now.tokens)
        return tokens if pays else tokens.in_heads.without(tokens)

    def _turned_queries(self, now: KVStep, tokens: NewTokens, piece: slice | None = None) -> Tensor:
        """The queries rotated to their positions, if they are rotated; `piece`: which of a step's tokens they are."""
        q, rotation = tokens.q, tokens.of_queries
        if rotation is not None:
            turn = now.turn(rotation, q.dtype, self._rolls)
            q = rotate(q, turn if piece is None else turn.of(piece))
        if tokens.query_lengths is not None:
            turn = now.turn(tokens.query_lengths, q.dtype, self._rolls)
            q = rotate(q, (turn if piece is None else turn.of(piece)).of_pairs(q.shape[-1] // 2))
        return q if tokens.query_norm is None else tokens.query_norm(q)

    def _old(self, now: KVStep, scores: SlotScores | None) -> _Old | None:
        if not now.held:
            return None
        kept = self._copied(now) if now.slots.copies else self._held(now, scores)
        decoded = [*map(self._coding.decode, kept)]
        return _Old(kept, decoded[0], decoded[-1])

    def _turned(self, now: KVStep, held_k: Tensor, rotation: Rotation | None) -> Tensor:
        """Held keys (rows, kv_heads, held, head_dim), rotated for attention."""
        if not self._rolls or rotation is None:
            return held_k
        return _rolled(held_k, now.held_order.expand(held_k.shape[:3]), rotation)

    def _enforce_budget(
        self, now: KVStep, scores: SlotScores | None, written: Written, old: _Old | None, got: Tensor | None
    ) -> None:
        """Chooses which of the old and new tokens are kept, by the attention that each got, and stores them."""
        coding, known, held = self._coding, self._known(now, scores), None
        kept = [coding.encode(each.transpose(1, 2)) for each in (written.k, written.v)[: coding.sets]]
        if coding.values_in_keys:
            written = written._replace(v=coding.values_of(written.k))
        written = written._replace(k=coding.of_head(written.k), v=coding.of_head(written.v))
        if old is not None:
            kept = [torch.cat(both, 2) for both in zip(old.kept, kept, strict=True)]
            if known is not None and known.worth is not None:
                values = coding.values_of(old.k) if coding.values_in_keys else old.v
                held = Held(coding.of_head(old.k), coding.of_head(values), known.worth, now.slots.counts)
        chosen = now.places_if_all_stay
        if scores is not None and known is not None:
            worth = None if self._judge is None else self._judge.of_all(written, held)
            chosen = scores.keep_best(now, got, known, worth)
        self._store(now, chosen, kept)

    def _asked_of_prompt(self, now: KVStep, scores: SlotScores | None) -> tuple[Tensor | None, str, int | None]:
        """How much queries count in the attention that tokens get, how that is gathered, and the tokens that each sees."""
        if scores is None:
            return None, SUM, None
        return scores.weights(now), scores.policy.gathers, scores.policy.sees

    def _outcome(
        self,
        now: KVStep,
        scores: SlotScores | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        more: More | None,
        in_heads: InHeads | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The outcome of attention, and the attention that each held and new token gets from the queries that count."""
        weights, gathers, window = self._asked_of_prompt(now, scores)
        if now.echo:
            return attend_with_echo(now, q, k, v, more, window, self._cap)
        return attention_of(in_heads)(q, k, v, now.counts, weights, more, gathers, window, self._cap)

    def _known(self, now: KVStep, scores: SlotScores | None) -> SlotScores | None:
        """The scores of the tokens held, oldest first."""
        if scores is None or not now.slots.copies:
            return None if scores is None else scores.held(now)
        noted = {group: prefix._scores for group, prefix in self.prefixes.items() if prefix._scores is not None}
        return scores.copied(now, noted)

    def _held(self, now: KVStep, scores: SlotScores | None) -> Sequence[Tensor]:
        """The keys and values held, oldest first. (rows, kv_heads, held, width) of each set"""
        image = self.image[:, : len(now.counts)]
        if scores is None:
            return [*image[:, :, :, : now.held]]
        index = scores.oldest_first(now)
        held = [own.new_empty(*own.shape[:2], now.held, own.shape[-1]) for own in image]
        for source, out in zip(image, held):
            take_slots(source, index, out)
        return held

    def _store(self, now: KVStep, chosen: Tensor, every: Sequence[Tensor]) -> None:
        """Fills every slot from place `chosen` (rows, kv_heads or 1, kept) of each set."""
        image, (first, kept) = self.image[:, : len(every[0])], now.slots.changed
        for own, new in zip(image, every, strict=True):
            if now.held or now.evicts:
                take_slots(new, chosen[..., first:].expand(len(new), -1, -1), own[:, :, first:kept])
            else:  # every token stays
                own[:, :, :kept] = new
        if not now.held or now.slots.copies:
            image[:, :, :, kept:] = 0  # masked, but 0 times a NaN left by an earlier user is still NaN
        if self._index is not None:
            self._index.note(image[0], first, kept)

    # -- what queries attend besides the keys of their rows ---------------------------------------------------------------

    def _more(self, now: KVStep, q: Tensor, sink_scores: Tensor | None) -> More | None:
        more = self._attended_elsewhere(now, q)
        if sink_scores is None:
            return more
        return More.of_sink_scores(sink_scores, *q.shape[:2]) if more is None else more.with_sink_scores(sink_scores)

    def _attended_elsewhere(self, now: KVStep, q: Tensor) -> More | None:
        """What queries (rows, tokens, heads, head_dim) attend in the prefixes that their rows share."""
        if now.slots.copies or not now.groups:
            return None
        (rows, tokens, heads), dim = q.shape[:3], q.shape[3]
        if len(now.groups) == 1 and len(now.groups[0][1]) == rows:
            return self._of_prefix(now.groups[0][0], q)
        scores = torch.full((rows, tokens, heads), -torch.inf, device=q.device)
        values = torch.zeros(rows, tokens, heads, dim, device=q.device)
        for prefix, own in now.groups:
            made = self._of_prefix(prefix, take_rows(q, own))
            assert made.values is not None, "a prefix has values"
            put_rows(scores, own, 0, made.scores)
            put_rows(values, own, 0, made.values)
        return More(scores, values)

    def _of_prefix(self, prefix: SharedPrefix, q: Tensor) -> More:
        image, format = self.prefixes[prefix.group].image[:, 0, :, : prefix.tokens], self._coding.format
        keys = KVSlots(image[0], format)
        values = keys if self._coding.values_in_keys else KVSlots(image[1], format)
        more = shared_attention(q.flatten(0, 1), keys, values, self._cap)
        return more.each(lambda x: x.view(*q.shape[:3], *x.shape[3:]))

    def _copied(self, now: KVStep) -> Sequence[Tensor]:
        """The keys and values of the prefixes that rows share, for each of them. (rows, kv_heads, held, width) of each set"""
        (sets, _, heads, _, width), tokens = self.image.shape, now.held
        every = self.image.new_zeros(sets, now.rows, heads, tokens, width)
        for prefix, rows in now.groups:
            every[:, rows, :, : prefix.tokens] = self.prefixes[prefix.group].image[:, :, :, : prefix.tokens]
        return [*every]

    # -- decode ----------------------------------------------------------------------------------------------------------

    def _decode(self, now: KVStep, tokens: NewTokens) -> Tensor:
        return self._attended(now, *self._appended(now, tokens), tokens.rotation)

    def choose(self, now: KVStep, tokens: NewTokens) -> None:
        """Notes the slots that a decode step attends. The step itself appends the newest tokens once more."""
        assert self._index is not None
        q, more = self._appended(now, tokens)
        _, keys, _, _, _, index = self.living(len(q))
        assert index is not None
        own, format = q.reshape(len(q), keys.shape[1], -1, q.shape[3]), self._coding.format
        self.choice.now, self.choice.slots = now, index.choose(now, own, KVSlots(keys, format), more, self._cap)

    def _appended(self, now: KVStep, tokens: NewTokens) -> tuple[Tensor, More | None]:
        """Appends the newest tokens. Returns their rotated queries, and what these attend elsewhere."""
        rotation = tokens.rotation
        if tokens.turns_queries_apart:
            asked = self.asked(now, tokens)
            self._append(now, asked.q, asked.k, asked.v, None, asked.worth)
            return asked.q, asked.more
        kept_rotated = None if self._rolls else rotation
        turned = self._append(now, tokens.q, tokens.k, tokens.v, kept_rotated, self._worth(now, tokens))
        if rotation is not None and self._rolls:
            turned = rotate(turned, now.turn(rotation, turned.dtype, rolls=True))
        return turned, self._more(now, turned, tokens.sink_scores)

    def _worth(self, now: KVStep, tokens: NewTokens) -> Tensor | None:
        """The worth of the newest tokens. (rows, kv_heads), fp32"""
        if self._judge is None:
            return None
        k, rotation = tokens.k, tokens.rotation
        if self._judge.reads_new_key and rotation is not None and not self._rolls:
            k = rotate(k, now.turn(rotation, k.dtype))
        coding = self._coding
        v = coding.values_of(k) if coding.values_in_keys else tokens.v
        return self._judge.newest(Written(tokens.x, coding.of_head(k), coding.of_head(v), now.slots.new))

    def asked(self, now: KVStep, tokens: NewTokens) -> AttentionInput:
        """What a decode step asks of a cache in other memory: all that needs no slots is computed here."""
        k, rotation = tokens.k, tokens.rotation
        q = self._turned_queries(now, tokens)
        if rotation is not None and not self._rolls:
            k = rotate(k, now.turn(rotation, k.dtype))
        v = None if self._coding.values_in_keys else tokens.v
        return AttentionInput(q, k, v, self._more(now, q, tokens.sink_scores), self._worth(now, tokens))

    def answer(self, now: KVStep, asked: AttentionInput, rotation: Rotation | None) -> Tensor:
        """The same step in the memory with the slots: appends, attends and evicts. (rows, 1, heads * head_dim)"""
        self._append(now, asked.q, asked.k, asked.v, None, asked.worth)
        return self._attended(now, asked.q, asked.more, rotation)

    def _attended(self, now: KVStep, q: Tensor, more: More | None, rotation: Rotation | None) -> Tensor:
        """Attends to all slots, the appended newest token included, with rotated queries; then evicts."""
        rows, _, heads, head_dim = q.shape
        image, keys, values, scores, _, index = self.living(rows)
        kv_heads = keys.shape[1]
        if scores is not None and self._rolls and rotation is not None:
            order = now.before[:, :, None] + scores.order(now)
            attended = KVSlots(_rolled(self._coding.decode(keys), order, rotation))
        else:
            attended = KVSlots(keys, self._coding.format)
        q = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)  # a group's query heads take the place of queries
        kept = attended if self._coding.values_in_keys else KVSlots(values, self._coding.format)
        gathers = None if scores is None or scores.scores is None else scores.policy.gathers
        if index is not None:
            out, got = index.attend(now, q, attended, kept, more, gathers, self._cap, self.choice.taken(now))
        else:
            out, got = decode_attention(q, attended, kept, now.with_newest, now.mask, more, gathers, self._cap)
        if scores is not None:
            self.replaced = self._evict(now, image, scores, got)
        if index is not None and self.replaced is not None:
            index.follow(now, self.replaced)
        changed = self.replaced
        if changed is None and (self.choice.is_needed or now.slots.stores_singly):
            changed = now.counts[:, None].expand(-1, kv_heads)  # the newest token's slots
        if self.choice.is_needed:
            self.choice.changed = changed
        if now.slots.stores_singly:
            self.replaced = changed
        return out.reshape(rows, 1, heads * head_dim)

    def _evict(self, now: KVStep, image: Tensor, scores: SlotScores, got: Tensor | None) -> Tensor | None:
        if self.note_change is None:
            return scores.evict(now, image, got)
        change = Change.by(now, image, scores, got)
        self.note_change(change)
        return change.slots

    def _append(
        self, now: KVStep, q: Tensor, k: Tensor, v: Tensor | None, rotation: Rotation | None, worth: Tensor | None
    ) -> Tensor:
        """Writes the newest token after the slots that each row holds, and returns the rotated query."""
        turn = None if rotation is None else now.turn(rotation, q.dtype)
        there, coding = self.living(q.shape[0]), self._coding
        v = None if coding.values_in_keys else v
        if not coding.is_plain:
            out = append_coded(coding.format, there.image, now.newest, q, k, v, turn, there.notes, worth)
            if out is not None:
                return out
            if turn is not None:  # keys are rotated before they are encoded
                q, k, turn = rotate(q, turn), rotate(k, turn), None
            k, v = coding.encode(k), None if v is None else coding.encode(v)
        return append(there.image, now.newest, q, k, v, turn, there.notes, worth)


def _rolled(keys: Tensor, order: Tensor, rotation: Rotation) -> Tensor:
    """Rotates stored, unrotated keys by their order among the tokens held."""
    slots, head_dim = keys.shape[2:]
    turn = rotation.turn(order.reshape(-1, slots), keys.dtype)
    return rotate(keys.reshape(-1, slots, 1, head_dim), turn).view(keys.shape)
