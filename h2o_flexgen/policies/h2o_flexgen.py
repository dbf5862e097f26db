"""H2O as the FlexGen fork of its authors has it: the oldest recent token always becomes a heavy one, and the weakest of the
heavy ones goes for it, even where that one is the stronger. For comparison with runs that were published."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.occupancy import Budget
from h2o_flexgen.policies.options import KVOptions, row_of
from h2o_flexgen.policies.policy import KVPolicy


class H2OFlexGen(KVPolicy):
    name: ClassVar[str] = "h2o-flexgen"

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        """With the place of the newest token."""
        return KVOptions(heavy=(slots + 1) - (slots + 1) // 2, recent=(slots + 1) // 2)

    def budget(self, prompt_len: int, gen_len: int) -> Budget:
        """Of the recent slots one is the place that the newest token is attended in."""
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        if heavy < 1 or recent < 1:
            raise ValueError(
                f"kv_policy {self.name!r} has {heavy} heavy and {recent} recent slots {row_of(prompt_len, gen_len)}; "
                "give it 1 or more of each"
            )
        return self._protecting(heavy + recent - 1, recent, recent - 1)
