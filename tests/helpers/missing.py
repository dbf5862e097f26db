"""Makes a package of an extra look as if it were not installed."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, package: str, user: str) -> None:
    """`user`: the module that imports it, which may have done so already."""
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.") or name == user]:
        monkeypatch.delitem(sys.modules, name)


def said_by(user: str) -> str:
    """What a module says that cannot import it."""
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module(user)
    return str(caught.value)
