"""Conversation: one text that goes on turn by turn. Its KV cache lives on, so that a turn computes only what is new.

with llm.converse() as talk:
    reply = talk.reply("The ferry left the harbour")
    reply = talk.reply(" and never came back")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from h2o_flexgen.core.allowed_values import check_tokens
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Batch, Block, Workload
from h2o_flexgen.engine.drafts import NONE_DRAFTED
from h2o_flexgen.engine.engine import BlockRun, Engine
from h2o_flexgen.engine.head import Picker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.positions import longest_text
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams, one_params
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.schedule.ops import Task
from h2o_flexgen.text.prompts import token_ids
from h2o_flexgen.text.tokenizer import Tokenizer

INTERRUPTED = "interrupted"
OnText = Callable[[str], None]
Stop = Callable[[], bool]


class ContextFull(ValueError):
    """The text has reached the most tokens that the model allows, or that the caller gave."""


@dataclass(frozen=True)
class Reply:
    completion: Completion  # finish_reason may be "interrupted"
    tokens_read: int  # those of the turn, and the last one of the reply before
    prompt_seconds: float
    decode_seconds: float
    fills_context: bool  # the reply ended because the text may grow no longer


@dataclass(frozen=True)
class Extent:
    """How far a conversation may go, and how it is computed."""

    levels: tuple[Level, ...]  # of KV heads
    context: int  # tokens that the text may grow to, unless it is endless; a budget that is a share is one of this
    piece_tokens: int  # tokens of a turn that are computed at once
    is_asked: bool = False  # the caller chose the context; otherwise it is all of the model's positions

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan, context: int | None) -> Extent:
        if plan.policy.options.hh_prompt_only:
            raise ValueError("hh_prompt_only keeps all that is generated, for which a conversation has no room; leave it out")
        longest = longest_text(spec, plan.policy)
        if context is not None and not 1 <= context <= longest:
            raise ValueError(f"context is {context}, but {spec.name} has {spec.max_positions} positions; give 1 to {longest}")
        most = context or longest
        extent = cls(plan.levels(spec), most, min(plan.prefill_tokens, most), context is not None)
        return extent._rolling(spec) if extent.is_endless else extent

    def _rolling(self, spec: ModelSpec) -> Extent:
        room = self.context - self.slots
        if room < 1:
            raise ValueError(
                f"the budget of {self.slots} slots leaves no position for what is new: {spec.name} has {self.context}; "
                "keep fewer"
            )
        return replace(self, piece_tokens=min(self.piece_tokens, room))

    @property
    def is_endless(self) -> bool:
        """Whether evictions make room for ever, in all heads, and positions are those in the cache."""
        return all(level.policy.rolls for level in self.levels)

    @property
    def limit(self) -> str:
        """The most tokens of the text, and what decided it."""
        asked = f"{self.context} tokens, the context that was asked for"
        return asked if self.is_asked else f"the model's {self.context} positions"

    @property
    def slots(self) -> int:
        """The most slots held between turns, in the heads that keep most."""
        return max(self._slots)

    @property
    def slots_on_average(self) -> float:
        """The same of all heads of all layers."""
        heads = [sum(map(len, level.heads)) for level in self.levels]
        return sum(count * slots for count, slots in zip(heads, self._slots, strict=True)) / sum(heads)

    @property
    def _slots(self) -> Sequence[int]:
        """The same for each level."""
        batch = Batch((0,), (1,), context=self.context)
        return [level.policy.occupancy(batch, 1).budgets[0].slots for level in self.levels]

    @property
    def workload(self) -> Workload:
        """The largest workload that can come: as many tokens as are computed at once, after all that the cache holds."""
        return Workload((min(self.piece_tokens, max(1, self.context - 1)),), 1, self.context)

    def held(self, seen: int) -> int:
        return min(seen, self.slots)

    def bytes_in_use(self, seen: int, specs: Sequence[ModelSpec]) -> int:
        """Bytes of the slots in use, of all heads of all layers; `specs`: the model with the heads of each level."""
        heads = (sum(map(len, level.heads)) * spec.kv_bytes_per_head for level, spec in zip(self.levels, specs, strict=True))
        return sum(own * min(seen, slots) for own, slots in zip(heads, self._slots, strict=True))

    def room(self, seen: int) -> int | None:
        """Tokens that the text may still take in; None means no limit."""
        return None if self.is_endless else self.context - seen

    def block(self, seen: int, length: int, gen_len: int) -> Block:
        return Block((Batch((0,), (length,), (seen,) if seen else (), self.context),), gen_len)


class Conversation:
    """A text that goes on turn by turn, made by `LLM.converse`; nothing else is generated until it is closed."""

    def __init__(
        self,
        engine: Engine,
        planned: WorkloadPlan,
        tokenizer: Tokenizer,
        extent: Extent,
        seed: int | None = None,
        adapter: int = 0,
    ) -> None:
        """`planned` is the extent's workload; `adapter`: the number of the one that all of it has beside the weights."""
        self.extent = extent
        self.seen = 0  # tokens of the text that are in the cache
        self.turns = 0
        self.closed = False
        self.drafted = NONE_DRAFTED
        self._spec = planned.spec
        self._planned = planned
        self._tokenizer = tokenizer
        self._sampler = Sampler(seed)
        self._engine = engine
        self._adapter = adapter
        self._tail: list[int] = []  # the end of the text, as far as a context reaches
        self._unread: list[int] = []  # the last token generated: the cache takes it in with the next turn
        self._is_broken = False
        self._stores = engine.open_stores(planned.planned(extent.block(0, 1, 1)))

    # -- what it is ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Slots in use, in the heads that keep most."""
        return self.extent.held(self.seen)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the slots in use, over all layers."""
        return self.extent.bytes_in_use(self.seen, self.planned_reply.kv.specs)

    @property
    def planned_reply(self) -> BlockPlan:
        """The plan of a short reply; that of any other reply differs only in its length."""
        return self._planned.planned(self.extent.block(0, 1, 2))

    # -- turns -----------------------------------------------------------------------------------------------------------

    def reply(
        self,
        turn: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        on_text: OnText | None = None,
        stop: Stop | None = None,
    ) -> Reply:
        """Appends the turn to the text and generates what follows. `on_text` gets the pieces as they come. When `stop` returns
        true, the reply ends after the current token."""
        params = one_params(sampling_params)
        self._refuse_if_closed_or_broken()
        self._refuse(params)
        ids = [*self._unread, *self._encoded(turn)]
        room = self.extent.room(self.seen)
        if room is not None and len(ids) > room:
            raise ContextFull(self._full(len(ids)))
        allowed = None if room is None else room - len(ids) + 1  # the last one is not taken in
        limits = [limit for limit in (params.max_tokens, allowed) if limit is not None]
        row = self._row(ids, params.up_to(min(limits)))
        *pieces, last = self._pieces(ids)
        began = time.perf_counter()
        try:
            for piece in pieces:
                self._take_in(row, piece)
            read = time.perf_counter()
            run = self._generate(row, last, on_text, stop)
        except BaseException:
            self._is_broken = True  # the caches of some layers may have tokens that others lack
            raise
        self._advance(row, last)
        wanted_more = params.max_tokens is None or (allowed is not None and allowed < params.max_tokens)
        fills_context = row.finish_reason == "length" and row.num_generated == allowed and wanted_more
        return Reply(row.completion(), len(ids), read - began + run.prefill_seconds, run.decode_seconds, fills_context)

    def reset(self) -> None:
        """Forgets everything that was said."""
        self.seen = 0
        self._tail, self._unread = [], []
        self._is_broken = False

    def _refuse_if_closed_or_broken(self) -> None:
        if self.closed:
            raise ValueError("this conversation is closed; open another one")
        if self._is_broken:
            raise ValueError("the last reply was interrupted within a token; reset the conversation to go on")

    def _refuse(self, params: SamplingParams) -> None:
        """Refuses sampling parameters that a conversation does not support."""
        params.check_vocabulary(self._spec.vocab, self._spec.name)
        if params.n > 1:
            raise ValueError(f"n is {params.n}, but a conversation has one reply to each turn; leave it out")
        if params.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs are not available in a conversation, where turns are read after cached text; use generate"
            )
        if params.max_tokens is None and self.extent.is_endless:
            raise ValueError("max_tokens is None, but this conversation has no end; give a number")

    def _encoded(self, turn: str | Sequence[int]) -> list[int]:
        if turn == "":
            new = []
        elif isinstance(turn, str):
            new = self._tokenizer.encode_more(turn) if self._tail else self._tokenizer.encode(turn)
        else:
            new = list(token_ids(f"turn {self.turns}", turn))
        if not new:
            raise ValueError(f"turn {self.turns} is empty; say at least one token")
        check_tokens(f"turn {self.turns} has", new, self._spec.vocab, self._spec.name)
        return new

    def _full(self, new: int) -> str:
        endless = ", or keep less with rolling positions, which have no limit" if self._spec.rotary else ""
        return (
            f"the conversation is full: it has {self.seen} tokens and {new} are new, but the limit is {self.extent.limit}; "
            f"reset it{endless}"
        )

    def _row(self, ids: Sequence[int], params: SamplingParams) -> RowState:
        if params.lora_name is not None:
            raise ValueError(
                f"lora_name is {shown(params.lora_name)}, and a conversation has the adapter that it is opened with; write "
                "llm.converse(lora_request=LoRARequest(NAME, 1, PATH))"
            )
        before = self._tail[: len(self._tail) - len(self._unread)]
        return RowState(self.turns, [*before, *ids], params, self._tokenizer, streamed=True, adapter=self._adapter)

    def _pieces(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        step = self.extent.piece_tokens
        return (ids[start : start + step] for start in range(0, len(ids), step))

    def _take_in(self, row: RowState, piece: Sequence[int]) -> None:
        """Computes tokens without logits: the run ends before the head."""
        head = len(self._spec.layers) - 1
        block = self._planned.planned(self.extent.block(self.seen, len(piece), 1))
        rows = [RowState(0, piece, row.params, self._tokenizer, adapter=self._adapter)]
        self._engine.run(block, rows, Picker(self._sampler), stop_at=_at(head), stores=self._stores)
        self.seen += len(piece)

    def _generate(self, row: RowState, piece: Sequence[int], on_text: OnText | None, stop: Stop | None) -> BlockRun:
        def on_token(_: int, token: int, text: str | None) -> None:
            rest = row.stop(INTERRUPTED) if stop is not None and stop() else None
            if on_text is not None and (new := (text or "") + (rest or "")):
                on_text(new)

        block = self._planned.planned(self.extent.block(self.seen, len(piece), row.max_tokens))
        run = self._engine.run(block, [row], Picker(self._sampler, on_token), stores=self._stores)
        self.drafted = self.drafted.plus(run.drafted)
        return run

    def _advance(self, row: RowState, piece: Sequence[int]) -> None:
        self.turns += 1
        self.seen += len(piece) + row.num_generated - 1
        self._unread = row.token_ids[-1:]
        self._tail = row.seen[-self.extent.context :]

    # -- the end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._engine.is_forked:
                self._stores.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _at(layer: int) -> Callable[[Task], bool]:
    return lambda task: task.is_compute_of(layer)
