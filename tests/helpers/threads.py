"""Threads that are left behind, whatever other tests have left in the same process."""

from __future__ import annotations

import threading
from collections.abc import Collection

OF_BARS = "tqdm_monitor"  # of transformers' bars: it begins with the first of them, whichever test that is in, and stays


def new_threads(before: Collection[threading.Thread]) -> list[str]:
    """The names of those that were not there before. One of an earlier test may end meanwhile."""
    return [thread.name for thread in threading.enumerate() if thread not in before and thread.name != OF_BARS]
