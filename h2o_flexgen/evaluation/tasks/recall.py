"""Recall: facts noted somewhere in prose, followed by a question with its answer in one of the notes. A visible question ends
the prompt, so attention has seen it before the first tokens are evicted; a hidden one comes after the prompt, token by token
through the cache.

Every answer has several tokens. The prompt decides the first, and every policy attends to the whole prompt; only the others
show what the cache has kept. A note says its fact twice, as a passkey in prose always did. It may repeat it more often, since
accumulated attention keeps what a text comes back to.

    passkey   one number:            The pass key is 4 7 1 9 3. Remember: the pass key is 4 7 1 9 3.
    lookup    keys and their values: Note: Anna river lamp stone. Remember: Anna river lamp stone.
    copy      a list of words:       Recite river lamp stone ... Once more: recite river lamp stone ...
    classify  a rule from examples:  Sort: chair river north gate.  (what ends in river is a north gate; three examples of each)
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.evaluation.cells import Figure, mean, of_means
from h2o_flexgen.evaluation.tasks.task import Advance, Bound, EvaluationTask, Shown, Size, in_blocks
from h2o_flexgen.planning.positions import of_windows
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.given_texts import checksum, start_tokens

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM


Encode = Callable[[str], list[int]]  # tokens of a text that continues another

NAMED = """
Alice Amy Anna Anne Arthur Beth Catherine Charles Charlotte David Diana Dora Edward Elizabeth Emma Frank Fred George
Harriet Harry Helen Henry Jack James Jane Jim Joe John Laurie Lucy Mary Meg Nicholas Peter Robert Sam Susan Sydney Tom
William"""
WRITTEN = """
animal arm bed bird boat book box boy bread bridge brother candle captain carriage castle chair church city cloud coat
corner country cousin cup dance daughter dinner doctor dog door dream evening face farm father field finger fire fish
flower foot forest friend garden gate gentleman girl glass gold grass ground hair hall hand hat head heart hill horse
hour house island journey king kitchen lady lamp lane leaf letter light line lion lord man master meadow money moon
morning mother mountain music neck night nose office ocean paper parlour party path picture place poor prince queen rain
river road rock room rose school sea shadow ship shoulder silver sister sky sleep snow soldier song spirit spring star
stone storm story street sugar summer sun supper table teacher tiger town tree uncle valley village voice wall water
wave whale wife wind window winter woman wood word world writing year youth"""
NAMES, WORDS = tuple(NAMED.split()), tuple(WRITTEN.split())
DIGITS = "0123456789"
EXAMPLES_OF_A_KIND = 3  # of classify
LONGEST_SENTENCE = 256  # tokens
ASKING = 32  # tokens left for question and answer: the same in all examples, though some need fewer


@dataclass(frozen=True)
class TextPiece:
    text: str
    is_new: bool  # False for what an earlier piece said already


@dataclass(frozen=True)
class Fact:
    """What is noted, in one note or several, and what is asked about it."""

    notes: tuple[tuple[TextPiece, ...], ...]
    question: str
    answer: str

    def said(self, mentions: int) -> Fact:
        """The fact with its note repeated until it occurs `mentions` times. Several notes are examples, each said once."""
        if len(self.notes) > 1:
            return self
        *first, again = self.notes[0]
        return replace(self, notes=((*first, *[again] * (mentions - 1)),))


def _noted(says: str, again: str, question: str, answer: str) -> Fact:
    return Fact(
        ((TextPiece(f"\n{says}", True), TextPiece(f"{answer}.", True), TextPiece(f" {again}{answer}.\n", False)),),
        question,
        answer,
    )


def _pass_key(draw: random.Random) -> tuple[Fact, ...]:
    answer = "".join(f" {digit}" for digit in draw.sample(DIGITS, 5))
    return (_noted("The pass key is", "Remember: the pass key is", "\nWhat is the pass key? The pass key is", answer),)


def _lookup(draw: random.Random) -> tuple[Fact, ...]:
    names, words = draw.sample(NAMES, draw.randint(3, 6)), _words(draw)
    return tuple(
        _noted(f"Note: {name}", f"Remember: {name}", f"\nWhat was noted? Note: {name}", _phrase(words, 3)) for name in names
    )


def _copy(draw: random.Random) -> tuple[Fact, ...]:
    return (_noted("Recite", "Once more: recite", "\nNow recite", _phrase(_words(draw), draw.randint(6, 10))),)


def _classify(draw: random.Random) -> tuple[Fact, ...]:
    words = _words(draw)
    return tuple(_kind(draw, words) for _ in range(draw.randint(2, 4)))


def _kind(draw: random.Random, words: list[str]) -> Fact:
    """Things of one kind share their last word, and are sorted the same way."""
    mark, answer = words.pop(), _phrase(words, 2)
    thing = [f"Sort: {words.pop()} {mark}" for _ in range(EXAMPLES_OF_A_KIND + 1)]
    notes = tuple(
        (TextPiece(f"\n{each}", True), TextPiece(f"{answer}.\n", place == 0)) for place, each in enumerate(thing[:-1])
    )
    return Fact(notes, f"\n{thing[-1]}", answer)


def _words(draw: random.Random) -> list[str]:
    """All words in random order; callers take from the end, so no word comes twice."""
    return draw.sample(WORDS, len(WORDS))


def _phrase(words: list[str], count: int) -> str:
    return "".join(f" {words.pop()}" for _ in range(count))


RECALL_TASKS: Mapping[str, Callable[[random.Random], tuple[Fact, ...]]] = {
    "passkey": _pass_key,
    "lookup": _lookup,
    "copy": _copy,
    "classify": _classify,
}


@dataclass(frozen=True)
class RecallExample:
    task: str
    length: int  # tokens asked for: at most so many in context, question and answer together
    mentions: int  # how often a note says its fact
    depth: float | None  # where the answer was noted, 0 being the beginning; None if it stands at several places
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Recall:
    """Makes examples for one tokenizer. Every text begins with the tokens `start`; `sentences` are the prose."""

    encode: Encode
    start: tuple[int, ...]
    sentences: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, prose: str, encode: Encode, start: Sequence[int]) -> Recall:
        sentences = tuple(part for sentence in split_sentences(prose) for part in _parts(encode(" " + sentence)))
        if not sentences:
            raise ValueError("the prose for the recall tasks is empty; give a text file with sentences in it")
        return cls(encode, tuple(start), sentences)

    def example(self, task: str, length: int, depth: float, draw: random.Random, mentions: int = 2) -> RecallExample:
        """The fact asked for stands at `depth`, or its notes are spread if it has several; the other facts stand anywhere."""
        facts = tuple(fact.said(mentions) for fact in RECALL_TASKS[task](draw))
        asked, others = facts[0], facts[1:]
        question, answer = self.encode(asked.question), self.encode(asked.answer)
        placed = [(depth if len(asked.notes) == 1 else draw.random(), note) for note in asked.notes]
        placed += [(draw.random(), note) for fact in others for note in fact.notes]
        notes = [(place, self.encode("".join(piece.text for piece in note))) for place, note in placed]
        asking = max(ASKING, len(question) + len(answer))
        fixed = len(self.start) + sum(len(ids) for _, ids in notes) + asking
        if fixed > length:
            raise ValueError(f"{task} needs {fixed} tokens, but its length is {length}; ask for longer texts or fewer mentions")
        context = [*self.start, *self._scattered(notes, length - fixed, draw)]
        single = len(asked.notes) == 1
        return RecallExample(task, length, mentions, depth if single else None, tuple(context), tuple(question), tuple(answer))

    def _scattered(self, notes: list[tuple[float, list[int]]], room: int, draw: random.Random) -> list[int]:
        """The notes among as much prose as fits, each at its depth."""
        prose = self.prose(room, draw)
        total, waiting, ids, told = sum(map(len, prose)), sorted(notes, key=lambda note: note[0]), [], 0
        for sentence in prose:
            while waiting and waiting[0][0] * total <= told:
                ids += waiting.pop(0)[1]
            ids += sentence
            told += len(sentence)
        return [*ids, *(token for _, note in waiting for token in note)]

    def prose(self, room: int, draw: random.Random) -> list[tuple[int, ...]]:
        """As many consecutive sentences, from a random one on, as fit."""
        if (total := sum(map(len, self.sentences))) < room:
            raise ValueError(
                f"the prose for recall has {total} tokens, and texts of this length need {room}; "
                "give a longer --text or shorter --lengths"
            )
        place = draw.randrange(len(self.sentences))
        taken: list[tuple[int, ...]] = []
        for offset in range(len(self.sentences)):
            sentence = self.sentences[(place + offset) % len(self.sentences)]
            if len(sentence) > room:
                return taken
            taken.append(sentence)
            room -= len(sentence)
        return taken


def _parts(sentence: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits long sentences: prose without full stops would fit nowhere."""
    return [tuple(sentence[start : start + LONGEST_SENTENCE]) for start in range(0, len(sentence), LONGEST_SENTENCE)]


