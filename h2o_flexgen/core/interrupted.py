"""Interrupts that Python drops, and the errors that led to an error. A signal is raised as an error in whatever code runs at
that moment. If that is a `__del__`, or a callback of a weak reference, of the garbage collector or of ctypes, Python prints the
error and continues as if there had been no signal. Here it is raised again, in the code that continues. And Python answers a
signal in the main thread's code alone: a signal that comes just before this thread falls asleep does not wake it. Here it is
woken, until its code has gone on."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    return _chain(error, lambda one: one.__cause__)


def contexts(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that were handled when it was raised."""
    return _chain(error, lambda one: one.__context__)


def _chain(error: BaseException | None, behind: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """Each error once: a chain may end in a circle, as `raise error from error` makes one."""
    met: list[BaseException] = []
    while error is not None and not any(error is one for one in met):
        met.append(error)
        yield error
        error = behind(error)


OF_LOCKS = ("unlocked lock", "un-acquired lock")  # how Python ends what it says of a lock


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt that was handled when an error about a lock was raised. Python raises one in place of an interrupt that
    comes while a lock is taken or left, as by `Event.wait`."""
    if not isinstance(error, RuntimeError) or not str(error).endswith(OF_LOCKS):
        return None
    return next((one for one in contexts(error) if isinstance(one, KeyboardInterrupt)), None)


SOON_SECONDS = 0.001  # by then the code that dropped it has mostly ended; if not, it is dropped and raised once more
AGAIN_SECONDS = 0.05  # between two calls: each may come at a moment at which it has no effect
CAN_CALL = hasattr(signal, "SIGURG") and hasattr(signal, "pthread_kill")


@contextmanager
def raised_again() -> Iterator[None]:
    """A context in which a signal wakes the main thread, and an interrupt that is dropped is raised again: soon, or else at the
    end."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    dropped = _Dropped(sys.unraisablehook)
    try:
        dropped.begin()
        yield
    finally:
        dropped.end()
    dropped.raise_it()


class _Dropped:
    """The interrupt that was dropped last, until it is raised again. Python tells a hook what it drops. An error that the hook
    raises is dropped too, so the hook has the main thread called."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook  # that was there before
        self._error: KeyboardInterrupt | None = None
        self._caller: _Caller | None = None
        self._has_ended = False

    def begin(self) -> None:
        if CAN_CALL and signal.getsignal(signal.SIGURG) is not None:  # None: a handler in C, which Python could not put back
            self._caller = _Caller(self._called)
            if not self._caller.begin():
                self._caller = None
        sys.unraisablehook = self._notice

    def end(self) -> None:
        try:
            self._has_ended = True
            sys.unraisablehook = self._hook
        finally:
            if self._caller is not None:
                self._caller.end()

    def raise_it(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _called(self, number: int, frame: FrameType | None) -> None:
        """Raises it, unless an interrupt is handled now: what is cleaned up is not disturbed. The next call looks again. The
        last one finds that nothing is left to raise."""
        if self._has_ended or self._caller is None:
            return
        if self._error is None:
            self._caller.is_answered = True
        elif not any(isinstance(error, KeyboardInterrupt) for error in contexts(sys.exc_info()[1])) and not _notices(frame):
            self.raise_it()

    def _notice(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._hook(unraisable)
            return
        try:
            self._keep(unraisable.exc_value)
        except KeyboardInterrupt as further:  # a signal came just now
            self._keep(further)

    def _keep(self, error: KeyboardInterrupt) -> None:
        """Keeps one of the same kind: the error itself would keep what its frames hold."""
        self._error = type(error)(*error.args)
        if self._caller is not None:
            self._caller.call()


def _notices(frame: FrameType | None) -> bool:
    """Whether this code is the hook's, or is called by it. What is raised there is lost."""
    while frame is not None and frame.f_code is not _Dropped._notice.__code__:
        frame = frame.f_back
    return frame is not None


class _Caller:
    """Calls the main thread when a signal has come, until that answers. Python writes into a socket which signals come, at once
    and from any thread. A thread reads it, and calls by a signal that is ignored where nothing handles it any more. A timer's
    signal would end the process there, and where a library has taken its handler. Nothing is woken any more where a library has
    taken Python's socket away, as asyncio's `remove_signal_handler` does."""

    def __init__(self, called: Callable[[int, FrameType | None], None]) -> None:
        self.is_answered = True
        self._called = called
        self._handler, self._before = signal.getsignal(signal.SIGURG), -1
        self._main = threading.main_thread().ident or 0
        self._hears, self._says = socket.socketpair()
        self._says.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def begin(self) -> bool:
        """Whether a thread could be started. If not, nothing is set."""
        try:
            self._thread.start()
        except RuntimeError as error:
            if interrupt_behind(error) is not None:
                raise
            self._hears.close()
            self._says.close()
            return False
        signal.signal(signal.SIGURG, self._called)
        self._before = signal.set_wakeup_fd(self._says.fileno(), warn_on_full_buffer=False)
        return True

    def call(self) -> None:
        with suppress(OSError):  # what is not read yet will do, and behind the end there is nothing to tell
            self._says.send(b"\0")

    def end(self) -> None:
        """Also behind half a beginning. What a library has set meanwhile stays."""
        try:
            ours, now = self._says.fileno(), signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._before if now == ours else now, warn_on_full_buffer=False)
        finally:
            try:
                with self._says:
                    if self._thread.is_alive():  # not in a process that was forked: its parent still needs the socket
                        self._says.shutdown(socket.SHUT_RDWR)  # such a process has a copy, which closing leaves open
                        self._thread.join()
            finally:
                if signal.getsignal(signal.SIGURG) == self._called:
                    signal.signal(signal.SIGURG, self._handler)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one that the main thread blocks is not for this one
        calls = bytes([signal.SIGURG])
        with self._hears:
            while True:
                try:
                    heard = self._hears.recv(64)
                except TimeoutError:
                    self._hears.settimeout(None if self.is_answered else AGAIN_SECONDS)
                    if not self.is_answered:
                        signal.pthread_kill(self._main, signal.SIGURG)
                    continue
                if not heard:
                    return
                if heard.strip(calls):
                    self.is_answered = False
                    self._hears.settimeout(SOON_SECONDS)
