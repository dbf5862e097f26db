"""What the answers of a job depend on, under the names that a person gives it by, for its manifest."""

from __future__ import annotations

import platform
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from h2o_flexgen.cli.batch_request import ANYWAY, OUTPUT, BatchRequest
from h2o_flexgen.jobs.manifest import Manifest, Settings
from h2o_flexgen.sampling.params import SamplingParams

PACKAGES = ("h2o_flexgen", "torch", "transformers", "numpy")


def option_settings(request: BatchRequest) -> Settings:
    """The options that lines leave open, the order of records, and what the input was made of."""
    params, named = request.defaults.params, [each.name for each in fields(SamplingParams)]
    sampling = {name: getattr(params, name) for name in named if name not in ("seed", "prompt_logprobs")}
    beside = {"style": request.style, "return_token_ids": request.defaults.token_ids, "ordered": request.ordered}
    return {**sampling, **beside, **request.made_of}


def refuse_other(begun: Manifest | None, settings: Settings, request: BatchRequest) -> None:
    """Refuses to go on with a job under other settings, unless that was asked for."""
    if begun is None or request.resuming.anyway:
        return
    if differences := list(begun.differences(settings)):
        job = f"the job in {OUTPUT} {request.files.output.name} was begun with other options"
        raise ValueError(f"{job}: {'; '.join(differences)}; give them as they were, or another {OUTPUT}; {ANYWAY} goes on")


def refuse_other_seed(request: BatchRequest) -> None:
    begun = request.begun
    if begun is not None and request.seed not in (None, begun.seed) and not request.resuming.anyway:
        asked = f"--seed is {request.seed}, but the job in {OUTPUT} {request.files.output.name} was begun with {begun.seed}"
        raise ValueError(f"{asked}; leave it out, or give another {OUTPUT}; {ANYWAY} goes on")


def versions() -> Settings:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
