"""What answers depend on, under the names by which users give it: for manifests of jobs and for keys of caches."""

from __future__ import annotations

from dataclasses import fields

from h2o_flexgen.evaluation.model_identity import model_identity
from h2o_flexgen.jobs.manifest import Settings
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.session.options import HEAD_BUDGETS, PROBE

WEIGHTS, TOKENIZER, DTYPE = "weights", "tokenizer", "dtype"
IN_LAST_BITS = ("device", "kernels", "torch")  # parts of a model's identity that numbers depend on in their last bits
# what a plan has to say about the answers
OF_PLAN = ("kv_policy", "weight_codec", "kv_codec", "compute", "prefix_policy", "least_prefix")


def model_settings(llm: LLM) -> tuple[Settings, Settings]:
    """What the answers depend on of the model, and what only their last bits depend on."""
    identity = model_identity(llm)
    of_answers = {f"the model's {name}": identity.get(name) for name in (WEIGHTS, TOKENIZER, DTYPE)}
    return of_answers, {name: identity[name] for name in IN_LAST_BITS}


def plan_settings(plan: Plan) -> Settings:
    kept = {each.name: getattr(plan.kv_options, each.name) for each in fields(KVOptions)}
    shared = {"shared_prefixes": plan.shares_prefixes}  # whatever keeps them from being shared, a flag or the schedule
    read = {HEAD_BUDGETS: plan.head_budgets, PROBE: plan.probe}  # files: their names say nothing about the answers
    files = {name: None if each is None else each.checksum for name, each in read.items()}
    return {**{name: getattr(plan, name) for name in OF_PLAN}, **shared, **kept, **files}
