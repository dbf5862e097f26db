"""The evaluate command's flags, and the request made of them. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.common_requests import model_of, plan_of, site_of
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import KV, PLAN, Group, Parser, add_placement, add_protection, add_sizes
from h2o_flexgen.cli.output_files import open_output_folder
from h2o_flexgen.core.allowed_values import AUTO, Bounds, decimal_number, whole_number
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.core.workload import TOKENS
from h2o_flexgen.evaluation.grid import WHOLE_TEXT, Amount, BudgetShare, BudgetSlots, Grid
from h2o_flexgen.evaluation.tasks import TASKS
from h2o_flexgen.evaluation.tasks.recall import FactsAsked
from h2o_flexgen.evaluation.tasks.task import (
    EXAMPLES,
    GEN_LEN,
    MENTIONS,
    MOST_EXAMPLES,
    MOST_MENTIONS,
    QUESTIONS,
    WINDOW,
    EvaluationTask,
    TaskOptions,
)
from h2o_flexgen.evaluation.tasks.xsum import XSum
from h2o_flexgen.formats.kernel_table import PRODUCTS
from h2o_flexgen.formats.table import BY_BITS, PLAIN
from h2o_flexgen.planning.plan import PERCENT, Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import EQUAL, OWN, HeadBudgets
from h2o_flexgen.policies.kv_options import BESIDE_BUDGET, KVOptions
from h2o_flexgen.policies.policy import PROBE as BY_PROBE
from h2o_flexgen.sampling.params import SEED
from h2o_flexgen.session.open_request import HEAD_BUDGETS, PROBE, ModelRequest, SiteRequest, head_budgets_of, probe_of
from h2o_flexgen.text.given_texts import Text

PROGRAM = "python -m h2o_flexgen.evaluate"
USUAL_POLICIES = "full,h2o,local,streaming,heavy,snapkv,tova,random"
USUAL_BUDGETS, USUAL_SIZES, ALL_SLOTS = "100,50,20,10,5", "64,128,256,512,1024,full", "full"
RECALL = "kv_recall"
USUAL_TASKS = "perplexity,recall,agreement"
OF_SIZES = (XSum.name,)  # tasks that usually have a grid of KV sizes
BOTH = "both"
DEMO_BATCH = 16  # rows of a small model that are computed at once
# the defaults of flags that say which examples tasks have
OF_TASKS: Mapping[str, object] = {
    "articles": None,
    "examples": None,
    "gen_len": GEN_LEN,
    "question": BOTH,
    "lengths": None,
    "depths": None,
    "mentions": MENTIONS,
    "seed": 0,
}
HEAVY_HITTERS, FACTS = "heavy-hitters", "facts"
STUDIES, STUDY_BUDGET = (HEAVY_HITTERS, FACTS), BudgetShare(20)
FACTS_POLICIES, FACTS_LENGTH = "h2o,snapkv,local", 512
OF_FACTS = ("examples", "question", "lengths", "depths", "mentions", "seed")  # those of them that say which facts
AS_IT_IS = "plain"

DESCRIPTION = """\
How good the text is under each policy and budget, measured through the real cache.
Without --model: a small one that travels with the package; nothing is downloaded."""

FIRST = "--model", "--tasks", "--policies", "--budgets", "--head-budgets", "--recall", "--text", "--output", "--cpu-mem"
EPILOG = f"""\
With --output every cell of the grid is kept as soon as it is finished: the same command goes on where it was interrupted.

  {PROGRAM} --policies full,h2o,local --budgets 100,20 --tasks perplexity,recall --output quality
  {PROGRAM} --model huggyllama/llama-7b --tasks xsum --articles xsum_0shot.jsonl --kv-sizes {USUAL_SIZES}
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Quality:
    """Tasks under every setting of a grid."""

    grid: Grid
    tasks: Mapping[str, EvaluationTask]
    fresh: bool  # whether to forget the cells that are there


@dataclass(frozen=True)
class Study:
    """A study of where attention goes in the first window of the texts, and what policies keep of it."""

    texts: tuple[Text, ...]
    window: int | None  # None: as the model has it
    policies: tuple[str, ...]
    budget: float  # a share


