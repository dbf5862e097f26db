"""The batch command on workers of Ray, of which one is held: whatever the speed of the others, the job is not over then.

    python -m tests.extras.held_worker WHERE FILE FLAGS_OF_THE_BATCH_COMMAND...

`WHERE`: each worker is held before it opens its model, or one in the middle of the first portion that is handed out. A worker
that is held appends its number to FILE, and waits to be ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NoReturn
from unittest.mock import patch

from h2o_flexgen import batch
from h2o_flexgen.cli import batch_work
from h2o_flexgen.cli.batch_work import ray_environment

if TYPE_CHECKING:
    from h2o_flexgen.cli.ray_job import Portion, WorkerMessage

AT_OPENING, IN_PORTION = "at-opening", "in-portion"
MESSAGES = 3  # of its portion that are said before a worker is held


def held_by(file: Path) -> list[int]:
    """The numbers of the processes that are held."""
    return [int(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def hold(file: Path) -> NoReturn:
    with file.open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    while True:
        Event().wait()


@contextmanager
def held(where: str, file: Path) -> Iterator[None]:
    """A context in which Ray may be imported, with the environment that the command gives it."""
    with ray_environment():
        from h2o_flexgen.cli import ray_job

        class Worker(ray_job.Worker):
            def open(self) -> Iterator[WorkerMessage]:
                if where == AT_OPENING:
                    hold(file)
                yield from super().open()

            def run(self, portion: Portion) -> Iterator[WorkerMessage]:
                for count, said in enumerate(super().run(portion)):
                    if where == IN_PORTION and (portion.number, count) == (0, MESSAGES):
                        hold(file)
                    yield said

        with patch.object(ray_job, "Worker", Worker):
            yield


if __name__ == "__main__":
    where, file, *flags = sys.argv[1:]
    with patch.object(batch_work, "ray_environment", lambda: held(where, Path(file))):
        raise SystemExit(batch.main(flags))
