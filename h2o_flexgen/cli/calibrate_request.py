"""The calibrate command's flags, and the request made of them. Nothing here imports torch."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.checkpoints.probe_file import FILE as PROBE_FILE
from h2o_flexgen.cli.common_requests import model_of, site_of
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import Group, Parser
from h2o_flexgen.cli.output_files import OUTPUT, check_output_file, check_picture
from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.workload import TOKENS
from h2o_flexgen.policies.head_budgets import FILE, OWN
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.given_texts import USUAL_TEXTS, USUAL_TOKENS, Text

PROGRAM = "python -m h2o_flexgen.calibrate"
MOST_TEXTS = 1000
INSTEAD = dict.fromkeys(("--lora", "--lora-modules"), "heads are measured with an adapter by --adapter PATH")

DESCRIPTION = """\
Measure which share of a text each KV head of a model needs, at several budgets of the whole model, and keep it in a file
below ~/.cache/h2o_flexgen, where every run that evicts finds it, or write it to one for --head-budgets; or fit what says how
much a token is worth, for --probe; or both. The model reads every text twice, layer by layer: one layer at a time is in memory,
however large the model is. Without --model: the small one that travels with the package."""

EPILOG = f"""\
  {PROGRAM} --model facebook/opt-1.3b --text novel.txt articles.txt
  {PROGRAM} --model smollm2 --text novel.txt articles.txt {OUTPUT} {FILE}
  python -m h2o_flexgen.run --model smollm2 --kv-budget 0.2 --head-budgets {FILE}
  {PROGRAM} --model smollm2 --text novel.txt articles.txt --texts 32 --probe {PROBE_FILE}
  python -m h2o_flexgen.run --model smollm2 --kv-policy kvzap --kv-budget 0.2 --probe {PROBE_FILE}
"""


@dataclass(frozen=True)
class CalibrateRequest:
    """Everything that is asked of one calibration."""

    model: ModelRequest
    site: SiteRequest
    texts: tuple[Text, ...]
    tokens: int  # of each text that is read
    number: int  # of such texts
    output: Path | None  # of head budgets
    keeps: bool  # head budgets in the user's cache, for runs of this model
    probe: Path | None
    picture: Path | None
    verbose: int


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse_or_demo(argv, {"model": DEMO})


def request_of(flags: Namespace) -> CalibrateRequest:
    _check_files(flags)
    texts = tuple(map(Text.read, dict.fromkeys(flags.text))) if flags.text else (Text.held_out(),)
    if flags.texts < len(texts):
        raise ValueError(f"--texts {flags.texts} leaves out files of --text, which are {len(texts)}; give {len(texts)} or more")
    return CalibrateRequest(
        model=model_of(flags),
        site=site_of(flags),
        texts=texts,
        tokens=flags.tokens,
        number=flags.texts,
        keeps=flags.output is None and flags.probe is None,
        output=flags.output and local_path(flags.output),
        probe=flags.probe and local_path(flags.probe),
        picture=flags.picture and local_path(flags.picture),
        verbose=flags.verbose,
    )


def _check_files(flags: Namespace) -> None:
    check_output_file(flags.output)
    check_output_file(flags.probe, "--probe")
    check_picture(flags.picture, "--picture")
    if flags.output and flags.probe and os.path.realpath(flags.output) == os.path.realpath(flags.probe):
        raise ValueError(f"{OUTPUT} and --probe are both {flags.output}, and each writes a file; give them different names")


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} [--model NAME] [--text FILE ...] [{OUTPUT} {FILE}] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), INSTEAD)
    parser.add_model()
    parser.add_tokenizer()
    _add_texts(parser.group("what is read"))
    _add_output(parser.group("output"))
    return parser


def _add_texts(group: Group) -> None:
    group.value("--text", "FILE", "of the kind that the model is for (default: prose of the package)", nargs="+")
    twice = "length of each piece of text, which is read twice, so the model must have twice as many positions"
    group.value("--tokens", "TOKENS", twice, TOKENS, USUAL_TOKENS)
    group.value("--texts", "N", "pieces, taken evenly from all files", Bounds(1, MOST_TEXTS), USUAL_TEXTS)


def _add_output(group: Group) -> None:
    own = f"the file of head budgets; as {FILE} in the model's folder it is what --head-budgets {OWN} means"
    own = f"{own} (default without --probe: a file below ~/.cache/h2o_flexgen, which runs of this model take by themselves)"
    group.value(OUTPUT, "FILE", own)
    own = f"the file of a probe, which says how much tokens are worth; as {PROBE_FILE} it is what --probe {OWN} means elsewhere"
    group.value("--probe", "FILE", own)
    group.value("--picture", "FILE", "what each head keeps at one budget (needs the extra [plot])")
    group.verbose(f"{TRACEBACK}: where errors come from")
