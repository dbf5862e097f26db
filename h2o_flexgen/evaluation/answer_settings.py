"""What answers depend on: the identity of a model, and settings under the names by which users give them. Manifests of jobs
and keys of caches hold both."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.checkpoints.checkpoint import open_checkpoint
from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import resolve_model
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.jobs.output import Settings
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import load_config, tensor_names
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.session.open_request import HEAD_BUDGETS, PROBE
from h2o_flexgen.session.opened_model import DUMMY_SEED
from h2o_flexgen.text.tokenizer import BYTES, TOKENIZER_FILES

CONFIG = "config.json"
CHUNK_BYTES = 1 << 24
WHOLE_BYTES = 1 << 30  # larger files are sampled
PLACES = 64  # samples of a larger file


def model_identity(llm: LLM) -> dict[str, object]:
    asked = llm.loaded.request.model
    weights = f"random, seed {DUMMY_SEED}: {llm.name}" if asked.dummy_weights else folder_digest(resolve_model(llm.name))
    if adapters := llm.loaded.opened.adapters:
        weights = f"{weights} with adapters {adapters.identity}"
    machine = describe_machine(llm.device)
    return {
        "weights": weights,
        **_tokenizer_identity(asked.tokenizer),
        "dtype": llm.spec.dtype,
        "device": machine["device"],
        "kernels": in_use(),
        "torch": machine["torch"],
    }


def _tokenizer_identity(asked: str) -> dict[str, object]:
    """Only a tokenizer other than the model's own is named; that one belongs to the folder's digest."""
    if asked == AUTO:
        return {}
    if asked == BYTES:
        return {"tokenizer": BYTES}
    place = resolve_model(asked, with_weights=False)
    files = [place] if is_gguf(place) else [place / name for name in TOKENIZER_FILES]
    return {"tokenizer": _digest(file for file in files if file.is_file())}


def folder_digest(place: Path) -> str:
    """A digest of config, tokenizer and weights: of a model in parts, the first may have nothing but what is said of it."""
    beside = [place] if is_gguf(place) else [place / name for name in (CONFIG, *TOKENIZER_FILES)]
    with closing(open_checkpoint(place, names=tensor_names(load_config(str(place))))) as checkpoint:
        return _digest(dict.fromkeys([*filter(Path.is_file, beside), *checkpoint.files]))


def _digest(files: Iterable[Path]) -> str:
    digest = blake2b(digest_size=12)
    for file in files:
        digest.update(f"{file.name}/{file.stat().st_size}/".encode())
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: blake2b, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= WHOLE_BYTES:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
            return
        for place in range(PLACES):
            opened.seek(place * (size - CHUNK_BYTES // PLACES) // (PLACES - 1))
            digest.update(opened.read(CHUNK_BYTES // PLACES))


WEIGHTS, TOKENIZER, DTYPE = "weights", "tokenizer", "dtype"
ADAPTERS = "lora"  # those that requests ask for: what identifies each, by its name
IN_LAST_BITS = ("device", "kernels", "torch")  # parts of a model's identity that numbers depend on in their last bits
# what a plan has to say about the answers
OF_PLAN = ("kv_policy", "weight_codec", "kv_codec", "compute", "state_dtype", "prefix_policy", "least_prefix")


def model_settings(llm: LLM) -> tuple[Settings, Settings]:
    """What the answers depend on of the model, and what only their last bits depend on."""
    identity = model_identity(llm)
    of_answers: dict[str, object] = {f"the model's {name}": identity.get(name) for name in (WEIGHTS, TOKENIZER, DTYPE)}
    # one setting, which is there without adapters, too: where some are no longer given, that is a difference
    of_answers[ADAPTERS] = {one.name: one.adapter.identity for one in llm.loaded.adapters} or None
    return of_answers, {name: identity[name] for name in IN_LAST_BITS}


def plan_settings(plan: Plan) -> Settings:
    kept = {each.name: getattr(plan.kv_options, each.name) for each in fields(KVOptions)}
    shared = {"shared_prefixes": plan.shares_prefixes}  # whatever keeps them from being shared, a flag or the schedule
    read = {HEAD_BUDGETS: plan.head_budgets, PROBE: plan.probe}  # files: their names say nothing about the answers
    files = {name: None if each is None else each.checksum for name, each in read.items()}
    return {**{name: getattr(plan, name) for name in OF_PLAN}, **shared, **kept, **files}
