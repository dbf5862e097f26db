"""llama.cpp as a system of the comparison: how its programs are found or compiled, what they are asked, and the GGUF file.

Programs are stood in for by scripts; the file is read with the package gguf where that is installed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baselines import llama_build
from benchmarks.baselines.llama_build import (
    AVX2,
    BENCH,
    NATIVE,
    QUANTIZE,
    cache_of,
    compiled_programs,
    missing_programs,
    programs_in,
)
from benchmarks.baselines.llama_cpp import System, command, measured
from benchmarks.baselines.request import Request
from tests.helpers.tiny import BLOCKS, save_tiny

CMAKE = """#!/bin/sh
echo "$@" >> {folder}/asked
if [ "$1" = --build ]; then mkdir -p "$2/bin"; echo "{instructions}" > "$2/bin/{bench}"; echo x > "$2/bin/{quantize}"; fi
"""
ANSWERS = """#!{python}
import json, sys
asked = sys.argv[sys.argv.index("-npp") + 1].split(",")
for prompt in map(int, asked):
    print("noise")
    steps = int(sys.argv[sys.argv.index("-ntg") + 1])
    print(json.dumps(dict(pp=prompt, tg=steps, t_pp=prompt / 10, t_tg=steps / 100)))
"""


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def programs(folder: Path, bench: str = "") -> Path:
    program(folder / BENCH, bench)
    program(folder / QUANTIZE, "")
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources as they lie in the unpacked sdist, and a cmake that only writes down what it is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = {"folder": tmp_path, "bench": BENCH, "quantize": QUANTIZE, "instructions": "made"}
    program(tmp_path / "tools" / "cmake", CMAKE.format(**names))
    program(tmp_path / "tools" / "g++", "")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"), prepend=os.pathsep)
    listed = tmp_path / "sdist" / "llama_cpp_python-1.2" / "vendor" / "llama.cpp" / "ggml" / "CMakeLists.txt"
    listed.parent.mkdir(parents=True)
    listed.touch()
    return tmp_path / "sdist"


def request(checkpoint: Path, **options: Any) -> Request:
    return Request("llama.cpp", str(checkpoint), "bfloat16", "cpu", 4, 12, 10, None, None, None, str(checkpoint), options)


# -- programs ----------------------------------------------------------------------------------------------------------------


def test_programs_are_found_where_people_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = programs(tmp_path / "llama" / "build" / "bin")
    assert programs_in(str(tmp_path / "llama"), NATIVE) == built
    assert programs_in(str(built), AVX2) == built
    monkeypatch.setenv("PATH", str(built))
    assert programs_in(None, NATIVE) == built
    assert programs_in(None, AVX2) is None  # it is not known what those on PATH were compiled for


def test_sources_are_compiled_once_for_each_kind_of_processor(sources: Path, tmp_path: Path) -> None:
    assert missing_programs(str(sources), NATIVE) is None and programs_in(str(sources), NATIVE) is None
    folders = {kind: compiled_programs(str(sources), kind) for kind in (NATIVE, AVX2)}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 4 and "-DGGML_NATIVE=ON" in asked[0] and "-DGGML_AVX2=ON" in asked[2]
    assert f"--target {BENCH} {QUANTIZE}" in asked[1]
    assert len(set(folders.values())) == 2 and all(folder.is_relative_to(tmp_path / "cache") for folder in folders.values())
    for kind, folder in folders.items():
        assert programs_in(str(sources), kind) == compiled_programs(str(sources), kind) == folder
        assert (folder / BENCH).read_text().strip() == "made"
    assert len((tmp_path / "asked").read_text().splitlines()) == 4


def test_other_sources_are_compiled_anew(sources: Path) -> None:
    found = llama_build.sources_in(sources)
    assert found is not None
    before = cache_of(found)
    os.utime(found / "ggml" / "CMakeLists.txt", ns=(1, 1))
    assert cache_of(found) != before


def test_a_compiler_that_fails_is_quoted(sources: Path, tmp_path: Path) -> None:
    program(tmp_path / "tools" / "cmake", "#!/bin/sh\necho so far, so good\necho ggml.c: error: no such thing\nexit 1\n")
    with pytest.raises(RuntimeError, match=r"^cmake failed: ggml\.c: error: no such thing$"):
        compiled_programs(str(sources), NATIVE)
    assert programs_in(str(sources), NATIVE) is None


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in (None, str(tmp_path)):
        told = missing_programs(folder, NATIVE)
        assert told and "pip download --no-deps --no-binary :all: llama-cpp-python" in told and "\n" not in told
    with pytest.raises(ValueError, match="lacks llama-batched-bench and llama-quantize, and has no sources"):
        compiled_programs(str(tmp_path), NATIVE)


# -- runs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 2])
def test_its_answers_become_prompts_and_steps(steps: int | None, tmp_path: Path) -> None:
    save_tiny("llama-gqa", tmp_path)
    folder = programs(tmp_path / "programs", ANSWERS.format(python=sys.executable))
    asked = replace(request(tmp_path, folder=str(folder), stored="q4_0"), steps=steps)
    called: list[str] = []
    answer = System().run(asked, lambda: called.append("ready"))
    assert called == ["ready"] and answer.prefill_seconds == 1.2
    assert answer.step_seconds == pytest.approx([0.01] * (9 if steps is None else 2))
    assert answer.peak_host_bytes > 0 and "q4_0" in answer.placement
    assert ("steps behind prompts of 17 tokens" in answer.notes) == (steps is not None)


def test_it_is_asked_for_the_whole_text_and_for_as_many_threads_as_the_others(tmp_path: Path) -> None:
    words = command(tmp_path / BENCH, tmp_path / "a.gguf", replace(request(tmp_path), steps=3))
    told = dict(zip(words[1::2], words[2::2]))
    assert (told["-c"], told["-npp"], told["-ntg"], told["-npl"]) == ("88", "12,17", "3", "4")
    assert told["-t"] == told["-tb"] == str(torch.get_num_threads())


def test_a_run_without_figures_says_why(tmp_path: Path) -> None:
    failing = program(tmp_path / BENCH, "#!/bin/sh\necho no such model >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="gave no figures: no such model"):
        measured(failing, tmp_path / "a.gguf", request(tmp_path))
    killed = program(tmp_path / BENCH, "#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(MemoryError, match="killed by signal 9, most likely because it went beyond its memory"):
        measured(killed, tmp_path / "a.gguf", request(tmp_path))


def test_models_that_it_is_not_given_are_said(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    assert System().missing(request(tmp_path)) == "no GGUF is written of opt: only of llama, mistral, qwen2, qwen3"
    save_tiny("llama-gqa", tmp_path)
    assert "not on cpu from float32" in str(System().missing(replace(request(tmp_path), dtype="float32")))


def test_the_file_holds_every_tensor_under_its_own_name(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    from safetensors.torch import load_file, save_file

    save_tiny("llama-gqa", tmp_path)
    (stored,) = tmp_path.glob("*.safetensors")
    save_file({name: value.bfloat16() for name, value in load_file(stored).items()}, stored, {"format": "pt"})
    System().prepare(request(tmp_path, folder=str(programs(tmp_path / "programs"))))
    reader = gguf.GGUFReader(tmp_path / "gguf" / "bf16.gguf")
    told = {tensor.name: tensor for tensor in reader.tensors}
    values, sizes = load_file(stored), json.loads((tmp_path / "config.json").read_text())
    assert len(told) == len(values)
    query, norm = told[f"blk.{BLOCKS - 1}.attn_q.weight"], told["output_norm.weight"]
    assert query.tensor_type == gguf.GGMLQuantizationType.BF16
    written = torch.from_numpy(query.data.copy()).view(torch.bfloat16)
    assert torch.equal(written, values[f"model.layers.{BLOCKS - 1}.self_attn.q_proj.weight"])
    assert torch.equal(torch.from_numpy(norm.data.copy()), values["model.norm.weight"].float())
    assert reader.fields["llama.block_count"].contents() == BLOCKS
    assert reader.fields["llama.attention.head_count_kv"].contents() == sizes["num_key_value_heads"]
