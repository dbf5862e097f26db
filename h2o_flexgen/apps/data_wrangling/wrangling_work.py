"""The work of data wrangling: a batch job answers the prompts, and its records are judged."""

from __future__ import annotations

import json

from h2o_flexgen.apps.data_wrangling.answers import answers_of, read_records
from h2o_flexgen.apps.data_wrangling.request import WranglingRequest
from h2o_flexgen.apps.data_wrangling.wrangling_report import WranglingReport
from h2o_flexgen.cli import batch_work
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.core.files import write_text


def work(request: WranglingRequest) -> None:
    ended = batch_work.run(request.job)
    if ended is None:  # only the plan was asked for
        return
    records = read_records(ended.output)
    answers = answers_of(request.rows, records, request.match, request.task.is_yes_or_no)
    report = WranglingReport(request, ended, answers)
    write_text(request.result_file, json.dumps(report.as_json(everything=True), indent=1) + "\n")
    if request.verbose:
        say(report.lines())
    print(json.dumps(report.as_json()), flush=True)
    ended.exit_if_failed()
