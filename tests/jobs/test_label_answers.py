"""What is said of labels is computed once for each text, however many labels there are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import exp

import pytest

from h2o_flexgen.core import labels
from h2o_flexgen.core.labels import TOGETHER, Labels
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.line_fields import read_label_options
from h2o_flexgen.jobs.openai_answers import label_body
from h2o_flexgen.sampling.completion import Completion

SCORES = array("f", (0.5, -1.0, 2.0))


def test_probabilities_of_labels_are_summed_up_once_for_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[float] = []

    def counting(values: Iterable[float]) -> float:
        sums.append(sum(values))
        return sums[-1]

    monkeypatch.setattr(labels, "sum", counting, raising=False)
    line = Line(None, "a", False, read_label_options({}, ()))
    told = [(line, Completion(place, "a", (5,), "", (), None, "stop", embedding=SCORES)) for place in range(2)]
    data = label_body({"id": "1", "created": 1, "model": "m"}, {}, Labels(("a", "b", "c"), TOGETHER), told)["data"]
    assert isinstance(data, list) and len(sums) == len(data) == 2
    for one in data:
        assert (one["label"], one["num_classes"]) == ("c", 3)
        assert one["probs"] == pytest.approx([exp(score) / sum(map(exp, SCORES)) for score in SCORES])
