"""The run command's flags, both FlexGen's with their meaning and our own, and the request made of them. Nothing here imports
torch."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.common_requests import (
    DEMO_SAMPLING,
    GPUS,
    WHERE_FOUND,
    adapter_of_all,
    asked_of,
    model_of,
    named_machine,
    plan_of,
    refuse_search_options,
    sampling_of,
    site_of,
)
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import FIRST_OF_PLANS, PLAN, REPEATABLE, SITE, Group, Parser, add_placement, add_sizes, typed
from h2o_flexgen.cli.output_files import check_output_file, check_picture, check_writable
from h2o_flexgen.core.allowed_values import AUTO, Bounds
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.workload import PROMPTS, TOKENS
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.policies.by_attention import H2O
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.given_texts import DEFAULT_TOKENS, given_prompts

PROGRAM = "python -m h2o_flexgen.run"
FEWER_BATCH, BREAKDOWN = "fewer_batch", "breakdown"
AUTO_LOG = "auto"

SPREAD = {"demo": True, "gpu_batch_size": 2, "num_gpu_batches": 2, "percent": [20, 30, 20, 30, 100, 0]}  # over every tier
# without --model: the package's own, heavy hitters kept; or a small OPT where weights are to be random
DEMO_RUN = {**SPREAD, "model": DEMO, "gen_len": 96, "kv_policy": H2O.name, **DEMO_SAMPLING}
KV_IN_MEMORY = [20, 30, 20, 80, 100, 0]  # where guessed tokens are taken back, KV must rest
NOISE_RUN = {**SPREAD, "model": "facebook/opt-125m", "dummy_weights": True, "prompt_len": 64, "gen_len": 16}
FEW_PROMPTS = 4  # that are made up where nothing says how much is to be run
SHOWS_TIERS = f"no --model: {DEMO}, the model of the package, spread over all tiers, with {H2O.name}, to show them"
DEMO_PROMPTS = (
    "It was a dark and stormy night, and the captain of the ship",
    '"My dear," said the old lady, laying down her knitting, "I must tell you',
    "Alice looked at the door for some time, and then she",
    "The two brothers had not met for many years. When at last",
)

DESCRIPTION = """\
Generate text with a model that is larger than the GPU, or than the memory; measure how fast it goes.
Without --model: a small one that travels with the package, with h2o, 96 tokens and a share of everything on each tier, where
nothing else is asked; nothing is downloaded."""

FIRST_OF_PROMPTS = "--prompt", "--prompt-file", "--prompt-len", "--num-prompts", "--gen-len"
FIRST = "--model", *FIRST_OF_PROMPTS, *FIRST_OF_PLANS, "--output", "--dry-run"
EPILOG = f"""\
To begin with, --model and --prompt are enough: the machine is measured once, and the plan is found. --dry-run shows what a plan
needs before anything is loaded:

  {PROGRAM} --model facebook/opt-1.3b --prompt-len 64 --gen-len 64 --dry-run
  {PROGRAM} --model facebook/opt-1.3b --percent 0 50 0 100 100 0 --prompt "The ferry left the harbour"
"""


@dataclass(frozen=True)
class MadeUpPrompts:
    """Prompts that are made up."""

    number: int | None  # None: as many as a block takes
    length: int


@dataclass(frozen=True)
class NamedByPlan:
    """A log file with a name made from the plan."""


@dataclass(frozen=True)
class OutputFiles:
    completions: str | None  # as it was written, for messages
    trace: Path | None
    timeline: Path | None
    log: Path | NamedByPlan | None


@dataclass(frozen=True)
class RunRequest:
    """Everything that is asked of one run."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan | PlanRequirements  # the plan itself, or what is asked of one that is to be found
    machine: Machine | None  # the named one; None stands for this one
    prompts: tuple[str, ...] | MadeUpPrompts
    gen_len: int
    steps: int  # tokens of each prompt that are really generated; the time of the rest is projected
    stops_after_layers: bool  # --debug-mode fewer_batch
    breaks_down: bool  # --debug-mode breakdown
    sampling: SamplingParams
    seed: int | None
    files: OutputFiles
    dry_run: bool
    verbose: int
    notes: tuple[str, ...]  # what is said of the options that were given, or were not
    others: Others = field(default_factory=Others, compare=False, repr=False)  # other processes that have been busy

    @property
    def shows_trace(self) -> bool:
        """Whether anything is asked that is drawn or counted from all tasks of a run."""
        return self.breaks_down or self.verbose >= 2 or any((self.files.trace, self.files.timeline))


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    """Parses the flags. Abbreviations are allowed, as published FlexGen commands have them (`--cpu`, `--debug`)."""
    parser = make_parser(program)
    return parser.parse_or_demo(argv, _demo_run(parser.parse(argv)), NOISE_RUN)


