"""A process that says its number, and does nothing until it is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from h2o_flexgen.cli.process_link import ProcessLink


def sleep(link: ProcessLink, place: object, part: object) -> int:
    link.say(os.getpid())
    while True:
        time.sleep(3600)


@contextmanager
def sleeping() -> Iterator[None]:
    """A context in which processes do nothing else. They are not told their places, and so need not import torch."""
    from h2o_flexgen.cli import shared_work

    with patch.object(shared_work, "compute", sleep), patch.object(shared_work, "ProcessPlace", lambda *given: None):
        yield
