"""Launches past Triton's own door tell CUDA's driver what that would tell it, and make few tensors. A driver that is pretended
notes what it is told; no GPU is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.samples import first_of

ROOT = Path(__file__).parents[3]
# by call: launches, tensors that it makes, and what the driver is told of them
CALLS = {
    "attention and sums, plain KV": (2, 3, 23),
    "attention and sums, group8 KV": (2, 3, 23),
    "attention and sums, group4 KV": (2, 3, 23),
    "newest token, rotated": (1, 1, 28),
    "newest token, rotated, in 4 bits": (1, 1, 28),
    "eviction": (1, 1, 17),
    "rotation": (1, 1, 10),
    "4-bit KV encoded": (1, 0, 5),
    "RMS norm": (1, 1, 6),
    "product of 4-bit tiles": (1, 1, 7),
    "three products of 4-bit tiles": (1, 3, 17),
    "product of a checkpoint's q4_K": (1, 1, 10),
}


SOME = "eviction", "RMS norm"  # which a default run launches
OTHERS = tuple(call for call in CALLS if call not in SOME)


@pytest.fixture(scope="module", params=first_of([SOME, OTHERS], 1), ids=["some", "others"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("launched")
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "tests.kernels.gpu.launching", str(folder), *request.param]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=surroundings, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    document: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return document | {"asked": request.param}


def test_the_driver_is_told_what_tritons_own_door_tells_it(said: dict[str, Any]) -> None:
    """This pins how Triton's launcher is called: where another Triton calls it in another way, the door is taken."""
    assert [one["name"] for one in said["calls"] if not one["as_the_door"]] == []
    assert [one["name"] for one in said["calls"] if not one["mistake_is_seen"]] == [], "the comparison sees nothing"
    assert [one["name"] for one in said["calls"] if one["through_the_door"]] == []


def test_calls_of_a_step_launch_and_make_no_more_than_this(said: dict[str, Any]) -> None:
    found = {one["name"]: (len(one["launches"]), one["tensors"], one["parameters"]) for one in said["calls"]}
    assert found == {name: CALLS[name] for name in said["asked"]}


def test_the_door_is_taken_where_nothing_else_would_be_right(said: dict[str, Any]) -> None:
    aligned, elsewhere, (why, through) = said["doors"]["aligned"], said["doors"]["elsewhere"], [*said["doors"].items()][-1]
    assert aligned == {} and elsewhere == {"norm_row": 1} == through
    assert "launches kernels in a way that is not known here" in why
