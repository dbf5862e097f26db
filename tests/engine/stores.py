"""The memories of an engine, opened and closed for the tests of the stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.memories import Memories
from tests.helpers.pretended import open_any_device


@contextmanager
def opened_memories(device: str, folder: Path) -> Iterator[Memories]:
    opened: Device = open_any_device(device)
    memories = Memories(opened, folder)
    try:
        yield memories
    finally:
        memories.close()
