"""The batch command, which waits behind so many records until a signal asks it to end: however late that comes, the job is not
over.

    python -m tests.helpers.held_job RECORDS FLAGS_OF_THE_BATCH_COMMAND...
"""

from __future__ import annotations

import sys
from threading import Event
from unittest.mock import patch

from h2o_flexgen import batch
from h2o_flexgen.cli.interrupts import Interrupts
from h2o_flexgen.jobs.output import JobOutput


def held_behind(records: int, argv: list[str]) -> int:
    made, add, listen = list[bytes](), JobOutput.add, Interrupts.listen
    heard: list[Interrupts] = []

    def listening(interrupts: Interrupts) -> None:
        heard.append(interrupts)
        listen(interrupts)

    def adding(output: JobOutput, place: int, line: bytes, failed: bool) -> None:
        add(output, place, line, failed)
        made.append(line)
        while len(made) >= records and not heard[-1].are_asked:
            Event().wait(0.01)  # a signal that another thread takes up is heard between two waits

    with patch.object(JobOutput, "add", adding), patch.object(Interrupts, "listen", listening):
        return batch.main(argv)


if __name__ == "__main__":
    raise SystemExit(held_behind(int(sys.argv[1]), sys.argv[2:]))
