"""The benchmark of mixtures from a disk: the file that both systems read, what is asked of them, and what counts.

llama.cpp's programs are stood in for by empty files, and answers and the machine are given."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.baselines import this_engine
from benchmarks.baselines.llama_build import COMPARED
from benchmarks.baselines.request import Answer, Request
from benchmarks.comparison import random_gguf
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.checkpoint import spec_of
from benchmarks.comparison.launch import Failed, Launcher
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import load_config
from h2o_flexgen.planning.plan import Shares
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.gguf_files import sizes_for
from tests.helpers.tiny import KINDS, tiny_config
from tests.scripts.loading import load_script

moe = load_script("moe.py", "benchmarks")
readme_results = load_script("readme_results.py")
MACHINE = Calibration(
    400e9, 30e9, 5e9, None, {"cpu": "a processor", "cores": 2, "instructions": "some", "torch": "2"}, 0.0, 1e12
)
MODEL = "allenai/OLMoE-1B-7B-0924"
MORE_SIZES = {"glm4-lite": {"q_lora_rank": 32, "rope_parameters": KINDS["glm4-lite"][1]["rope_parameters"]}}


@pytest.mark.parametrize(
    "kind", ["olmoe", "qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "gemma4", "glm4-lite", "qwen3-5-moe"]
)
def test_a_file_of_random_blocks_is_read_as_the_model_that_it_is_named_after(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, values = KINDS[kind]
    read_as = random_gguf.READ_AS.get(model_type, model_type)
    sizes = {**values, **sizes_for("q4_0", read_as), "clip_qkv": None, **MORE_SIZES.get(kind, {})}
    said = {**tiny_config(kind, **sizes).to_dict(), **sizes}
    config = SimpleNamespace(**{key: value for key, value in said.items() if not key.startswith("per_layer")})
    monkeypatch.setattr(random_gguf, "known_config", lambda _: config)
    file, form = random_gguf.random_gguf("some/model", tmp_path), "mxfp4" if kind == "gpt-oss" else "q4_0"
    assert [each.name for each in tmp_path.iterdir()] == [f"some--model-centred-{form}.gguf"]
    assert moe.spec_in(file, moe.DTYPE).weight_bytes == pytest.approx(file.stat().st_size, rel=0.1)
    packed = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.tensor_type in random_gguf.SCALES]
    drawn = np.concatenate([gguf.dequantize(tensor.data, tensor.tensor_type).flatten() for tensor in packed])
    assert abs(drawn.mean()) < drawn.std() / 20, "what all tokens have in common would decide which their experts are"
    found = load_config(str(file))
    assert (found.model_type, found.num_experts_per_tok) == (read_as, sizes.get("top_k_experts") or config.num_experts_per_tok)
    with LLM(file, tokenizer="bytes", dtype="float32", device="cpu", offload_dir=tmp_path / "offload") as llm:
        (row,) = llm.generate([[3, 5, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1))
    assert len(row.token_ids) == 4 and all(step.chosen.logprob > -20 for step in row.logprobs or ())


def test_types_that_are_not_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"GLM-4\.5-Air is of type glm4_moe; random files are written of .*olmoe"):
        random_gguf.random_gguf("zai-org/GLM-4.5-Air", tmp_path)


def test_unknown_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the shapes of some/model are not known"):
        random_gguf.random_gguf("some/model", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The benchmark with these arguments, on a file and a machine that are given."""
    for program in COMPARED:
        (tmp_path / program).touch(0o755)
    (tmp_path / "file.gguf").write_bytes(bytes(1000))
    monkeypatch.setattr(moe, "random_gguf", lambda *_: tmp_path / "file.gguf")
    monkeypatch.setattr(moe, "calibrated", lambda _: MACHINE)
    monkeypatch.setattr(moe, "spec_in", lambda *_: spec_of(MODEL, "bfloat16").packed("group4"))  # as many bits as Q4_0
    rates = cycle((3e9, 2e9))  # before every run, and after it
    monkeypatch.setattr(moe, "disk_read_rate", lambda files, seconds: next(rates))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: str) -> dict[str, Any]:
        given = ("--folder", str(tmp_path), "--llama-cpp", str(tmp_path), "--output", str(tmp_path / "results"))
        monkeypatch.setattr(sys, "argv", ["moe.py", *given, *arguments])
        assert moe.main() == 0
        result: dict[str, Any] = json.loads((tmp_path / "results" / "moe-olmoe-1b-7b-0924.json").read_text())
        return result

    return run


def test_systems_take_turns_and_medians_count(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Request] = []

    def answer(self: Launcher, request: Request, loads_within_cap: bool) -> Answer:
        told.append(request)
        seconds = 2.0 if request.system == "llama.cpp" else 4.0 + len(told) // 5
        return Answer({}, "on disk", 1.0, 9.0, (seconds, seconds, 99.0), 10**9, 6e9, disk_busy=0.9)

    monkeypatch.setattr(Launcher, "run", answer)
    asked = ("--rows", "64", "512", "--their-rows", "8", "--repeats", "2", "--systems", "h2o_flexgen", "llama.cpp")
    result = run(*asked)
    assert [(one.system, one.rows) for one in told] == [("h2o_flexgen", 64), ("h2o_flexgen", 512), ("llama.cpp", 8)] * 2
    assert {one.checkpoint for one in told} == {told[0].checkpoint} and {one.host_bytes for one in told} == {2 << 30}
    assert "percent" not in told[0].options and told[0].options["kv_policy"] == "h2o"
    first, second, theirs = result["rows"]
    assert [one["tokens_per_s"] for one in (first, second, theirs)] == [64 / 4, 512 / 4.5, 4.0]
    assert result["times_their_best"] == pytest.approx(512 / 4.5 / 4)
    assert first["disk_read_per_s"] == [[3e9, 2e9]] * 2
    assert first["of_ceiling"] == pytest.approx((3.89e9 - (2 << 30)) / 3e9 / 4, rel=0.04)  # what the disk bounds
    assert (first["of_lane"], first["disk_busy"], theirs["of_lane"]) == (0.5, 0.9, None)
    written = readme_results.read_result(tmp_path / "results" / "moe-olmoe-1b-7b-0924.json")
    assert [row[0] for row in written.cells] == ["system", "h2o_flexgen", "h2o_flexgen", "llama.cpp"]
    assert (
        written.headline["tokens/s in steps"] == "114"
        and written.headline["times"] == "28.4"
        and written.headline["with rows"] == "8"
    )


