"""Fixtures of the tests on the clocked device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.clocked.backend import IS_POSSIBLE, registered
from tests.clocked.checker import Checker
from tests.clocked.context import sound
from tests.helpers.contract import Checkpoints


@pytest.fixture(autouse=True)
def torch_takes_devices_in_python() -> None:
    if not IS_POSSIBLE:
        pytest.skip("this torch takes no device that is written in Python")
    registered()  # for tests that open no model, too


@pytest.fixture(scope="session")
def by_twins(checkpoints: Checkpoints) -> Checkpoints:
    """The same checkpoints, with results of the functions of torch alone."""
    return replace(checkpoints, read={}, resident={})


@pytest.fixture
def checker() -> Iterator[Checker]:
    """A checker that has to find nothing."""
    with sound() as listening:
        yield listening
