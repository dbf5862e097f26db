"""The work of the chat command: answers turns one by one, over a KV cache that lives on."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

from h2o_flexgen.cli.chat_request import COMMANDS, HELP, QUIT, RESET, STATS, ChatRequest
from h2o_flexgen.cli.errors import EndedBySignal, line_of
from h2o_flexgen.cli.report import Entry, document_of, entry, noted
from h2o_flexgen.cli.report.arithmetic import Arithmetic, StoredWeights
from h2o_flexgen.cli.report.kept_by_policy import as_asked, asked_of, facts_kept
from h2o_flexgen.cli.report.summary import guessed, say_broken
from h2o_flexgen.cli.slow import experts_reason, kernel_reasons, say_slow, unchecked_reason, unguessed_reason, unread_reason
from h2o_flexgen.cli.terminal import printable, say, say_document
from h2o_flexgen.cli.watch import Crowd, OpeningReport, open_llm, say_threads
from h2o_flexgen.core.hints import did_you_mean
from h2o_flexgen.core.site import HOST, TIERS, on_tier
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.engine.conversation import ContextFull, Conversation, Reply
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.host import peak_resident_bytes
from h2o_flexgen.planning.plan import OFF
from h2o_flexgen.policies.recall import ALL
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import Style, choose_style

PROMPT = "> "
LIKE_A_COMMAND = re.compile(r"/[a-z]+")  # no path, and no words behind it


def work(request: ChatRequest) -> None:
    is_typed = request.turns is None and sys.stdin.isatty()
    turns = request.turns if request.turns is not None else typed_turns() if is_typed else piped_turns()
    params = request.sampling
    with open_llm(request.model, request.site, request.plan) as llm:
        params.check_vocabulary(llm.spec.vocab, llm.name)
        if not llm.tokenizer.reads_texts:
            llm.tokenizer.encode("")  # reports a missing tokenizer before anything is loaded
        is_crowded = say_threads(request.others, request.site.threads, _arithmetic(llm))
        say_slow(kernel_reasons(_arithmetic(llm)))
        say_slow(unchecked_reason(llm.plan, llm.loaded.site))
        style = choose_style(request.style, llm.tokenizer, request.system)
        params = replace(params, stop=(*params.stop_strings, *style.stops))
        with _opened(request, llm) as talk:
            say_slow(experts_reason(talk.planned_reply, is_talk=True))
            say_slow(unguessed_reason(talk.planned_reply))
            say_slow(unread_reason(talk.planned_reply))
            chat = Chat(talk, style, params, is_typed, is_crowded=is_crowded)
            say(request.notes)
            say(chat.greeting(llm))
            chat.run(turns)
            say_broken(llm.peaks())
            if not is_typed:
                say_document(chat.as_json(llm))


def _opened(request: ChatRequest, llm: LLM) -> Conversation:
    with Progress(0, f"loading {llm.name}", late=True) as progress:
        stages = OpeningReport(progress).stage
        return llm.converse(request.context_len, seed=request.seed, lora_request=request.lora, on_stage=stages)


def typed_turns() -> Iterator[str]:
    import readline  # noqa: F401  # arrow keys and what was typed before

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except EndedBySignal:
            raise
        except KeyboardInterrupt:
            print(f"\n{QUIT} {COMMANDS[QUIT]}")


def piped_turns() -> Iterator[str]:
    return (line.rstrip("\n") for line in sys.stdin)


@dataclass(frozen=True)
class AnsweredTurn:
    """The figures of an answered turn: an endless talk must not keep every token."""

    turn: str
    reply: str
    tokens: int
    finish_reason: str
    tokens_read: int
    prompt_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, turn: str, reply: Reply) -> AnsweredTurn:
        done = reply.completion
        seconds = (round(reply.prompt_seconds, 6), round(reply.decode_seconds, 6))
        return cls(turn, done.text, len(done.token_ids), done.finish_reason, reply.tokens_read, *seconds)


@dataclass
class Chat:
    talk: Conversation
    style: Style
    params: SamplingParams
    is_typed: bool
    before: Completion | None = None  # the reply before the turn
    answered: list[AnsweredTurn] = field(default_factory=list)
    is_crowded: bool = False  # it was said
    forgotten: int = 0  # answered turns before the last reset

    # -- turns -----------------------------------------------------------------------------------------------------------

    def run(self, turns: Iterable[str]) -> None:
        answers: dict[str, Callable[[], Iterable[str]]] = {RESET: self._reset, STATS: self.stats, HELP: self._help}
        for turn in turns:
            word = turn.strip()
            if not self.is_typed and word:
                say([printable(f"{PROMPT}{turn}")])
            if word == QUIT:
                return
            if word in answers:
                say(answers[word]())
            elif self.is_typed and LIKE_A_COMMAND.fullmatch(word):
                say([f"{word} is no command{did_you_mean(word, COMMANDS) or f'; {HELP} names them'}"])
            elif word:
                self._answer(turn)

    def _answer(self, turn: str) -> None:
        try:
            self.reply(turn)
        except ValueError as error:  # reported in one line; the talk goes on
            if not self.is_typed:
                raise
            print(f"error: {line_of(error)}", file=sys.stderr)

    def reply(self, turn: str) -> None:
        try:
            self._reply(turn)
        except ContextFull as full:
            raise ValueError(f"{full} ({self._ways_on()})") from full

    def _reply(self, turn: str) -> None:
        crowded = list[str]()  # said behind the reply
        crowd = Crowd(crowded.append)

        def stops() -> bool:
            crowd.look()
            return stop()

        with ExitStack() as waiting, _stoppable() as stop:
            waiting.enter_context(Progress(0, "reading", late=True))

            def show(piece: str) -> None:
                waiting.close()
                print(printable(piece), end="", flush=True)

            reply = self.talk.reply(self.style.turn(turn, self.before), self.params, show, stops)
        print(flush=True)
        self._tell_of_crowd(crowded)
        self.before = reply.completion
        self.answered.append(AnsweredTurn.of(turn, reply))
        if reply.fills_context:
            say([f"({self._end()})"])

    def _tell_of_crowd(self, crowded: Sequence[str]) -> None:
        """Says once what makes replies slow."""
        for line in () if self.is_crowded else crowded:
            print(line, file=sys.stderr, flush=True)
        self.is_crowded |= bool(crowded)

    def _end(self) -> str:
        return f"the text has {self.talk.seen + 1} tokens, and the limit is {self.talk.extent.limit}; {self._ways_on()}"

    def _ways_on(self) -> str:
        more = "; --context-len sets the limit" if self.talk.extent.is_asked else ""
        return f"{RESET} begins anew{more}"

    # -- commands --------------------------------------------------------------------------------------------------------

    def _reset(self) -> Iterator[str]:
        self.talk.reset()
        self.before, self.forgotten = None, len(self.answered)
        yield "all that was said is forgotten"

    def _help(self) -> Iterator[str]:
        yield from (f"{word:7} {meaning}" for word, meaning in COMMANDS.items())
        yield "Ctrl-C  stops a reply"

    def stats(self) -> Iterator[str]:
        talk, answered = self.talk, self.answered[self.forgotten :]
        limit = "no limit" if talk.extent.is_endless else f"the limit is {talk.extent.context}"
        yield f"text: {talk.seen} tokens in {len(answered)} turn{'s' * (len(answered) != 1)} ({limit})"
        yield f"KV cache: {talk.held} of {talk.extent.slots} slots a head, {format_bytes(talk.kv_bytes)}"
        decoded = sum(turn.tokens - 1 for turn in answered)  # the first token comes with the prompt
        yield f"read: {_rate(sum(turn.tokens_read for turn in answered), sum(turn.prompt_seconds for turn in answered))}"
        yield f"generated: {_rate(decoded, sum(turn.decode_seconds for turn in answered))}"
        if talk.planned_reply.plan.draft != OFF:
            yield f"drafts: {guessed(talk.drafted)}"
        yield f"memory: {format_bytes(peak_resident_bytes())} at most"

    # -- what is told ----------------------------------------------------------------------------------------------------

    def greeting(self, llm: LLM) -> Iterator[str]:
        yield from (f"{one.label}: {words}" for one in self._entries(llm) for words in one.words)
        if self.is_typed:
            yield from self._help()

    def as_json(self, llm: LLM) -> dict[str, object]:
        peaks = llm.peaks()
        return {
            **document_of(self._entries(llm)),
            "turns": [asdict(turn) for turn in self.answered],
            "seen": self.talk.seen,
            "held": self.talk.held,
            "kv_bytes": self.talk.kv_bytes,
            "peak_host_bytes": peaks.peak_bytes[HOST],
            "over_budget_bytes": dict(peaks.over_budget_bytes),
        }

    def _entries(self, llm: LLM) -> Iterator[Entry]:
        """What is said of the model and its plan before a talk, and stays as it is."""
        extent, policy, budgets = self.talk.extent, llm.plan.policy, llm.plan.head_budgets
        ends = "no limit" if extent.is_endless else f"up to {extent.context} tokens of text"
        average, share = extent.slots_on_average, extent.slots_on_average / extent.context
        by_head = f"at most a head and {average:.0f} on average ({100 * share:.3g} % of {extent.context} tokens)"
        of_head = "a head" if budgets is None else f"{by_head}, by head budgets {budgets.checksum}"
        recalled = "" if policy.recall == ALL else f", of which a step attends {100 * policy.recall:g} %"
        yield entry(
            llm.name,
            f"KV policy {as_asked(policy)}, {extent.slots} slots {of_head}{recalled}, {ends}; weights {_placed(llm)}",
            model=llm.name,
            percent=list(llm.plan.percent),
            kept={"policy": policy.name, "asked": asked_of(policy), "slots": extent.slots, "context": extent.context}
            | {"share": round(share, 4)},
            head_budgets=None if budgets is None else budgets.as_json(),
            endless=extent.is_endless,
        )
        if not policy.keeps_all and not llm.loaded.request.model.dummy_weights:
            yield facts_kept(llm.plan, llm.spec.name)
        stored, arithmetic = StoredWeights.of(llm.loaded.opened), _arithmetic(llm)
        yield noted(stored=None) if stored is None else stored.entry()
        yield entry("numbers", arithmetic.line(), arithmetic=arithmetic.as_json())
        if llm.tokenizer.note:
            yield entry("tokens", llm.tokenizer.note)


def _arithmetic(llm: LLM) -> Arithmetic:
    """The arithmetic of one row; a turn is read in pieces."""
    own, rows = processor(llm.device.kind), llm.plan.prefill_tokens
    return Arithmetic(llm.plan, llm.spec.dtype, own, prompt_rows=rows, formats=llm.spec.formats)


def _placed(llm: LLM) -> str:
    shares = llm.plan.weights
    return ", ".join(f"{100 * shares.of(tier):g} % {on_tier(tier)}" for tier in TIERS if shares.of(tier) > 0)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.1f} s" + (f", {tokens / seconds:.2f} tokens/s" if seconds > 0 else "")


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """A context in which Ctrl-C asks the reply to stop after the token under way; a second one interrupts."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
