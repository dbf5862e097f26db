"""The rows of one batch while they are generated: which are alive, what is computed next, and which replace finished ones.

A finished row leaves at once: from the next layer on it is no longer computed. The caches follow when they are next opened:
living rows from the end fill the gaps, so that living rows always come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.drafts import NONE_DRAFTED, Drafted, Drafts
from h2o_flexgen.engine.masks import BatchMasks, MaskMaker, RowBroken
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.stores.prefix_store import Prefix
from h2o_flexgen.engine.stores.states_of_visits import TokensLaid
from h2o_flexgen.kernels.matrix import AdaptedRows
from h2o_flexgen.kernels.pick_tokens import Upload
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.working_space import attended_together
from h2o_flexgen.policies.occupancy import Occupancy, StepSlots
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.sampling.sampler import NoTokenLeft, Sampler
from h2o_flexgen.sampling.structured_outputs import ConstraintBroken

# a row's number is its place among all rows of the input: that of its prompt, if every prompt has one completion
OnToken = Callable[[int, int, str | None], object]  # row, token, new text if the row's text is decoded as it comes
OnLogits = Callable[[int, int, Tensor], None]  # row, number of the token, a copy of its logits (vocab,)


class TokensAhead(NamedTuple):
    """Tokens that follow others of their rows in a decode step: one of each of some neighbouring rows, or some of one row."""

    rows: slice  # their places in the batch
    levels: tuple[KVStep, ...]  # the step of these tokens alone, each as a row
    of_one: bool = False  # several of one row, of which each is attended by those behind it
    number: int | None = None  # of guesses, for which slots may be given up: how many others lie between them and the newest


class RowRange(NamedTuple):
    """Neighbouring tokens of a row."""

    row: int
    first: int
    end: int


@dataclass(frozen=True)
class RowsPart:
    """Rows that a layer computes at once: all in a decode step, a few at a time for long prompts; or one piece by piece. Or a
    prefix that rows share, as one row that has no seat."""

    rows: slice
    levels: tuple[KVStep, ...]  # the step as each level of KV heads has it
    tokens: Tensor  # (rows, tokens)
    prefix: int | None = None  # the number of its group
    at_once: int | None = None  # the most tokens that a layer computes at once; None: all
    ahead: tuple[TokensAhead, ...] = ()  # in a decode step: each token is a row of `tokens` of its own, behind the others
    places: tuple[tuple[int, ...], ...] = ()  # if there are tokens ahead: where those of each row are among `tokens`
    adapters: tuple[int, ...] = ()  # the number of each row's adapter; nothing where no row has one

    @cached_property
    def positions(self) -> Tensor:
        """The positions of all tokens in their texts."""
        own = self.now.text_positions
        return torch.cat([own, *(one.levels[0].text_positions for one in self.ahead)]) if self.ahead else own

    def on(self, device: Device) -> RowsPart:
        """The same, on another device."""
        target = device.torch_device

        def there(levels: Iterable[KVStep]) -> tuple[KVStep, ...]:
            return tuple(now.on(target, device.upload) for now in levels)

        ahead = tuple(one._replace(levels=there(one.levels)) for one in self.ahead)
        return replace(self, levels=there(self.levels), tokens=self.tokens.to(target, non_blocking=True), ahead=ahead)

    @cached_property
    def adapted(self) -> AdaptedRows | None:
        """The adapters of the rows of `tokens`; None if none has one."""
        if not self.adapters:
            return None
        own = [*self.adapters, *(0 for _ in range(len(self.tokens) - len(self.adapters)))]
        for number, places in zip(self.adapters, self.places):
            for place in places:
                own[place] = number
        return AdaptedRows(tuple(own), self.tokens.device)

    @cached_property
    def laid(self) -> TokensLaid | None:
        """The places of the tokens of each row, if some have several in a decode step."""
        return TokensLaid.of(self.places, self.tokens.device) if self.places else None

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The tokens that a layer computes one piece after the other."""
        return (() if self.at_once is None else self.now.pieces(self.at_once)) or (slice(None),)

    @property
    def lengths(self) -> Tensor | None:
        """The tokens of each row that are no pads. None stands for all, also of a prompt that is computed piece by piece."""
        new = self.now.slots.new
        return None if min(new) == max(new) else self.now.lengths[:, 0, 0]

    @property
    def now(self) -> KVStep:
        """The step, for what all levels know alike: rows, tokens and what rows share, but not their slots."""
        return self.levels[0]


