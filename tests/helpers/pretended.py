"""An accelerator for machines without one: the CPU with memory of its own, so that everything has to be loaded and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from h2o_flexgen.memory.device import Device, DeviceTier, open_device
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from h2o_flexgen.session import loaded_model
from tests.helpers.recorded import repeated


class PretendedDevice(Device):
    """A device that goes every way of an accelerator through schedule and stores; its copies are over when the call returns."""

    accelerator = True
    captures = True
    chains = False
    steps_before_capture = 2
    graph_bytes = GRAPH_BYTES

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return repeated(work)

    def names_of(self, count: int) -> list[str]:
        return ["pretended"] * count

    def memory(self, host: HostTier) -> HostTier | DeviceTier:
        return DeviceTier(self.torch_device)


def open_any_device(name: str) -> Device:
    return PretendedDevice() if name == "pretended" else open_device(name)


@contextmanager
def pretend() -> Iterator[None]:
    """A context in which LLM(device="pretended") works."""
    with patch.object(loaded_model, "open_device", open_any_device):
        yield
