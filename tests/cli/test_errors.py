"""How commands end: quietly where nothing reads their output any more."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import socket
import sys
import threading
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from io import StringIO
from itertools import count
from operator import methodcaller
from queue import Queue
from threading import Event, Lock
from types import ModuleType
from typing import Any

import pytest

from h2o_flexgen import calibrate, chat, evaluate, plan, profile, run
from h2o_flexgen.cli.chat_work import typed_turns
from h2o_flexgen.cli.errors import TRACEBACK, UNREAD, exit_status
from h2o_flexgen.cli.terminal import say
from h2o_flexgen.cli.worded_errors import as_typed
from h2o_flexgen.core.option import options_of
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.schedule.ops import Key, Op
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.threads import new_threads

COMMANDS = (run, plan, profile, chat, calibrate, evaluate)


@contextmanager
def unread() -> Iterator[StringIO]:
    """Standard output that is not read any more, and what goes to standard error meanwhile."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(StringIO()) as errors:
        yield errors
        stream.flush()  # the interpreter does so at its end; it must not fail any more


def _args() -> Namespace:
    return Namespace(verbose=0)


def _print(_: Namespace) -> None:
    print("x" * 100_000)


def _print_little(_: Namespace) -> None:
    print("x")


def _in_a_task(_: Namespace) -> None:
    try:
        print("x", flush=True)
    except BrokenPipeError as error:
        raise TaskFailed(Key(Op.COMPUTE, 0, 0, 0), error) from error


@pytest.mark.parametrize("work", [_print, _print_little, _in_a_task])
def test_no_message_says_that_nothing_reads(work: Callable[[Namespace], None]) -> None:
    with unread() as errors:
        assert exit_status(_args, work) == UNREAD
    assert errors.getvalue() == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_help_that_is_not_read_ends_every_command_quietly(command: ModuleType) -> None:
    with unread() as errors:
        assert command.main(["--help"]) in (0, UNREAD)  # argparse itself drops a long help
    assert errors.getvalue() == ""


def test_a_plan_that_is_not_read_is_no_error() -> None:
    words = "--model facebook/opt-125m --dummy-weights --machine cpu-2core --evaluate --percent 0 50 0 100 0 100"
    with unread() as errors:
        assert plan.main(words.split()) == UNREAD
    assert "roken" not in errors.getvalue()


def test_a_long_value_is_shortened_in_the_line_that_ends_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "m", "--machine", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 600


@pytest.mark.parametrize(
    ("options", "in_python", "typed"),
    [
        (
            {"kv_policy": "local", "heavy": 3},
            "kv_policy 'local' does not take heavy",
            "--kv-policy local does not take --heavy",
        ),
        (
            {"kv_recall_together": True},
            "kv_recall_together says how kv_recall chooses; give kv_recall, or leave kv_recall_together out",
            "--kv-recall-together says how --kv-recall chooses; give --kv-recall, or leave --kv-recall-together out",
        ),
        (
            {"kv_policy": "h2o", "kv_budget": 0.2, "heavy": 3},
            "both kv_budget=0.2 and heavy=3 are given",
            "both --kv-budget 0.2 and --heavy 3 are given",
        ),
        (
            {"pipeline": 2, "graphs": "on"},
            "graphs='on' is for a single GPU, and a pipeline of 2 devices was asked for",
            "--graphs on is for a single GPU, and a pipeline of 2 devices was asked for",
        ),
        ({"pipeline": 2, "attend_on": "host"}, "leave attend_on='host' out", "leave --cpu-cache-compute out"),
        (
            {"kv_policy": "kvzap", "kv_budget": 0.2},
            "kv_policy 'kvzap' ranks tokens by a probe; give probe=FILE, or probe='own'",
            "--kv-policy kvzap ranks tokens by a probe; give --probe FILE, or --probe own",
        ),
        (
            {"kv_recall": 0.1, "pipeline": 2},
            "give pipeline=1, or leave kv_recall out",
            "give --pipeline 1, or leave --kv-recall out",
        ),
    ],
)
def test_an_error_names_options_as_they_were_given(
    options: dict[str, Any], in_python: str, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(in_python)):
        Plan.create(**options)
    tables = {**options_of(KVOptions), **options_of(Plan)}
    flags = [word for name, value in options.items() for word in tables[name].written(value)]
    assert run.main(["--model", "facebook/opt-125m", "--dummy-weights", "--percent", *map(str, Plan().percent), *flags]) == 2
    assert typed in capsys.readouterr().err


