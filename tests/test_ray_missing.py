"""Where Ray is not installed, one line names the extra that brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDE = "import sys; sys.modules['ray'] = None; "
COMMAND = "from h2o_flexgen.batch import main; sys.exit(main(['-i', 'in.jsonl', '-o', 'out.jsonl', '--ray', 'local']))"


@pytest.mark.parametrize("code", ["import h2o_flexgen.ray", COMMAND])
def test_one_line_names_the_extra(code: str) -> None:
    command = [sys.executable, "-c", HIDE + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("Ray is not installed; it comes with the extra [ray]: pip install -e '.[ray]'")
    if code == COMMAND:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
