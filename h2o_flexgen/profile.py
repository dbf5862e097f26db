"""The profile command: measures this machine, as plans are priced with it, and keeps what it finds.

    python -m h2o_flexgen.profile
    python -m h2o_flexgen.profile --quick -o machine.yaml

A table goes to stdout, behind it one JSON document. The profile is kept in the user's cache, where plans for this machine find
it; the same machine measured again replaces it.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.flags import TRACEBACK, Help, Parser, add_device, add_threads, add_verbose
from h2o_flexgen.cli.machine_report import machine_lines
from h2o_flexgen.cli.report import check_writable, say
from h2o_flexgen.core.folders import default_offload_folder
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.machines import SUFFIXES

PROGRAM = "python -m h2o_flexgen.profile"
DESCRIPTION = """\
Measure this machine: its disk, its memory, its links and what it computes, each with the means that a run uses. Plans are
priced with the outcome. It takes a minute or two, and is best done while nothing else runs."""
AUTO = "auto"


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: parse(argv), _run)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    return _parser().parse(argv)


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, formatter_class=Help)
    add = parser.add_argument
    add("--quick", action="store_true", help="a third of a minute: fewer repetitions, a smaller file")
    add("-o", "--output", metavar="FILE", help="also write the profile here, as YAML; the machine is named after the file")
    add(
        "--offload-dir",
        metavar="FOLDER",
        help="the disk to measure; left as it was found (default: below ~/.cache/h2o_flexgen)",
    )
    add_device(parser)
    add_threads(parser)
    types = "of all but the products, which are measured in every type; auto: the one that runs use"
    add("--dtype", default=AUTO, choices=(AUTO, *DTYPE_BYTES), help=types)
    add_verbose(add, f"{TRACEBACK}: where errors come from")
    return parser


def _run(args: Namespace) -> None:
    file = _output_file(args.output)
    with Progress(0, "profile") as progress:
        from h2o_flexgen.engine.threads import set_threads
        from h2o_flexgen.memory.device import open_device  # imports torch, which takes a while
        from h2o_flexgen.profiling.kept import about, fingerprint_of, keep, note_partial, partial_file
        from h2o_flexgen.profiling.machine import profile
        from h2o_flexgen.profiling.others import Others
        from h2o_flexgen.profiling.sizes import FULL, QUICK

        set_threads(args.threads)
        folder = Path(args.offload_dir or default_offload_folder()).expanduser()
        device, dtype = open_device(args.device), None if args.dtype == AUTO else args.dtype
        mark, begun, others = fingerprint_of(device, folder, dtype), time.perf_counter(), Others()
        note_partial(mark, progress.note)
        machine = profile(
            device,
            folder,
            mark.name,
            dtype,
            QUICK if args.quick else FULL,
            lambda title, done, total: progress.stage(title, f"{done}/{total}" if total else ""),
            partial_file(mark),
        )
        seconds, warning = time.perf_counter() - begun, others.warning()
        kept = keep(machine, mark, warning)
        if file is not None:
            machine = replace(machine, name=file.stem)
            machine.save(file, about(mark, warning))
    say(machine_lines(machine))
    say(["", f"measured in {seconds:.0f} s and kept in {kept}" + (f", and written to {file}" if file else "")])
    say([warning] if warning else [])
    print(json.dumps({"profile": asdict(machine), "seconds": round(seconds, 1), "kept": str(kept)}), flush=True)


def _output_file(output: str | None) -> Path | None:
    """Where it can be written; the name has to be one that is taken for a machine's file."""
    if output is None:
        return None
    check_writable(output, "-o")
    file = Path(output).expanduser()
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"-o {output} does not end in {' or '.join(SUFFIXES)}; give it such a name")
    return file


if __name__ == "__main__":
    sys.exit(main())
