"""Rows of training: a text from the books, as it stands or with facts and questions strewn into it, or tokens in any order that
come again and again; and the weight of every token in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from h2o_flexgen.evaluation.tasks.recall import RECALL_TASKS, WORDS, Fact, Recall

QUESTION_EVERY = 110  # tokens
TOKENS_PER_FACT = 60
SINGLE = 0.25  # share of facts that are stated only once
PROSE, NEW, AGAIN, ANSWER = 1.0, 0.0, 1.5, 6.0  # weights in the loss: what is new cannot be predicted
SHORTEST_ROUND = 8


@dataclass(frozen=True)
class Row:
    tokens: tuple[int, ...]
    weights: tuple[float, ...]  # the weight of each token as a target


@dataclass(frozen=True)
class RowMaker:
    recall: Recall
    vocab: int
    share_of_tasks: float
    seed: int

    def row(self, number: int, length: int, share_of_rounds: float) -> Row:
        """A row of the given length, the same whenever it is asked for. Rounds, tokens in any order that repeat, teach to look
        back sooner than prose would."""
        draw = random.Random(self.seed * 1_000_003 + number)
        if draw.random() < share_of_rounds:
            return self._round(length, draw)
        made = _Text(self.recall)
        made.add(self.recall.start, NEW)
        events = self._events(length, draw) if draw.random() < self.share_of_tasks else []
        for sentence in self._endless_prose(draw):
            while events and events[0][0] <= len(made.tokens):
                for text, weight in events.pop(0)[1]:
                    made.add(self.recall.encode(text), weight)
            if len(made.tokens) >= length:
                break
            made.add(sentence, PROSE)
        return Row(tuple(made.tokens[:length]), tuple(made.weights[:length]))

    def _round(self, length: int, draw: random.Random) -> Row:
        """The same tokens, repeated."""
        start = len(self.recall.start)
        known = WORDS if draw.random() < 0.5 else []
        words = [token for word in known for token in self.recall.encode(f" {word}")] or range(self.vocab)
        once = draw.choices(words, k=draw.randint(SHORTEST_ROUND, min(64, length // 2)))
        tokens = [*self.recall.start, *(once * (length // len(once) + 1))][:length]
        fresh = min(length, start + len(once))
        return Row(tuple(tokens), (NEW,) * fresh + (AGAIN,) * (length - fresh))

    def _endless_prose(self, draw: random.Random) -> Iterator[tuple[int, ...]]:
        sentences = self.recall.sentences
        place = draw.randrange(len(sentences))
        while True:
            yield sentences[place]
            place = (place + 1) % len(sentences)

    def _events(self, length: int, draw: random.Random) -> list[tuple[int, list[tuple[str, float]]]]:
        """What is said at which place: notes of facts, and questions, each behind the last note of its fact."""
        facts: list[Fact] = []
        while not facts or (len(facts) * TOKENS_PER_FACT < length / 2 and draw.random() < 0.6):
            facts += self._unlike(facts, RECALL_TASKS[draw.choice(list(RECALL_TASKS))](draw))
        events, noted = [], []
        for fact in facts:
            places = sorted(int(draw.random() ** 1.5 * 0.8 * length) for _ in fact.notes)
            for note, place in zip(fact.notes, places):
                pieces = note[:-1] if len(note) > 2 and draw.random() < SINGLE else note
                spoken = [(piece.text, NEW if piece.is_new else AGAIN) for piece in pieces]
                events.append((place, spoken))
            noted.append((places[-1], fact))
        for _ in range(max(1, length // QUESTION_EVERY)):
            last, fact = draw.choice(noted)
            place = draw.randint(last + 1, length)
            events.append((place, [(fact.question, NEW), (fact.answer, ANSWER), (".\n", PROSE)]))
        return sorted(events, key=lambda event: event[0])

    def _unlike(self, facts: list[Fact], more: tuple[Fact, ...]) -> list[Fact]:
        """The facts with another question: one question could not have two answers."""
        asked = {fact.question for fact in facts}
        return [fact for fact in more if fact.question not in asked]


@dataclass
class _Text:
    recall: Recall

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.weights: list[float] = []

    def add(self, tokens: tuple[int, ...] | list[int], weight: float) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)
