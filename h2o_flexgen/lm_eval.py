"""`python -m h2o_flexgen.lm_eval ...`: the command line of lm-evaluation-harness, which then knows the model `h2o_flexgen`.

    python -m h2o_flexgen.lm_eval --model h2o_flexgen --tasks hellaswag --batch_size auto
        --model_args "pretrained=facebook/opt-1.3b,kv_policy=h2o,kv_budget=0.2,percent=0;50;0;100;0;100"

Releases that look for models in entry points (group `lm_eval.models`) find it there as well.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from h2o_flexgen.cli.errors import TRACEBACK, exit_status
from h2o_flexgen.cli.main import working_half
from h2o_flexgen.core.hints import not_installed

NAME, CLASS = "h2o_flexgen", "h2o_flexgen.evaluation.lm_eval_model:LmEvalModel"
MISSING = not_installed("lm-evaluation-harness", "eval")


def register() -> None:
    """Makes the model known by its name; its module is imported when it is asked for. A second call does nothing."""
    try:
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise ValueError(MISSING) from error
    if NAME not in model_registry:
        model_registry.register(NAME, target=CLASS)


def _evaluate(_: Namespace) -> None:
    register()
    from lm_eval.__main__ import cli_evaluate  # reads the arguments of the process

    with working_half("failures").told_in_one_line():
        cli_evaluate()


def main() -> int:
    level = TRACEBACK if os.environ.get("LMEVAL_LOG_LEVEL", "").upper() == "DEBUG" else 0
    return exit_status(lambda: Namespace(verbose=level), _evaluate)


if __name__ == "__main__":
    sys.exit(main())
