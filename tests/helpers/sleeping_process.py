"""A process that says its number, and does nothing until it is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from h2o_flexgen.cli.processes.link import ProcessLink


def sleep(link: ProcessLink, place: object, part: object) -> int:
    link.say(os.getpid())
    while True:
        time.sleep(3600)


@contextmanager
def sleeping() -> Iterator[None]:
    """A context in which processes do nothing else. They are not told their places, and so need not import torch."""
    from h2o_flexgen.cli.processes import supervisor

    with patch.object(supervisor, "compute", sleep), patch.object(supervisor, "ProcessPlace", lambda *given: None):
        yield
