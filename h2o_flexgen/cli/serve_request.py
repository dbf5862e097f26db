"""The serve command's flags, and the request made of them. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.common_requests import (
    WHERE_FOUND,
    asked_of,
    model_of,
    named_machine,
    plan_of,
    refuse_search_options,
    site_of,
)
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import FIRST_OF_PLANS, MODEL, NOISE, PLAN, Group, Parser, add_placement, add_prefix_folder, add_sizes
from h2o_flexgen.core.allowed_values import AUTO, Allowed, Bounds, decimal_number
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.units import SIZE, parse_bytes
from h2o_flexgen.core.workload import GATHER, PROMPTS, TOKENS
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.workload_plan import ROOM
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.sampling.params import SEED
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.dialogue import STYLES

PROGRAM = "python -m h2o_flexgen.serve"
KEYS = "--api-key-file"
DATA_DIR = "--data-dir"
STACK = ("starlette", "uvicorn", "python_multipart")  # what the extra brings
LACKS = "the server needs starlette, uvicorn and python-multipart, which the extra [serve] brings: pip install -e '.[serve]'"
HOST, PORT = "127.0.0.1", 8000
WAITS = "0.1s"
ROWS, WAITING = 32, 1024
PROMPT_LEN, GEN_LEN = 1024, 256
MOST_BODY, MOST_FILE = "4MB", "200MB"
MOST_PORT = (1 << 16) - 1
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}

DESCRIPTION = """\
Answer requests over HTTP, in the form of OpenAI's: chats and completions, streamed or whole. Requests that come together are
computed in one block, and later ones join it where a seat is free.
Without --model: the small one that travels with the package."""

FIRST = "--model", "--host", "--port", KEYS, "--prompt-len", "--gen-len", "--rows", *FIRST_OF_PLANS
EPILOG = f"""\
  {PROGRAM} --model facebook/opt-1.3b --prompt-len 1024 --gen-len 256
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{{"prompt": "The ferry"}}'
"""


@dataclass(frozen=True)
class ListenRequest:
    """The address of the server, and the keys that requests need."""

    host: str
    port: int  # 0: one that is free
    key_file: Path | None  # None: requests need no key
    most_body_bytes: int


@dataclass(frozen=True)
class KeepRequest:
    """The folder of files and batches, and how large a file may be."""

    folder: Path
    most_file_bytes: int


@dataclass(frozen=True)
class ServeRequest:
    """Everything that is asked of a server."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan | PlanRequirements  # the plan itself, or what is asked of one that is to be found
    machine: Machine | None  # the named one; None stands for this one
    listen: ListenRequest
    keep: KeepRequest | None  # None: nothing is kept
    name: str  # by which clients know the model
    prompt_len: int | None  # of the longest prompt; None: as the model has room
    gen_len: int | None  # tokens of the longest completion
    rows: int  # that a plan is found for
    prefix_room: int | None  # tokens for what requests share; None: as many as are of use and fit
    gather_seconds: float
    most_waiting: int
    style: str
    seed: int | None
    verbose: int
    others: Others = field(default_factory=Others, compare=False, repr=False)  # other processes that have been busy


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse_or_demo(argv, {"model": DEMO}, NOISE)


def request_of(flags: Namespace) -> ServeRequest:
    if any(find_spec(package) is None for package in STACK):
        raise ValueError(LACKS)
    plan = plan_of(flags)
    if flags.percent != AUTO:
        refuse_search_options(flags, f"say --percent {AUTO}")
    machine, model = named_machine(flags), model_of(flags)
    return ServeRequest(
        model=model,
        site=site_of(flags),
        plan=asked_of(flags, plan) if flags.percent == AUTO else plan,
        machine=machine,
        listen=_listen(flags),
        keep=_keep(flags),
        name=flags.served_model_name or model.name,
        prompt_len=flags.prompt_len,
        gen_len=flags.gen_len,
        rows=flags.rows,
        prefix_room=flags.prefix_room,
        gather_seconds=flags.gather,
        most_waiting=flags.queue,
        style=flags.style,
        seed=flags.seed,
        verbose=flags.verbose,
    )


