"""The table of KV policies. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.kv.chance import Random
from h2o_flexgen.kv.full import Full
from h2o_flexgen.kv.h2o import H2O
from h2o_flexgen.kv.h2o_flexgen import H2OFlexGen
from h2o_flexgen.kv.heavy import Heavy
from h2o_flexgen.kv.local import Local
from h2o_flexgen.kv.policy import KVPolicy
from h2o_flexgen.kv.snapkv import SnapKV
from h2o_flexgen.kv.streaming import Streaming
from h2o_flexgen.kv.tova import Tova

POLICIES: Mapping[str, type[KVPolicy]] = {
    policy.name: policy for policy in (Full, H2O, H2OFlexGen, Local, Streaming, Heavy, Random, SnapKV, Tova)
}