class SharedOf(NamedTuple):
    """What a row shares: the first tokens of a prefix."""

    prefix: Prefix
    tokens: int


class BatchRows:
    def __init__(
        self,
        batch: Batch,
        rows: Sequence[RowState],
        plan: Plan,
        policies: Sequence[KVPolicy],
        gen_len: int,
        device: torch.device,
        upload: Upload = Tensor.to,
        read_back: Callable[[Tensor], Tensor] = Tensor.cpu,
        masks: MaskMaker | None = None,
        drafts: Drafts | None = None,
        most_ahead: int = 0,
        runs_ahead: bool = False,
    ) -> None:
        """`policies`: of each level of KV heads. `masks`: of rows that are held to something; otherwise none may be. `drafts`:
        if tokens are guessed. `most_ahead`: tokens of each row for which a step has room beside the newest. `runs_ahead`: rows
        take those that must come without asking the model."""
        self.generation = 0  # how often the living rows have moved up
        self.places_before: list[int] = list(range(len(rows)))  # for each place, the one before the rows last moved up
        self.held_before: tuple[int, ...] = ()  # slots in use when the rows last moved up, in the heads of each level
        self.staying: Sequence[int] = ()  # by the place of a row in the last pass: tokens behind its newest that count
        self.last_step: int | None = None  # known once all rows are finished and no more come
        self.follows_trial = False  # the step before had tokens ahead, guessed or certain: states may just have noted them
        self.parts: tuple[RowsPart, ...] = ()
        self._batch = batch  # the living rows
        self._rows = list(rows)
        self._policies = policies
        self._gen_len = gen_len
        self._occupancies = self._occupancies_of(batch)
        self._capacities = [own.capacity for own in self._occupancies]
        self._device = device
        self._upload, self._read_back = upload, read_back
        self._newest = torch.empty(0, dtype=torch.long, device=device)  # the newest token of each row, once one was picked
        self._mask_maker = masks
        self._drafts = drafts
        self._attended_at_once = attended_together(batch.size, drafts is not None)
        self._most_ahead = most_ahead
        self._runs_ahead = runs_ahead
        self._slots = dict[int, Sequence[Occupancy]]()  # of each row, at each level, where rows are at steps of their own
        if drafts is not None and batch.seats is None:
            self._slots = {row.row: self._occupancies_of(batch.only([place])) for place, row in enumerate(rows)}
        self.parts = self._prompts(plan.prefill_tokens)
        self._masks = self._begin_masks()

    def _occupancies_of(self, batch: Batch) -> Sequence[Occupancy]:
        return [policy.occupancy(batch, self._gen_len) for policy in self._policies]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compute. Lanes read this at any moment, also after rows left and before others join."""
        return self.last_step is not None

    @property
    def drafted(self) -> Drafted:
        return NONE_DRAFTED if self._drafts is None else self._drafts.drafted

    @property
    def lives_on(self) -> bool:
        """Whether the KV of these rows is needed after they have ended."""
        return self._batch.lives_on

    @property
    def alive(self) -> Sequence[RowState]:
        return self._rows

    @property
    def steps_together(self) -> int:
        """Steps until the first of the living rows has all its tokens; it may end sooner."""
        return min((row.max_tokens - row.num_generated for row in self._rows), default=0)

    # -- what is computed next -------------------------------------------------------------------------------------------

    @property
    def _own_parts(self) -> Sequence[RowsPart]:
        return [part for part in self.parts if part.prefix is None]

    @property
    def size(self) -> int:
        return sum([part.now.rows for part in self.parts if part.prefix is None])  # a list: each visit asks

    @property
    def tokens(self) -> int:
        """Tokens that are computed, with pads."""
        return sum(part.tokens.numel() for part in self.parts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that are read, without pads."""
        return sum(sum(part.now.slots.new) for part in self.parts if part.now.is_prefill)

    @property
    def prefixes(self) -> Set[int]:
        """The groups of the prefixes that this step computes, copies or attends to."""
        if not any(part.now.prefixes or part.prefix is not None for part in self.parts):
            return frozenset()
        shared = {prefix.group for part in self.parts for prefix, _ in part.now.groups}
        return shared.union(part.prefix for part in self.parts if part.prefix is not None)

    def changed(self, level: int) -> tuple[int, int]:
        """The range of slots that this step writes in the heads of a level, over all rows."""
        if len(self.parts) == 1 and not self.parts[0].ahead:
            return self.parts[0].levels[level].slots.changed
        steps = ((part.levels, *(one.levels for one in part.ahead)) for part in self._own_parts)
        ranges = [levels[level].slots.changed for of_part in steps for levels in of_part]
        return min(first for first, _ in ranges), max(last for _, last in ranges)

    def ranges(self, level: int) -> Sequence[RowRange]:
        """The slots that this step writes in the heads of a level, row by row, where every token stays in its place, or all
        are chosen anew."""
        found = []
        for part in self._own_parts:
            slots = part.levels[level].slots
            is_anew = slots.copies or (slots.is_prefill and slots.evicts)
            counts = (0,) * len(slots.counts) if is_anew else slots.counts
            found += [RowRange(row, *own) for row, own in enumerate(zip(counts, slots.after), part.rows.start or 0)]
        return found

    @property
    def joining(self) -> slice | None:
        """The rows that have their prompts read in this step; they come after all others."""
        reading = [part.rows for part in self._own_parts if part.now.is_prefill]
        return slice(reading[0].start, reading[-1].stop) if reading else None

    @property
    def beginning(self) -> slice | None:
        """Those of them with texts that begin in this step: all, or none where texts go on."""
        first = next((part for part in self._own_parts if part.now.is_prefill), None)
        return None if first is None or not first.now.slots.begins[0] else self.joining

    @property
    def changes_all(self) -> bool:
        """Whether new rows join others: then all slots of the batch are stored again."""
        return len(self.parts) > 1 and len({part.now.is_prefill for part in self._own_parts}) > 1

    def split(self, hidden: Tensor) -> Iterator[tuple[RowsPart, Tensor]]:
        """Each part with its hidden states, (rows, tokens, width). Several parts lie one behind the other, (tokens, width)."""
        if len(self.parts) == 1:
            yield self.parts[0], hidden
            return
        start = 0
        for part in self.parts:
            end = start + part.tokens.numel()
            yield part, hidden[start:end].view(*part.tokens.shape, -1)
            start = end

    def prompts(self, hidden: Tensor) -> Iterator[tuple[RowState, Tensor]]:
        """The rows that have their prompts read, each with the hidden states of its new tokens, (tokens, width)."""
        for part, states in self.split(hidden):
            if part.now.is_prefill and part.prefix is None:
                for row, own, length in zip(self._rows[part.rows], states, part.now.slots.new):
                    yield row, own[:length]

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """The hidden states of each row's last token, for logits: (rows, width)."""
        return torch.cat([self._last(part, states) for part, states in self.split(hidden) if part.prefix is None])

    def _last(self, part: RowsPart, hidden: Tensor) -> Tensor:
        if hidden.shape[1] > 1:
            return hidden[part.now.row_index, part.now.lengths[:, 0, 0] - 1]
        if not part.ahead:
            return hidden[:, 0]
        return self.at([own[row.ahead] for row, own in zip(self._rows, part.places)], hidden[:, 0])

    def tried_hidden(self, hidden: Tensor) -> Tensor | None:
        """The hidden states of the tokens that were guessed, turn by turn: the first ones of all rows, and so on. None if there
        are none."""
        part, states = next(iter(self.split(hidden)))
        places = [part.places[place][row.ahead + turn] for turn, rows in self._turns for place, row in rows]
        return self.at(places, states[:, 0]) if places else None

    @property
    def _turns(self) -> Iterator[tuple[int, Sequence[tuple[int, RowState]]]]:
        """The rows that have a first guessed token, with their places, those that have a second one, and so on."""
        drafts = self._drafts
        most = 0 if drafts is None else max((len(drafts.of(row)) for row in self._rows), default=0)
        for turn in range(1, most + 1):
            assert drafts is not None
            yield turn, [(place, row) for place, row in enumerate(self._rows) if len(drafts.of(row)) >= turn]

    def note_prefixes(self, hidden: Tensor) -> None:
        """Keeps the hidden states of shared prefixes that are computed now, for rows that ask for their log-probabilities."""

    def prefix_of(self, row: RowState) -> SharedOf | None:
        """What a row shares with others."""
        return None

    @property
    def spared_tokens(self) -> int:
        """Tokens of the prompts read now that need not be computed, as they were computed for other rows."""
        return 0

    def _prompts(self, tokens: int) -> tuple[RowsPart, ...]:
        parts, start = [], 0
        for batch in self._batch.parts(tokens):
            rows = slice(start, start + batch.size)
            tokens_of_part = padded(self._rows[rows], batch.lengths, batch.readings)
            slots = [policy.occupancy(batch, self._gen_len).at(0) for policy in self._policies]
            levels = self._steps_of(slots, echoes_within=batch.echoes_within)
            own = adapters_of(self._rows[rows])
            parts.append(RowsPart(rows, levels, self._uploaded(tokens_of_part), at_once=tokens, adapters=own))
            start += batch.size
        return tuple(parts)

    def _steps_of(
        self,
        slots: Iterable[StepSlots],
        prefixes: Sequence[SharedPrefix | None] = (),
        capacity: int | None = None,
        echoes_within: int | None = None,
    ) -> tuple[KVStep, ...]:
        """The step of each level, with these slots; `capacity`: if not that of the seats."""
        given, each = (self._device, prefixes, self._upload, echoes_within), zip(slots, self._capacities, strict=True)
        return tuple(KVStep.of(own, capacity or usual, *given) for own, usual in each)

    def _uploaded(self, values: Tensor) -> Tensor:
        return self._upload(values, self._device)

    # -- at the head -----------------------------------------------------------------------------------------------------

    def growing(self) -> list[int]:
        """The places of rows for which a token is picked; those that only have their prompts scored end here."""
        for row in self._rows:
            if row.max_tokens == 0:
                row.stop("length")
        return [place for place, row in enumerate(self._rows) if row.finish_reason is None]

    def at(self, places: Sequence[int], values: Tensor) -> Tensor:
        """The values of some rows."""
        return values[self._uploaded(torch.tensor(places))]

    def advance(
        self,
        logits: Tensor,
        sampler: Sampler,
        step: int,
        on_token: OnToken | None = None,
        on_logits: OnLogits | None = None,
    ) -> int:
        """Picks a token for every growing row without a given one, drops finished rows, and returns the number of tokens. A row
        that starts again is given the tokens it had, and listeners do not get them again. Behind its token a row takes those
        of its guess that are picked anyway, and those that must follow, unless a listener is to have their logits."""
        growing = self.growing()
        first = self._first_steps()
        rows = self._rows if len(growing) == len(self._rows) else [self._rows[place] for place in growing]
        pick = partial(self._pick, sampler=sampler, on_token=on_token, on_logits=on_logits)
        self._newest = pick(rows, logits[: len(rows)], self._masks)
        count = len(rows) + self._try_on(logits[len(rows) :], pick)
        if self._runs_ahead and on_logits is None:
            count += sum(self._run_ahead(rows, place, on_token) for place, row in enumerate(rows) if row.constraint is not None)
        if count > len(rows) and self._drafts is not None:
            self._newest = self._uploaded(torch.tensor([row.seen[-1 - row.ahead] for row in rows]))
        self.staying = [now - before - 1 for now, before in zip(self._first_steps(), first)]
        self._drop(step, growing)
        return count

    def _pick(
        self,
        rows: Sequence[RowState],
        logits: Tensor,
        made: BatchMasks | None,
        sampler: Sampler,
        on_token: OnToken | None,
        on_logits: OnLogits | None,
    ) -> Tensor:
        """Picks the next token of each of these rows, and returns them where they were picked."""
        params, indices, histories = zip(*[(row.params, row.index, row.history) for row in rows])
        steps, given = [row.num_generated for row in rows], [row.given for row in rows]
        with _naming(rows):
            held = (None, None) if made is None else (made.of(rows), partial(made.refuse, rows) if made.tries else None)
            picked = sampler.sample(logits, params, indices, steps, histories, given, self._upload, self._read_back, *held)
        for place, (row, token, logprobs) in enumerate(zip(rows, picked.tokens.tolist(), picked.logprobs)):
            known = row.known
            if known is None and on_logits is not None:
                on_logits(row.row, row.num_generated, logits[place].float().cpu())
            with _naming(rows, place):
                text = row.push(token, logprobs if known is None else known[1])
            if known is None and on_token is not None:
                on_token(row.row, token, text)
        return picked.where_picked

    def _try_on(self, logits: Tensor, pick: Callable[[Sequence[RowState], Tensor, BatchMasks | None], Tensor]) -> int:
        """Goes on with the rows of which guessed tokens were picked, as long as they are, and returns the number of tokens.
        `logits`: behind all guessed tokens, turn by turn."""
        if self._drafts is None:
            return 0
        right, going, start, count = dict[int, int](), {*range(len(self._rows))}, 0, 0  # right ones and rows, by their places
        for turn, tried in self._turns:
            held = [number for number, (place, row) in enumerate(tried) if place in going and self._is_right(row, turn)]
            right.update({tried[number][0]: turn for number in held})
            held = [number for number in held if not tried[number][1].finished]
            if rows := [tried[number][1] for number in held]:
                pick(rows, self.at([start + number for number in held], logits), self._masks_of(rows))
            going, start, count = {tried[number][0] for number in held}, start + len(tried), count + len(rows)
        there = [(row, right.get(place, 0)) for place, row in enumerate(self._rows) if self._drafts.of(row)]
        self._drafts.judge([row for row, _ in there], [accepted for _, accepted in there])
        return count

    def _is_right(self, row: RowState, turn: int) -> bool:
        """Whether the newest token of a row is the one that was guessed for this turn."""
        return self._drafts is not None and row.seen[-1] == self._drafts.of(row)[turn - 1]

    def _run_ahead(self, rows: Sequence[RowState], place: int, on_token: OnToken | None) -> int:
        """Takes the tokens of a row that must come next, and returns their number. The next pass computes them with the one
        before."""
        row = rows[place]
        row.ahead = 0
        with _naming(rows, place):
            while row.ahead < self._most_ahead and (token := row.only_token) is not None:
                known = row.known
                row.ahead += 1
                text = row.push(token, None if known is None else known[1])
                if known is None and on_token is not None:
                    on_token(row.row, token, text)
        return row.ahead

    def _begin_masks(self) -> BatchMasks | None:
        """Asks for the masks of the next tokens."""
        return self._masks_of(self._rows)

    def _masks_of(self, rows: Sequence[RowState]) -> BatchMasks | None:
        return None if self._mask_maker is None else self._mask_maker.begin(rows, tries=self._device.type == "cpu")

    def drop_finished(self, step: int) -> None:
        """Ends a step in which no token was picked."""
        self._drop(step, range(len(self._rows)))

    def _drop(self, step: int, growing: Sequence[int]) -> None:
        """Moves living rows up, and prepares what is computed next for them. `growing`: the places of the newest tokens."""
        self._move_up([place for place, row in enumerate(self._rows) if row.finish_reason is None])
        if self._rows and self.places_before != list(growing):
            of_place = {place: number for number, place in enumerate(growing)}
            self._newest = self.at([of_place[place] for place in self.places_before], self._newest)
        self.parts = self._next_parts(step + 1)
        if self._drafts is not None:
            self._drafts.begin(not any(part.now.is_prefill for part in self.parts))
        self._masks = self._begin_masks()
        if not self._rows:
            self.last_step = step

    def _next_parts(self, step: int) -> tuple[RowsPart, ...]:
        if not self._rows:
            return ()
        if self._drafts is not None:
            return (self._decoding(slice(None)),)
        levels = self._steps_of(own.at(step) for own in self._occupancies)
        return (RowsPart(slice(None), levels, self._newest[:, None], adapters=adapters_of(self._rows)),)

    def _decoding(self, staying: slice) -> RowsPart:
        """The step of rows that are each at a step of their own, with what they have taken ahead, and what is guessed behind
        it. All rows that there are stay."""
        if self._drafts is not None:
            self._drafts.propose(self._rows, [self._most_ahead - row.ahead for row in self._rows])
        self.follows_trial = any(part.ahead for part in self.parts)
        first, more = self._first_steps(), [*map(self._behind_newest, self._rows)]
        levels, most = self._steps_at([*zip(self._rows, first)]), max(map(len, more))
        adapters = adapters_of(self._rows)
        if not most:
            return RowsPart(staying, levels, self._newest[:, None], adapters=adapters)
        ahead, tokens, places = list[TokensAhead](), list[int](), [[place] for place in range(len(more))]
        for group in self._grouped([*map(len, more)]):
            levels_ahead = self._steps_at([(self._rows[place], first[place] + turn + 1) for place, turn in group.tokens])
            ahead.append(TokensAhead(group.rows, levels_ahead, group.of_one, group.number))
            for place, turn in group.tokens:
                places[place].append(len(more) + len(tokens))
                tokens.append(more[place][turn])
        all_tokens = torch.cat((self._newest, self._uploaded(torch.tensor(tokens))))
        own = tuple(map(tuple, places))
        return RowsPart(staying, levels, all_tokens[:, None], ahead=tuple(ahead), places=own, adapters=adapters)

    def _first_steps(self) -> list[int]:
        """The step of each row in which its next pass begins."""
        return [row.num_generated - row.ahead for row in self._rows]

    def _grouped(self, more: Sequence[int]) -> Sequence[_Group]:
        """Tokens that are attended in one call, for so many of each row: those of a row where all is kept and attended, or else
        those that rows have in one turn. The fewer calls, the better, but none has more tokens than the plan has room for."""
        certain = [row.ahead for row in self._rows]
        in_turn = [
            _Group(rows, [(place, turn) for place in range(rows.start, rows.stop)], False, turn if is_guess else None)
            for turn in range(max(more))
            for is_guess, rows in _neighbours([turn >= known if turn < count else None for count, known in zip(more, certain)])
        ]
        by_row = [
            _Group(
                slice(place, place + 1),
                [(place, turn) for turn in range(start, min(count, start + self._attended_at_once))],
                True,
            )
            for place, count in enumerate(more)
            for start in range(0, count, self._attended_at_once)
        ]
        return by_row if len(by_row) < len(in_turn) and all(policy.attends_all for policy in self._policies) else in_turn

    def _behind_newest(self, row: RowState) -> Sequence[int]:
        """The tokens of a row that are computed behind its newest: those taken ahead, and those that are guessed."""
        guessed = () if self._drafts is None else self._drafts.of(row)
        return [*(row.seen[-row.ahead :] if row.ahead else ()), *guessed]

    def _steps_at(self, rows: Sequence[tuple[RowState, int]]) -> tuple[KVStep, ...]:
        """The decode step of rows that are each at a step of their own."""
        each, steps = [self._slots[row.row] for row, _ in rows], [step for _, step in rows]
        return self._steps_of((Occupancy.joint_step([*zip(slots, steps)]) for slots in zip(*each)), self._shared_by(rows))

    def _shared_by(self, rows: Sequence[tuple[RowState, int]]) -> Sequence[SharedPrefix | None]:
        """What rows share with others and keep elsewhere than in their own slots."""
        return ()

    def _move_up(self, alive: list[int]) -> None:
        """Fills the gaps among the first rows with living rows from the end."""
        count = len(alive)
        if count == len(self._rows):
            self.places_before = alive
            return
        from_behind = [place for place in reversed(alive) if place >= count]
        in_front = set(alive)
        kept = [place if place in in_front else from_behind.pop(0) for place in range(count)]
        self.generation += 1
        self.held_before = tuple(self.changed(level)[1] for level in range(len(self._policies)))
        self._rows = [self._rows[place] for place in kept]
        self._keep(kept)
        self.places_before = kept

    def _keep(self, places: Sequence[int]) -> None:
        self._batch = self._batch.only(places)
        self._occupancies = [policy.occupancy(self._batch, self._gen_len) for policy in self._policies] if places else []


