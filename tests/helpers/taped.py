"""Graphs for devices that have none, as a GPU has them: what Python does is done once, when work is captured, and never again.

The operations are kept with the tensors that they were given and those that they made. A replay does them again, in the same
memory. While work is captured nothing outside of it changes. Values of the host can be no part of a graph: a GPU refuses to
capture most copies of them, and would repeat the others from memory that something else has by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.recorded import READ_BACK, storage_of, tensors_in


class _Operation(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    made: list[Tensor]  # that are not part of what it was given


def taped(work: Callable[[], None], is_of_host: Callable[[Tensor], bool] = lambda one: False) -> Callable[[], None]:
    with _Taping(is_of_host) as tape:
        work()
    operations = tape.operations

    def replay() -> None:
        for func, args, kwargs, made in operations:
            outcome = func(*args, **kwargs)
            if made:
                for there, now in zip(made, tensors_in(outcome), strict=True):
                    there.copy_(now)

    return replay


class _Taping(TorchDispatchMode):
    def __init__(self, is_of_host: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_of_host = is_of_host
        self.operations: list[_Operation] = []
        self._inside = set[int]()  # storages that were made meanwhile

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert not any(one in str(func) for one in READ_BACK), f"{func} waits for the device, which a graph cannot"
        self._refuse_two_places(func, args, kwargs)
        changed = _changed(func, args, kwargs)
        is_done = all(storage_of(one) in self._inside for one in changed)  # the others wait for the first replay
        outcome = func(*args, **kwargs) if is_done else changed[0] if len(func._schema.returns) == 1 else tuple(changed)
        known = {storage_of(one) for one in tensors_in((args, kwargs))}
        made = [one for one in tensors_in(outcome) if storage_of(one) not in known]
        self._inside |= {storage_of(one) for one in made}
        if changed or (made and "empty" not in str(func)):
            self.operations.append(_Operation(func, args, kwargs, made))
        return outcome

    def _refuse_two_places(self, func: Any, args: Any, kwargs: Any) -> None:
        """A single value of the host becomes a number of the launch."""
        given = [one for one in tensors_in((args, kwargs)) if one.numel()]
        of_host = [one for one in given if self._is_of_host(one) and (one.dim() or "copy" in str(func))]
        goes = kwargs.get("device") is not None and bool(given)  # from one place to another
        is_of_one = not of_host or len(of_host) == len(given)
        assert is_of_one and not goes, f"{func} copies from the host or to it, which a graph cannot"


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that an operation writes."""
    found = []
    for place, one in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(one.name)
        if one.alias_info is not None and one.alias_info.is_write:
            found += list(tensors_in(given))
    return found
