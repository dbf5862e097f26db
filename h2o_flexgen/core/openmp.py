"""How the threads of OpenMP, which torch computes with, wait for each other."""

from __future__ import annotations

import os
import sys

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if the user sets one of them, it stays
SPINS = 2000  # how often a waiting thread looks for work before it sleeps


def let_threads_sleep_soon() -> None:
    """Makes waiting threads sleep soon. OpenMP's threads spin long for work before they sleep: where another process needs
    the core, each then waits for the other, and two threads are several times slower than one. Threads that sleep at once
    are slow where no other process runs, so these spin a little (docs/log/measuring.md has the figures). OpenMP reads the
    variable when torch is imported; if that has happened, nothing is changed."""
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = str(SPINS)
