"""Summaries: articles with reference summaries, in the JSONL that H2O's authors used. Generation is greedy, up to "###"; its
first line is the summary, and ROUGE tells how many of its words and word pairs are those of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.core.files import local_path, parse_json
from h2o_flexgen.evaluation.cells import Figure, mean, of_means
from h2o_flexgen.evaluation.tasks.task import Advance, Bound, EvaluationTask, Shown, Size, TaskOptions, in_blocks
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.given_texts import checksum, read_lines, start_tokens

if TYPE_CHECKING:
    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM

ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
ARTICLE, SUMMARIES = "article", ("summary_gt", "summary")
STOP = "###"
EXAMPLES = 100  # as in the script of H2O's authors


@dataclass(frozen=True)
class Article:
    text: str  # including the instruction to the model
    summary: str


def read_articles(file: str) -> tuple[Article, ...]:
    what = f"--articles {file}"
    lines = read_lines(local_path(file), "--articles", "an article and its summary, as JSON,")
    return tuple(_article(line, f"{what}, line {number}") for number, line in enumerate(lines, start=1))


def _article(line: str, where: str) -> Article:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON; mend or remove it") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{where} is no {{"{ARTICLE}": ..., "{SUMMARIES[0]}": ...}}; mend or remove it')
    summary = next((name for name in SUMMARIES if name in fields), None)
    if ARTICLE not in fields or summary is None:
        missing = ARTICLE if ARTICLE not in fields else " or ".join(SUMMARIES)
        raise ValueError(f"{where} has no field {missing}; add it or remove the line")
    for name in (ARTICLE, summary):
        if not isinstance(fields[name], str) or not fields[name].strip():
            raise ValueError(f"{where}: the field {name} is no text; mend or remove it")
    return Article(fields[ARTICLE], fields[summary])


@dataclass(frozen=True)
class XSum(EvaluationTask):
    articles: tuple[Article, ...]

    name: ClassVar[str] = "xsum"
    shown: ClassVar[tuple[Shown, ...]] = tuple(Shown(kind, f"{title} F", True, of_means) for kind, title in ROUGES.items())
    reads_texts: ClassVar[bool] = False

    @classmethod
    def of(cls, asked: TaskOptions) -> XSum:
        if asked.articles is None:
            raise ValueError(f"{cls.name} needs articles and their summaries; give --articles FILE.jsonl")
        articles = read_articles(asked.articles)[: asked.examples or EXAMPLES]
        if find_spec("rouge_score") is None:
            raise ValueError(f"{cls.name} needs rouge-score; install it, or the extra [eval]: pip install -e '.[eval]'")
        return cls(asked, articles)

    def bind(self, llm: LLM) -> BoundXSum:
        gen_len, positions = self.asked.gen_len, llm.spec.max_positions
        room = positions + 1 - gen_len
        if room < 1:
            raise ValueError(f"--gen-len is {gen_len}, but {llm.name} has {positions} positions; give fewer")
        prompts = [llm.tokenizer.encode(article.text) for article in self.articles]
        start = start_tokens(llm.tokenizer)
        short = tuple(_shortened(prompt, room, len(start)) for prompt in prompts)
        cut = sum(len(prompt) > room for prompt in prompts)
        summaries = tuple(article.summary for article in self.articles)
        return BoundXSum(short, summaries, gen_len, llm.tokenizer.eos_ids, cut, room)


@dataclass(frozen=True)
class BoundXSum(Bound):
    prompts: tuple[tuple[int, ...], ...]
    summaries: tuple[str, ...]
    gen_len: int
    eos_ids: frozenset[int]  # tokens that end a summary
    cut: int  # prompts that were too long
    prompt_room: int  # the most tokens of a prompt

    @property
    def num_tokens(self) -> int:
        """An upper limit, since a summary may end early."""
        return len(self.prompts) * self.gen_len

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple({(len(prompt), self.gen_len): None for prompt in self.prompts})

    @property
    def identity(self) -> Mapping[str, object]:
        asked = {"articles": checksum(self.prompts, self.summaries), "count": len(self.prompts), "gen_len": self.gen_len}
        return {**asked, "eos_ids": sorted(self.eos_ids)}

    @property
    def notes(self) -> tuple[str, ...]:
        first = f"{len(self.prompts)} articles, up to {self.gen_len} tokens for each summary"
        where = f"the model's positions have room for: their beginnings are left out, down to {self.prompt_room} tokens"
        return (first, f"{self.cut} of {len(self.prompts)} articles are longer than {where}") if self.cut else (first,)

    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]:
        texts = [""] * len(self.prompts)
        params = SamplingParams(max_tokens=self.gen_len, stop=STOP)
        for rows in in_blocks(self.prompts, llm.plan.block_size):
            done = llm.generate([self.prompts[row] for row in rows], params, on_token=lambda *_: advance(1))
            for row, completion in zip(rows, done):
                texts[row] = completion.text
                advance(self.gen_len - len(completion.token_ids))
        return rouge([first_line(text) for text in texts], self.summaries)


def _shortened(prompt: Sequence[int], room: int, start: int) -> tuple[int, ...]:
    """Cuts the beginning, but not its start tokens, to which heads attend that find nothing; the end says what to do."""
    kept = min(start, room - 1)
    return tuple(prompt) if len(prompt) <= room else (*prompt[:kept], *prompt[len(prompt) - room + kept :])


def first_line(text: str) -> str:
    """The first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def rouge(texts: list[str], summaries: tuple[str, ...]) -> tuple[Figure, ...]:
    from rouge_score.rouge_scorer import RougeScorer  # the extra [eval]

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scores = [scorer.score(summary, text) for text, summary in zip(texts, summaries)]
    return tuple(mean(kind, [score[kind].fmeasure for score in scores]) for kind in ROUGES)