@dataclass(frozen=True)
class OfFacts:
    """A study of which heads find facts in prose, and which of them still hold these."""

    facts: FactsAsked
    policies: tuple[str, ...]
    heads: tuple[HeadBudgets | None, ...]
    budget: float  # a share


@dataclass(frozen=True)
class EvaluateRequest:
    """Everything that is asked of one evaluation."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan  # a grid changes its policy and codecs
    work: Quality | Study | OfFacts
    output: Path | None  # an existing folder
    verbose: int
    command: tuple[str, ...]  # as it was typed


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    parser = make_parser(program)
    parser.set_defaults(command=(*program.split(), *argv))
    return parser.parse_or_demo(argv, {"model": DEMO, "gpu_batch_size": DEMO_BATCH})


def request_of(flags: Namespace) -> EvaluateRequest:
    names = _task_names(flags)
    for flag, codec, here in (("cache", flags.kv_codec, "--kv-bits"), ("weight", flags.weight_codec, "--weight-bits")):
        if codec not in (None, PLAIN):
            raise ValueError(f"--compress-{flag} is a part of the grid here; say {here}, also for several side by side")
    grid = _grid(flags, names)
    plan = plan_of(flags, without=(*BESIDE_BUDGET, RECALL, "compute", HEAD_BUDGETS, PROBE))  # the grid has these
    work: Quality | Study | OfFacts
    if flags.study is not None:
        work = _study(flags, grid)
        plan = replace(plan, kv_codec=grid.kv_codecs[0], weight_codec=grid.weight_codecs[0], compute=grid.computes[0])
    else:
        asked = _asked(flags, names)
        work = Quality(grid, {name: TASKS[name].of(asked) for name in names}, flags.fresh)
    return EvaluateRequest(
        output=open_output_folder(flags.output),
        model=model_of(flags).without_measuring,
        site=site_of(flags),
        plan=plan,
        work=work,
        verbose=flags.verbose,
        command=flags.command,
    )


# -- tasks -----------------------------------------------------------------------------------------------------------------


def _task_names(flags: Namespace) -> tuple[str, ...]:
    usual = USUAL_TASKS if flags.articles is None else XSum.name
    names = _names("--tasks", usual if flags.tasks is None else flags.tasks, TASKS)
    if flags.articles is not None and XSum.name not in names:
        raise ValueError(f"--articles is about {XSum.name}, and --tasks has {', '.join(names)}; add it, or leave one out")
    return names


def _asked(flags: Namespace, names: Sequence[str]) -> TaskOptions:
    lengths = None if flags.lengths is None else _numbers("--lengths", flags.lengths, whole_number, TOKENS)
    depths = None if flags.depths is None else _depths(flags.depths)
    if flags.fresh and flags.output is None:
        raise ValueError("--fresh is about the cells that --output keeps; give --output, or leave it out")
    unchanged = {name: getattr(flags, name) for name in ("articles", "window", "examples", "gen_len", "mentions", "seed")}
    texts = _texts(flags, is_read=any(TASKS[name].reads_texts for name in names))
    questions = QUESTIONS if flags.question == BOTH else (flags.question,)
    return TaskOptions(texts=texts, questions=questions, lengths=lengths, depths=depths, **unchanged)


def _texts(flags: Namespace, is_read: bool) -> tuple[Text, ...]:
    if flags.text is not None:
        return tuple(map(Text.read, flags.text))
    return (Text.held_out(),) if is_read else ()


def _depths(text: str) -> tuple[float, ...]:
    return tuple(percent / 100 for percent in _numbers("--depths", text, _percent, PERCENT))


# -- the grid --------------------------------------------------------------------------------------------------------------


def _grid(flags: Namespace, tasks: Collection[str]) -> Grid:
    unset = KVOptions()
    asked = {name: getattr(flags, name) for name in (*BESIDE_BUDGET, RECALL)}
    beside = tuple((name, value) for name, value in asked.items() if value != getattr(unset, name))
    usual = FACTS_POLICIES if flags.study == FACTS else USUAL_POLICIES
    policies = _names("--policies", flags.policies or usual, POLICIES)
    for name, _ in beside:
        if not any(name in POLICIES[policy].accepts for policy in policies if policy != Full.name):
            raise ValueError(f"--{name.replace('_', '-')} is taken by none of the policies {', '.join(policies)}; leave it out")
    KVOptions(**dict(beside))  # refuses wrong values
    kv_codecs, weight_codecs = _codecs("--kv-bits", flags.kv_bits), _codecs("--weight-bits", flags.weight_bits)
    computes = _names("--compute", flags.compute, PRODUCTS)
    amounts = _amounts(flags, tasks)
    if flags.recall and not all(isinstance(amount, BudgetShare) for amount in amounts):
        raise ValueError("--recall attends a share of what is kept, and KV sizes are asked for; give --budgets")
    heads, probe = _heads(flags, policies, amounts), _probe(flags, policies)
    return Grid(policies, amounts, kv_codecs, weight_codecs, computes, beside, heads, probe, flags.recall)


def _probe(flags: Namespace, policies: Collection[str]) -> Probe | None:
    if flags.study is not None:  # it refuses such policies, and takes no probe
        return None
    asking = next((name for name in policies if POLICIES[name].ranks_by == BY_PROBE), None)
    if flags.probe is None:
        if asking is not None:
            raise ValueError(f"--policies has {asking}, which ranks tokens by a probe; give --probe FILE, or --probe {OWN}")
        return None
    if asking is None:
        raise ValueError(f"--probe {flags.probe} is for policies that ask for one, and --policies has none; leave one out")
    return probe_of(flags.probe, model_of(flags).source)


def _heads(flags: Namespace, policies: Collection[str], amounts: Collection[Amount]) -> tuple[HeadBudgets | None, ...]:
    """Equal budgets, head budgets, or both side by side."""
    words = _words("--head-budgets", flags.head_budgets)
    if AUTO in words:
        raise ValueError(f"--head-budgets {AUTO} is for runs, and tables say what was measured; give {EQUAL}, {OWN} or FILE")
    files = [word for word in words if word != EQUAL]
    if len(files) > 1:
        raise ValueError(f"--head-budgets has {' and '.join(files)}, which tables could not tell apart; give one of them")
    if files and not all(isinstance(amount, BudgetShare) for amount in amounts):
        raise ValueError(f"--head-budgets {files[0]} shares out --budgets, and KV sizes are asked for; leave one of them out")
    if files and not {*policies} - {Full.name}:
        raise ValueError(f"--head-budgets {files[0]} is for policies that evict, and --policies has none; leave one out")
    source = model_of(flags).source
    return tuple(None if word == EQUAL else head_budgets_of(word, source) for word in words)


def _amounts(flags: Namespace, tasks: Collection[str]) -> tuple[Amount, ...]:
    if flags.budgets is not None and flags.kv_sizes is not None:
        raise ValueError("--budgets and --kv-sizes both say how much is kept; give one of them")
    if flags.kv_sizes is not None or (flags.budgets is None and set(tasks) <= set(OF_SIZES)):
        return tuple(map(_size, _words("--kv-sizes", flags.kv_sizes or USUAL_SIZES)))
    return tuple(map(BudgetShare, _numbers("--budgets", flags.budgets or USUAL_BUDGETS, _percent)))


def _size(word: str) -> BudgetSlots:
    return BudgetSlots(None) if word == ALL_SLOTS else BudgetSlots(_number("--kv-sizes", word, whole_number))


def _codecs(flag: str, text: str) -> tuple[str, ...]:
    known = {AS_IT_IS: PLAIN} | {str(bits): codec for bits, codec in BY_BITS.items()}
    return tuple(known[word] for word in _names(flag, text, known))


# -- a study ---------------------------------------------------------------------------------------------------------------


def _study(flags: Namespace, grid: Grid) -> Study | OfFacts:
    """The request for a study: one setting, with all policies that evict."""
    budget = _one_setting(flags, grid).percent / WHOLE_TEXT
    of_facts = OF_FACTS if flags.study == FACTS else ()
    unused = {"--tasks": flags.tasks is not None, "--kv-sizes": flags.kv_sizes is not None, "--fresh": flags.fresh}
    unused |= {"--probe": flags.probe is not None, "--recall": flags.recall}
    unused |= {"--head-budgets": flags.study != FACTS and grid.heads != (None,)}
    unused |= {"--window": flags.study == FACTS and flags.window is not None}
    unused |= {f"--{name.replace('_', '-')}": True for name, _ in grid.beside}
    for name, usual in OF_TASKS.items():
        unused[f"--{name.replace('_', '-')}"] = name not in of_facts and getattr(flags, name) != usual
    if found := next((flag for flag, is_given in unused.items() if is_given), None):
        raise ValueError(f"--study {flags.study} takes no {found}; leave it out")
    policies = tuple(policy for policy in grid.policies if policy != Full.name)
    if flags.study == FACTS:
        return OfFacts(_facts(flags), policies, grid.heads, budget)
    return Study(_texts(flags, is_read=True), flags.window, policies, budget)


def _one_setting(flags: Namespace, grid: Grid) -> BudgetShare:
    """Refuses whatever is a grid; the one budget."""
    asked = [STUDY_BUDGET] if flags.budgets is None else [one for one in grid.amounts if isinstance(one, BudgetShare)]
    budgets = [one for one in asked if not one.keeps_all]
    for flag, count in (
        ("budget below 100", len(budgets)),
        ("--kv-bits", len(grid.kv_codecs)),
        ("--weight-bits", len(grid.weight_codecs)),
        ("--compute", len(grid.computes)),
    ):
        if count != 1:
            raise ValueError(f"--study takes one {flag}, and {count} are given; give one")
    return budgets[0]


def _facts(flags: Namespace) -> FactsAsked:
    lengths = (FACTS_LENGTH,) if flags.lengths is None else _numbers("--lengths", flags.lengths, whole_number, TOKENS)
    depths = (FactsAsked.depth,) if flags.depths is None else _depths(flags.depths)
    for flag, count in (("--lengths", len(lengths)), ("--depths", len(depths))):
        if count != 1:
            raise ValueError(f"--study {FACTS} takes one number for {flag}, and {count} are given; give one")
    return FactsAsked(
        prose="\n".join(text.content for text in _texts(flags, is_read=True)),
        length=lengths[0],
        examples=flags.examples or FactsAsked.examples,
        depth=depths[0],
        mentions=flags.mentions,
        question=FactsAsked.question if flags.question == BOTH else flags.question,
        seed=flags.seed,
    )


# -- lists with commas -----------------------------------------------------------------------------------------------------


def _words(flag: str, text: str) -> tuple[str, ...]:
    """The distinct words of a list with commas."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ValueError(f"{flag} is empty; give one or more, with commas between them")
    return words


