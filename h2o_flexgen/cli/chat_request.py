"""The chat command's flags, the request made of them, and the turns in a file. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.common_requests import DEMO_SAMPLING, adapter_of_all, model_of, plan_of, sampling_of, site_of
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import FIRST_OF_PLANS, PLAN, Group, Parser, add_placement
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.files import JSON_LINES, local_path, parse_json
from h2o_flexgen.core.workload import TOKENS
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.sampling.params import LoRARequest, SamplingParams
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.dialogue import STYLES
from h2o_flexgen.text.given_texts import read_lines, refuse_other_names

PROGRAM = "python -m h2o_flexgen.chat"
GEN_LEN = 256

RESET, STATS, HELP, QUIT = "/reset", "/stats", "/help", "/quit"
COMMANDS = {
    RESET: "forgets all that was said",
    STATS: "tells of tokens and memory",
    HELP: "names these commands",
    QUIT: "(or Ctrl-D) leaves",
}

DESCRIPTION = """\
Talk with a model. Its weights may be larger than the memory. What was said stays in the KV cache.
Without --model: a small one that travels with the package; nothing is downloaded."""

GOES_ON = f"no --model: {DEMO}, the model of the package, which goes on with prose and was not trained to answer"
FIRST = "--model", "--input", "--system", "--gen-len", "--context-len", "--temperature", *FIRST_OF_PLANS, "--positions"
EPILOG = f"""\
With a policy that evicts and rolling positions the talk has no end, in constant memory:

  {PROGRAM} --model Qwen/Qwen3-8B --kv-policy h2o --heavy 512 --recent 512 --positions rolling

While you talk: {", ".join(f"{word} {meaning}" for word, meaning in COMMANDS.items())}; Ctrl-C stops a reply.
"""


@dataclass(frozen=True)
class ChatRequest:
    """Everything that is asked of one talk."""

    model: ModelRequest
    lora: LoRARequest | None  # the adapter of all turns
    site: SiteRequest
    plan: Plan  # has one row
    turns: tuple[str, ...] | None  # None: typed, or read from standard input
    style: str
    system: str
    context_len: int | None  # None: the model's positions
    sampling: SamplingParams
    seed: int | None
    verbose: int
    notes: tuple[str, ...]  # what is said before the talk of the options that were not given
    others: Others = field(default_factory=Others, compare=False, repr=False)  # other processes that have been busy


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse_or_demo(argv, {"demo": True, "model": DEMO, **DEMO_SAMPLING})


def request_of(flags: Namespace) -> ChatRequest:
    plan = replace(plan_of(flags), gpu_batch_size=1)
    turns = None if flags.input is None else tuple(turns_in(flags.input))
    model = model_of(flags)
    return ChatRequest(
        model=model,
        lora=adapter_of_all(model),
        site=site_of(flags),
        plan=plan,
        turns=turns,
        style=flags.style,
        system=flags.system,
        context_len=flags.context_len,
        sampling=sampling_of(flags),
        seed=flags.seed,
        verbose=flags.verbose,
        notes=(GOES_ON,) if flags.demo else (),
    )


# -- turns in a file -------------------------------------------------------------------------------------------------------


def turns_in(name: str) -> list[str]:
    file = local_path(name)
    refuse_other_names(file, "input", "a turn")
    lines = read_lines(file, "input", "a turn")
    if file.suffix != JSON_LINES:
        return lines
    return [turn for number, line in enumerate(lines, start=1) for turn in _of_json(line, f"input {file}, line {number}")]


def _of_json(line: str, where: str) -> list[str]:
    try:
        found = parse_json(line)
        turns = [found["prompt"]] if "prompt" in found else found["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise TypeError(turns)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{where} is neither {{"prompt": "..."}} nor {{"turns": ["...", ...]}}; mend or remove it') from error
    return turns


# -- flags -----------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} [--model NAME] [--input turns.jsonl] [--kv-policy NAME] [--percent W W KV KV A A] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), first=FIRST)
    parser.add_model(takes_lora=True)
    parser.add_tokenizer()
    _add_turns(parser.group("talk"))
    group = parser.group("plan")
    add_placement(group, instead_of_auto="no plan is searched for a talk; `h2o-flexgen plan` finds the numbers")
    group.option(PLAN["compute"])
    parser.add_kv()
    parser.add_sampling(without=("logprobs",))
    parser.set_defaults(demo=False)
    return parser


def _add_turns(group: Group) -> None:
    given = 'turns, all of one talk: one per line (.txt), or {"prompt": ...} or {"turns": [...]} per line (.jsonl)'
    group.value("--input", "FILE", given)
    styles = "how turns become text: the model's chat template, a script of User: and Assistant:, or plain continuing"
    group.choice("--style", (AUTO, *STYLES), f"{styles}; auto: the template, or a script where there is none", AUTO)
    group.value("--system", "TEXT", "what the model is told before the first turn", default="")
    group.value("--gen-len", "TOKENS", "of a reply, at most", TOKENS, GEN_LEN)
    room = "tokens that the text may grow to; of this a --kv-budget or --hh-ratio is a share (default: the model's positions)"
    group.value("--context-len", "TOKENS", room, TOKENS)
    group.add("--verbose", action="store_const", const=TRACEBACK, default=0, help="show where errors come from")
