"""The KV policies, and their table. A new policy is a class in the file of what it ranks by, and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.policies.by_attention import H2O, H2OFlexGen, Heavy, KVzip, SnapKV, Tova
from h2o_flexgen.policies.by_judge import KeyDiff, KNorm, KVzap, LagKV
from h2o_flexgen.policies.by_position import Full, Local, Random, Streaming
from h2o_flexgen.policies.policy import KVPolicy

POLICIES: Mapping[str, type[KVPolicy]] = {
    policy.name: policy
    for policy in (
        *(Full, H2O, H2OFlexGen, Local, Streaming, Heavy, Random, SnapKV, Tova),
        *(KVzip, KVzap, KeyDiff, LagKV, KNorm),
    )
}
