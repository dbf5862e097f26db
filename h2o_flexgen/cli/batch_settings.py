"""What the answers of a job depend on, under the names that a person gives it by, for its manifest."""

from __future__ import annotations

import platform
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from h2o_flexgen.cli.batch_request import ANYWAY, OUTPUT, BatchRequest
from h2o_flexgen.evaluation.model_identity import model_identity
from h2o_flexgen.jobs.manifest import Manifest, Settings
from h2o_flexgen.llm import LLM
from h2o_flexgen.options import HEAD_BUDGETS, PROBE
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.options import KVOptions
from h2o_flexgen.sampling.params import SamplingParams

WEIGHTS, TOKENIZER, DTYPE = "weights", "tokenizer", "dtype"
IN_LAST_BITS = ("device", "kernels", "torch")  # parts of a model's identity that numbers depend on in their last bits
# what a plan has to say about the answers
OF_PLAN = ("kv_policy", "weight_codec", "kv_codec", "compute", "prefix_policy", "least_prefix")
PACKAGES = ("h2o_flexgen", "torch", "transformers", "numpy")


def model_settings(llm: LLM) -> tuple[Settings, Settings]:
    """What the answers depend on of the model, and what only their last bits depend on."""
    identity = model_identity(llm)
    of_answers = {f"the model's {name}": identity.get(name) for name in (WEIGHTS, TOKENIZER, DTYPE)}
    return of_answers, {name: identity[name] for name in IN_LAST_BITS}


def option_settings(request: BatchRequest) -> Settings:
    """The options that lines leave open, the order of records, and what the input was made of."""
    params, named = request.defaults.params, [each.name for each in fields(SamplingParams)]
    sampling = {name: getattr(params, name) for name in named if name not in ("seed", "prompt_logprobs")}
    beside = {"style": request.style, "return_token_ids": request.defaults.token_ids, "ordered": request.ordered}
    return {**sampling, **beside, **request.made_of}


def plan_settings(plan: Plan) -> Settings:
    kept = {each.name: getattr(plan.kv_options, each.name) for each in fields(KVOptions)}
    shared = {"shared_prefixes": plan.shares_prefixes}  # whatever keeps them from being shared, a flag or the schedule
    read = {HEAD_BUDGETS: plan.head_budgets, PROBE: plan.probe}  # whose names say nothing about the answers
    files = {name: None if each is None else each.checksum for name, each in read.items()}
    return {**{name: getattr(plan, name) for name in OF_PLAN}, **shared, **kept, **files}


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
