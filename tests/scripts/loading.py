"""Loads scripts, which are not in a package, from their files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


def load_script(name: str, folder: str = "scripts") -> ModuleType:
    """Loads a script as a module, like an import, but leaves no compiled file beside it."""
    file = PROJECT / folder / name
    module = ModuleType(f"{folder}_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look there for the names of their types
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True), module.__dict__)
    return module
