"""Memory by which one process gives weights that rest on its device to all others."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from h2o_flexgen.cli.process_link import BytesTaken, Passing, ProcessLink

PASSING_BYTES = 16 << 20  # of a device's weights that are handed round at once


class HandedRound:
    """Memory by which one process gives bytes to all others, as many at a time as it holds."""

    def __init__(self, link: ProcessLink, descriptor: int) -> None:
        self._link = link
        os.ftruncate(descriptor, PASSING_BYTES)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, PASSING_BYTES, flags=mmap.MAP_SHARED), dtype=torch.uint8)

    def give(self, given: Tensor) -> None:
        for part in given.split(PASSING_BYTES):
            self._memory[: part.nbytes].copy_(part)
            self._link.say(Passing(part.nbytes))
            self._link.hear(BytesTaken)

    def take(self, out: Tensor) -> None:
        for part in out.split(PASSING_BYTES):
            assert self._link.hear(Passing).nbytes == part.nbytes, "processes have one plan"
            part.copy_(self._memory[: part.nbytes])
            self._link.say(BytesTaken())
