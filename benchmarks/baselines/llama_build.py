"""The programs of llama.cpp: found, or compiled once from its sources into the user's cache.

python -m benchmarks.baselines.llama_build SOURCES [native | native-without-amx | avx2] [PROGRAM ...]
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from h2o_flexgen.core.environment import cores
from h2o_flexgen.profiling.measure import cpu_name

BENCH, QUANTIZE = "llama-batched-bench", "llama-quantize"
COMPLETION, PERPLEXITY, TOKENIZE = "llama-completion", "llama-perplexity", "llama-tokenize"
COMPARED = (BENCH, QUANTIZE)  # the programs that compare.py runs
Programs = Sequence[str]
NATIVE, WITHOUT_AMX, AVX2 = "native", "native-without-amx", "avx2"
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
INSTRUCTIONS: Mapping[str, Sequence[str]] = {  # what is compiled for: this processor, or any with AVX2 and without AVX-512
    NATIVE: ("GGML_NATIVE=ON", "CMAKE_C_FLAGS=", "CMAKE_CXX_FLAGS="),
    # the products of llama.cpp with AMX (llama-cpp-python 0.3.36) crash on virtual machines that do not allow AMX
    WITHOUT_AMX: ("GGML_NATIVE=ON", f"CMAKE_C_FLAGS={NO_AMX}", f"CMAKE_CXX_FLAGS={NO_AMX}"),
    AVX2: (
        *("GGML_NATIVE=OFF", "GGML_AVX2=ON", "GGML_FMA=ON", "GGML_F16C=ON", "GGML_BMI2=ON"),
        *("CMAKE_C_FLAGS=", "CMAKE_CXX_FLAGS="),
    ),
}
OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_COMMON=ON"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_SERVER=OFF", "LLAMA_BUILD_TOOLS=ON"),
)
PLACES = (".", "bin", "build/bin")  # of programs in a folder
SOURCES = (
    ".",
    "vendor/llama.cpp",
    "*/vendor/llama.cpp",
)  # of sources in a folder: the last two in the sdist of llama-cpp-python
HOW = (
    "put {} on PATH, or name a folder of them or of sources with --llama-cpp "
    "(pip download --no-deps --no-binary :all: llama-cpp-python, unpacked, has sources)"
)


def missing_programs(folder: str | None, instructions: str, wanted: Programs = COMPARED) -> str | None:
    """Why there are no programs and none can be compiled, in a line."""
    if programs_in(folder, instructions, wanted) is not None:
        return None
    if folder is None:
        return f"llama.cpp is not installed: {HOW.format(_listed(wanted))}"
    if sources_in(Path(folder)) is None:
        return f"{folder} lacks {_listed(wanted)}, and has no sources of llama.cpp: {HOW.format(_listed(wanted))}"
    lacking = next((tool for tool in ("cmake", "g++") if shutil.which(tool) is None), None)
    return None if lacking is None else f"{lacking} is not installed, with which llama.cpp is compiled"


def programs_in(folder: str | None, instructions: str, wanted: Programs = COMPARED) -> Path | None:
    """The folder with the programs: in the one that is named, among what was compiled of it, or on PATH."""
    if folder is None:
        found = shutil.which(wanted[0])
        return Path(found).parent if found and instructions == NATIVE else None
    sources = sources_in(Path(folder))
    compiled = () if sources is None else (cache_of(sources) / instructions,)
    places = (*compiled, *(Path(folder) / place for place in PLACES))
    return next((place for place in places if all((place / program).is_file() for program in wanted)), None)


def compiled_programs(folder: str | None, instructions: str, wanted: Programs = COMPARED) -> Path:
    """The folder with the programs, which are compiled if they are not there yet."""
    if (found := programs_in(folder, instructions, wanted)) is not None:
        return found
    sources = None if folder is None else sources_in(Path(folder))
    if sources is None:
        raise ValueError(missing_programs(folder, instructions, wanted))
    return _compiled(sources, instructions, wanted)


def _compiled(sources: Path, instructions: str, wanted: Programs) -> Path:
    """All kinds are compiled in one folder, one after the other, because most of the code is the same for all."""
    target, build = cache_of(sources) / instructions, cache_of(sources) / "build"
    print(f"compiling {_listed(wanted)} for {instructions} from {sources} into {target}: minutes", file=sys.stderr)
    options = [f"-D{option}" for option in (*OPTIONS, *INSTRUCTIONS[instructions])]
    _run(["cmake", "-S", str(sources), "-B", str(build), *options])
    _run(["cmake", "--build", str(build), "--target", *wanted, "-j", str(cores())])
    target.mkdir(parents=True, exist_ok=True)
    for program in wanted:
        shutil.copy2(build / "bin" / program, target / f".{program}")
        os.replace(target / f".{program}", target / program)
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        wrong = [line for line in said if "error" in line.lower()]
        raise RuntimeError(f"{command[0]} failed: {(wrong or said or ['without a word'])[0]}")


def sources_in(folder: Path) -> Path | None:
    return next((place for place in _places_of_sources(folder) if (place / "ggml" / "CMakeLists.txt").is_file()), None)


def _places_of_sources(folder: Path) -> Iterator[Path]:
    for pattern in SOURCES:
        yield from [folder] if pattern == "." else sorted(folder.glob(pattern))


def cache_of(sources: Path) -> Path:
    """A folder in the user's cache for these sources and this processor."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen" / "baselines"
    changed = (sources / "ggml" / "CMakeLists.txt").stat().st_mtime_ns
    told = hashlib.sha256(f"{sources.resolve()} {changed} {cpu_name()}".encode()).hexdigest()
    return cache / f"llama.cpp-{told[:12]}"


def _listed(programs: Programs) -> str:
    return " and ".join(part for part in (", ".join(programs[:-1]), programs[-1]) if part)


if __name__ == "__main__":
    print(compiled_programs(*sys.argv[1:2], *(sys.argv[2:3] or [NATIVE]), sys.argv[3:] or COMPARED))
