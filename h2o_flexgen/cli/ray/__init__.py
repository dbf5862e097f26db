"""Jobs on workers of Ray. Here are the settings of a cluster of a job's own: Ray takes them from the environment when it is
imported, so they are set before."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # what goes wrong for good is raised
    "RAY_memory_monitor_refresh_ms": "0",  # the engine keeps its own promise, and goes on with less when memory runs out
}
AUTH_MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def ray_environment() -> Iterator[None]:
    """A context for a cluster of this process's own: without its token, no process can hand workers anything."""
    settings = dict(SETTINGS)
    if "ray" not in sys.modules:  # otherwise it has chosen to do without
        settings |= {AUTH_MODE: "token", TOKEN: secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
