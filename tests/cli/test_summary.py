"""Projections: exact where the truth is a line, never below what was measured, and never silent about what they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.cli.report.summary import Timing, after_first_layers, extended_seconds, step_seconds_of
from h2o_flexgen.schedule.ops import Op, Task


@given(st.integers(2, 20), st.integers(0, 40), st.floats(0.01, 10), st.floats(0, 1))
def test_steps_on_a_line_are_continued_exactly(measured: int, more: int, first: float, growth: float) -> None:
    steps = [first + growth * step for step in range(measured + more)]
    assert extended_seconds(steps[:measured], measured + more) == pytest.approx(sum(steps))


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=12), st.integers(0, 30))
def test_a_projection_never_goes_below_the_mean_of_what_was_measured(steps: list[float], more: int) -> None:
    mean = sum(steps) / len(steps)
    assert extended_seconds(steps, len(steps) + more) >= sum(steps) + mean * more - 1e-9


def test_the_second_half_of_the_layers_stands_for_all() -> None:
    ends = {layer: 100.0 + (5.0 * layer if layer < 9 else 45.0 + 2.0 * (layer - 9)) for layer in range(20)}
    assert step_seconds_of(ends, layers=50) == pytest.approx(100.0)  # 2 s a layer: the first nine took longer


def test_one_layer_tells_nothing() -> None:
    assert step_seconds_of({0: 3.0}, layers=50) == 0.0


def test_a_run_of_fewer_layers_ends_before_layer_20_of_the_first_decode_step() -> None:
    goes_on = [Task(Op.COMPUTE, 0, 49, 3), Task(Op.COMPUTE, 1, 19, 3), Task(Op.READ_W, 1, 21, 0)]
    assert [after_first_layers(task) for task in goes_on] == [False] * 3
    assert after_first_layers(Task(Op.COMPUTE, 1, 20, 0)) and after_first_layers(Task(Op.COMPUTE, 2, 0, 0))


def test_rates_are_those_of_flexgen() -> None:
    timing = Timing(num_prompts=4, prompt_tokens=40, generated_tokens=20, prefill_seconds=2.0, decode_seconds=8.0)
    assert timing.prefill_tokens_per_second == 20.0
    assert timing.decode_tokens_per_second == 2.0  # the first token of each prompt comes out of prefill
    assert timing.tokens_per_second == 2.0
    assert Timing(4, 40, 4, 0.0, 0.0).decode_tokens_per_second == 0.0
