"""Agreement with the full cache: its greedy tokens are given to every other setting, one by one, and compared with what that
setting would have said. This needs no labels, so it works with any model and any text.

The full cache has KV and weights uncompressed: what fewer bits change counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.evaluation.figures import Figure, mean
from h2o_flexgen.evaluation.tasks.task import EXAMPLES, Advance, Asked, Bound, Shown, Size, Task, in_blocks, window_of
from h2o_flexgen.evaluation.texts import Text, checksum, windows
from h2o_flexgen.sampling.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM


@dataclass(frozen=True)
class Agreement(Task):
    texts: tuple[Text, ...]
    window: int | None
    examples: int
    gen_len: int

    name: ClassVar[str] = "agreement"
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown("equal", "share of tokens that the full cache says too", True, None, True),
        Shown("kl", "KL (full, policy) per token, in nats", False, None),
        Shown("until_first", "share of tokens before the first that differs", True, None, True),
    )

    @classmethod
    def of(cls, asked: Asked) -> Agreement:
        return cls(asked.texts, asked.window, asked.examples or EXAMPLES, asked.gen_len)

    def bind(self, llm: LLM) -> BoundAgreement:
        window = window_of(self.window, llm)
        gen_len = min(self.gen_len, window // 2)
        found = windows(self.texts, llm.tokenizer, window, self.examples).ids
        return BoundAgreement(tuple(ids[: window - gen_len] for ids in found), gen_len, llm.spec.vocab)


@dataclass(frozen=True)
class BoundAgreement(Bound):
    prompts: tuple[tuple[int, ...], ...]
    gen_len: int
    vocab: int

    needs_reference: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        return len(self.prompts) * self.gen_len

    @property
    def sizes(self) -> tuple[Size, ...]:
        return ((len(self.prompts[0]), self.gen_len),)

    @property
    def identity(self) -> Mapping[str, object]:
        return {"prompts": checksum(self.prompts), "count": len(self.prompts), "gen_len": self.gen_len}

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{len(self.prompts)} prompts of {len(self.prompts[0])} tokens, {self.gen_len} are generated for each",)

    @property
    def _greedy(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.gen_len, ignore_eos=True)

    def refer(self, llm: LLM, folder: Path, advance: Advance) -> FullCache:
        from h2o_flexgen.evaluation.tasks.full_cache import FullCache  # imports torch

        full = FullCache(len(self.prompts), self.gen_len, self.vocab, folder)
        try:
            for rows in self._blocks(llm):

                def put(place: int, number: int, logits: Tensor, rows: Sequence[int] = rows) -> None:
                    full.put(rows[place], number, logits)
                    advance(1)

                prompts = [self.prompts[row] for row in rows]
                for row, completion in zip(rows, llm.generate(prompts, self._greedy, on_logits=put)):
                    full.tokens[row] = completion.token_ids
        except BaseException:
            full.close()
            raise
        return full

    def _blocks(self, llm: LLM) -> list[list[int]]:
        return in_blocks([len(prompt) for prompt in self.prompts], llm.plan.block_size)

    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]:
        from h2o_flexgen.evaluation.tasks.full_cache import Comparison  # imports torch

        assert reference is not None
        compared = Comparison(reference, len(self.prompts), self.gen_len)
        for rows in self._blocks(llm):

            def put(place: int, number: int, logits: Tensor, rows: Sequence[int] = rows) -> None:
                compared.put(rows[place], number, logits)
                advance(1)

            prompts = [self.prompts[row] for row in rows]
            forced = [reference.tokens[row] for row in rows]
            llm.generate(prompts, self._greedy, forced=forced, on_logits=put)
        values = {"equal": compared.equal, "kl": compared.lost, "until_first": compared.until_first}
        return tuple(mean(name, value) for name, value in values.items())