def split_sentences(prose: str) -> list[str]:
    """Splits at ends of sentences and of lines. An abbreviation ends a sentence too; that does no harm here."""
    pieces = prose.replace("! ", "!\n").replace("? ", "?\n").replace(". ", ".\n").replace('." ', '."\n').split("\n")
    return [piece.strip() for piece in pieces if piece.strip()]


AT_ONE_PLACE = ("passkey", "lookup")  # of recall: those with the fact at one place, whatever its length
VISIBLE = "visible"


@dataclass(frozen=True)
class FactsAsked:
    """The facts that are asked for."""

    prose: str
    length: int  # tokens of a text with question and answer
    examples: int = 4  # of each kind
    depth: float = 0.3  # where the facts stand; 0 is the beginning
    mentions: int = 1  # how often each is said
    question: str = VISIBLE  # at the end of the prompt; otherwise after it
    seed: int = 0


@dataclass(frozen=True)
class AskedFact:
    kind: str
    ids: tuple[int, ...]  # context, question and answer
    fact: tuple[int, ...]  # the places of the noted answer
    context_len: int
    prompt_len: int
    asked: int  # the number of tokens before the answer

    @property
    def queries(self) -> tuple[int, int]:
        """The range of the tokens that have a part of the answer as their output: the first, and the one after the last."""
        return self.asked - 1, len(self.ids) - 1


