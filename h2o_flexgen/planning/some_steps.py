"""Some steps of a block, simulated one after the other as if they were all: each represents a step of the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.task import Key, Task
from h2o_flexgen.schedule.trace import Trace


def simulated(pricing: Pricing, steps: Sequence[int]) -> Trace:
    schedule = of_so_many_steps(pricing.schedule, len(steps))
    tasks, priced = schedule.tasks(), _Priced(pricing, steps)
    return simulate(tasks, priced.seconds, schedule.ahead, lanes=schedule.traffic.lanes, latency=priced.latency)


def of_so_many_steps(schedule: Schedule, steps: int) -> Schedule:
    return replace(schedule, traffic=replace(schedule.traffic, steps=steps))


def step_seconds(trace: Trace, schedule: Schedule) -> list[float]:
    """Seconds of each step, from one head to the next, whatever the order of the schedule."""
    spent: dict[int, float] = {}
    clock, head = 0.0, schedule.traffic.layers - 1
    for span in sorted(trace.spans, key=lambda span: span.end):
        if span.key.op is Op.COMPUTE and span.key.layer == head:
            spent[span.key.step] = spent.get(span.key.step, 0.0) + span.end - clock
            clock = span.end
    return [spent[step] for step in sorted(spent)]


class _Priced:
    """The seconds and the latency of a task in a step that represents another one."""

    def __init__(self, pricing: Pricing, steps: Sequence[int]) -> None:
        self._pricing, self._steps = pricing, steps
        self._stretches = {step: pricing.stretches(step) for step in set(steps)}

    def seconds(self, task: Task) -> float:
        op, at, layer, batch, _ = task
        step = self._steps[at]
        return self._stretches[step][op] * self._pricing.seconds(Key(op, step, layer, batch))

    def latency(self, task: Task) -> float:
        return self._stretches[self._steps[task.step]][task.op] * self._pricing.latency(task.op)
