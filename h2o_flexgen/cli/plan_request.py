"""The plan command's flags, the request made of them, and a found plan written as flags of the run command. Nothing here
imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from h2o_flexgen.cli.common_requests import asked_of, model_of, named_machine, plan_of, refuse_search_options, site_of
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import DUMMY_PATH, FIRST_OF_PLANS, PLAN, SITE, Group, Parser, add_placement, add_sizes
from h2o_flexgen.cli.output_files import check_picture
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.option import flag_of, flags_written
from h2o_flexgen.core.workload import PROMPTS, TOKENS
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import HEAD_BUDGETS, PROBE, ModelRequest, SiteRequest
from h2o_flexgen.text.given_texts import DEFAULT_TOKENS

PROGRAM = "python -m h2o_flexgen.plan"
FIRST = (
    *("--model", "--machine", "--num-prompts", "--prompt-len", "--gen-len"),
    *(*FIRST_OF_PLANS, "--disk-mem", "--latency-limit", "--prefer", "--evaluate"),
)
EPILOG = f"""\
The flags that it prints are those of `python -m h2o_flexgen.run`. Without --machine it plans for this one:

  {PROGRAM} --model facebook/opt-6.7b --prompt-len 512 --gen-len 32 --cpu-mem 8GB
  {PROGRAM} --model facebook/opt-6.7b --cpu-mem 8GB --evaluate --percent 0 10 0 50 0 100 --gpu-batch-size 4
"""


@dataclass(frozen=True)
class PlanRequest:
    """Everything that is asked of one plan."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan | PlanRequirements  # the plan to price, or what is asked of one that is to be found
    machine: Machine | None  # the named one; None stands for this one
    num_prompts: int | None  # None: as many as make one block
    prompt_len: int
    gen_len: int
    plot: Path | None
    timeline: Path | None
    verbose: int
    model_flags: tuple[str, ...]  # as they were typed, for the run command
    head_flags: tuple[str, ...]
    site_flags: tuple[str, ...]

    def run_flags(self, plan: Plan) -> list[str]:
        """The flags that ask the run command for this plan, without those that are its defaults."""
        number = () if self.num_prompts is None else ("--num-prompts", str(self.num_prompts))
        work = (*number, "--prompt-len", str(self.prompt_len), "--gen-len", str(self.gen_len))
        return [*self.model_flags, *work, *plan_flags(plan), *self.head_flags, *self.site_flags]


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    parser = make_parser(program)
    flags = parser.parse(argv)
    if flags.model is None and flags.path in (None, DUMMY_PATH):
        parser.error("the model to plan for is missing; give --model with a hub name or a local folder")
    return flags


def request_of(flags: Namespace) -> PlanRequest:
    _refuse(flags)
    plan = plan_of(flags)
    for flag in ("plot", "timeline"):
        check_picture(getattr(flags, flag), f"--{flag}")
    request = PlanRequest(
        model=model_of(flags),
        site=site_of(flags),
        plan=plan if flags.evaluate else asked_of(flags, plan),
        machine=named_machine(flags),
        num_prompts=flags.num_prompts,
        prompt_len=flags.prompt_len,
        gen_len=flags.gen_len,
        plot=flags.plot and local_path(flags.plot),
        timeline=flags.timeline and local_path(flags.timeline),
        verbose=flags.verbose,
        model_flags=(*_typed(flags, ("model", "path")), *(("--dummy-weights",) if flags.dummy_weights else ())),
        head_flags=tuple(_typed(flags, (HEAD_BUDGETS, PROBE))),
        site_flags=(*_typed(flags, ("dtype",)), *flags_written(site_of(flags), SiteRequest)),
    )
    request.model.without_weights().refuse_missing()  # as it will be opened
    return request


def _typed(flags: Namespace, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if (value := getattr(flags, name)) not in (None, AUTO):
            yield from (flag_of(name), str(value))


def _refuse(flags: Namespace) -> None:
    if flags.percent is not None and not flags.evaluate:
        raise ValueError("--percent is what is searched; leave it out, or give --evaluate to price it")
    if flags.threads is not None and flags.machine is not None:
        figures = f"--machine {flags.machine} has figures of its own"
        raise ValueError(f"--threads {flags.threads} is for plans for this machine, and {figures}; leave one of them out")
    if flags.evaluate:
        refuse_search_options(flags, "do without --evaluate")
    if flags.evaluate and flags.plot is not None:
        raise ValueError("--plot shows what a search has found; leave it out with --evaluate")


# -- a plan as flags -------------------------------------------------------------------------------------------------------


def plan_flags(plan: Plan) -> Iterator[str]:
    """What differs from the defaults, and the sizes, which a run may else search. What files hold is passed on as typed."""
    yield from ("--percent", *(f"{share:g}" for share in plan.percent))
    if plan.buffers == 1:
        yield from ("--overlap", "0")
    named = replace(plan, head_budgets=None, probe=None, buffers=Plan.buffers if plan.buffers == 1 else plan.buffers)
    yield from flags_written(named, Plan, always=("gpu_batch_size", "num_gpu_batches"))
    yield from flags_written(plan.kv_options, KVOptions)


# -- flags -----------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} --model NAME [--machine NAME] [--prompt-len P] [--gen-len G] [options]"
    description = "Find the plan that generates fastest within the memory of a machine, say why, and predict its seconds."
    parser = Parser(program, description, usage, EPILOG.replace(PROGRAM, program), first=FIRST)
    parser.add_model()
    several = parser.group("several GPUs")
    several.option(SITE["gpus"])
    several.option(PLAN["pipeline"])
    _add_workload(parser.group("work"))
    _add_plan(parser)
    _add_search(parser)
    parser.add_kv()
    _add_output(parser.group("output"))
    return parser


def _add_workload(group: Group) -> None:
    group.value("--num-prompts", "N", "how many there are (default: as many as make one block)", PROMPTS)
    group.value("--prompt-len", "TOKENS", "of each prompt", TOKENS, DEFAULT_TOKENS)
    group.value("--gen-len", "TOKENS", "generated for each prompt", TOKENS, SamplingParams.max_tokens)


def _add_plan(parser: Parser) -> None:
    group = parser.group("plan", "what is named is kept, and the rest of sizes and shares is searched")
    add_placement(group, instead_of_auto="without --percent the plan is searched")
    group.option(PLAN["compute"])
    parser.set_defaults(percent=None)
    add_sizes(group, "without --evaluate")


def _add_search(parser: Parser) -> None:
    group = parser.add_search("search", "its memory is the limit where no other is given")
    priced = "search nothing: price the plan that --percent, the sizes and the other flags describe"
    group.truth("--evaluate", text=priced)


def _add_output(group: Group) -> None:
    group.value("--plot", "FILE", "a picture of latency against throughput (needs the extra [plot])")
    group.value("--timeline", "FILE", "a picture of the lanes over two decode steps (needs the extra [plot])")
    group.verbose(f"{TRACEBACK}: where errors come from")
