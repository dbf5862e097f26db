"""The place of a model, unless it is a name on the hub, and of files that were made for it."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_flexgen.demo import demo_folder
from h2o_flexgen.demo.fetched import FETCHED_MODELS


def local_place(model: str) -> Path:
    """The folder or file of a model of the package, of one in the cache, or of one that is named by its path."""
    fetched = FETCHED_MODELS.get(model)
    return demo_folder(model) or (fetched.path if fetched else Path(os.path.expanduser(model)))


def folders_beside(model: str) -> tuple[Path, ...]:
    """The folders for what belongs to a model: its own or that of its file, and the package's for one that it knows."""
    place = local_place(model)
    own = place if place.is_dir() else place.parent if place.is_file() else None
    known = (fetched.folder for fetched in FETCHED_MODELS.values() if model == fetched.name or place.name == fetched.file)
    return tuple(filter(None, (own, *known)))


def file_beside(model: str, file: str, lacking: str, flag: str) -> Path:
    """The file of this name that belongs to a model. The error says what is `lacking` without it, and which flag of `calibrate`
    writes one."""
    folders = folders_beside(model)
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        places = f"in {' or '.join(map(str, folders))}" if folders else "on the hub"
        command = f"python -m h2o_flexgen.calibrate --model {model} {flag} {file}"
        raise ValueError(f"there {lacking} of {model} {places}; make the file ({command}) and name it")
    return found
