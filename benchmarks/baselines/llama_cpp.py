"""llama.cpp's own benchmark of batches, with the weights mapped from a GGUF file: the checkpoint itself, or one of 16 or of 4
bits (Q4_0) that is written of a folder.

It makes up its tokens, so a row is neither picked from logits nor ended. Of the steps it tells the sum alone: each counts as
their mean. A shortened run computes prompts as long as half the text for its steps, as this engine does.

Options: "stored" ("bf16" or "q4_0"), "folder" (of its programs or its sources; none: PATH), "instructions" ("native" or
"avx2", where it is compiled), "batch_tokens" (of prompts that are computed at once; its own default), "repacks" (whether
weights are copied into memory in another order, as it does by itself; what does not fit has to stay mapped).
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.installed import missing_package
from benchmarks.baselines.llama_build import BENCH, NATIVE, QUANTIZE, compiled_programs, missing_programs, programs_in
from benchmarks.baselines.request import Answer, Ready, Request
from benchmarks.baselines.sizes import config_of
from h2o_flexgen.checkpoints.gguf_format import SUFFIX

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> its own name
PLAIN = {"bfloat16": "bf16", "float16": "f16"}  # as files are named here
BATCH_TOKENS = 512  # its own default
BLOCK_BYTES = 512  # in which the system counts what a process has read


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        if _is_file(request):
            return missing_programs(*_where(request))
        model_type = config_of(request)["model_type"]
        if model_type not in ARCHITECTURES:
            return f"no GGUF is written of {model_type}: only of {', '.join(ARCHITECTURES)}"
        if request.device != "cpu" or request.dtype not in PLAIN:
            return f"it is run on CPUs, from 16 bits: not on {request.device} from {request.dtype}"
        return missing_package("gguf") or missing_programs(*_where(request))

    def prepare(self, request: Request) -> None:
        programs = compiled_programs(*_where(request))
        if _is_file(request):
            return
        plain = _file(request, PLAIN[request.dtype])
        if not plain.is_file():
            from benchmarks.baselines.gguf_file import write_gguf

            config = config_of(request)
            write_gguf(Path(request.checkpoint), config, ARCHITECTURES[config["model_type"]], plain)
        file = _file(request, _stored(request))
        if not file.is_file():
            half_done = file.with_suffix(".partial")
            subprocess.run([programs / QUANTIZE, plain, half_done, _stored(request)], stdout=subprocess.DEVNULL, check=True)
            half_done.replace(file)

    def run(self, request: Request, ready: Ready) -> Answer:
        programs = programs_in(*_where(request))
        assert programs is not None, request.options
        ready()
        began = time.perf_counter()
        lines = measured(programs / BENCH, _file(request, _stored(request)), request)
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        steps = lines[-1]["tg"]
        computed = sum(line["t_pp"] + line["t_tg"] for line in lines)
        notes = ["each step counts as their mean", "bytes read are those of the whole run, by its steps"]
        if request.steps is not None:
            notes.append(f"steps behind prompts of {request.middle} tokens")
        return Answer(
            versions={"llama.cpp": version_of(programs / BENCH)},
            placement=f"weights of {_file(request, _stored(request)).name}, mapped; KV in memory; {programs}",
            load_seconds=seconds - computed,
            prefill_seconds=lines[0]["t_pp"],
            step_seconds=(lines[-1]["t_tg"] / steps,) * steps,
            peak_host_bytes=used.ru_maxrss * 1024,
            read_bytes_per_step=used.ru_inblock * BLOCK_BYTES / steps,
            notes="; ".join(notes),
        )


def measured(program: Path, file: Path, request: Request) -> list[Mapping[str, Any]]:
    """Its answers: of the prompts and, if the run is shortened, of the steps in the middle of the text."""
    done = subprocess.run(command(program, file, request), capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode < 0:
        raise MemoryError(f"{BENCH} was killed by signal {-done.returncode}, most likely because it went beyond its memory")
    if done.returncode or len(lines) != (1 if request.steps is None else 2):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"{BENCH} gave no figures: {(said or ['without a word'])[-1]}")
    return lines


def command(program: Path, file: Path, request: Request) -> Sequence[str]:
    """The cache is as large as the whole text wants it, in a shortened run, too."""
    threads, at_once = str(torch.get_num_threads()), str(request.options.get("batch_tokens", BATCH_TOKENS))
    prompts = [request.prompt_len] if request.steps is None else [request.prompt_len, request.middle]
    steps = request.gen_len - 1 if request.steps is None else request.steps
    sizes = {
        "-m": str(file),
        "-c": str(request.rows * (request.prompt_len + request.gen_len)),
        "-ub": at_once,
        "-npp": ",".join(map(str, prompts)),
        "-ntg": str(steps),
        "-npl": str(request.rows),
        "-t": threads,
        "-tb": threads,
        "--output-format": "jsonl",
    }
    as_mapped = [] if request.options.get("repacks", True) else ["--no-repack"]
    return [str(program), *(word for pair in sizes.items() for word in pair), *as_mapped]


def version_of(program: Path) -> str:
    done = subprocess.run([program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"version: *(\S+)", done.stdout)
    return found[1] if found else "unknown"


def _stored(request: Request) -> str:
    stored = request.options.get("stored", "bf16")
    return PLAIN[request.dtype] if stored == "bf16" else str(stored)


def _file(request: Request, stored: str) -> Path:
    """The checkpoint itself, or a file in it, which goes with it, and out of the page cache with it."""
    return Path(request.checkpoint) if _is_file(request) else Path(request.checkpoint) / "gguf" / f"{stored}.gguf"


def _is_file(request: Request) -> bool:
    return Path(request.checkpoint).suffix == SUFFIX


def _where(request: Request) -> tuple[str | None, str]:
    return request.options.get("folder"), request.options.get("instructions", NATIVE)
