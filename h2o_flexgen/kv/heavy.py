"""Heavy hitters alone, no recent tokens: one half of H2O, to show that both are needed."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.kv.policy import EVICTING, PROTECTION, KVPolicy
from h2o_flexgen.kv.slots import Budget


class Heavy(KVPolicy):
    name: ClassVar[str] = "heavy"
    takes: ClassVar[tuple[str, ...]] = ("heavy", "hh_ratio", "kv_budget", *PROTECTION, "score_decay", *EVICTING)

    def budget(self, prompt_len: int, gen_len: int) -> Budget:
        return self._protecting(sum(self.options.heavy_and_recent(prompt_len, gen_len)), window=0)
