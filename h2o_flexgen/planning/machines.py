"""Finds a machine: a file, one that travels with the package, or this one, from its profile in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_flexgen.core.hints import did_you_mean
from h2o_flexgen.planning.machine import Machine

SUFFIXES = (".yaml", ".yml")


def find_machine(name_or_file: str | Path) -> Machine:
    """Loads a machine from a file, or by the name of one of the package."""
    file = Path(name_or_file).expanduser()
    if file.suffix.lower() in SUFFIXES or file.is_file():
        return Machine.load(file)
    known, name = _package_files(), str(name_or_file)
    if name not in known:
        raise ValueError(
            f"machine {name!r} is unknown; give a YAML file or one of {', '.join(known_machines())}{did_you_mean(name, known)}"
        )
    return Machine.load(known[name])


def known_machines() -> list[str]:
    return list(_package_files())


def _package_files() -> dict[str, Path]:
    package = Path(__file__).resolve().parents[1]
    places = (package / "configs" / "machines", package.parent / "configs" / "machines")  # installed, or a source checkout
    folder = next((place for place in places if place.is_dir()), places[0])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


# -- profiles that were kept ---------------------------------------------------------------------------------------------


def saved_machine(fingerprint: str) -> Machine | None:
    """The kept profile of this machine; None if there is none. A damaged file is a ValueError that names it."""
    file = machine_file(fingerprint)
    return Machine.load(file) if file.is_file() else None


def save_machine(fingerprint: str, machine: Machine, comment: str = "") -> Path:
    file = machine_file(fingerprint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        machine.save(file, comment)
    except OSError as error:
        raise ValueError(f"the profile cannot be kept in {file} ({error.strerror}); set XDG_CACHE_HOME to a folder") from error
    return file


def machine_file(fingerprint: str) -> Path:
    return kept_folder("machines") / f"{fingerprint}.yaml"


def kept_folder(kind: str) -> Path:
    """The folder of the user's cache for what was found of machines."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "h2o_flexgen" / kind
