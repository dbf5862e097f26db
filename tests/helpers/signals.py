"""Restores signals to what a terminal has: a process started in the background ignores some, and so do its children."""

from __future__ import annotations

import signal


def as_in_a_terminal() -> None:
    """Serves as `preexec_fn` of a process that is to be signalled."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
