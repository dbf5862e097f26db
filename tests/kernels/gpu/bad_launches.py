"""Launches of kernels that break limits, so that it is seen whether a test would notice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.kernels.gpu.launch import Launch


@triton.jit
def narrow_kernel(data, out, stride, SIZE: tl.constexpr):
    """Reads byte by byte, though bytes may be neighbours."""
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(data + place * stride).to(tl.float32))


@triton.jit
def spilling_kernel(data, out, SIZE: tl.constexpr):
    """Holds more values than a thread has registers."""
    place = tl.arange(0, SIZE)
    values = tl.load(data + place)
    tl.store(out + place, values - tl.sum(values, 0))


@triton.jit
def sharing_kernel(left, right, out, SIZE: tl.constexpr, INNER: tl.constexpr):
    """Multiplies tiles that are too large for shared memory."""
    place, inner = tl.arange(0, SIZE), tl.arange(0, INNER)
    a = tl.load(left + place[:, None] * INNER + inner[None, :])
    b = tl.load(right + inner[:, None] * SIZE + place[None, :])
    tl.store(out + place[:, None] * SIZE + place[None, :], tl.dot(a, b))


def narrow() -> None:
    data = torch.empty(4096, dtype=torch.uint8, device="meta")
    narrow_kernel[(1,)](data, data.float(), 3, SIZE=1024)


def twice() -> None:
    data = torch.empty(64, device="meta")
    for _ in range(2):
        spilling_kernel[(1,)](data, data, SIZE=64, num_warps=1)


def spilling() -> None:
    data = torch.empty(16384, device="meta")
    spilling_kernel[(1,)](data, data, SIZE=16384, num_warps=1)


def sharing() -> None:
    left, right = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((16, 2048), (2048, 16)))
    sharing_kernel[(1,)](left, right, left.float(), SIZE=16, INNER=2048)


LAUNCHES = (
    Launch("narrow", narrow, loads={"narrow_kernel": 16}, narrowest={"narrow_kernel": 2}, since=80),
    Launch("spilling", spilling, registers=40, since=80),
    Launch("sharing", sharing, registers=255, since=80),
    Launch("twice", twice, kernels=1, since=80),
)
