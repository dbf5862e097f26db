"""Agreement with the full cache: its greedy tokens are given to every other setting, one by one, and compared with what that
setting would have said. This needs no labels, so it works with any model and any text.

The full cache has KV and weights uncompressed: what fewer bits change counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from h2o_flexgen.evaluation.cells import Figure, mean
from h2o_flexgen.evaluation.tasks.task import EXAMPLES, Advance, Bound, EvaluationTask, Shown, Size, in_blocks, window_of
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.given_texts import checksum, windows

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_flexgen.evaluation.tasks.full_cache import FullCache
    from h2o_flexgen.llm import LLM
    from h2o_flexgen.sampling.completion import Completion

    Put = Callable[[int, int, Tensor], None]  # row, number of the token, its logits


@dataclass(frozen=True)
class Agreement(EvaluationTask):
    name: ClassVar[str] = "agreement"
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown("equal", "share of tokens that the full cache says too", True, None, True),
        Shown("kl", "KL (full, policy) per token, in nats", False, None),
        Shown("until_first", "share of tokens before the first that differs", True, None, True),
    )

    def bind(self, llm: LLM) -> BoundAgreement:
        window = window_of(self.asked.window, llm)
        gen_len = min(self.asked.gen_len, window // 2)
        found = windows(self.asked.texts, llm.tokenizer, window, self.asked.examples or EXAMPLES).ids
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
            for row, completion in self._generated(llm, advance, full.put):
                full.tokens[row] = completion.token_ids
        except BaseException:
            full.close()
            raise
        return full

    def measure(self, llm: LLM, advance: Advance, reference: FullCache | None) -> tuple[Figure, ...]:
        from h2o_flexgen.evaluation.tasks.full_cache import Comparison  # imports torch

        assert reference is not None
        compared = Comparison(reference, len(self.prompts), self.gen_len)
        self._generated(llm, advance, compared.put, reference.tokens)
        return tuple(mean(name, values) for name, values in compared.by_row.items())

    def _generated(
        self, llm: LLM, advance: Advance, put: Put, forced: Sequence[tuple[int, ...]] | None = None
    ) -> list[tuple[int, Completion]]:
        """What follows each prompt, with its row; `put` is given the logits of every token."""
        done: list[tuple[int, Completion]] = []
        for rows in in_blocks(self.prompts, llm.plan.block_size):

            def told(place: int, number: int, logits: Tensor, rows: Sequence[int] = rows) -> None:
                put(rows[place], number, logits)
                advance(1)

            own = None if forced is None else [forced[row] for row in rows]
            done += zip(rows, llm.generate([self.prompts[row] for row in rows], self._greedy, forced=own, on_logits=told))
        return done
