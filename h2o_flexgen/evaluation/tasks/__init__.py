"""Tasks of evaluation, and their table. A new task is a file here and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.evaluation.tasks.agreement import Agreement
from h2o_flexgen.evaluation.tasks.perplexity import Perplexity
from h2o_flexgen.evaluation.tasks.recall import RecallTask
from h2o_flexgen.evaluation.tasks.task import EvaluationTask
from h2o_flexgen.evaluation.tasks.xsum import XSum

TASKS: Mapping[str, type[EvaluationTask]] = {task.name: task for task in (Perplexity, RecallTask, Agreement, XSum)}
