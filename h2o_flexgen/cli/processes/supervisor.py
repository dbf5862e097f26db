"""The processes of a job: started, looked after, and ended whatever happens. An error of one ends all of them. Nothing is left
of them: what they share has no name, and a lifeline that breaks with this process ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from h2o_flexgen.cli.errors import Mendable
from h2o_flexgen.cli.processes.link import BytesTaken, Failed, Loaded, News, PartDone, Passing, ProcessLink
from h2o_flexgen.cli.processes.process import ProcessPart, ProcessPlace, compute
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.disk import OffloadFolder
from h2o_flexgen.memory.host import file_in_memory
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest

START = """\
import json, signal, sys
ours = {signal.SIGINT, signal.SIGHUP}  # a terminal sends these to all; only the process that looks after the others answers
for one in ours: signal.signal(one, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
sys.path[:] = json.loads(sys.argv[1])
from h2o_flexgen.cli.processes.link import begin
sys.exit(begin(int(sys.argv[2]), int(sys.argv[3])))
"""
PATIENCE_SECONDS = 30.0  # within which a process that was told to end does
FOLDER = "process-{}"
Waits: TypeAlias = Callable[[], AbstractContextManager[object]]  # makes a context in which nothing is done but wait


class Processes:
    """Processes that do parts of a job, until the end of a `with`."""

    def __init__(self, llm: LLM, model: ModelRequest, site: SiteRequest, parts: Sequence[ProcessPart]) -> None:
        self._llm, self._model, self._site, self._parts = llm, model.without_measuring, site, parts
        self._links: list[ProcessLink] = []
        self.exchange = ProcessExchange(self._links, self._name, self._death)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = ExitStack()

    # -- from the beginning to the end ---------------------------------------------------------------------------------

    def __enter__(self) -> Processes:
        with ExitStack() as undo:
            undo.push(self.__exit__)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.close()

    def _start(self) -> None:
        folder = OffloadFolder(self._llm.loaded.offload_folder)
        self._ending.callback(folder.close)
        self._ending.callback(self._remove_folders, folder.path)
        weights, passing = (self._held(file_in_memory()) for _ in range(2))
        ours, lifeline = os.pipe()
        self._held(ours)
        self._ending.callback(self._wait)
        self._ending.callback(self._close_links)
        self._held(lifeline)  # the first to be closed
        for number, part in enumerate(self._parts):
            site = replace(
                self._site.of_each,
                gpus=1,
                device=self.device(number),
                cpu_mem=str(self._llm.limits.host),
                offload_dir=str(folder.path.absolute() / FOLDER.format(number)),
            )
            place = ProcessPlace(number, self._model, site, self._llm.plan, weights, passing)
            self._links.append(self._started((weights, passing, ours)))
            self._links[-1].say((compute, (place, part)))

    def _held(self, descriptor: int) -> int:
        self._ending.callback(os.close, descriptor)
        return descriptor

    def _started(self, descriptors: tuple[int, ...]) -> ProcessLink:
        mine, its = Pipe()
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(its.fileno()), str(descriptors[-1])]
        with its, _signals_held():
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=(its.fileno(), *descriptors),
                )
            )
        return ProcessLink(mine)

    def _close_links(self) -> None:
        for link in self._links:
            link.connection.close()

    def _wait(self) -> None:
        """Waits for all processes after their lifeline is closed. A process that takes too long is killed."""
        until = time.monotonic() + PATIENCE_SECONDS
        try:
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _remove_folders(self, folder: Path) -> None:
        """Removes what a process that was killed has left; its files had no names."""
        for number in range(len(self._processes)):
            with suppress(OSError):
                (folder / FOLDER.format(number)).rmdir()

    # -- what they say -------------------------------------------------------------------------------------------------

    def said(self, waits: Waits) -> Iterator[tuple[int, News]]:
        """What processes say of the job, until all have ended."""
        yield from self.exchange.said(waits)
        for process in self._processes:  # they close what they have opened
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)

    def device(self, number: int) -> str:
        return self._llm.device.names_of(len(self._parts))[number]

    def _name(self, number: int) -> str:
        return f"process {number} of {len(self._parts)} ({self.device(number)})"

    def _death(self, number: int) -> str:
        status = self._processes[number].wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{how}, and so are the others; if memory ran out, give fewer processes or smaller blocks"


@contextmanager
def _signals_held() -> Iterator[None]:
    """A context in which a process is started that is not to hear of a terminal's signals before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


class ProcessExchange:
    """Messages of a job's processes go to each other, or to the process that runs the job."""

    def __init__(self, links: Sequence[ProcessLink], name: Callable[[int], str], death: Callable[[int], str]) -> None:
        """`name` is what people call a process, and `death` says how one has ended that did not say that it would."""
        self.shared_bytes = 0  # of weights in host memory
        self._links, self._name, self._death = links, name, death
        self._not_taken = 0  # processes that have yet to take what is handed round

    def said(self, waits: Waits) -> Iterator[tuple[int, News]]:
        """What processes say of the job, each with its number, until all have ended. An error of one of them is raised."""
        number_of: dict[Any, int] = {link.connection: number for number, link in enumerate(self._links)}
        while number_of:
            with waits():
                ready: Sequence[Any] = wait(list(number_of))
            for connection in ready:
                number = number_of[connection]
                message = self._heard(connection, number)
                if not self._is_passed_on(message):
                    yield number, message
                if isinstance(message, PartDone):
                    del number_of[connection]

    def _heard(self, connection: Any, number: int) -> Any:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise self._of_death(number) from None
        if isinstance(message, Failed):
            if message.line is None:
                raise RuntimeError(f"{self._name(number)}:\n{message.trace}")
            raise Mendable(f"{self._name(number)}: {message.line}")
        return message

    def _is_passed_on(self, message: object) -> bool:
        """Passes a message on if it is for other processes."""
        if isinstance(message, Loaded):
            self.shared_bytes = message.shared_bytes
        if isinstance(message, Passing):
            self._not_taken = len(self._links) - 1
        if isinstance(message, (Loaded, Passing)):
            for number in range(1, len(self._links)):
                self._tell(number, message)
            return True
        if isinstance(message, BytesTaken):
            self._not_taken -= 1
            if not self._not_taken:
                self._tell(0, message)
            return True
        return False

    def _tell(self, number: int, message: object) -> None:
        try:
            self._links[number].say(message)
        except OSError:
            raise self._of_death(number) from None

    def _of_death(self, number: int) -> Mendable:
        return Mendable(f"{self._name(number)} {self._death(number)}")