def _demo_run(asked: Namespace) -> Mapping[str, object]:
    """The run without --model. Its KV on disk gives way to guesses, and its policy to a recall, which keeps all tokens."""
    kept = {name: value for name, value in DEMO_RUN.items() if name != "kv_policy" or asked.kv_recall is None}
    return kept if asked.draft == PLAN["draft"].default else {**kept, "percent": KV_IN_MEMORY}


def request_of(flags: Namespace) -> RunRequest:
    """The request. Texts are read, and visible mistakes refused, before torch is imported."""
    plan = plan_of(flags)
    plan = plan.without_overlap() if flags.debug_mode == BREAKDOWN else plan
    _refuse(flags, plan)
    sampling = sampling_of(flags)
    prompts = _prompts(flags)
    files, machine, model = _files(flags), named_machine(flags), model_of(flags)
    if lora := adapter_of_all(model):
        sampling = replace(sampling, lora_name=lora.lora_name)
    return RunRequest(
        files=files,
        machine=machine,
        model=model.without_weights() if flags.dry_run else model,
        site=site_of(flags),
        plan=asked_of(flags, plan) if flags.percent == AUTO else plan,
        prompts=prompts,
        gen_len=flags.gen_len,
        steps=flags.gen_len if flags.cut_gen_len is None else flags.cut_gen_len,
        stops_after_layers=flags.debug_mode == FEWER_BATCH,
        breaks_down=flags.debug_mode == BREAKDOWN,
        sampling=sampling,
        seed=flags.seed,
        dry_run=flags.dry_run,
        verbose=flags.verbose,
        notes=tuple(_notes(flags, prompts)),
    )


def _prompts(flags: Namespace) -> tuple[str, ...] | MadeUpPrompts:
    asked = (flags.prompt, flags.prompt_file, flags.prompt_len, flags.num_prompts)
    texts = DEMO_PROMPTS if flags.demo and flags.model == DEMO and asked == (None,) * 4 else flags.prompt
    given = tuple(given_prompts(texts, flags.prompt_file, flags.num_prompts))
    number = FEW_PROMPTS if _asks_no_sizes(flags) else flags.num_prompts
    return given or MadeUpPrompts(number, DEFAULT_TOKENS if flags.prompt_len is None else flags.prompt_len)


def _asks_no_sizes(flags: Namespace) -> bool:
    """Whether nothing says how much is to be run: then a block, as large as a search finds it, would take long."""
    sizes = (flags.num_prompts, flags.prompt_len, flags.gpu_batch_size, flags.num_gpu_batches)
    is_open = not flags.demo and flags.percent == AUTO and sizes == (None,) * len(sizes)
    return is_open and not model_of(flags).dummy_weights  # random weights are there to be measured


def _files(flags: Namespace) -> OutputFiles:
    check_writable(flags.trace, "--trace")
    check_picture(flags.timeline, "--timeline")
    if flags.log_file not in (None, AUTO_LOG):
        check_writable(flags.log_file, "--log-file")
    check_output_file(flags.output)
    trace, timeline, log = (name and local_path(name) for name in (flags.trace, flags.timeline, flags.log_file))
    log = None if flags.no_log else NamedByPlan() if flags.log_file == AUTO_LOG else log
    return OutputFiles(flags.output, trace, timeline, log)


def _notes(flags: Namespace, prompts: tuple[str, ...] | MadeUpPrompts) -> Iterator[str]:
    if flags.demo and all(getattr(flags, name) == DEMO_RUN[name] for name in ("model", "percent", "kv_policy")):
        yield SHOWS_TIERS
    if not isinstance(prompts, MadeUpPrompts) and flags.prompt_len is not None and not flags.demo:
        yield f"--prompt-len {flags.prompt_len} is not used: the prompts are given"
    if isinstance(prompts, MadeUpPrompts) and _asks_no_sizes(flags):
        yield f"no prompt is given: {FEW_PROMPTS} made-up ones are run; --prompt gives one, and --num-prompts says how many"