def _names(flag: str, text: str, known: Mapping[str, object]) -> tuple[str, ...]:
    words = _words(flag, text)
    for word in words:
        if word not in known:
            raise ValueError(
                f"{flag} has {shown(word)}, which is unknown; known: {', '.join(known)}{did_you_mean(word, known)}"
            )
    return words


def _number(flag: str, word: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(word)
    except ValueError as error:
        raise ValueError(f"{flag} has {shown(word)}, which is no number; give numbers with commas between them") from error


def _percent(word: str) -> float:
    return decimal_number(word.removesuffix("%"))


def _numbers(flag: str, text: str, kind: Callable[[str], T], bounds: Bounds | None = None) -> tuple[T, ...]:
    numbers = tuple(dict.fromkeys(_number(flag, word, kind) for word in _words(flag, text)))
    for number in numbers:
        if bounds is not None and not bounds.least <= number <= bounds.most:  # type: ignore[operator]
            raise ValueError(f"{flag} has {number:g}; give {bounds}")
    return numbers


# -- flags -----------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} [--model NAME] [--policies A,B] [--budgets 100,20] [--tasks A,B] [--output FOLDER] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), first=FIRST)
    # flags of a plan that the grid also sets
    unasked = dict.fromkeys(("heavy", "recent", "hh_ratio", "kv_budget"))
    parser.set_defaults(hh_all=False, kv_policy=Full.name, **unasked)
    parser.add_model()
    parser.add_tokenizer()
    _add_grid(parser.group("grid", "what is compared: every policy at every budget"))
    _add_tasks(parser.group("tasks"))
    parser.set_defaults(**OF_TASKS)
    group = parser.group("plan")
    add_placement(group)
    add_sizes(group)
    _add_output(parser.group("output"))
    return parser


def _add_grid(group: Group) -> None:
    group.value("--policies", "NAMES", f"of {', '.join(POLICIES)} (default: {USUAL_POLICIES})")
    shares = "per cent of each text that is kept; 100 is the full cache, for all policies"
    group.value("--budgets", "PERCENT", f"{shares} (default: {USUAL_BUDGETS})")
    slots = f"slots kept of each text, half heavy, half recent, instead of budgets ({', '.join(OF_SIZES)}: {USUAL_SIZES})"
    group.value("--kv-sizes", "SLOTS", slots)
    several = f"one or more of {'|'.join([AS_IT_IS, *map(str, BY_BITS)])}, with commas"
    group.value("--kv-bits", "BITS", f"that keys and values take: {several}", default=AS_IT_IS)
    group.value("--weight-bits", "BITS", f"that matrices take: {several}", default=AS_IT_IS)
    products = f"how packed weights are multiplied: one or more of {'|'.join(PRODUCTS)}, with commas"
    group.value("--compute", "NAMES", products, default=Plan.compute)
    by_head = f"{EQUAL}: equal budgets of all heads; FILE: as this file of `calibrate` says; {OWN}: the file beside the model"
    group.value("--head-budgets", "NAMES", f"{by_head}; with a comma both are compared", default=EQUAL)
    group.option(PLAN["probe"])
    recalled = "beside policies: everything is kept, and a decode step attends each of the budgets of it (`run --kv-recall`)"
    group.truth("--recall", text=recalled)
    read = "of what policies that evict keep, a decode step attends this share, chosen by its own query (default: all)"
    group.option(KV[RECALL], read)
    add_protection(group)


def _add_tasks(group: Group) -> None:
    value = group.value
    value("--tasks", "NAMES", f"of {', '.join(TASKS)} (default: {USUAL_TASKS}; with --articles: {XSum.name})")
    value("--text", "FILE", "for perplexity and agreement, and the prose of recall (default: prose of the package)", nargs="+")
    articles = 'for xsum, a line each: {"article": ..., "summary_gt": ...}; an article says what is to be done with it'
    value("--articles", "FILE", articles)
    value("--window", "TOKENS", f"of a text at once (default: {WINDOW}, or the model's positions)", TOKENS)
    each = f"windows of text (default: {EXAMPLES}), articles (100), or questions of each kind, length and depth (4)"
    value("--examples", "N", each, Bounds(1, MOST_EXAMPLES))
    value("--gen-len", "TOKENS", "generated for each summary, or to be agreed on", TOKENS)
    seen = "recall: is the question there when tokens of the prompt are evicted, or does it come behind"
    group.choice("--question", (*QUESTIONS, BOTH), seen)
    value("--lengths", "TOKENS", "recall: of texts, with commas (default: 256,512,1024, as far as the model has positions)")
    value("--depths", "PERCENT", "recall: where the answer stands; 0 is the beginning (default: 0,25,50,75,100)")
    mentions = "recall: how often a note says its fact; accumulated attention keeps what a text comes back to"
    value("--mentions", "N", mentions, Bounds(1, MOST_MENTIONS))
    value("--seed", "N", "recall: of the questions", SEED)
    share = f"(default: {STUDY_BUDGET.percent:g})"
    attention = f"{HEAVY_HITTERS}: where attention goes over the first window of the text, and which tokens are kept"
    facts = f"{FACTS}: which heads look at what recall asks for, and which of them still hold it"
    studies = f"instead of tasks, at one budget {share}; {attention}; {facts}"
    group.choice("--study", STUDIES, studies)


def _add_output(group: Group) -> None:
    kept = "results.json, table.md, picture.png (with the extra [plot]), and every cell as soon as it is finished, go here"
    group.value("--output", "FOLDER", kept)
    group.truth("--fresh", text="forget the cells that are there")
    group.verbose(f"{TRACEBACK}: where errors come from")
