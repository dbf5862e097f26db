"""The policies that a study can follow: those that evict by what reading the text alone can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.policy import PROBE, KVPolicy
from h2o_flexgen.policies.table import POLICIES


def studied_policies(names: Sequence[str], budget: float) -> Mapping[str, KVPolicy]:
    """Each policy with the share `budget` of a text; a policy that cannot be studied is refused."""
    policies: dict[str, KVPolicy] = {}
    for name in names:
        if name in POLICIES and POLICIES[name].judged_by == PROBE:
            raise ValueError(f"kv_policy {name!r} asks a probe, which a study does not do; leave it out")
        policy = Plan.create(kv_policy=name, kv_budget=None if name == "full" else budget).policy
        if policy.keeps_all:
            raise ValueError(f"kv_policy {name!r} keeps everything, and there is nothing to study; name policies that evict")
        if policy.echoes:
            raise ValueError(f"kv_policy {name!r} judges a prompt by an echo that a study does not compute; leave it out")
        if name in policies:
            raise ValueError(f"kv_policy {name!r} is named twice; name it once")
        policies[name] = policy
    if not policies:
        raise ValueError("no KV policy to study was named; name one or more")
    return policies


def coding_of(llm: LLM) -> Coding:
    """How the plan of `llm` stores keys and values."""
    return Coding(llm.spec.kv_codec, getattr(torch, llm.spec.dtype), llm.spec.head_dim)