def test_a_word_of_an_error_that_is_no_option_stays_as_it_is() -> None:
    flags = {"kv_policy", "device", "state", "max_tokens", "percent", "prefix_room", "gpu_batch_size", "weight_codec"}
    line = "'kv_policy' of /a/kv_policy/kv_policy.py (in Python kv_policy): device 0 has a state, max_tokens is 0, 5 percent"
    assert as_typed(line, flags) == line and as_typed(line, ()) == line
    fits = "would fit: gpu_batch_size 2 with percent 0 100 0 0 0 0 or less than 5 tokens of prefix_room; weight_codec 'group9'"
    assert as_typed(fits, flags) == (
        "would fit: --gpu-batch-size 2 with --percent 0 100 0 0 0 0 or less than 5 tokens of --prefix-room; "
        "--compress-weight 'group9'"
    )
    unlike = "percent for weights is 50 (GPU) and 60 (CPU); device='cuda:7' was asked for; 5 percent for each"
    assert as_typed(unlike, flags) == (
        "--percent for weights is 50 (GPU) and 60 (CPU); --device cuda:7 was asked for; 5 percent for each"
    )
    lacking = "give 3 GB more in CPU memory (cpu_mem='5000MB', rounded up)"
    assert as_typed(lacking, {"cpu_mem"}) == "give 3 GB more in CPU memory (--cpu-mem 5000MB, rounded up)"


def test_a_gpu_that_is_not_there_is_named_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for asked in ("cuda", "cuda:7"):
        with pytest.raises(
            ValueError, match=f"^device='{asked}' was asked for, but torch finds no CUDA device; take device='cpu'"
        ):
            open_device(asked)


@pytest.mark.parametrize(
    "line",
    [
        "jobs.jsonl, line 1: kv_policy is 'x'",
        "stop is ['my kv_policy text', 3]",
        'a text says "leave kv_policy out"',
        "head budgets head_budgets cannot be read: there is no such file",
        "--prefix-dir prefix_dir cannot be used",
        "dummy_weights=False was given",
    ],
)
def test_what_was_given_stays_as_it_was_written(line: str) -> None:
    assert as_typed(line, {"kv_policy", "head_budgets", "prefix_dir", "dummy_weights"}) == line


def _in_a_circle(_: Namespace) -> None:
    first, second = ValueError("the first"), ValueError("the second")
    first.__cause__, second.__cause__ = second, first
    raise first


def test_errors_that_name_each_other_as_the_cause_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(_args, _in_a_circle) == 2
    assert capsys.readouterr().err == "error: the first\n"


def _in_del(interrupt: Callable[[], object]) -> None:
    class Dropping:
        def __del__(self) -> None:
            interrupt()

    Dropping()


def _in_callback_of_reference(interrupt: Callable[[], object]) -> None:
    class Referred: ...

    referred = Referred()
    _reference = weakref.ref(referred, lambda _: interrupt())
    del referred


def _in_callback_of_collector(interrupt: Callable[[], object]) -> None:
    def called(phase: str, info: object) -> None:
        gc.callbacks.remove(called)
        interrupt()

    gc.callbacks.append(called)
    gc.collect()


def _in_callback_of_ctypes(interrupt: Callable[[], object]) -> None:
    ctypes.CFUNCTYPE(None)(lambda: interrupt() and None)()


DROPPING = (_in_del, _in_callback_of_reference, _in_callback_of_collector, _in_callback_of_ctypes)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What Python says that it has dropped. Signals are handled as in a terminal, also where `nohup` had them ignored."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_type))
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("dropping", DROPPING)
def test_a_signal_that_python_has_dropped_ends_the_code_that_goes_on(
    dropping: Callable[[Callable[[], object]], None], number: int, dropped: list[object]
) -> None:
    reached: list[str] = []

    def work(_: Namespace) -> None:
        dropping(lambda: signal.raise_signal(number))
        Event().wait(PATIENCE_SECONDS)
        reached.append("its end")

    before = signal.getsignal(signal.SIGURG)
    assert exit_status(_args, work) == 128 + number
    assert reached == [] and dropped == []
    assert signal.getsignal(signal.SIGURG) == before


LIBRARY = ctypes.CDLL(None)


def _until_called() -> None:
    LIBRARY.sleep(int(PATIENCE_SECONDS))


def _at_once(*calls: Callable[[], object]) -> None:
    """Between these calls no code of Python runs, and so no signal is answered where they are written in C."""
    deque(map(methodcaller("__call__"), calls), maxlen=0)


def _asleep(reached: list[str]) -> tuple[Callable[[], object], ...]:
    """Calls in C: the main thread sleeps, and says so if no signal has ended that."""
    lock = Lock()
    lock.acquire()
    return partial(lock.acquire, True, PATIENCE_SECONDS), partial(reached.append, "its end")


