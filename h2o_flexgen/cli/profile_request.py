"""The profile command's flags, and the request made of them. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_flexgen.cli.common_requests import site_of
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import MODEL, SITE, Parser
from h2o_flexgen.cli.output_files import check_writable
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.files import local_path
from h2o_flexgen.planning.machine import SUFFIXES
from h2o_flexgen.session.open_request import SiteRequest

PROGRAM = "python -m h2o_flexgen.profile"
DESCRIPTION = """\
Measure this machine: its disk, its memory, its links and what it computes, each with the means that a run uses. Plans are
priced with the outcome. It takes two minutes at most, and is best done while nothing else runs."""


@dataclass(frozen=True)
class ProfileRequest:
    """Everything that is asked of one profile."""

    site: SiteRequest
    dtype: str | None  # None: the type that runs use
    quick: bool
    file: Path | None  # where the profile also goes, beside the user's cache
    verbose: int


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse(argv)


def request_of(flags: Namespace) -> ProfileRequest:
    dtype = None if flags.dtype == AUTO else flags.dtype
    return ProfileRequest(site_of(flags), dtype, flags.quick, _output_file(flags.output), flags.verbose)


def _output_file(output: str | None) -> Path | None:
    """The file of --output, if it can be written and its name is one of a machine's file."""
    if output is None:
        return None
    check_writable(output, "-o")
    file = local_path(output)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"-o {output} does not end in {' or '.join(SUFFIXES)}; give it such a name")
    return file


def make_parser(program: str = PROGRAM) -> Parser:
    parser = Parser(program, DESCRIPTION)
    group = parser.group()
    group.truth("--quick", text="half a minute at most: fewer repetitions, a smaller file")
    written = "also write the profile here, as YAML; the machine is named after the file"
    group.add("-o", "--output", metavar="FILE", help=written)
    disk = "the disk to measure; left as it was found (default: below ~/.cache/h2o_flexgen)"
    group.option(SITE["offload_dir"], disk)
    group.option(SITE["device"])
    group.option(SITE["threads"])
    group.option(MODEL["dtype"], "the type of values and products; auto: the one that runs use")
    group.verbose(f"{TRACEBACK}: where errors come from")
    return parser
