"""Tensors of the clocked device: each wraps a tensor of the host, and tells the checker what is done with it.

Values are computed at once. What a GPU would do in its own time, the checker treats as issued to the current stream. What a GPU
refuses, such as tensors of two devices in one product, is refused here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as traced
from torch.utils._python_dispatch import TorchDispatchMode

from tests.clocked.block import Block, Moment
from tests.clocked.checker import Checker, current
from tests.clocked.clock import Clock

NAME = "clocked"
MAKES_ROOM = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided")
MOVES = ("aten::copy_", "aten::_to_copy")
MAY_MOVE = ("aten::to", "aten::type_as")  # made of the moves
INDEXES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put")
OF_TWO_DEVICES = (*MOVES, *INDEXES)
ANSWERS = (  # the host needs values, or the size of the outcome depends on them
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
)

Function = torch._ops.OpOverload


class ClockedTensor(torch.Tensor):
    """The `inner` tensor has the values; the `block` is the memory that it lies in."""

    inner: Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block) -> ClockedTensor:
        made: ClockedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.block, made.inner = block, inner  # in the order in which they go: the memory is told of before it goes
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, known = kwargs or {}, facts(func)
        if known.name in MAY_MOVE:
            return func.decompose(*args, **kwargs)
        return dispatched(func, known, args, kwargs, tensors_in(*args, *kwargs.values()))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ClockedTensor({tuple(self.shape)}, {self.dtype})"


class Watched(TorchDispatchMode):
    """A mode of a thread in which all that torch does is seen: also what makes tensors, and the processor's own work."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and saying so at every call takes a tenth of the time of these tests."""
        return False

    def __torch_dispatch__(
        self, func: Function, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, known = kwargs or {}, facts(func)
        given = tensors_in(*args, *kwargs.values())
        if ClockedTensor in map(type, given) or _is_for_us(args, kwargs):
            if known.name not in MAY_MOVE:
                return dispatched(func, known, args, kwargs, given)
            with self:  # its moves are seen here again
                return func.decompose(*args, **kwargs)
        outcome = func(*args, **kwargs)
        _note_work_of_the_processor(known, args, kwargs, given, outcome)
        return outcome


def tensors_in(*given: object) -> list[Tensor]:
    """The tensors among arguments or results, and in lists among them."""
    found = []
    for one in given:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += [each for each in one if isinstance(each, Tensor)]
    return found


def own_block(inner: Tensor, checker: Checker) -> Block:
    """The memory of a tensor that is made now, from the pool of the current stream."""
    name = f"a tensor {tuple(inner.shape)} made in {checker.task or 'no task'}"
    return _Pooled(name, checker, checker.stream, inner.data_ptr() if inner.numel() else None)


class _Pooled(Block):
    """Memory of a stream's pool."""

    def __init__(self, name: str, checker: Checker, stream: str, address: int | None) -> None:
        super().__init__(name)
        self._checker, self._stream, self._address = checker, stream, address
        if address is not None:
            traced.MemoryAllocationCallbacks.fire_callbacks(address)

    def __del__(self) -> None:
        if self._checker.is_over:
            return
        with self._checker.lock:
            self._checker.given_back(self, self._stream)
            if self._address is not None:
                traced.MemoryDeallocationCallbacks.fire_callbacks(self._address)


class Facts(NamedTuple):
    """What the schema of a function says."""

    name: str
    writes: Sequence[int]  # places of the arguments that it changes
    writes_named: Sequence[str]
    may_view: bool  # its results may be parts of what it is given

    @property
    def short(self) -> str:
        return self.name.removeprefix("aten::")


@cache
def facts(func: Function) -> Facts:
    schema = func._schema
    changed = [(at, one.name) for at, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    may_view = any(one.alias_info is not None for one in schema.returns)
    return Facts(schema.name, [at for at, _ in changed], [name for _, name in changed], may_view)


def _changed(known: Facts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    _, places, names, _ = known
    if not places:
        return []
    return tensors_in(*(args[at] for at in places if at < len(args)), *(kwargs[name] for name in names if name in kwargs))


def _is_for_us(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the outcome is to be on the device."""
    return _is_ours(kwargs.get("device")) or any(isinstance(one, torch.device) and _is_ours(one) for one in args)


def _is_ours(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME  # type: ignore[call-overload]


def _inner(given: Any) -> Any:
    if isinstance(given, ClockedTensor):
        return given.inner
    if isinstance(given, (list, tuple)) and any(isinstance(one, ClockedTensor) for one in given):
        return type(given)(map(_inner, given))
    return given


def dispatched(func: Function, known: Facts, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> Any:
    checker = current()
    with checker.lock:
        return _Call(func, known, args, kwargs, given, checker).outcome()


class _Call:
    """One call of a function of torch with tensors of the device, or for some."""

    def __init__(
        self,
        func: Function,
        known: Facts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        checker: Checker,
    ) -> None:
        self.func, self.facts, self.args, self.kwargs, self.given, self.checker = func, known, args, kwargs, given, checker
        self.name = known.name
        self.ours = [one for one in given if isinstance(one, ClockedTensor)]
        self.changed = _changed(known, args, kwargs)
        self.wanted = kwargs.get("device")  # where the outcome is to be
        self.leaves = self.wanted is not None and not _is_ours(self.wanted)

    def outcome(self) -> Any:
        self._refuse_two_devices()
        kwargs = {name: _inner(one) for name, one in self.kwargs.items()}
        if self.wanted is not None:
            kwargs["device"] = torch.device("cpu")
        outcome = self.func(*map(_inner, self.args), **kwargs)
        now = None if self.name in MAKES_ROOM or self._is_view(outcome) else self._issued()
        if any(not isinstance(one, ClockedTensor) for one in self.changed):
            return self.changed[0]
        known = {id(one.inner): one for one in self.ours}
        if isinstance(outcome, (list, tuple)):
            return type(outcome)(self._wrapped(one, known, now) for one in outcome)
        return self._wrapped(outcome, known, now)

    def _is_view(self, outcome: object) -> bool:
        """Whether nothing is done but to look at what is there."""
        if self.changed or not self.facts.may_view:
            return False
        storages = {_storage(_inner(one)) for one in self.given}
        return all(_storage(one) in storages for one in tensors_in(outcome))

    def _refuse_two_devices(self) -> None:
        if self.name in OF_TWO_DEVICES or (not self.ours and not self.changed):
            return
        strange = [one for one in self.given if not isinstance(one, ClockedTensor) and one.dim()]
        if self.ours and strange:
            raise RuntimeError(f"{self.name} got tensors of two devices: {strange[0].device} and {self.ours[0].device}")

    def _issued(self) -> tuple[Moment, Clock]:
        """Tells of the launch and its accesses, and of the host's wait if it is one."""
        now = self.checker.launch(self.facts.short)
        self.checker.launched[self.checker.task, self.facts.short] += 1
        for one in self.given:
            block = one.block if isinstance(one, ClockedTensor) else self.checker.locked(one)
            if block is not None:
                self.checker.access(block, _inner(one), any(one is changed for changed in self.changed), *now)
        if self._waits():
            self.checker.wait_for_stream(self.facts.short)
        return now

    def _waits(self) -> bool:
        """Whether the call returns only when all that was issued to the stream is over."""
        if self.name in ANSWERS:
            return True
        if self.name in INDEXES:  # indices of the host are brought here; a mask has to be counted
            return any(one.dtype == torch.bool or not isinstance(one, ClockedTensor) for one in tensors_in(self.args[1]))
        return self.name in MOVES and self._crosses() and not (self._may_go_on() and self._is_locked())

    def _crosses(self) -> bool:
        of_host = [one for one in self.given if not isinstance(one, ClockedTensor)]
        return self.leaves or bool(of_host and (self.ours or _is_ours(self.wanted)))

    def _may_go_on(self) -> bool:
        return bool(self.kwargs.get("non_blocking") or (self.name == "aten::copy_" and len(self.args) > 2 and self.args[2]))

    def _is_locked(self) -> bool:
        of_host = [one for one in self.given if not isinstance(one, ClockedTensor)]
        return bool(of_host) and all(self.checker.locked(one) is not None for one in of_host)

    def _wrapped(self, result: Any, known: Mapping[int, ClockedTensor], now: tuple[Moment, Clock] | None) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in known:
            return known[id(result)]
        if self.leaves:  # a copy on the host
            return result
        if self.facts.may_view:
            own = next((one for one in self.ours if _storage(one.inner) == _storage(result)), None)
            if own is not None:
                return ClockedTensor(result, own.block)
        block = own_block(result, self.checker)
        if now is not None:
            self.checker.access(block, result, True, *now)
        return ClockedTensor(result, block)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _note_work_of_the_processor(
    known: Facts, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], outcome: object
) -> None:
    """Tells of accesses to page-locked memory by the calling thread. Views touch nothing."""
    checker = current()
    touched = [(one, block) for one in given if (block := checker.locked(one)) is not None]
    if not touched:
        return
    changed, storages = _changed(known, args, kwargs), {_storage(one) for one in given}
    if not changed and known.may_view and all(_storage(one) in storages for one in tensors_in(outcome)):
        return
    with checker.lock:
        now = checker.act(f"{known.short} of the processor")
        for one, block in touched:
            checker.access(block, one, any(one is each for each in changed), *now)