def test_a_call_that_comes_just_before_the_main_thread_falls_asleep_is_followed_by_another(dropped: list[object]) -> None:
    reached: list[str] = []

    def work(_: Namespace) -> None:
        drop = partial(_in_del, lambda: signal.raise_signal(signal.SIGTERM))
        _at_once(drop, partial(LIBRARY.sleep, int(PATIENCE_SECONDS)), *_asleep(reached))

    assert exit_status(_args, work) == 128 + signal.SIGTERM
    assert reached == [] and dropped == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_comes_just_before_the_main_thread_falls_asleep_wakes_it(number: int, dropped: list[object]) -> None:
    reached: list[str] = []
    threads = set(threading.enumerate())

    def work(_: Namespace) -> None:
        _at_once(partial(getattr(LIBRARY, "raise"), number), *_asleep(reached))

    assert exit_status(_args, work) == 128 + number
    assert reached == [] and dropped == []
    assert signal.set_wakeup_fd(-1) == -1 and not new_threads(threads)


def test_a_signal_that_another_thread_hears_wakes_the_main_thread(dropped: list[object]) -> None:
    reached: list[str] = []
    gate = Lock()
    gate.acquire()

    def hear() -> None:
        gate.acquire()
        getattr(LIBRARY, "raise")(signal.SIGTERM)  # to this thread

    def work(_: Namespace) -> None:
        threading.Thread(target=hear).start()
        _at_once(gate.release, *_asleep(reached))

    assert exit_status(_args, work) == 128 + signal.SIGTERM
    assert reached == [] and dropped == []


def test_a_signal_that_was_dropped_while_another_was_handled_is_raised_behind_that(dropped: list[object]) -> None:
    reached: list[str] = []

    def work(_: Namespace) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            _in_del(lambda: signal.raise_signal(signal.SIGTERM))
            _until_called()
            reached.append("the end of the handling")
        Event().wait(PATIENCE_SECONDS)
        reached.append("its end")

    assert exit_status(_args, work) == 128 + signal.SIGTERM
    assert reached == ["the end of the handling"] and dropped == []


def test_a_signal_that_is_dropped_long_after_it_came_ends_the_code_that_goes_on(dropped: list[object]) -> None:
    reached: list[str] = []

    def slowly() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            _until_called()  # and answered: nothing has been dropped yet

    def work(_: Namespace) -> None:
        _in_del(slowly)
        Event().wait(PATIENCE_SECONDS)
        reached.append("its end")

    assert exit_status(_args, work) == 128 + signal.SIGTERM
    assert reached == [] and dropped == []


def test_a_signal_is_not_lost_where_python_tells_meanwhile_what_else_it_drops(
    monkeypatch: pytest.MonkeyPatch, dropped: list[object]
) -> None:
    reached: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda _: _until_called())

    def work(_: Namespace) -> None:
        _in_del(lambda: signal.raise_signal(signal.SIGTERM))
        _in_del(lambda: {}["nothing"])
        Event().wait(PATIENCE_SECONDS)
        reached.append("its end")

    assert exit_status(_args, work) == 128 + signal.SIGTERM and reached == []


def _leave_a_lock(_: Namespace) -> None:
    lock = Lock()
    with lock:
        lock.release()  # as a condition does before it waits
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_where_a_lock_is_left_is_told_in_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(_args, _leave_a_lock) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "terminated\n"
    assert exit_status(lambda: Namespace(verbose=TRACEBACK), _leave_a_lock) == 128 + signal.SIGTERM
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and told.endswith("\nterminated\n")


@pytest.mark.parametrize("error", [KeyError("a bug"), RuntimeError("a bug")])
def test_a_bug_in_what_is_cleaned_up_behind_a_signal_is_told_as_one(error: Exception, dropped: list[object]) -> None:
    def work(_: Namespace) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise error

    with pytest.raises(type(error), match="a bug"):
        exit_status(_args, work)


def test_a_process_that_was_forked_and_lives_on_is_not_waited_for() -> None:
    reads, writes = os.pipe()
    child = 0

    def work(_: Namespace) -> None:
        nonlocal child
        child = os.fork()
        if not child:
            os.close(writes)
            os._exit(not select.select([reads], [], [], PATIENCE_SECONDS)[0])

    assert exit_status(_args, work) == 0
    os.close(writes)  # which ends it
    assert os.waitpid(child, 0)[1] == 0
    os.close(reads)


def test_a_forked_process_that_leaves_the_command_takes_no_signal_from_its_parent(dropped: list[object]) -> None:
    reached: list[str] = []

    def work(_: Namespace) -> None:
        child = os.fork()
        if not child:
            raise SystemExit(0)
        os.waitpid(child, 0)
        _at_once(partial(getattr(LIBRARY, "raise"), signal.SIGTERM), *_asleep(reached))

    process = os.getpid()
    try:
        status = exit_status(_args, work)
    finally:
        if os.getpid() != process:
            os._exit(0)
    assert status == 128 + signal.SIGTERM and reached == [] and dropped == []


