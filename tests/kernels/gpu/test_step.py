"""A step of a cache with the kernels for GPUs is that of torch: the same tokens are kept, and what is attended is the same to
the last bits. And it takes the launches that are written here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.formats.kernel_table import CUDA, HALVES, TORCH, TRITON, Processor
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.gpu.launching import Launch, Launcher
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rotary
from h2o_flexgen.planning.plan import Plan
from tests.helpers.samples import first_of, spread

ROWS, KV_HEADS, GROUP, DIM, STEPS = 2, 2, 2, 64, 4
LENGTHS = (12, 7)
KEPT: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"kv_policy": "h2o", "heavy": 4, "recent": 4},
    "fading": {"kv_policy": "h2o", "heavy": 4, "recent": 4, "score_decay": 0.9, "sinks": 1},
    "chance": {"kv_policy": "random", "heavy": 4, "recent": 4},
    "rolling": {"kv_policy": "h2o", "heavy": 4, "recent": 4, "positions": "rolling"},
}


class Launches(TorchDispatchMode):
    """Counts what a GPU is told to do: operations of torch that are no views, and kernels in Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name() and "_unsafe_view" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_of(build: str) -> Iterator[None]:
    """A context in which tensors take the kernels of a GPU, or their twins, wherever they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "processor", lambda _: Processor(CUDA, build, HALVES))
        yield


@contextmanager
def counted() -> Iterator[list[str]]:
    with Launches() as launches, pytest.MonkeyPatch.context() as patch:
        for kind in (Launch, Launcher):
            patch.setattr(kind, "__call__", noted(kind.__call__, launches))
        yield launches.names


def noted(launch: Callable[..., None], launches: Launches) -> Callable[..., None]:
    def noting(own: Launch, *tensors: Tensor) -> None:
        before = len(launches.names)
        launch(own, *tensors)
        launches.names[before:] = [f"triton::{own.kernel.__name__}"]  # whatever the interpreter does

    return noting


def passed_through(
    kept: str, format: str, dtype: torch.dtype, cap: float | None, device: torch.device
) -> tuple[list[Tensor], SlotScores | None, list[str]]:
    """What all steps attend, what is noted in the end, and the launches of the last step in a layer that is not the first."""
    policy, batch = Plan.create(**KEPT[kept]).policy, Batch(tuple(range(ROWS)), LENGTHS)
    occupancy, coding, draw = policy.occupancy(batch, STEPS), Coding(format, dtype, DIM), torch.Generator().manual_seed(1)
    shape = (ROWS, KV_HEADS, occupancy.capacity)
    slots = torch.zeros(occupancy.capacity, 2, ROWS, KV_HEADS, coding.width, dtype=coding.kept_dtype, device=device)
    region = torch.zeros(8 * ROWS * KV_HEADS * occupancy.capacity, dtype=torch.uint8, device=device)
    scores = SlotScores.over(region, policy, shape) if policy.score_bytes else None
    cache = KVCache(slots.permute(1, 2, 3, 0, 4), scores, coding, cap=cap)
    rotary = Rotary((1.0 / 10000.0 ** (torch.arange(DIM // 2) / (DIM // 2))).to(device))
    outs, names = list[Tensor](), list[str]()
    for step in range(STEPS):
        now = KVStep.of(occupancy.at(step), occupancy.capacity, device)
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        new = [torch.randn(ROWS, max(LENGTHS) if step == 0 else 1, each, DIM, generator=draw) for each in heads]
        given = NewTokens(*(each.to(device, dtype) for each in new), rotary)
        before = cache.image.clone(), None if scores is None else region.clone()
        outs.append(cache.attend(now, given).cpu())
        if step == STEPS - 1:  # once more, from the same state: what is the same in all layers is there already
            cache.image.copy_(before[0])
            if before[1] is not None:
                region.copy_(before[1])
            with counted() as found:
                cache.attend(now, given)
            names = list(found)
    return outs, scores, names


ATTENDED, JOINED = "attend_chunk_kernel", "join_chunks_kernel"
LAUNCHED: dict[tuple[str, str], tuple[str, ...]] = {  # between products
    ("full", PLAIN): ("append_heads", ATTENDED),
    ("h2o", PLAIN): ("append_heads", ATTENDED, JOINED, "evict_one"),
    ("chance", PLAIN): ("append_heads", ATTENDED, "evict_one"),
    ("h2o", "group4"): ("append_coded_heads", ATTENDED, JOINED, "evict_one"),
}
CASES = [
    *first_of(spread((kept, PLAIN, torch.float16, None) for kept in reversed(KEPT)), 2),
    ("h2o", PLAIN, torch.float32, 2.0),
    ("h2o", "group4", torch.float16, 2.0),
]


@pytest.mark.parametrize(("kept", "format", "dtype", "cap"), CASES)
def test_steps_keep_what_torch_keeps_and_are_these_launches(
    kept: str, format: str, dtype: torch.dtype, cap: float | None, gpu: torch.device
) -> None:
    with kernels_of(TRITON):
        outs, noted, names = passed_through(kept, format, dtype, cap, gpu)
    with kernels_of(TORCH):
        twins, noted_by_twin, _ = passed_through(kept, format, dtype, cap, torch.device("cpu"))
    near = 1e-5 if dtype == torch.float32 else 2**-8 if format == PLAIN else 2**-4  # a code of 4 bits may be the next one
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(outs[0][row, :length], twins[0][row, :length], rtol=near, atol=near)
    for out, twin in zip(outs[1:], twins[1:]):
        torch.testing.assert_close(out, twin, rtol=near, atol=near)
    if noted is not None and noted_by_twin is not None:
        assert torch.equal(noted.positions.cpu(), noted_by_twin.positions)
    if (kept, format) in LAUNCHED:
        assert names == [f"triton::{name}" for name in LAUNCHED[kept, format]]


@pytest.mark.parametrize("format", [PLAIN, "group4"])
def test_several_tokens_of_a_row_are_attended_as_those_of_rows_with_the_same_slots(format: str, gpu: torch.device) -> None:
    coding, draw = Coding(format, torch.float32, DIM), torch.Generator().manual_seed(2)
    own, capacity = Plan().policy.occupancy(Batch((0,), LENGTHS[:1]), STEPS), LENGTHS[0] + STEPS - 1
    slots = [
        torch.zeros(capacity, 2, ROWS, KV_HEADS, coding.width, dtype=coding.kept_dtype, device=gpu).permute(1, 2, 3, 0, 4)
        for _ in range(2)
    ]
    one_by_one, at_once = (KVCache(image, None, coding) for image in slots)
    rotary = Rotary((1.0 / 10000.0 ** (torch.arange(DIM // 2) / (DIM // 2))).to(gpu))
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)

    def drawn(rows: int, tokens: int) -> list[Tensor]:
        return [torch.randn(rows, tokens, each, DIM, generator=draw).to(gpu) for each in heads]

    begun, more = drawn(1, LENGTHS[0]), drawn(STEPS - 1, 1)
    with kernels_of(TRITON):
        for cache in (one_by_one, at_once):
            cache.part(slice(1, 2)).attend(KVStep.of(own.at(0), capacity, gpu), NewTokens(*begun, rotary))
        wanted = [
            one_by_one.part(slice(1, 2)).attend(
                KVStep.of(own.at(step), capacity, gpu), NewTokens(*(each[step - 1 : step] for each in more), rotary)
            )
            for step in range(1, STEPS)
        ]
        now = KVStep.of(own.joint_step([(own, step) for step in range(1, STEPS)]), capacity, gpu)
        found = at_once.repeated(1, STEPS - 1).attend(now, NewTokens(*more, rotary))
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)
    assert torch.equal(slots[0], slots[1])
