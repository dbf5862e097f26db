"""LLM as Python users meet it: nothing that is asked for is dropped in silence, and every stage is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen import LLM, Plan, SamplingParams
from h2o_flexgen.planning.schedule import SCHEDULES
from h2o_flexgen.runtime.stage import Stage
from tests.tiny import save_tiny

Told = list[tuple[Stage, int, int]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slotz": 3}, r"unknown option 'slotz'; did you mean slots\?"),
        ({"cpu_men": "8GB"}, r"unknown option 'cpu_men'; did you mean cpu_mem\?"),
        ({"plan": Plan(), "slotz": 3}, "unknown option 'slotz'"),
        ({"plan": Plan(), "slots": 3}, "both plan and slots are given"),
        ({"plan": Plan(), "percent": (0, 100, 0, 100, 0, 100)}, "both plan and percent are given"),
        ({"schedule": "zigzagg"}, "'zigzagg' is unknown; known: zigzag"),
        ({"kv_policy": "h20"}, "'h20' is unknown; known: full, h2o"),
        ({"kv_policy": "local", "heavy": 3}, "'local' does not take heavy"),
        ({"percent": (0, 0, 0)}, "percent takes six numbers"),
        ({"schedule": "flexgen_barrier", "overlap": False}, "flexgen_barrier cannot do without overlap"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_a_model_is_looked_for(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LLM("/no/such/model", **options)  # type: ignore[arg-type]
    assert "--" not in str(caught.value), "Python knows no flags"


def test_a_plan_is_taken_as_it_is(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    plan = Plan(gpu_batch_size=3, schedule=list(SCHEDULES)[-1]).with_percent((0, 100, 0, 100, 0, 100))
    with LLM(str(tmp_path), plan=plan, device="cpu") as llm:
        assert llm.requested == llm.plan == plan
    with LLM(str(tmp_path), plan=plan, device="cpu", overlap=False) as llm:
        assert llm.plan == plan.without_overlap()


def test_another_plan_can_be_adopted_until_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=10**9, used=0, free=10**9))
    save_tiny("opt", tmp_path / "model")
    packed = Plan(weight_codec="group4").with_percent((50, 50, 0, 100, 0, 100))
    with LLM(str(tmp_path / "model"), device="cpu") as llm:
        assert llm.packing is None and llm.budgets.disk == 10**9
        llm.adopt(packed)
        assert llm.requested == packed and llm.plan == packed.folded() and llm.spec.layers[1].matrices[0].codec == "group4"
        assert llm.packing is not None and llm.budgets.disk == 10**9 - llm.packing[1] < 10**9
        (found,) = llm.generate([[7, 8]], SamplingParams(max_tokens=2))
        assert len(found.token_ids) == 2
        with pytest.raises(ValueError, match="make a new LLM for another plan"):
            llm.adopt(Plan())
    with pytest.raises(ValueError, match="is closed"):
        llm.adopt(Plan())


def test_converting_bin_files_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("opt", tmp_path / "model", safe=False)
    told: Told = []
    for times in (1, 2):
        with LLM(str(tmp_path / "model"), device="cpu", on_stage=lambda *one: told.append(one)):
            sizes = [(done, total) for stage, done, total in told if stage is Stage.CONVERTING]
        assert len(told) == len(sizes) > 3, f"a second time it is there already ({times})"
        assert sizes == sorted(sizes) and sizes[-1][0] == sizes[-1][1] > 0


def test_random_weights_tell_how_many_are_written_and_then_that_the_rest_is_loaded(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model")
    opened: Told = []
    told: Told = []
    options = {"percent": (0, 50, 0, 100, 0, 100), "offload_dir": tmp_path, "device": "cpu", "dummy_weights": True}
    with LLM(str(tmp_path / "model"), on_stage=lambda *one: opened.append(one), **options) as llm:  # type: ignore[arg-type]
        for prompt in ([7, 8], [9]):
            llm.generate([prompt], SamplingParams(max_tokens=2), on_stage=lambda *one: told.append(one))
        llm.generate([[5]], SamplingParams(max_tokens=1))
    stages = [stage for stage, _, _ in told]
    writing = stages.count(Stage.WRITING)
    once = [Stage.LOADING, *[Stage.WRITING] * writing, Stage.LOADING, Stage.GENERATING]
    assert writing > 3 and stages == [*once, Stage.GENERATING]
    assert all((total > 0) == (stage is Stage.WRITING) for stage, _, total in told)
    assert opened == [(Stage.GENERATING, 0, 0)], "who listens to one call hears the others no more"


def test_the_peak_of_a_process_is_its_own_and_not_that_of_its_parent() -> None:
    held = bytearray(b"1") * 1_500_000_000
    code = "from h2o_flexgen.llm import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50_000_000 < int(done.stdout) < len(held)


def test_percent_in_python_takes_numbers_and_says_where_they_come_from() -> None:
    with pytest.raises(ValueError, match=r"percent is .auto., but here it takes six numbers"):
        LLM("facebook/opt-125m", dummy_weights=True, percent="auto")  # type: ignore[arg-type]