class _Group(NamedTuple):
    """Tokens that are attended in one call."""

    rows: slice  # their places in the batch
    tokens: Sequence[tuple[int, int]]  # the place of each row, and which of its tokens behind the newest it is
    of_one: bool
    number: int | None = None  # of guesses, as in `TokensAhead`


def _neighbours(kinds: Sequence[bool | None]) -> Iterator[tuple[bool, slice]]:
    """The ranges of neighbouring places of a kind. None is no kind."""
    start = 0
    for kind, own in groupby(kinds):
        count = len([*own])
        if kind is not None:
            yield kind, slice(start, start + count)
        start += count


@contextmanager
def _naming(rows: Sequence[RowState], place: int = 0) -> Iterator[None]:
    """A context in which an error of one row names it. `place`: of the row, where the error does not say which it is."""
    try:
        yield
    except NoTokenLeft as broken:
        broken.row = rows[broken.place].row  # numbers of prompts may be given twice
        raise
    except ConstraintBroken as broken:
        place = broken.place if isinstance(broken, RowBroken) else place
        lost = NoTokenLeft(place, rows[place].index, f"prompt {rows[place].index} cannot go on: {broken}")
        lost.row = rows[place].row
        raise lost from broken


def adapters_of(rows: Sequence[RowState]) -> tuple[int, ...]:
    """The number of each row's adapter; nothing where no row has one."""
    own = tuple(row.adapter for row in rows)
    return own if any(own) else ()


def padded(rows: Sequence[RowState], lengths: Sequence[int], readings: int = 1) -> Tensor:
    """The last tokens of prompts (rows, tokens), padded on the right with 0, and all of them again where they are echoed. Pads
    are computed, but nothing attends to them."""
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for place, (row, length) in enumerate(zip(rows, lengths)):
        tokens[place, :length] = torch.tensor(row.prompt_ids[-length:])  # earlier ones are in the cache
    return tokens.repeat(1, readings)


class PartsThere:
    """The parts of a step on a device other than the one that picked their tokens. It serves one device. The data of a step are
    copied to it once for all its layers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, int | None], tuple[RowsPart, RowsPart]] = {}  # batch and first row -> a part, and it there

    def of(self, batch: int, part: RowsPart) -> RowsPart:
        known = self._known.get((batch, part.rows.start))
        if known is None or known[0] is not part:
            known = part, part.on(self._device)
            self._known[batch, part.rows.start] = known
        return known[1]
