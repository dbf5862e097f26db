"""The benchmark of the host's part: what it counts and adds up for an estimate."""

from __future__ import annotations

import pytest

from h2o_flexgen.planning.plan import Plan
from tests.scripts.loading import load_script

host = load_script("host.py", "benchmarks")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STEPS", 5)


def test_every_kind_of_task_is_measured_and_launches_are_counted() -> None:
    plan = Plan.create(gpu_batch_size=2, num_gpu_batches=2, pin_weight=False, weight_codec="group4")
    visits = host.of_engine(plan.with_percent((0, 100, 0, 100, 0, 100)))
    moving = {"LOAD_W", "LOAD_KV", "STORE_KV", "LOAD_H", "STORE_H"}
    assert set(visits) == moving | {"embed", "attention", "mlp", "head"}
    assert all(one.us > 0 for one in visits.values())
    assert {visits[kind].torch_launches for kind in moving} == {1}, "a task moves one range"
    assert visits["mlp"].kernel_launches >= 2 and visits["attention"].kernel_launches >= 5


def test_an_estimate_adds_up_tasks_and_launches() -> None:
    plan = Plan.create(gpu_batch_size=8, num_gpu_batches=4, weight_codec="group4").with_percent((0, 100, 0, 100, 100, 0))
    planned = host.planned_at_size(plan)
    kinds = ("LOAD_W", "LOAD_KV", "STORE_KV", "embed", "attention", "mlp", "head")
    visits = {kind: host.Visit(us=10.0, torch_launches=2.0, kernel_launches=1.0) for kind in kinds}
    found = host.estimate(planned, 5.0, visits, host.GpuHost(slower=2.0, launch_us=10.0, kernel_us=20.0))
    layers, batches = 98, 4
    tasks = layers * batches + 98 * batches + 2 * 48 * batches  # COMPUTEs, slices of weights, KV there and back
    assert found["tasks"] == tasks
    assert found["host_seconds"] == pytest.approx(tasks * 15e-6 * 2)
    assert found["launch_seconds"] == pytest.approx(tasks * (2 * 10e-6 + 20e-6))
    assert found["share_of_link"] == pytest.approx((found["host_seconds"] + found["launch_seconds"]) / found["link_seconds"])
