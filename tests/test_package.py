"""The public names: all there, documented by the type checker, and imported on first use only."""

from __future__ import annotations

import subprocess
import sys

import pytest

import h2o_flexgen


@pytest.mark.parametrize("name", h2o_flexgen.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(h2o_flexgen, name).__name__ == name
    assert name in dir(h2o_flexgen)


def test_an_unknown_name_is_an_error_of_the_usual_kind() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Lama'"):
        _ = h2o_flexgen.Lama  # type: ignore[attr-defined]


def test_plans_can_be_made_without_torch() -> None:
    code = "import sys\nfrom h2o_flexgen import Plan, Workload, Completion, Machine\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