def _refuse(flags: Namespace, plan: Plan) -> None:
    if flags.attn_sparsity != 1.0:
        raise ValueError("--attn-sparsity is not supported by this version; leave it out")
    if flags.percent != AUTO:
        refuse_search_options(flags, f"say --percent {AUTO}")
    of_runs = (name for name in ("output", "trace", "timeline") if getattr(flags, name) is not None)
    if flags.dry_run and (flag := next(of_runs, None)):
        raise ValueError(f"--{flag} shows what was run, and --dry-run runs nothing; leave one of them out")
    _refuse_of_one_process(flags)
    if flags.cut_gen_len is not None and flags.cut_gen_len < 2:
        raise ValueError(
            f"--cut-gen-len is {flags.cut_gen_len}; give 2 or more: a decode step must be measured to be projected"
        )
    if flags.output is not None and flags.debug_mode == FEWER_BATCH:
        raise ValueError(f"--output is for texts, and --debug-mode {FEWER_BATCH} ends before the second token; leave one out")
    if flags.cut_gen_len is not None and flags.cut_gen_len > flags.gen_len:
        cut = f"--cut-gen-len {flags.cut_gen_len} cuts nothing: --gen-len has {flags.gen_len} tokens generated"
        raise ValueError(f"{cut}; give fewer, or leave it out")
    if flags.cut_gen_len is not None and flags.debug_mode == FEWER_BATCH:
        raise ValueError(f"--cut-gen-len and --debug-mode {FEWER_BATCH} both cut the run short; give one of them")
    if flags.debug_mode == FEWER_BATCH and flags.schedule == "row_by_row":
        raise ValueError(
            f"--debug-mode {FEWER_BATCH} needs all batches in one decode step; row_by_row has none: use --cut-gen-len"
        )
    if flags.cut_gen_len is not None and not plan.policy.keeps_all and plan.kv_options.is_share_of_text:
        raise ValueError(
            f"--cut-gen-len {flags.cut_gen_len} would cut the budget of {plan.kv_policy} as well, which is a share of "
            "prompt and generation; give it as --hh-ratio, or as --heavy and --recent"
        )


def _refuse_of_one_process(flags: Namespace) -> None:
    """Refuses what looks at the work of one process, where there are several."""
    names = ("trace", "timeline", "log_file", "debug_mode", "cut_gen_len")
    if flags.gpus > 1 and (name := next((name for name in names if getattr(flags, name) is not None), None)):
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"{flag} looks at the work of one process, and {GPUS} {flags.gpus} starts several; leave one of them out"
        )


# -- flags ------------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} [--model NAME] [--prompt TEXT] [--percent W W KV KV A A] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), first=FIRST)
    parser.set_defaults(demo=False)
    parser.add_model(takes_lora=True)
    parser.add_tokenizer()
    several = parser.group("several GPUs")
    several.option(SITE["gpus"])
    several.option(PLAN["pipeline"])
    _add_prompts(parser.group("prompts"))
    _add_plan(parser.group("plan"))
    parser.add_search(f"search, {WHERE_FOUND}", "a run with a plan of your own is predicted for it, too")
    parser.add_kv()
    parser.add_sampling()
    _add_output(parser.group("output"))
    _add_later(parser)
    return parser


def _add_prompts(group: Group) -> None:
    group.add("--prompt", action="append", metavar="TEXT", help=f"a text to continue; {REPEATABLE}")
    group.value("--prompt-file", "FILE", 'a prompt per line (.txt), or a {"prompt": ...} per line (.jsonl)')
    number = f"how many made-up prompts (default: one block; {FEW_PROMPTS} without sizes or a plan); of given ones the first N"
    group.value("--num-prompts", "N", number, PROMPTS)
    group.value("--prompt-len", "TOKENS", f"length of made-up prompts (default: {DEFAULT_TOKENS})", TOKENS)
    group.value("--gen-len", "TOKENS", "generated for each prompt, at most", TOKENS, SamplingParams.max_tokens)
    group.value("--cut-gen-len", "TOKENS", "run only so many and project the time of the rest", TOKENS)


def _add_plan(group: Group) -> None:
    add_placement(group, may_be_found=True)
    group.option(PLAN["compute"])
    add_sizes(group, WHERE_FOUND)
    group.truth("--dry-run", text="print the plan and its bytes per tier; no weights are loaded")


def _add_output(group: Group) -> None:
    records = "a line of JSON per prompt, in order: whole texts, token ids, finish reasons; until the end as FILE.partial"
    group.value("--output", "FILE", records)
    group.verbose(f"0: no texts; 1: the first texts; 2: all texts and the timeline; {TRACEBACK}: where errors come from")
    timeline = "a picture of decode steps, lane by lane, as predicted above those that were run (needs the extra [plot])"
    group.value("--timeline", "FILE", timeline)
    group.value("--trace", "FILE", "the last block, task by task, for ui.perfetto.dev or chrome://tracing")
    log = "append the summary here (no FILE: a name made of the plan)"
    group.value("--log-file", "FILE", log, nargs="?", const=AUTO_LOG)
    group.truth("--no-log", text="write no log, whatever --log-file says")
    modes = f"{FEWER_BATCH}: 20 layers of the first decode step, then project; {BREAKDOWN}: no overlap, seconds per operation"
    group.choice("--debug-mode", (FEWER_BATCH, BREAKDOWN), modes)


def _add_later(parser: Parser) -> None:
    """Adds flags of published FlexGen commands that this version does not support, so that they can be refused by name."""
    group = parser.group("FlexGen's flags that this version refuses when they are on", "--attn-sparsity below 1")
    group.add("--attn-sparsity", type=typed(Bounds(0, 1, is_whole=False)), default=1.0, help=argparse.SUPPRESS)
