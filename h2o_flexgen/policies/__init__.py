"""The KV policies, and their table. A new policy is a file here and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.policies.chance import Random
from h2o_flexgen.policies.full import Full
from h2o_flexgen.policies.h2o import H2O, H2OFlexGen, Heavy, Local
from h2o_flexgen.policies.keydiff import KeyDiff
from h2o_flexgen.policies.knorm import KNorm
from h2o_flexgen.policies.kvzip import KVzap, KVzip
from h2o_flexgen.policies.lagkv import LagKV
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.policies.snapkv import SnapKV
from h2o_flexgen.policies.streaming import Streaming
from h2o_flexgen.policies.tova import Tova

POLICIES: Mapping[str, type[KVPolicy]] = {
    policy.name: policy
    for policy in (
        *(Full, H2O, H2OFlexGen, Local, Streaming, Heavy, Random, SnapKV, Tova),
        *(KVzip, KVzap, KeyDiff, LagKV, KNorm),
    )
}