def asked_facts(llm: LLM, asked: FactsAsked) -> tuple[AskedFact, ...]:
    """The texts, in the model's tokens."""
    positions, tokenizer, draw = llm.spec.seen_positions, llm.tokenizer, random.Random(asked.seed)
    if asked.length > positions:
        there = f"{llm.name} has {positions} positions{of_windows(llm.spec)}"
        raise ValueError(f"texts of {asked.length} tokens are asked for, but {there}; give fewer")
    made = Recall.of(asked.prose, tokenizer.encode_more, start_tokens(tokenizer))
    return tuple(
        _asked(made.example(kind, asked.length, asked.depth, draw, asked.mentions), asked.question == VISIBLE)
        for kind, _ in product(AT_ONE_PLACE, range(asked.examples))
    )


def _asked(example: RecallExample, is_visible: bool) -> AskedFact:
    context, answer = example.context, example.answer
    begins = [place for place in range(len(context)) if context[place : place + len(answer)] == answer]
    if not begins:
        raise ValueError(
            f"a noted answer of {example.task} has other tokens in its text than after its question; "
            "choose a model with a tokenizer that does not join words"
        )
    asked = len(context) + len(example.question)
    return AskedFact(
        kind=example.task,
        ids=(*context, *example.question, *answer),
        fact=tuple(begin + token for begin in begins for token in range(len(answer))),
        context_len=len(context),
        prompt_len=asked if is_visible else len(context),
        asked=asked,
    )


# -- the task ----------------------------------------------------------------------------------------------------------

LENGTHS, DEPTHS = (256, 512, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)
EXAMPLES = 4  # per task, length and depth
MOST_QUESTIONS = 100_000  # since all are made before the first is asked
SEVERAL_PLACES = "spread"


