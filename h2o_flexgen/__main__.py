"""`python -m h2o_flexgen` is h2o-flexgen: one command that has all others."""

from __future__ import annotations

import sys

from h2o_flexgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
