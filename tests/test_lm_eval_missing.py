"""Where lm-evaluation-harness is not installed, one line names the extra that brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = "import sys; sys.modules['lm_eval'] = None; "


@pytest.mark.parametrize("code", ["from h2o_flexgen.lm_eval import main; sys.exit(main())", "import h2o_flexgen.lm_eval_model"])
def test_one_line_names_the_extra(code: str) -> None:
    command = [sys.executable, "-c", HIDE + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    last = done.stderr.splitlines()[-1]
    assert last.endswith("lm-evaluation-harness is not installed; it comes with the extra [eval]: pip install -e '.[eval]'")
    assert done.returncode != 0
    if "main" in code:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
