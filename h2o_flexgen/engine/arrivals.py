"""Arrivals: requests that come while a block runs, from any thread. First come, first served: a request that finds a free seat
joins at the next pass over the weights.

The block is planned before any request comes, for the longest prompt and the most tokens that are admitted. It runs until no
row is left. A batch that is empty at its turn stays empty until the block ends. If enough rows wait to fill it, no row joins
for a while: the block ends with its rows, and the next block has all seats.

Background requests have a queue of their own. They take free seats when no other request waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from threading import Condition
from time import monotonic
from typing import NamedTuple

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.engine.job import Request, prompt_of
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.engine.row_state import RowState, completion_of
from h2o_flexgen.engine.seated_rows import NOTHING, HeldBytes, Sharing, Waiting, held_bytes
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import one_params

ROWS_PER_SEAT = 16  # that a block is planned for: after so many it has to end, and a new block begins
SECONDS_BETWEEN_LOOKS = 0.5  # between wake-ups of the main thread, so that it notices a signal that another thread received
GIVEN_UP = "abort"  # finish reason of a row for which no client waits any more
OnPiece = Callable[[RowState, int, "str | None"], object]  # row, its newest token, its new text


class Load(NamedTuple):
    """How many rows wait, and how many of the seats are taken."""

    waiting: int  # not in the background
    seated: int
    seats: int


class Arrival:
    """A request that has come: its rows, one for each completion."""

    def __init__(self, rows: Sequence[RowState], on_piece: OnPiece | None) -> None:
        self.rows = rows
        self.on_piece = on_piece
        self.in_background = False
        self.is_given_up = False

    @property
    def is_over(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def completion(self) -> Completion:
        return replace(completion_of(self.rows), cached_tokens=self.rows[0].shared_tokens)


class TooLong(ValueError):
    """An error: the seats have no room for this prompt, or for so many tokens."""


class Closed(ValueError):
    """An error: no more requests are admitted."""


class Arrivals(Waiting):
    keeps_prefixes = True

    def __init__(self, planned: WorkloadPlan, maker: RowMaker) -> None:
        """`planned`: a workload of rows that come and go, each as long as a row may be."""
        self.planned = planned
        self.longest_prompt, self.most_tokens = planned.workload.prompt_lens[0], planned.workload.gen_len
        self._maker = maker
        self._numbers, self._places = count(), count()
        self._changed = Condition()
        self._queue: deque[RowState] = deque()
        self._background: deque[RowState] = deque()
        self._seated: dict[int, RowState] = {}
        self._of_row: dict[int, Arrival] = {}  # of all rows that have not ended
        self._needs: dict[int, SeatNeed] = {}  # of rows that have a seat, from when it is known what they share
        self._sharing = Sharing(planned.plan) if planned.workload.prefix_room else None
        self._is_closed = False
        self.seat_in(planned.blocks.first)

    # -- requests that come, in any thread ---------------------------------------------------------------------------------

    def offer(self, request: Request, on_piece: OnPiece | None = None, in_background: bool = False) -> Arrival:
        """Puts a request at the end of a queue; its prompt is tokenized already. Without max_tokens it gets the most allowed.
        `on_piece` is called for every token, in the thread that computes."""
        arrival = self.prepare(request, on_piece)
        self.admit([arrival], in_background)
        return arrival

    def prepare(self, request: Request, on_piece: OnPiece | None = None) -> Arrival:
        """A request that may be admitted. A request too large for a seat is refused."""
        number = next(self._numbers) if request.index is None else request.index
        return Arrival(self._maker.rows_of(number, self._bounded(number, request), on_piece is not None, 0), on_piece)

    def admit(self, arrivals: Iterable[Arrival], in_background: bool = False) -> None:
        """Puts all of these at the end of a queue at once, so that a block that begins now sees them all."""
        come = list(arrivals)
        if self._sharing is not None:
            self._sharing.take_note((arrival.rows[0].compared_ids, len(arrival.rows)) for arrival in come)
        with self._changed:
            if self._is_closed:
                raise Closed("no more requests are taken")
            for arrival in come:
                arrival.in_background = in_background
                for row in arrival.rows:
                    row.row = next(self._places)
                    self._of_row[row.row] = arrival
                self._queue_of(arrival).extend(arrival.rows)
            self._changed.notify_all()

    def _queue_of(self, arrival: Arrival) -> deque[RowState]:
        return self._background if arrival.in_background else self._queue

    def _bounded(self, number: int, request: Request) -> Request:
        prompt_len, params = len(prompt_of(request).ids), one_params(request.params)
        if prompt_len > self.longest_prompt:
            raise TooLong(f"the prompt has {prompt_len} tokens, and no more than {self.longest_prompt} are taken")
        if params.max_tokens is None:
            params = params.up_to(min(self.most_tokens, self._maker.size(number, request).gen_len))
        elif params.max_tokens > self.most_tokens:
            raise TooLong(f"max_tokens is {params.max_tokens}; a seat has room for {self.most_tokens} at most")
        return replace(request, params=params)

    def give_up(self, arrival: Arrival) -> None:
        """Cancels a request: its rows leave the queue, and rows that have a seat end at their next token."""
        with self._changed:
            arrival.is_given_up = True
            queue = self._queue_of(arrival)
            for row in arrival.rows:
                if row in queue:
                    queue.remove(row)
                    del self._of_row[row.row]
                    row.stop(GIVEN_UP)

    def close(self) -> None:
        """Admits no more requests. Those that were admitted go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- the thread that serves them ---------------------------------------------------------------------------------------

    @property
    def load(self) -> Load:
        with self._changed:
            return Load(len(self._queue), len(self._seated), sum(self._sizes))

    @property
    def waiting_in_background(self) -> int:
        """How many rows wait in the background queue."""
        with self._changed:
            return len(self._background)

    @property
    def in_foreground(self) -> int:
        """How many rows wait or have a seat that are not in the background."""
        with self._changed:
            seated = (self._of_row.get(row) for row in self._seated)
            return len(self._queue) + sum(arrival is not None and not arrival.in_background for arrival in seated)

    @property
    def requests(self) -> tuple[int, int]:
        """How many requests have a row with a seat, and how many have none yet."""
        with self._changed:
            come = {id(arrival) for arrival in self._of_row.values()}
            seated = {id(self._of_row[row]) for row in self._seated if row in self._of_row}
            return len(seated), len(come - seated)

    @property
    def kv_bytes(self) -> HeldBytes:
        """Bytes of the keys and values of seated rows, and the bytes that all seats can hold."""
        with self._changed:
            return held_bytes(self._block, [(row, self._needs.get(row.row)) for row in self._seated.values()])

    def gather(self, seconds: float) -> bool:
        """Waits for a request, and then until more requests fill all seats, but at most so many seconds. A background request
        does not wait for more. Returns whether a request waits; if none does, the queues are closed and none will come."""
        with self._changed:
            while self._waiting or not self._is_closed:
                if not self._changed.wait_for(lambda: self._waiting or self._is_closed, SECONDS_BETWEEN_LOOKS):
                    continue
                self._wait_for_others(monotonic() + seconds)
                if self._waiting:
                    return True  # otherwise all requests that had come were cancelled meanwhile
            return False

    @property
    def _waiting(self) -> int:
        """How many rows wait in both queues."""
        return len(self._queue) + len(self._background)

    def _wait_for_others(self, until: float) -> None:
        """Waits for more requests after the first, while seats are free and the first still waits."""
        while (left := until - monotonic()) > 0 and not self._is_closed and self._queue and self._waiting < sum(self._sizes):
            self._changed.wait(min(left, SECONDS_BETWEEN_LOOKS))

    def abandon(self) -> list[Arrival]:
        """Forgets and returns all requests that wait or have a seat, since nothing can be computed for them."""
        with self._changed:
            return self._forget(self._of_row.values())

    def break_off(self) -> list[Arrival]:
        """Forgets and returns the requests that had a seat in a block that has failed; the others keep waiting. If none had a
        seat yet, no request caused the failure, and all are forgotten: otherwise they would be retried for ever."""
        with self._changed:
            waiting = {row.row for queue in (self._queue, self._background) for row in queue}
            seated = [arrival for place, arrival in self._of_row.items() if place not in waiting]
            return self._forget(seated or self._of_row.values())

    def drop(self, row: int) -> list[Arrival]:
        """Forgets and returns the request of this row, which made the block fail. All others that had a seat wait again, before
        those that had none."""
        self.left(())
        with self._changed:
            return self._forget([self._of_row[row]] if row in self._of_row else [])

    def _forget(self, requests: Iterable[Arrival]) -> list[Arrival]:
        """Forgets all rows of these requests when no block runs, and names each once."""
        lost = [*dict.fromkeys(requests)]
        own = {row.row for arrival in lost for row in arrival.rows}
        for queue in (self._queue, self._background):
            left = [row for row in queue if row.row not in own]
            queue.clear()
            queue.extend(left)
        self._seated.clear()
        self._needs.clear()
        self._of_row = {place: arrival for place, arrival in self._of_row.items() if place not in own}
        return lost

    def on_token(self, row: int, token: int, text: str | None) -> None:
        """Calls the listener of this row, and ends the row if its request was cancelled."""
        arrival, state = self._of_row[row], self._seated[row]
        if arrival.on_piece is not None and not arrival.is_given_up:
            arrival.on_piece(state, token, text)
        if arrival.is_given_up:
            state.stop(GIVEN_UP)

    def over(self, ended: Iterable[RowState]) -> Iterator[Arrival]:
        """The requests of which all rows have ended."""
        for row in ended:
            with self._changed:
                arrival = self._of_row.pop(row.row, None)
            if arrival is not None and arrival.is_over:
                yield arrival

    # -- the block that runs -----------------------------------------------------------------------------------------------

    def seat_in(self, planned: BlockPlan) -> None:
        self._block = planned
        self._sizes = [batch.size for batch in planned.block.batches]
        self._passes_left = [planned.block.gen_len] * len(self._sizes)
        self._empty: set[int] = set()  # batches that no row joined at their turn
        self._held_back = [0] * len(self._sizes)  # passes in which background requests waited for the next block

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        """The first places of the workload, one for each row that lost its seat: all places are alike. These rows go to the
        front of their queues."""
        with self._changed:
            left = [row for row in self._seated.values() if not row.finished]
            self._seated.clear()
            self._needs.clear()
            for row in left:
                row.start_anew()
            for row in reversed(left):
                self._queue_of(self._of_row[row.row]).appendleft(row)
        return range(len(left))

    def end(self, row: RowState) -> None:
        with self._changed:
            del self._seated[row.row], self._needs[row.row]

    def choose(self, row: RowState, kept: PrefixStore, room: int) -> SharedPrefix | None:
        shared = NOTHING if self._sharing is None else self._sharing.choice(row.compared_ids, kept, room)
        need = SeatNeed.behind(shared.prefix, row.prompt_len, row.max_tokens, self.planned.plan.copies_prefixes)
        if not all(level.policy.suits(need) for level in self._block.levels):
            shared, need = NOTHING, SeatNeed(row.prompt_len, row.max_tokens)
        with self._changed:
            self._needs[row.row] = need
        row.shared_tokens = shared.spared
        return shared.source

    def need(self, row: RowState) -> SeatNeed:
        return self._needs[row.row]

    def take(self, batch: int, seated: Sequence[SharedPrefix | None]) -> list[RowState]:
        """The first rows of the queue and then of the background, sorted by prompt length, longest first. Called at each pass
        of a batch, until no row is left in it."""
        with self._changed:
            self._passes_left[batch] -= 1
            taken = [self._queue.popleft() for _ in range(self._admitted(batch, len(seated)))]
            taken += [self._background.popleft() for _ in range(self._fill_in(batch, len(seated) + len(taken)))]
            self._seated |= {row.row: row for row in taken}
            if not seated and not taken:
                self._empty.add(batch)
        return sorted(taken, key=lambda row: -row.prompt_len)

    def _admitted(self, batch: int, seated: int) -> int:
        """How many rows of the queue may join now."""
        free = min(self._sizes[batch] - seated, len(self._queue))
        return 0 if self._would_fill_another(len(self._queue) - free) or self._is_ending(batch) else free

    def _fill_in(self, batch: int, seated: int) -> int:
        """How many background rows may join now: none while other rows wait. They too wait for an empty batch that they would
        fill, but no longer than the block can run without new rows: after that, only new rows would keep it from ending."""
        free = min(self._sizes[batch] - seated, len(self._background))
        if not free or self._queue or self._is_ending(batch):
            return 0
        if self._would_fill_another(len(self._background) - free) and self._held_back[batch] < self.most_tokens:
            self._held_back[batch] += 1
            return 0
        return free

    def _would_fill_another(self, left: int) -> bool:
        """Whether this many waiting rows would fill a batch that is empty."""
        return any(left >= self._sizes[one] for one in self._empty)

    def _is_ending(self, batch: int) -> bool:
        """Whether a row that begins now might not be finished when all passes are over."""
        return self._passes_left[batch] < self.most_tokens