def test_as_many_weights_stay_in_memory_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Request("h2o_flexgen", "file.gguf", "bfloat16", "cpu", 128, 64, 16, 4, 8 << 30, None, str(tmp_path), {"buffers": 4})
    monkeypatch.setattr(this_engine, "_have_states", lambda _: False)
    monkeypatch.setattr(this_engine, "_fits", lambda request, rows: request.options["percent"][1] <= 37 and rows == 128)
    assert this_engine.with_residents(asked).options == {"buffers": 4, "percent": (0, 37, 0, 100, 0, 100)}
    given = replace(asked, options={"percent": (0, 5, 0, 100, 0, 100)})
    assert this_engine.with_residents(given) == given


@pytest.mark.parametrize(("room", "states", "weights"), [(60, 60, 0), (130, 100, 30)])
def test_states_come_before_weights(
    room: int, states: int, weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Request("h2o_flexgen", "file.gguf", "bfloat16", "cpu", 128, 64, 16, 4, 8 << 30, None, str(tmp_path), {})

    def fits(request: Request, _: int) -> bool:
        return 100 * request.options["state"].host + request.options["percent"][1] <= room

    monkeypatch.setattr(this_engine, "_have_states", lambda _: True)
    monkeypatch.setattr(this_engine, "_fits", fits)
    found = this_engine.with_residents(asked).options
    assert (found["state"], found["percent"][1]) == (Shares(0.0, states / 100), weights)


@pytest.mark.parametrize(("model", "named"), [(MODEL, []), ("Qwen/Qwen3.6-35B-A3B", ["h2o_flexgen, states in bfloat16"])])
def test_states_are_kept_in_two_ways_where_rows_have_some(model: str, named: list[str], tmp_path: Path) -> None:
    for program in COMPARED:
        (tmp_path / program).touch(0o755)
    found = {one.name: one for one in moe.parse(["--model", model, "--llama-cpp", str(tmp_path)]).contenders}
    assert [*found] == ["h2o_flexgen", *named, "h2o_flexgen, int8", "llama.cpp"]
    assert [found[name].options["state_dtype"] for name in named] == ["bfloat16"] * len(named)


def test_what_fails_is_left_out(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Launcher, request: Request, loads_within_cap: bool) -> Answer:
        if request.system == "llama.cpp":
            raise Failed("killed")
        return Answer({}, "on disk", 1.0, 9.0, (1.0,), 10**9, 0.0)

    monkeypatch.setattr(Launcher, "run", failing)
    result = run("--rows", "8", "--their-rows", "1", "--systems", "h2o_flexgen", "llama.cpp", "--resident", "25")
    assert len(result["rows"]) == 1 and result["times_their_best"] is None


def test_lines_of_several_calls_come_together(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((4.0, 2.0, 3.0, 5.0))

    def answer(self: Launcher, request: Request, loads_within_cap: bool) -> Answer:
        return Answer({}, "on disk", 1.0, 9.0, (next(seconds),), 10**9, 6e9, disk_busy=0.9, written_bytes_per_step=3e9)

    monkeypatch.setattr(Launcher, "run", answer)
    first = run("--rows", "128", "512", "--systems", "h2o_flexgen")
    assert first["rows"][0]["of_lane"] == (6e9 + 3e9) / 3e9 / 4
    both = run("--rows", "512", "--systems", "h2o_flexgen", "--keep")
    assert [(row["rows"], row["tokens_per_s"]) for row in both["rows"]] == [(128, 32.0), (512, 512 / 3)]
    assert both["rows"][0] == first["rows"][0]
    told = [row["command"] for row in both["rows"]]
    assert "--keep" not in told[0] and "--keep" in told[1] and both["command"] == "; ".join(told), "each has its own"
    more = run("--rows", "1024", "--systems", "h2o_flexgen", "--keep")
    assert [row["command"] for row in more["rows"]][:2] == told
    with pytest.raises(SystemExit, match=r"is of .*64\+64 tokens.*not of .*32\+64 tokens"):
        run("--rows", "512", "--systems", "h2o_flexgen", "--keep", "--load", "32+64")
    monkeypatch.setattr(moe, "OURS", "another")
    with pytest.raises(SystemExit, match="has lines of 'h2o_flexgen', which is no system here; leave out --keep"):
        run("--rows", "512", "--systems", "another", "--keep")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--systems", "vllm"), "unknown systems vllm; known: h2o_flexgen"),
        (("--steps", "40"), "--steps 40 do not fit into the second half of 64 tokens"),
        (("--memory", "much"), "much"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: tuple[str, ...], said: str, run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    assert said in capsys.readouterr().err
