"""What a machine leaves to its system: every machine of the package, and the smallest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.planning.footprint import HOST_LEAST, HOST_MOST, left_to_system
from h2o_flexgen.planning.machine import find_machine, known_machines
from h2o_flexgen.session.open_request import SiteRequest
from h2o_flexgen.session.opened_model import system_share


@pytest.mark.parametrize("name", known_machines())
def test_a_machine_keeps_a_share_of_every_memory(name: str) -> None:
    machine = find_machine(name)
    left = left_to_system(machine)
    assert HOST_LEAST <= left[HOST] <= HOST_MOST
    assert (left[DEVICE] > 0) == machine.has_accelerator
    assert left[DEVICE] < 0.06 * machine.device_bytes or not machine.has_accelerator


def test_a_t4_has_no_more_than_it_reports_less_its_context() -> None:
    assert 15.0e9 < 16.0e9 - left_to_system(find_machine("t4-gcp"))[DEVICE] < 15.8e9 - 0.4e9


def test_never_more_than_there_is() -> None:
    small = replace(find_machine("t4-gcp"), host_bytes=10**6, device_bytes=10**6)
    assert left_to_system(small) == {DEVICE: 10**6, HOST: 10**6}


def test_what_was_asked_for_and_what_was_measured_as_free_are_planned_with_whole() -> None:
    machine = find_machine("t4-gcp")

    def left(name: str | None, gpu: str | None, cpu: str | None) -> set[str]:
        return set(system_share(machine if name else None, SiteRequest(gpu_mem=gpu, cpu_mem=cpu)))

    assert left("t4-gcp", None, None) == {DEVICE, HOST}
    assert left("t4-gcp", "16GB", None) == {HOST} and left("t4-gcp", None, "64GB") == {DEVICE}
    assert left(None, None, None) == set()
