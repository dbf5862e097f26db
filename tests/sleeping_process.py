"""A process that says who it is, and does nothing until it is ended."""

from __future__ import annotations

import os
import time

from h2o_flexgen.cli.process_link import Link


def sleep(link: Link, place: object, part: object) -> int:
    link.say(os.getpid())
    while True:
        time.sleep(3600)
