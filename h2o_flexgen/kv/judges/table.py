"""The judges that need only tokens, by their names in policies."""

from __future__ import annotations

from h2o_flexgen.kv.judges.judge import Judge
from h2o_flexgen.kv.judges.key_difference import KeyDifference
from h2o_flexgen.kv.judges.lag import Lag
from h2o_flexgen.kv.judges.value_norms import ValueNorms
from h2o_flexgen.policies.policy import KEY_DIFFERENCE, LAG, VALUE_NORMS, KVPolicy


def judge_of(policy: KVPolicy) -> Judge | None:
    """The judge that a policy asks, of any layer; None if it asks none, or one that was fitted to a model."""
    if policy.judge == LAG:
        return Lag(policy.sinks)
    known = {VALUE_NORMS: ValueNorms, KEY_DIFFERENCE: KeyDifference}
    return known[policy.judge]() if policy.judge in known else None
