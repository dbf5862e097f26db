"""H2O as in the paper (Algorithm 1): keeps the newest tokens and, of the others, those with the most attention so far. Beside
it stand H2O as its authors' fork of FlexGen has it, and its two halves alone, which show that both are needed."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.kv_options import KVOptions, row_of
from h2o_flexgen.policies.occupancy import RowBudget
from h2o_flexgen.policies.policy import AGE, COMMON, PROTECTION, SHARES, KVPolicy


class H2O(KVPolicy):
    name: ClassVar[str] = "h2o"
    accepts: ClassVar[tuple[str, ...]] = (*KVPolicy.accepts, "value_norms")


class H2OFlexGen(KVPolicy):
    """The oldest recent token always becomes a heavy one and replaces the weakest heavy one, even if that one is stronger. It
    serves comparisons with published runs."""

    name: ClassVar[str] = "h2o-flexgen"

    @classmethod
    def options_of(cls, slots: int, sinks: int | None = None) -> KVOptions:
        """The slots include the newest token's place."""
        return KVOptions(heavy=(slots + 1) - (slots + 1) // 2, recent=(slots + 1) // 2)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        """One of the recent slots is the place in which the newest token is attended."""
        heavy, recent = self.options.heavy_and_recent(prompt_len, gen_len)
        if heavy < 1 or recent < 1:
            raise ValueError(
                f"kv_policy {self.name!r} has {heavy} heavy and {recent} recent slots {row_of(prompt_len, gen_len)}; "
                "give it 1 or more of each"
            )
        return self._protecting(heavy + recent - 1, recent, recent - 1)


class Heavy(KVPolicy):
    """Heavy hitters alone, no recent tokens."""

    name: ClassVar[str] = "heavy"
    accepts: ClassVar[tuple[str, ...]] = ("heavy", *SHARES, *PROTECTION, "score_decay", *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return self._protecting(self.options.total(prompt_len, gen_len), window=0)


class Local(KVPolicy):
    """The newest tokens alone: also the paper's baseline."""

    name: ClassVar[str] = "local"
    ranks_by: ClassVar[str] = AGE
    accepts: ClassVar[tuple[str, ...]] = ("recent", *SHARES, *COMMON)

    def budget(self, prompt_len: int, gen_len: int) -> RowBudget:
        return RowBudget(self.options.total(prompt_len, gen_len))
