"""A crash in a recorded program: the process ends as it did before, and a line says which layer and operation it was."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.kernels.variants import VARIANTS

pytestmark = pytest.mark.skipif(not VARIANTS, reason="there are no kernels in C")
CRASHES = """
import ctypes, mmap, sys, torch
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.call_image import Moves
from h2o_flexgen.kernels.recording import CallRecording, Program, enter
from h2o_flexgen.kernels.recording import WorkingRoom

threads, enters, bad = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(threads)
x, weight = torch.ones(4000, 64), torch.ones(64)
other = torch.ones(4000, 64)

def work():
    operations.rms_norm(x, weight, 1e-5)
    if enters:
        enter(enters)
    operations.rms_norm(x, weight, 1e-5)
    operations.rms_norm(other, weight, 1e-5)
    operations.rms_norm(x, weight, 1e-5)

def address():
    # where nothing can be read, or that of memory whose last row cannot be read
    if bad == "all":
        return 8
    last = ctypes.addressof(ctypes.c_char.from_buffer(room)) + len(room) - mmap.PAGESIZE
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), ctypes.c_size_t(mmap.PAGESIZE), 0)
    return last - other[:-1].nbytes

room = mmap.mmap(-1, (other.nbytes // mmap.PAGESIZE + 2) * mmap.PAGESIZE)
program = CallRecording.of(work, WorkingRoom())
if bad != "none":
    moves = Moves([(other.data_ptr(), 1, address())])
    program = Program([piece.moved(moves) for piece in program.pieces], program.room)
print(program(), flush=True)
ctypes.string_at(8)  # a crash of another kind
"""


def crashed(*arguments: object, handler: str = "-Xfaulthandler") -> tuple[int, str, str]:
    command = [sys.executable, *([handler] if handler else []), "-c", CRASHES, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("threads", "handler"), [(1, "-Xfaulthandler"), (2, "-Xfaulthandler"), (2, "")])
def test_a_line_names_the_layer_and_the_operation(threads: int, handler: str) -> None:
    """The thread that comes to the last row crashes, alone."""
    status, out, error = crashed(threads, "attention of block 3", "last", handler=handler)
    assert (status, out) == (-signal.SIGSEGV, "")
    line, _, rest = error.partition("\n")
    assert line == "crash in the recorded program for attention of block 3: operation rms_norm (call 2 of 3)"
    assert ("Fatal Python error: Segmentation fault" in rest) == bool(handler)
    assert "most recent call first" in rest or not handler


def test_threads_that_crash_at_once_have_one_line() -> None:
    """The first that comes to its end ends the process, so what else is told, and in which order, is open."""
    status, out, error = crashed(2, "attention of block 3", "all")
    assert (status, out) == (-signal.SIGSEGV, "") and error.count("crash in the recorded program") <= 1


def test_without_a_layer_the_call_is_counted_among_all() -> None:
    assert crashed(1, "", "all")[2].startswith("crash in the recorded program for no layer: operation rms_norm (call 3 of 4)\n")


def test_a_crash_elsewhere_is_not_taken_for_one_of_a_program() -> None:
    status, out, error = crashed(1, "attention of block 3", "none")
    assert (status, out) == (-signal.SIGSEGV, "None\n")
    assert error.startswith("Fatal Python error: Segmentation fault")
