"""Where HELM is not installed, one line names the extra that brings it."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def test_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helm", None)
    for name in [name for name in sys.modules if name.startswith("helm.") or name == "h2o_flexgen.helm"]:
        monkeypatch.delitem(sys.modules, name)
    said = r"^HELM is not installed; it comes with the extra \[helm\]: pip install -e '.\[helm\]'$"
    with pytest.raises(ModuleNotFoundError, match=said):
        import_module("h2o_flexgen.helm")
