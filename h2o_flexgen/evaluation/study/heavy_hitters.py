"""HeavyHitterStudy: attention statistics of one text under one model, and the tokens that the policies keep at one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from h2o_flexgen.evaluation.study import study_report
from h2o_flexgen.evaluation.study.held_tokens import (
    Gone,
    Held,
    heaviest_found,
    held_after,
    jaccard,
    of_layers,
    still_held,
    survival,
)
from h2o_flexgen.evaluation.study.kept_tokens import Keeper
from h2o_flexgen.evaluation.study.onlooker import ORACLE, Onlooker
from h2o_flexgen.evaluation.study.studied_policies import coding_of, studied_policies
from h2o_flexgen.evaluation.study.study_scores import Array, PowerLaw, fit_power_law, sorted_scores
from h2o_flexgen.evaluation.study.text_reading import OnLayer, TextReading, read_texts
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.positions import of_windows

FEWEST_TOKENS = 16
PROMPT_PART = 4  # by default a quarter of the text is its prompt


@dataclass(frozen=True, eq=False)
class HeavyHitterStudy:
    model: str
    tokens: int
    prompt_len: int
    budget: float  # share of the text
    sparsity: Array  # (layers, heads)
    scores: Array  # (layers, kv_heads, tokens), accumulated, in text order
    gone: Mapping[str, Gone]  # by the oracle and every policy
    captured: Mapping[str, Array]  # shares of the full cache's attention, by the same: (layers, kv_heads)

    @property
    def slots(self) -> int:
        return _slots(self.budget, self.tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """The oracle, then the policies in the order asked for."""
        return tuple(self.gone)

    @cached_property
    def sorted_scores(self) -> Array:
        """The scores of each head, heaviest first."""
        return sorted_scores(self.scores)

    @cached_property
    def laws(self) -> tuple[tuple[PowerLaw, ...], ...]:
        """The power laws of every layer, head by head."""
        return tuple(tuple(fit_power_law(head) for head in layer) for layer in self.sorted_scores)

    @cached_property
    def overlap(self) -> Mapping[tuple[str, str], Array]:
        """How alike two policies' tokens are at the end of the text, for all pairs of names. (layers,)"""
        held = self._held_at_end
        return {(one, other): jaccard(held[one], held[other]) for one, other in product(self.names, self.names)}

    @cached_property
    def heaviest_found(self) -> Mapping[str, Array]:
        """The share of the heaviest tokens, half as many as there are slots, that is held at the end. (layers,)"""
        count = max(1, self.slots // 2)
        return {name: heaviest_found(held, self.scores, count) for name, held in self._held_at_end.items()}

    @cached_property
    def survival(self) -> Mapping[str, Array]:
        """The share of tokens still held at each age. (tokens after the prompt,)"""
        return {name: survival(gone, self.prompt_len) for name, gone in self.gone.items()}

    @property
    def later(self) -> int:
        """Tokens between the two times that `still_held` compares: as many as there are slots, if the text is long enough."""
        return max(1, min(self.slots, (self.tokens - self.prompt_len) // 2))

    @cached_property
    def still_held(self) -> Mapping[str, Array]:
        """The share of tokens held at one time that is held `later` tokens afterwards too. (layers,)"""
        return {name: still_held(gone, self.prompt_len, self.later) for name, gone in self.gone.items()}

    @cached_property
    def _held_at_end(self) -> Mapping[str, Held]:
        return {name: held_after(gone, self.tokens) for name, gone in self.gone.items()}

    def as_json(self) -> dict[str, object]:
        return study_report.as_json(self)

    def lines(self) -> list[str]:
        """The tables for a terminal."""
        return study_report.lines(self)


@torch.inference_mode()
def study(
    llm: LLM,
    ids: Sequence[int],
    policies: Sequence[str] = ("h2o", "snapkv", "tova", "heavy", "local", "random"),
    budget: float = 0.2,
    *,
    prompt_len: int | None = None,
    on_layer: OnLayer | None = None,
) -> HeavyHitterStudy:
    """Studies one text, `ids`; each policy keeps the share `budget` of it. The first `prompt_len` tokens (a quarter of the
    text by default) are a prompt, attended whole and selected from once; the rest is read token by token. A `prompt_len` of 1
    is Algorithm 1 of the paper from the first token on; `snapkv`, which looks at prompts, is then the same as h2o.

    Weights and KV have the codecs of the plan of `llm`; its KV policy does not matter here. `on_layer` is called with the
    number of layers done and the number of all."""
    prompt_len = max(1, len(ids) // PROMPT_PART) if prompt_len is None else prompt_len
    _check_text(llm, ids, prompt_len)
    keepers = _keepers(llm, policies, budget, len(ids), prompt_len)
    onlooker = Onlooker(keepers, _slots(budget, len(ids)), prompt_len)
    readers = [*(keeper.attend for keeper in keepers.values()), onlooker.attend]
    read_texts(llm, [TextReading(ids, attend) for attend in readers], on_layer)
    seen = onlooker.by_layer
    return HeavyHitterStudy(
        model=llm.name,
        tokens=len(ids),
        prompt_len=prompt_len,
        budget=budget,
        sparsity=_array([layer.sparsity for layer in seen]),
        scores=_array([layer.scores for layer in seen]),
        gone={ORACLE: of_layers([layer.foreseen for layer in seen]), **{name: keeper.gone for name, keeper in keepers.items()}},
        captured={name: _array([layer.captured[name] for layer in seen]) for name in (ORACLE, *keepers)},
    )


def _check_text(llm: LLM, ids: Sequence[int], prompt_len: int) -> None:
    spec = llm.spec
    if len(ids) < FEWEST_TOKENS:
        raise ValueError(f"the text to study has {len(ids)} tokens; give one of {FEWEST_TOKENS} or more")
    if len(ids) > spec.seen_positions:
        positions = f"{spec.seen_positions} positions{of_windows(spec)}"
        raise ValueError(f"the text to study has {len(ids)} tokens, but {spec.name} has {positions}; give a shorter one")
    if wrong := [token for token in ids if not 0 <= token < spec.vocab]:
        raise ValueError(f"the text to study has the token id {wrong[0]}; {spec.name} knows 0 to {spec.vocab - 1}")
    if not 0 < prompt_len < len(ids):
        raise ValueError(f"the prompt to study has {prompt_len} tokens of a text of {len(ids)}; give 1 to {len(ids) - 1}")


def _keepers(llm: LLM, names: Sequence[str], budget: float, tokens: int, prompt_len: int) -> Mapping[str, Keeper]:
    """Each policy computes its slots here, so that a budget that is too small is refused before anything is loaded."""
    coding, policies = coding_of(llm), studied_policies(names, budget)
    keepers = {name: Keeper(policy, tokens, prompt_len, coding) for name, policy in policies.items()}
    for keeper in keepers.values():
        _ = keeper.occupancy
    return keepers


def _slots(budget: float, tokens: int) -> int:
    return int(budget * tokens)


def _array(by_layer: Sequence[torch.Tensor]) -> Array:
    return np.asarray(torch.stack([*by_layer]).double().cpu().numpy())
