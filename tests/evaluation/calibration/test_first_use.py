"""Head budgets are measured at a model's first use that wants them, where that takes little time, and kept; a reading that was
interrupted goes on, and one that would take too long is given up at its beginning. No test goes by the true clock."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_flexgen import calibrate, run
from h2o_flexgen.calibration.calibration import Calibration
from h2o_flexgen.calibration.calibration import calibrate as calibrated
from h2o_flexgen.calibration.text_reading import KeptReading, Pace, ReadSoFar, TakesTooLong
from h2o_flexgen.checkpoints.derived import HEAD_BUDGETS, kept_file
from h2o_flexgen.engine.reports import Stages
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.head_budgets import HeadBudgets, read_head_budgets
from h2o_flexgen.session import measured_heads
from h2o_flexgen.session.measured_heads import HeadMeasuring
from tests.helpers.commands import Result, called
from tests.helpers.contract import Checkpoints, distinct_prompts

TEXTS = distinct_prompts((17, 20), seed=3)
Measured = Callable[[float], "tuple[HeadBudgets | None, list[str]]"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measured_heads, "FEWEST_TOKENS", 16)  # these models have few positions
    monkeypatch.setattr(HeadMeasuring, "most_seconds", inf)


def kept_for(model: Path) -> Path:
    place = kept_file(str(model), HEAD_BUDGETS)
    assert place is not None
    return place


@pytest.fixture
def ran(capfd: pytest.CaptureFixture[str], offload: Path, tiny_llama: Path) -> Callable[..., Result]:
    def call(main: Any, *argv: object) -> Result:
        common = ("--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--offload-dir", offload)
        return called(main, capfd, *common, *argv)

    return call


ASKED = ("--kv-policy", "h2o", "--prompt-len", 40, "--gen-len", 4, "--num-prompts", 1)
ON_DISK = ("--percent", 0, 0, 0, 0, 0, 0)


def test_the_first_run_that_evicts_measures_what_later_ones_go_by(ran: Callable[..., Result], tiny_llama: Path) -> None:
    place = kept_for(tiny_llama)
    assert ran(run.main, *ASKED, "--head-budgets", "equal").json["plan"]["head_budgets"] is None and not place.exists()
    assert ran(run.main, *ASKED, "--dummy-weights").json["plan"]["head_budgets"] is None and not place.exists()
    first = ran(run.main, *ASKED, *ON_DISK)
    budgets = read_head_budgets(place)
    assert first.json["plan"]["head_budgets"]["checksum"] == budgets.checksum
    assert any("heads     what each needs is measured now, once for this model, in about" in line for line in first.err)
    assert [*place.parent.iterdir()] == [place], "what was read so far is removed"
    again = ran(run.main, *ASKED)
    assert again.json["plan"]["head_budgets"] == first.json["plan"]["head_budgets"]
    assert not any("measured now" in line for line in again.err)
    place.unlink()
    tokens = budgets.source.split(" tokens")[0].rpartition(" ")[2]
    assert ran(calibrate.main, "--tokens", tokens).json["checksum"] == budgets.checksum


OWN: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
EVICTS: dict[str, Any] = {**OWN, "kv_policy": "h2o", "kv_budget": 0.5}


@pytest.mark.parametrize("percent", [None, "auto"])
def test_python_measures_too_unless_a_plan_says_what_heads_keep(percent: str | None, tiny_llama: Path) -> None:
    place = kept_for(tiny_llama)
    with LLM(tiny_llama, plan=Plan.create(kv_policy="h2o"), **OWN) as llm:
        assert llm.plan.head_budgets is None and not place.exists()
    with LLM(tiny_llama, tokenizer="bytes", **EVICTS) as llm:
        assert llm.plan.head_budgets is None and not place.exists(), "other tokens say nothing of the model"
    with pytest.warns(UserWarning, match="what each needs is measured now, once for this model"):
        llm = LLM(tiny_llama, percent=percent, **EVICTS)
    with llm:
        llm.generate([[5] * 30])
        assert llm.plan.head_budgets == read_head_budgets(place)


def test_a_cache_that_cannot_be_written_costs_no_run(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = kept_for(tiny_llama)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(measured_heads, "write_head_budgets", full)
        with pytest.warns(UserWarning, match="cannot be kept for later runs: .*No space left on device"):
            llm = LLM(tiny_llama, **EVICTS)
        with llm:
            assert llm.plan.head_budgets is not None and not place.exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.warns(UserWarning, match="equal budgets, since what each needs cannot be measured: .*Permission denied"):
        llm = LLM(tiny_llama, **EVICTS)
    with llm:
        assert llm.plan.head_budgets is None


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")])
def test_where_memory_does_not_suffice_budgets_are_equal(
    error: Exception, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(measured_heads, "calibrate", fails)
    with pytest.warns(UserWarning, match=f"cannot be measured: {str(error).splitlines()[0]}$"):
        llm = LLM(tiny_llama, **EVICTS)
    with llm:
        assert llm.plan.head_budgets is None


def test_short_windows_and_copies_that_no_run_needs_leave_heads_equal(
    tiny_llama: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_heads, "calibrate", lambda *_, **__: pytest.fail("it was read"))
    with monkeypatch.context() as patched:
        patched.setattr(measured_heads, "FEWEST_TOKENS", 10_000)
        with LLM(tiny_llama, **EVICTS) as llm:
            assert llm.plan.head_budgets is None
    monkeypatch.setattr("h2o_flexgen.session.loaded_model.AUTO", "bytes")
    with pytest.warns(UserWarning, match="to measure what each needs, weights are copied: python -m h2o_flexgen.calibrate"):
        llm = LLM(checkpoints.folder("gpt2"), tokenizer="bytes", weight_codec="group4", **EVICTS)
    with llm:
        assert llm.plan.head_budgets is None


def test_what_heads_need_with_an_adapter_is_not_kept_for_the_model(ran: Callable[..., Result], tmp_path: Path) -> None:
    refused = ran(calibrate.main, "--adapter", tmp_path)
    assert refused.status == 2 and "with --adapter is not kept" in refused.err[-1]


def interrupted_after(layers: int) -> Callable[[int, int], None]:
    def on_layer(done: int, all_layers: int) -> None:
        if done == layers:
            raise KeyboardInterrupt

    return on_layer


def test_a_reading_that_was_interrupted_goes_on(checkpoints: Checkpoints, tmp_path: Path) -> None:
    kept, seen = KeptReading(tmp_path / "x.reading", "these"), []
    with LLM(str(checkpoints.folder("llama-gqa")), dtype="float32") as llm:
        model = llm.loaded.reading
        whole = calibrated(model, TEXTS, "texts")
        with pytest.raises(KeyboardInterrupt):
            calibrated(model, TEXTS, "texts", interrupted_after(len(model.layers) - 1), kept=kept)
        rest = calibrated(model, TEXTS, "texts", lambda done, layers: seen.append((done, layers)), kept=kept)
        others = KeptReading(kept.file, "others")
        assert others.found(2) is None and kept.found(2) is not None and kept.found(3) is None
        kept.file.write_bytes(b"no tensors")
        assert kept.found(2) is None
        kept.remove()
        assert kept.found(2) is None
    assert seen == [(len(model.layers), len(model.layers))]
    assert_equal(whole, rest)


def assert_equal(one: Calibration, other: Calibration) -> None:
    assert one.head_budgets == other.head_budgets
    for budget, shares in one.shares.items():
        assert all((a == b).all() for a, b in zip(shares, other.shares[budget], strict=True))


def clock(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def read_by(pace: Pace, *numbers: int, kinds: str = "aaa") -> None:
    """Reads some layers of three texts with a pace."""
    layers = [SimpleNamespace(nbytes=nbytes, computes=kind) for nbytes, kind in zip((10, 10, 20), kinds)]
    model: Any = SimpleNamespace(layers=layers)
    hidden: Any = [None] * 3
    pace.begin()
    for number in numbers:
        for texts in range(4):
            pace.note(ReadSoFar(number, texts, hidden), model)


FIRST = 100.0, 102.0, 202.0, 205.0, 208.0  # two seconds to load a layer, a hundred for its first text, three for others
THEN = 209.0, 212.0, 217.0, 222.0  # one second to load another one, three for its first text, five for others


def test_the_first_texts_tell_how_long_all_layers_take() -> None:
    told: list[float] = []
    read_by(Pace(44.0, told.append, clock(*FIRST)), 0)
    read_by(Pace(11.0, told.append, clock(*FIRST)), 2)
    assert told == [44.0, 11.0]  # of all layers, and of the last one alone
    with pytest.raises(TakesTooLong, match="it takes about 44 s"):
        read_by(Pace(43.9, told.append, clock(*FIRST)), 0)
    assert len(told) == 2


def test_the_first_layer_of_another_kind_tells_how_long_its_own_take() -> None:
    told: list[float] = []
    read_by(Pace(156.0, told.append, clock(*FIRST, *THEN)), 0, 1, kinds="abb")
    read_by(Pace(150.0, told.append, clock(*FIRST, *THEN)), 0, 1, kinds="aba")
    assert told == [44.0, 44.0], "it is told once"
    with pytest.raises(TakesTooLong, match="it takes about 156 s"):  # 108 of the first layer, 16 of the second, 32 of the third
        read_by(Pace(155.9, told.append, clock(*FIRST, *THEN)), 0, 1, kinds="abb")


@pytest.fixture(params=["llama-gqa", "qwen3-5-moe"])
def measured(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Measured]:
    folder = checkpoints.folder(request.param)
    with LLM(folder, dtype="float32", device="cpu", tokenizer="bytes") as llm:

        def call(most_seconds: float) -> tuple[HeadBudgets | None, list[str]]:
            said: list[str] = []
            measuring = HeadMeasuring(str(folder), llm.tokenizer, Stages(None), said.append, most_seconds)
            return measuring.budgets(llm.loaded.reading), said

        yield call


def test_what_takes_too_long_is_left_to_the_command(measured: Measured) -> None:
    said = "heads     equal budgets: what each needs takes about "
    command = " to measure, once: python -m h2o_flexgen.calibrate --model "
    found, lines = measured(0.0)
    assert found is None and len(lines) == 1 and lines[0].startswith(said) and command in lines[0]
    found, lines = measured(inf)
    assert found is not None and len(lines) == 1 and "measured now" in lines[0], "it was not remembered"