def _left() -> tuple[int, object, int]:
    """What a command may leave behind: where Python writes which signals come, the handler of calls, and listening threads."""
    listening = [thread for thread in threading.enumerate() if thread.name == "signals"]
    return signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGURG), len(listening)


def _raises(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_command_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _left()
    monkeypatch.setattr(threading.Thread, "start", _raises)
    assert exit_status(_args, lambda _: None) == 0 and _left() == before


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_an_interrupt_at_the_beginning_or_at_the_end_leaves_nothing_behind(
    chosen: int, monkeypatch: pytest.MonkeyPatch, dropped: list[object]
) -> None:
    before, calls, set_one = _left(), count(), signal.set_wakeup_fd

    def interrupted(*args: Any, **options: Any) -> int:
        found = set_one(*args, **options)
        if next(calls) == chosen:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    assert exit_status(_args, lambda _: None) == 128 + signal.SIGINT
    monkeypatch.undo()
    assert _left() == before


def test_what_a_library_has_set_meanwhile_stays() -> None:
    def handle(number: int, frame: object) -> None: ...

    def work(_: Namespace) -> None:
        signal.set_wakeup_fd(theirs.fileno())
        signal.signal(signal.SIGURG, handle)

    before = signal.getsignal(signal.SIGURG)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        assert exit_status(_args, work) == 0
        assert _left()[:2] == (theirs.fileno(), handle)
    signal.signal(signal.SIGURG, before)


def test_a_handler_in_c_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, get, set_one = _left(), signal.getsignal, signal.signal

    def told(number: int, handler: Any) -> Any:
        """None for a handler that Python does not know."""
        return None if number == signal.SIGURG else handler

    monkeypatch.setattr(signal, "getsignal", lambda number: told(number, get(number)))
    monkeypatch.setattr(signal, "signal", lambda number, handler: told(number, set_one(number, handler)))
    assert exit_status(_args, lambda _: None) == 0
    monkeypatch.undo()
    assert _left() == before


def test_the_thread_of_signals_hears_none_that_the_main_thread_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Queue[tuple[str, set[Any]]] = Queue()
    change = signal.pthread_sigmask

    def told(how: int, numbers: set[signal.Signals]) -> set[Any]:
        before = change(how, numbers)
        masks.put((threading.current_thread().name, change(signal.SIG_BLOCK, ())))
        return before

    def work(_: Namespace) -> None:
        name, blocked = masks.get(timeout=PATIENCE_SECONDS)
        assert name == "signals" and blocked >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

    monkeypatch.setattr(signal, "pthread_sigmask", told)
    assert exit_status(_args, work) == 0


def test_a_signal_that_is_dropped_last_of_all_ends_the_command_too(dropped: list[object]) -> None:
    assert exit_status(_args, lambda _: _in_del(lambda: signal.raise_signal(signal.SIGTERM))) == 128 + signal.SIGTERM
    assert dropped == []


def test_what_is_dropped_and_is_no_interrupt_is_told_as_before(dropped: list[object]) -> None:
    assert exit_status(_args, lambda _: _in_del(lambda: {}["nothing"])) == 0
    assert dropped == [KeyError]


def test_a_signal_ends_a_command_also_where_python_has_dropped_the_one_before(dropped: list[object]) -> None:
    def work(_: Namespace) -> None:
        _in_del(lambda: signal.raise_signal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)

    assert exit_status(_args, work) == 128 + signal.SIGTERM and dropped == []


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """Under `nohup` they are ignored, and commands leave it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_further_signals_do_not_disturb_the_cleaning_up(hangups_are_heard: None) -> None:
    cleaned: list[str] = []

    def work(_: Namespace) -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            with suppress(KeyError):
                signal.raise_signal(signal.SIGHUP)
                {}["while something else goes wrong"]
            try:
                {}["that is dealt with"]
            except KeyError:
                signal.raise_signal(signal.SIGTERM)
            cleaned.append("all")

    assert exit_status(_args, work) == 128 + signal.SIGHUP and cleaned == ["all"]


def test_whoever_waits_for_a_turn_to_be_typed_is_ended_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(signal.SIGTERM))
    assert exit_status(_args, lambda _: print(next(typed_turns()))) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("name", "mode"), [("stdin", "r"), ("stdout", "w"), ("stderr", "w")])
def test_a_standard_stream_that_is_closed_is_opened_onto_nothing(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: Namespace) -> None:
        stream = getattr(sys, name)
        assert stream.mode == mode and not stream.isatty() and os.get_inheritable(stream.fileno())
        with Progress(0, "work", late=True):
            say(["a line"])
        stream.close()
        monkeypatch.undo()

    monkeypatch.setattr(sys, name, None)
    assert exit_status(_args, work) == 0
