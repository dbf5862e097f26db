"""Recall: facts in prose, and questions about them. A visible question ends the prompt, so attention has seen it before the
first tokens are evicted; a hidden one comes after the prompt, token by token through the cache."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.evaluation.cells import Figure, mean, of_means
from h2o_flexgen.evaluation.recall_questions import RECALL_TASKS, Recall, RecallExample
from h2o_flexgen.evaluation.tasks.task import Advance, Bound, EvaluationTask, Shown, Size, in_blocks
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.measured_texts import checksum, start_tokens

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM

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
