"""This engine and llama.cpp on one GGUF file: both as contenders, and what a run of either is asked where the model lies in
memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.baselines.llama_build import INSTRUCTIONS, NATIVE
from benchmarks.baselines.request import Request
from benchmarks.comparison.suites import Contender, Load
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.formats.kernel_table import EXACT, INT8

OURS, THEIRS = "h2o_flexgen", "llama.cpp"
IN_MEMORY = (100, 0, 100, 0, 100, 0)
DTYPE = "bfloat16"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where llama.cpp is found."""
    told = "of its programs, or of its sources, which are compiled once (default: PATH)"
    parser.add_argument("--llama-cpp", metavar="FOLDER", help=told)
    told = "the instructions for which it is compiled"
    parser.add_argument("--llama-cpp-for", choices=INSTRUCTIONS, default=NATIVE, help=told)


def chosen(known: list[Contender], names: list[str] | None) -> list[Contender]:
    if unknown := set(names or ()) - {one.name for one in known}:
        raise ValueError(f"unknown systems {', '.join(unknown)}; known: {', '.join(one.name for one in known)}")
    return [one for one in known if one.name in (names or [one.name])]


def their_contender(programs: Path) -> Contender:
    options = {"folder": str(programs), "instructions": NATIVE}
    return Contender(THEIRS, THEIRS, options, computes="rows in int8, KV in float16", dtype="float16", arithmetic=INT8)


def our_contender(name: str, computes: str, dtype: str = DTYPE, **options: Any) -> Contender:
    """`options`: of the plan."""
    given, arithmetic = {"percent": IN_MEMORY, **options}, options.get("compute", EXACT)
    return Contender(f"{OURS}, {name}", OURS, given, computes=computes, dtype=dtype, arithmetic=arithmetic)


def request(file: Path, contender: Contender, rows: int, load: Load, memory: int | None = None) -> Request:
    """All of the text, with so much memory."""
    return Request(
        system=contender.system,
        checkpoint=str(file),
        dtype=contender.dtype or DTYPE,
        device="cpu",
        rows=rows,
        prompt_len=load.prompt_len,
        gen_len=load.gen_len,
        steps=None,
        host_bytes=memory,
        device_bytes=None,
        scratch=str(default_offload_folder().parent / "compare"),
        options=contender.options,
    )
