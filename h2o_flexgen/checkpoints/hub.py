"""Finds a model: a local folder or GGUF file itself, a demo model in the package, a fetched one in the cache, a hub name in the
hub's own cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import SUFFIX, first_part, has_magic, is_gguf
from h2o_flexgen.checkpoints.model_files import SAFETENSORS, TORCH
from h2o_flexgen.checkpoints.model_places import DEMO_MODELS, FETCHED_MODELS, demo_folder
from h2o_flexgen.core.hints import did_you_mean

TEXTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template*")
SAFETENSORS_FILES = (SAFETENSORS.single, SAFETENSORS.index, "model-*.safetensors")
TORCH_FILES = (TORCH.single, TORCH.index, "pytorch_model-*.bin")
TIMEOUT_SECONDS = 10
ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*/.+\.gguf")  # owner, repository, and a file there
WHOLE_MODELS = (SAFETENSORS.single, SAFETENSORS.index, TORCH.single, TORCH.index)
MOST_NAMED = 5  # files in a message
PART = re.compile(r"-\d{5}-of-")  # in the name of a part of a file
ADVICE = f"give a local folder or {SUFFIX} file, or dummy weights (--dummy-weights)"


def resolve_model(name_or_path: str, with_weights: bool = True) -> Path:
    """The folder with config, tokenizer and, if wanted, weights, or the GGUF file that has all of them. Code from the
    repository is never downloaded."""
    if not name_or_path:
        raise ValueError(f"model {name_or_path!r} is empty; {ADVICE}")
    folder = Path(os.path.expanduser(name_or_path))  # Path's own raises for an unknown user
    if demo := demo_folder(name_or_path):  # first, so that the demo runs even beside a folder ./demo
        return demo
    if fetched := FETCHED_MODELS.get(name_or_path):
        return fetched.found()
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        is_elsewhere = ON_HUB.fullmatch(name_or_path) and not folder.exists()
        return first_part(_gguf_from_hub(name_or_path) if is_elsewhere else folder)
    if folder.exists():
        raise ValueError(f"model {name_or_path!r} is a file; {_what_instead(folder)}")
    if name_or_path.count("/") > 1 or name_or_path[0] in "./~":
        raise ValueError(f"model {name_or_path!r} is neither an existing folder nor a name on the hub; {ADVICE}")
    return _from_hub(name_or_path, with_weights)


def _what_instead(file: Path) -> str:
    """What to do about a file of another kind. Some programs keep their GGUF files under names without a suffix."""
    if has_magic(file):
        return f"it is a GGUF file, but its name does not end in {SUFFIX}; rename it, or give a link with such a name"
    return f"give the folder that it lies in, or a {SUFFIX} file"


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
        cached = _cached_folder(place)
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
    folder = _cached_folder(name)
    if folder is None:
        return None
    weights = any((folder / file).exists() for kind in (SAFETENSORS, TORCH) for file in (kind.single, kind.index))
    return folder if (folder / "config.json").exists() and (weights or not with_weights) else None


def _cached_folder(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # as above: there is none, or the cache cannot be read
        return None
