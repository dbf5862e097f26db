"""Task: how to measure a model under one setting. It is created without a model; `bind` gives it the model's tokens before
weights are loaded, and the Bound measures any number of settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from h2o_flexgen.evaluation.cells import Figure, Relation
from h2o_flexgen.text.given_texts import Text

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM

Advance = Callable[[int], None]  # called with the number of tokens just done
Compare = Callable[[Sequence[float], Sequence[float]], Relation | None]
AnyTask = TypeVar("AnyTask", bound="EvaluationTask")
Size = tuple[int, int]  # tokens of a prompt, and tokens after it

EXAMPLES, WINDOW, GEN_LEN = 16, 1024, 64
QUESTIONS = ("visible", "hidden")

MENTIONS = 2
MOST_EXAMPLES, MOST_MENTIONS = 1_000_000, 1000  # more than any text or test needs


@dataclass(frozen=True)
class TaskOptions:
    """What the command line asks of tasks; None leaves it to the task and the model."""

    texts: tuple[Text, ...] = ()
    articles: str | None = None  # a file
    window: int | None = None
    examples: int | None = None
    gen_len: int = GEN_LEN
    questions: tuple[str, ...] = QUESTIONS
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] | None = None
    mentions: int = MENTIONS
    seed: int = 0


@dataclass(frozen=True)
class Shown:
    """A figure that tables and pictures show."""

    name: str
    title: str
    higher_is_better: bool
    compare: Compare | None  # with the full cache
    is_share: bool = False  # between 0 and 1


class Bound(ABC):
    """A task with a model's tokens."""

    needs_reference: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that go through the cache, without prompts."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[Size, ...]:
        """The sizes of its examples, each once."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """Everything that its figures depend on apart from model and setting."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its figures has to know."""
        return ()

    def refer(self, llm: LLM, folder: Path, advance: Advance) -> FullCache:
        """Runs the full cache and keeps what it says."""
        raise AssertionError(f"{type(self).__name__} needs no reference")

    @abstractmethod
    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]: ...


@dataclass(frozen=True)
class EvaluationTask(ABC):
    asked: TaskOptions

    name: ClassVar[str]
    shown: ClassVar[tuple[Shown, ...]]
    reads_texts: ClassVar[bool] = True

    @classmethod
    def of(cls: type[AnyTask], asked: TaskOptions) -> AnyTask:
        """Reads the task's files and refuses faulty ones."""
        return cls(asked)

    @abstractmethod
    def bind(self, llm: LLM) -> Bound: ...


def window_of(asked: int | None, llm: LLM) -> int:
    """The number of tokens in a window."""
    positions = llm.spec.max_positions
    window = min(WINDOW, positions) if asked is None else asked
    if not 4 <= window <= positions:
        raise ValueError(f"--window is {window}, but {llm.name} has {positions} positions; give 4 to {positions}")
    return window


def in_blocks(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Groups of at most `size` rows to run together, neighbours in length."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    return [order[start : start + size] for start in range(0, len(order), size)]
