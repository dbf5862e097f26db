"""How many threads compute: as many as are asked for, fewer beside others, and the same tokens with any number."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.core.environment import SPINS, cores
from h2o_flexgen.engine import resources
from h2o_flexgen.engine.resources import crowding, make_room_for_others, quota_cores, set_threads, threads_beside
from h2o_flexgen.memory.host import KEPT_PRODUCTS


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(resources, "cores", lambda: 8)
    for name in resources.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("busy", "cores", "quota", "most", "expected"),
    [
        (0.0, 8, math.inf, 8, 8),
        (0.4, 8, math.inf, 8, 8),  # next to nothing
        (1.1, 8, math.inf, 8, 7),
        (1.0, 2, math.inf, 2, 1),
        (9.0, 8, math.inf, 8, 1),
        (2.0, 8, math.inf, 4, 4),  # there is room beside as many as torch takes
        (0.0, 64, 2.5, 64, 3),
        (62.0, 64, 4.0, 64, 2),
        (0.0, 2, 16.0, 2, 2),
    ],
)
def test_threads_leave_cores_to_others(busy: float, cores: int, quota: float, most: int, expected: int) -> None:
    assert threads_beside(busy, cores, quota, most) == expected


def test_room_is_made_and_told_of_unless_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "quota_cores", lambda: math.inf)
    torch.set_num_threads(2)
    assert make_room_for_others(3.0, None) is None and torch.get_num_threads() == 2
    assert make_room_for_others(7.0, asked=2) is None and torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert make_room_for_others(7.0, None) is None and torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    line = make_room_for_others(7.0, None)
    assert line == ("1 of 2: other processes keep 7.0 cores busy, and without them it is faster; --threads chooses otherwise")
    assert torch.get_num_threads() == 1


def test_threads_that_others_leave_no_cores_for_are_too_many() -> None:
    assert [crowding(busy, 2, 4) for busy in (0.0, 0.4, 2.4)] == [None] * 3
    assert crowding(2.6, 2, 4) == (
        "2 threads compute on 4 cores, and other processes keep 2.6 of them busy; "
        "stop them, start them with `nice`, or give --threads 1"
    )
    assert crowding(4.0, 1, 4, had=0.5) == (
        "1 thread computes on 4 cores, and other processes keep 3.5 of them busy, which leaves 0.5 to this one; "
        "stop them, or start them with `nice`"
    ), "all together have no more than the cores that there are"


def test_a_container_may_have_less_than_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half").write_text("50000 100000\n")
    (tmp_path / "all").write_text("max 100000\n")
    assert [quota_cores(tmp_path / name) for name in ("half", "all", "none")] == [0.5, math.inf, math.inf]
    monkeypatch.setattr(resources, "quota_cores", lambda: 0.5)
    torch.set_num_threads(2)
    assert make_room_for_others(0.0, None) == "1 of 2: no more may be used here at a time; --threads chooses otherwise"


@pytest.mark.parametrize("asked", [0, -1, 9, "2", 2.0, True])
def test_a_number_that_cannot_be_is_refused(asked: int) -> None:
    with pytest.raises(ValueError, match=rf"^threads is {asked!r}; allowed is a whole number from 1 to 8, the cores that"):
        set_threads(asked)


@pytest.mark.skipif(cores() < 2, reason="more threads than cores are refused")
def test_tokens_are_the_same_with_any_number_of_threads() -> None:
    prompts, params, found = ["It was a dark night, and the", "Alice"], SamplingParams(max_tokens=8, ignore_eos=True), []
    for number in (1, 2):
        with LLM("demo", threads=number, dtype="float32", device="cpu", gpu_batch_size=2) as llm:
            found.append([one.token_ids for one in llm.generate(prompts, params)])
            assert torch.get_num_threads() == number
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_a_command_sleep_soon_unless_told_otherwise(given: dict[str, str], expected: str | None) -> None:
    """And before torch is there, which is when it is read."""
    code = "import os, sys; from h2o_flexgen import run; run.main(['--prompt', '']); print(os.environ.get('GOMP_SPINCOUNT'))"
    told_in(code, given, expected)


@pytest.mark.parametrize(("first", "expected"), [("", str(SPINS)), ("import torch; ", None)])
@pytest.mark.slow
def test_so_do_threads_of_python_that_imports_the_package_first(first: str, expected: str | None) -> None:
    told_in(f"import os; {first}from h2o_flexgen import LLM; print(os.environ.get('GOMP_SPINCOUNT'))", {}, expected)


def told_in(code: str, given: dict[str, str], expected: str | None) -> None:
    free = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**free, **given})
    assert done.stdout.split() == [str(expected)], done.stderr


@pytest.mark.parametrize("name", resources.COMPILED_PRODUCTS)
def test_few_compiled_products_are_kept_unless_their_number_was_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "5")
    resources.keep_few_compiled_products()
    assert os.environ[name] == "5"
    monkeypatch.delenv(name)
    resources.keep_few_compiled_products()
    assert os.environ[name] == str(KEPT_PRODUCTS)
