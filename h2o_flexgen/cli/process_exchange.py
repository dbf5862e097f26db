"""Exchange: messages of a job's processes go to each other, or to the process that runs the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from h2o_flexgen.cli.errors import Mendable
from h2o_flexgen.cli.process_link import BytesTaken, Failed, Loaded, News, PartDone, Passing, ProcessLink

Waits: TypeAlias = Callable[[], AbstractContextManager[object]]  # makes a context in which nothing is done but wait


class ProcessExchange:
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
