"""This engine and its peers side by side: see benchmarks/comparison/command.py, and `python benchmarks/compare.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package
    from benchmarks.comparison.command import main

    sys.exit(main())
