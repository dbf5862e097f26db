"""AskedFact: a text in which a fact is noted, a question about it, and the answer; where the fact stands."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from h2o_flexgen.evaluation.recall_questions import Recall, RecallExample
from h2o_flexgen.evaluation.texts import start_tokens
from h2o_flexgen.planning.positions import of_windows

if TYPE_CHECKING:
    from h2o_flexgen.llm import LLM

KINDS = ("passkey", "lookup")  # of recall: those with the fact at one place, whatever its length
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
        for kind, _ in product(KINDS, range(asked.examples))
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
