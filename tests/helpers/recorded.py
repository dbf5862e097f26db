"""Graphs for devices that have none: work is done again by calling it, and must do the same on the same addresses each time.

That is what makes it fit to be captured: a graph repeats operations with the numbers and addresses that they had once. Views
are no operations of a graph. They may be made when it is captured and kept for later, and show in what is then done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READ_BACK = (
    "_local_scalar_dense",
    "aten.item",
    "aten.equal",
    "nonzero",
    "masked_select",
    "unique",
)  # nothing that a host waits for can be captured


def repeated(work: Callable[[], None]) -> Callable[[], None]:
    """What does the work again and again."""
    noted: list[_Calls] = []

    def again() -> None:
        with _Calls() as calls:
            work()
        first = (noted or [calls])[0]
        noted[:] = [first]
        for before, now in zip(first.made, calls.made):
            assert before == now, f"a graph would repeat {before}, but this step wants {now}"
        count, wanted = len(first.made), len(calls.made)
        assert count == wanted, f"a graph has {count} operations, but this step wants {wanted}"

    return again


class _Calls(TorchDispatchMode):
    """Notes every operation but views: its numbers, and where the tensors lie that it did not find inside of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[object, ...]] = []
        self._inside: dict[int, int] = {}  # storage -> number
        self._held: list[object] = []  # of all that was met: otherwise addresses of what was freed would come again

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        assert not any(one in name for one in READ_BACK), f"{name} waits for the device, which a graph cannot"
        if not _only_views(func):
            self.made.append((name, *self._noted(args), *self._noted(sorted(kwargs.items()))))
        known = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        outcome = func(*args, **kwargs)
        for tensor in tensors_in(outcome):
            if storage_of(tensor) not in known:
                self._inside.setdefault(storage_of(tensor), len(self._inside))
        self._held.append((args, kwargs, outcome))
        return outcome

    def _noted(self, value: object) -> tuple[object, ...]:
        if isinstance(value, Tensor):
            where = self._inside.get(storage_of(value))
            place = ("outside", _plain(value).data_ptr()) if where is None else ("inside", where, value.storage_offset())
            return (*place, tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, (list, tuple)):
            return tuple(self._noted(one) for one in value)
        return (str(value),)


def _only_views(func: Any) -> bool:
    """Whether an operation makes nothing but parts of what it is given."""
    made = func._schema.returns
    return bool(made) and all(one.alias_info is not None and not one.alias_info.is_write for one in made)


def _plain(tensor: Tensor) -> Tensor:
    inner: Tensor = vars(tensor).get("inner", tensor)  # that of a device which is pretended by wrapping tensors
    return inner


def storage_of(tensor: Tensor) -> int:
    return _plain(tensor).untyped_storage()._cdata


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in what an operation is given or makes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
