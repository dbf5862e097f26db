"""Scripts are no package: a test reads them from their files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


def load_script(name: str, folder: str = "scripts") -> ModuleType:
    """As a module, like an import, but no compiled file is left beside the script."""
    file = PROJECT / folder / name
    module = ModuleType(f"{folder}_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look there for the names of their types
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True), module.__dict__)
    return module
