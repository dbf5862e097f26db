"""Launches of kernels in Triton that take the processor little more than the call of CUDA's driver.

At each launch, Triton's own door looks at every argument: its type, whether it is 1 or a multiple of 16, and what was compiled
for that. Here a `Launcher` has all that a kernel is told beside addresses: its numbers, its constants, its grid. Functions keep
launchers by the shapes and types of what they are given. So the first launch goes through the door, and each later one calls
what was compiled then.

The compiler may have been told that addresses are multiples of 16. Where one is not, the door is taken again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from triton.runtime import driver as drivers
from triton.runtime.jit import JITFunction

from h2o_flexgen.kernels.raw_memory import addresses_of

ALIGNED = 16  # bytes
SHAPES_KNOWN = 512  # of each function: rows come and go, and prompts have many lengths
# What the door does in the end. Triton does not promise `run`: where something else stands there, the door is always taken.
CALLED = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)
NO_HOOKS = None, None, None  # metadata for profilers, and what they want called before and behind a launch

Seen: TypeAlias = "tuple[torch.Size, tuple[int, ...], torch.dtype]"
Type: TypeAlias = "torch.dtype | None"
kept_by_shape = lru_cache(SHAPES_KNOWN)  # of functions that make launchers


def seen(tensor: Tensor) -> Seen:
    """What a launch depends on of a tensor, beside its address."""
    return tensor.shape, tensor.stride(), tensor.dtype


def type_of(tensor: Tensor | None) -> Type:
    """What a launch depends on of a tensor that may be missing, and of which the shape is known."""
    return None if tensor is None else tensor.dtype


class InWords(NamedTuple):
    """Tensors of a launch that are only moved, in words of this type. Beside their addresses only the door asks for it."""

    word: torch.dtype
    places: tuple[int, ...]  # among the tensors

    def of(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [each.view(self.word) if place in self.places else each for place, each in enumerate(tensors)]


NOT_IN_WORDS = InWords(torch.uint8, ())


class Launch:
    """A kernel and all that it is told beside tensors, launched through Triton's own door. The parameters of a kernel are
    tensors, then numbers, then constants."""

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        numbers: Sequence[float],
        constants: dict[str, Any],
        words: InWords = NOT_IN_WORDS,
    ) -> None:
        """`constants`: those of the kernel, and options of the compiler."""
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.numbers = tuple(numbers)
        self.constants = constants
        self._words = words
        self._types: list[torch.dtype] = []  # of the tensors of the first launch

    def __call__(self, *tensors: Tensor) -> None:
        self.through_the_door(tensors)

    def through_the_door(self, tensors: Sequence[Tensor]) -> Any:
        """Launches it, and gives what Triton has compiled, if it compiles."""
        tensors = self._words.of(tensors) if self._words.places else tensors
        types = [each.dtype for each in tensors]
        self._types = self._types or types
        assert types == self._types, f"{self.kernel.__name__} has other types than the launch that it was kept for"
        return self.kernel[self.grid](*tensors, *self.numbers, **self.constants)


class _Compiled(NamedTuple):
    """What Triton has compiled for one GPU."""

    run: Callable[..., object]
    function: object
    metadata: object
    stream_of: Callable[[int], int]
    device: int  # its number


class Launcher(Launch):
    """The same where Triton compiles: later launches call what was compiled for the first one."""

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        numbers: Sequence[float],
        constants: dict[str, Any],
        words: InWords = NOT_IN_WORDS,
    ) -> None:
        super().__init__(kernel, grid, numbers, constants, words)
        own = [constants[name] for name in kernel.arg_names if name in constants]
        self._behind = (*numbers, *own)  # what comes behind addresses
        tensors = kernel.params[: len(kernel.params) - len(self._behind)]
        self._told_of = itemgetter(*(one.num for one in tensors if not one.do_not_specialize_on_alignment))
        self._compiled: dict[int, _Compiled] = {}  # by the number of the GPU that the tensors are on

    def __call__(self, *tensors: Tensor) -> None:
        addresses, known = addresses_of(tensors), self._compiled.get(tensors[0].get_device())
        is_aligned = not reduce(or_, self._told_of(addresses)) % ALIGNED
        if known is not None and is_aligned:
            run, function, metadata, stream_of, device = known
            run(*self.grid, stream_of(device), function, metadata, *NO_HOOKS, *addresses, *self._behind)
            return
        compiled = self.through_the_door(tensors)
        if compiled is not None and is_aligned and why_not() is None:
            there = drivers.active.get_current_stream, drivers.active.get_current_device()
            own = _Compiled(compiled.run, compiled.function, compiled.packed_metadata, *there)
            self._compiled[tensors[0].get_device()] = own


def launcher(
    kernel: Any, grid: Sequence[int], numbers: Sequence[float], words: InWords = NOT_IN_WORDS, /, **constants: Any
) -> Launch:
    """`constants`: those of the kernel, and options of the compiler."""
    kind = Launcher if isinstance(kernel, JITFunction) else Launch  # otherwise it is interpreted
    return kind(kernel, grid, numbers, constants, words)


@cache
def why_not() -> str | None:
    """Why what was compiled is not called past Triton's own door; None where it is."""
    try:
        there = " ".join(inspect.getsource(JITFunction.run).split())
    except (OSError, TypeError):
        there = ""
    return None if CALLED in there else f"Triton {triton.__version__} launches kernels in a way that is not known here"
