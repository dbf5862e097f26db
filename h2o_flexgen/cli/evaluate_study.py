"""What --study of the evaluate command does: statistics of attention over one window of a text, and pictures of them."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.cli.choose_model import ChosenModel
from h2o_flexgen.cli.open_llm import open_llm
from h2o_flexgen.cli.report import say
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.evaluation.tasks.task import window_of
from h2o_flexgen.evaluation.texts import Text, windows

RESULT, TABLES = "study.json", "study.txt"


def run_study(args: Namespace, chosen: ChosenModel, texts: tuple[Text, ...], output: Path | None) -> None:
    with open_llm(args, chosen) as llm, Progress(0, f"study of {chosen.name}", late=True) as progress:
        from h2o_flexgen.evaluation.study.heavy_hitters import study  # imports torch, which is there by now
        from h2o_flexgen.evaluation.study.pictures import draw

        def on_layer(done: int, layers: int) -> None:
            progress.expect(layers)
            progress.update("layers", done)

        ids = windows(texts, llm.tokenizer, window_of(args.window, llm), 1).ids[0]
        found = study(llm, ids, args.study_policies, args.study_budget, on_layer=on_layer)
        if output is not None:
            (output / RESULT).write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
            (output / TABLES).write_text("\n".join(found.lines()) + "\n", encoding="utf-8")
        if output is not None and find_spec("matplotlib") is not None:
            progress.stage("pictures")
            draw(found, output)
    if output is not None and find_spec("matplotlib") is None:
        print("no pictures: they need matplotlib; install it, or the extra [plot]", file=sys.stderr)
    say(found.lines())
    print(json.dumps(found.as_json()), flush=True)
