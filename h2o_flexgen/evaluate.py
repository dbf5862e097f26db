"""The evaluate command: how good the text is under each policy and budget, measured through the real cache.

    python -m h2o_flexgen.evaluate --policies full,h2o,local --budgets 100,20 --tasks perplexity,recall --output quality

Tables go to stdout; its last line is one JSON document. With --output every finished cell is kept, and the same command goes on
where it was interrupted.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.cli.choose_model import ChosenModel, choose_model
from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.cli.evaluate_arguments import parse
from h2o_flexgen.cli.evaluate_study import run_study
from h2o_flexgen.cli.evaluation_report import Report, write_report
from h2o_flexgen.cli.evaluation_watch import EvaluationWatch
from h2o_flexgen.cli.open_llm import make_llm, open_llm
from h2o_flexgen.cli.output_folder import open_output
from h2o_flexgen.cli.report import say
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.evaluation.cells import Cells
from h2o_flexgen.evaluation.run import Evaluation
from h2o_flexgen.evaluation.tasks.task import Asked, Task
from h2o_flexgen.evaluation.tasks.tasks import TASKS
from h2o_flexgen.evaluation.texts import Text
from h2o_flexgen.planning.plan import Plan

if TYPE_CHECKING:
    from h2o_flexgen.llm import LLM


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: parse(words), lambda args: _run(args, words))


def _run(args: Namespace, words: Sequence[str]) -> None:
    if args.study is not None:
        texts, output = _texts(args), open_output(args.output)
        run_study(args, choose_model(args.model, args.path, args.dummy_weights), texts, output)
        return
    tasks = {name: TASKS[name].of(_asked(args)) for name in args.tasks}
    output = open_output(args.output)
    chosen = choose_model(args.model, args.path, args.dummy_weights)
    evaluation, machine, offload_folder = _bound(args, chosen, tasks, Cells(output))
    evaluation.check()
    if args.fresh:  # not before: a command that is refused costs nobody his cells
        evaluation.cells.forget()
    _announce(evaluation, output)
    _fill(args, chosen, evaluation, offload_folder, output)
    report = Report(chosen.name, tuple(words), machine, evaluation, tasks)
    say(report.lines())
    if output is not None:
        write_report(report, output)
    print(json.dumps(report.as_json()), flush=True)


def _asked(args: Namespace) -> Asked:
    return Asked(
        texts=_texts(args),
        articles=args.articles,
        window=args.window,
        examples=args.examples,
        gen_len=args.gen_len,
        questions=args.questions,
        lengths=args.lengths,
        depths=args.depths,
        mentions=args.mentions,
        seed=args.seed,
    )


def _texts(args: Namespace) -> tuple[Text, ...]:
    if args.text is not None:
        return tuple(map(Text.read, args.text))
    return (Text.held_out(),) if args.study is not None or any(TASKS[name].reads_texts for name in args.tasks) else ()


def _bound(
    args: Namespace, chosen: ChosenModel, tasks: dict[str, Task], cells: Cells
) -> tuple[Evaluation, dict[str, object], Path]:
    """All that is known of the model without its weights."""
    with open_llm(args, chosen) as llm:
        from h2o_flexgen.evaluation.model_identity import model_identity  # imports torch, which is there by now
        from h2o_flexgen.profiling.measure import describe_machine

        bound = {name: task.bind(llm) for name, task in tasks.items()}
        evaluation = Evaluation(model_identity(llm), args.grid.settings, bound, args.plan, cells)
        return evaluation, describe_machine(llm.device), llm.offload_folder


def _announce(evaluation: Evaluation, output: Path | None) -> None:
    there, total = evaluation.num_cells - evaluation.num_missing, evaluation.num_cells
    words = ["1 cell" if total == 1 else f"{total} cells"]
    if there:
        words.append(f"{there} {'is' if there == 1 else 'are'} in {output} already")
    print("; ".join(words), file=sys.stderr)
    for name, task in evaluation.tasks.items():
        for note in task.notes:
            print(f"{name}: {note}", file=sys.stderr)


def _fill(args: Namespace, chosen: ChosenModel, evaluation: Evaluation, folder: Path, output: Path | None) -> None:
    with Progress(evaluation.num_tokens, "evaluate", late=True) as progress:
        watch = EvaluationWatch(progress)

        def opened(plan: Plan) -> LLM:
            return make_llm(args, chosen, plan, watch.stage)

        try:
            evaluation.run(opened, folder, watch)
        except KeyboardInterrupt:
            done = evaluation.num_cells - evaluation.num_missing
            if output is not None and done:
                progress.note(f"{done} of {evaluation.num_cells} cells in {output}; the same command goes on from there")
            raise


if __name__ == "__main__":
    sys.exit(main())