def _listen(flags: Namespace) -> ListenRequest:
    key_file = None if flags.api_key_file is None else local_path(flags.api_key_file)
    return ListenRequest(flags.host, flags.port, key_file, parse_bytes(flags.max_body))


def _keep(flags: Namespace) -> KeepRequest | None:
    if flags.data_dir is not None:
        return KeepRequest(local_path(flags.data_dir), parse_bytes(flags.max_file or MOST_FILE))
    if flags.max_file is not None:
        raise ValueError(f"--max-file is for files that are kept; add {DATA_DIR} FOLDER, or leave it out")
    return None


# -- flags -----------------------------------------------------------------------------------------------------------------


class Time(Allowed):
    """A number of seconds, or one with its unit."""

    def typed(self, word: str) -> float:
        unit = next((unit for unit in UNITS if word.endswith(unit) and word[: -len(unit)][-1:].isdigit()), "")
        try:
            return float(GATHER.read(decimal_number(word[: len(word) - len(unit)]) * UNITS.get(unit, 1.0)))
        except ValueError:
            raise ValueError(f"{shown(word)} is not allowed; give a time like 2s, 100ms or 0") from None


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} [--model NAME] [--port N] [--percent W W KV KV A A] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), first=FIRST)
    _add_listening(parser.group("listening"))
    _add_requests(parser.group("requests"))
    _add_batches(parser.group("files and batches"))
    parser.add_model()
    parser.add_tokenizer()
    _add_plan(parser.group("plan"))
    parser.add_search(f"search, {WHERE_FOUND}", "what a search prices plans for")
    parser.add_kv()
    return parser


def _add_listening(group: Group) -> None:
    group.value("--host", "ADDRESS", "where to listen; other machines reach 0.0.0.0, and this one alone", default=HOST)
    group.value("--port", "N", "0: one that is free", Bounds(0, MOST_PORT), PORT)
    group.value(
        KEYS, "FILE", "a file with a key in each line; every request must have one of them (default: requests need no key)"
    )
    group.value("--max-body", "SIZE", "the largest body of a request; larger ones are refused", SIZE, MOST_BODY)
    group.value("--served-model-name", "NAME", "the name that clients use for the model (default: as --model says)")
    group.verbose(f"0: no plan; {TRACEBACK}: where errors come from")


def _add_requests(group: Group) -> None:
    shorter = "less where the model has fewer positions"
    group.value("--prompt-len", "TOKENS", f"of the longest prompt that is taken (default: {PROMPT_LEN}, {shorter})", TOKENS)
    group.value("--gen-len", "TOKENS", f"of the longest completion (default: {GEN_LEN}, {shorter})", TOKENS)
    group.value("--gather", "TIME", "how long the first request of a block waits for others, like 2s", Time(), WAITS)
    group.value("--queue", "N", "completions that may wait for a seat; then clients are turned away", PROMPTS, WAITING)
    group.value("--rows", "N", f"completions that are computed at once, at most, {WHERE_FOUND}", PROMPTS, ROWS)
    room = "kept of what requests begin with alike, which is computed once; 0: nothing is shared"
    usual = "as many as are of use and fit beside the seats, but 0 where answers would depend on other requests"
    group.value("--prefix-room", "TOKENS", f"{room} (default: {usual})", ROOM)
    group.option(PLAN["prefix_policy"])
    add_prefix_folder(group)
    group.option(MODEL["lora_modules"])
    styles = "how chats become text: the model's chat template, a script of User: and Assistant:, or plain text"
    group.choice("--style", (AUTO, *STYLES), f"{styles}; auto: the template, or a script where there is none", AUTO)
    drawn = "requests without a seed draw by it and by their order of arrival (default: another one each time)"
    group.value("--seed", "N", drawn, SEED)


def _add_batches(group: Group) -> None:
    group.value(DATA_DIR, "FOLDER", "where they are kept, and found again after a restart (default: there are none)")
    group.value("--max-file", "SIZE", f"of a file; larger ones are refused (default: {MOST_FILE})", SIZE)


def _add_plan(group: Group) -> None:
    add_placement(group, may_be_found=True)
    group.option(PLAN["compute"])
    add_sizes(group, WHERE_FOUND)