@dataclass(frozen=True)
class RecallTask(EvaluationTask):
    name: ClassVar[str] = "recall"
    shown: ClassVar[tuple[Shown, ...]] = (Shown("accuracy", "share of answers that are right in full", True, of_means, True),)

    def bind(self, llm: LLM) -> BoundRecall:
        asked, positions, tokenizer = self.asked, llm.spec.max_positions, llm.tokenizer
        depths, each = DEPTHS if asked.depths is None else asked.depths, asked.examples or EXAMPLES
        lengths = asked.lengths or tuple(length for length in LENGTHS if length <= positions) or (positions,)
        if max(lengths) > positions:
            raise ValueError(f"--lengths has {max(lengths)}, but {llm.name} has {positions} positions; give no more")
        count = len(RECALL_TASKS) * len(lengths) * len(depths) * each
        if count > MOST_QUESTIONS:
            raise ValueError(
                f"--examples {each} makes {count} questions, for each kind, length and depth; "
                f"give fewer examples, --lengths or --depths: the most is {MOST_QUESTIONS} questions"
            )
        prose = "\n".join(text.content for text in asked.texts)
        made = Recall.of(prose, tokenizer.encode_more, start_tokens(tokenizer))
        draw = random.Random(asked.seed)
        examples = tuple(
            made.example(task, length, depth, draw, asked.mentions)
            for task, length, depth, _ in product(RECALL_TASKS, lengths, depths, range(each))
        )
        bound = BoundRecall(examples, asked.questions)
        needed = max(prompt + generated - 1 for prompt, generated in bound.sizes)
        if needed > positions:  # if the tokenizer needs many tokens for a question
            has = f"but {llm.name} has {positions}"
            raise ValueError(
                f"texts of {max(lengths)} tokens need {needed} positions with their answers, {has}; give shorter --lengths"
            )
        return bound


@dataclass(frozen=True)
class BoundRecall(Bound):
    examples: tuple[RecallExample, ...]
    questions: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.examples) * sum(map(self._gen_len, self.questions))

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(
            {(len(self._prompt(one, kind)), self._gen_len(kind)): None for kind in self.questions for one in self.examples}
        )

    @property
    def identity(self) -> Mapping[str, object]:
        return {"examples": checksum(self.examples), "count": len(self.examples), "questions": list(self.questions)}

    @property
    def notes(self) -> tuple[str, ...]:
        lengths = ", ".join(map(str, sorted({one.length for one in self.examples})))
        facts = f"facts said {self.examples[0].mentions} times"
        return (
            f"{len(self.examples)} questions about texts of {lengths} tokens, {facts}; every token of an answer must be right",
        )

    def _prompt(self, example: RecallExample, kind: str) -> tuple[int, ...]:
        return example.context + (example.question if kind == "visible" else ())

    def _forced(self, example: RecallExample, kind: str) -> tuple[int, ...]:
        return () if kind == "visible" else example.question

    def _gen_len(self, kind: str) -> int:
        """The same for all examples, so that a budget, a share of prompt and generation, depends on the example alone."""
        return max(len(self._forced(one, kind)) + len(one.answer) for one in self.examples)

    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]:
        return tuple(figure for kind in self.questions for figure in self._figures(self._right(llm, kind, advance), kind))

    def _right(self, llm: LLM, kind: str, advance: Advance) -> list[float]:
        right = [0.0] * len(self.examples)
        prompts = [self._prompt(one, kind) for one in self.examples]
        params = SamplingParams(max_tokens=self._gen_len(kind), ignore_eos=True)
        for rows in in_blocks(prompts, llm.plan.block_size):
            forced = [self._forced(self.examples[row], kind) for row in rows]
            done = llm.generate([prompts[row] for row in rows], params, forced=forced, on_token=lambda *_: advance(1))
            for row, question, completion in zip(rows, forced, done):
                answer = self.examples[row].answer
                right[row] = float(completion.token_ids[len(question) :][: len(answer)] == answer)
        return right

    def _figures(self, right: Sequence[float], kind: str) -> list[Figure]:
        panel = f"{kind} questions"
        figures = [mean("accuracy", right, panel)]
        for by in ("task", "length", "depth"):
            groups: defaultdict[str, list[float]] = defaultdict(list)
            for example, value in zip(self.examples, right):
                groups[_at(getattr(example, by))].append(value)
            figures += [mean("accuracy", values, panel, by, at) for at, values in groups.items()]
        return figures


def _at(value: str | int | float | None) -> str:
    """The name of a group: a task, a length or a depth."""
    if value is None:
        return SEVERAL_PLACES
    return f"{100 * value:g} %" if isinstance(value, float) else str(value)
