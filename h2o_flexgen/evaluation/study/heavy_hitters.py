"""HeavyHitterStudy: the attention statistics of one text under one model, and whom the policies keep of it at one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from h2o_flexgen.evaluation.study import foresight, report
from h2o_flexgen.evaluation.study.kept import Gone, Keeper, held_after
from h2o_flexgen.evaluation.study.onlooker import LayerSeen, Onlooker
from h2o_flexgen.evaluation.study.overlap import Held, heaviest_found, jaccard
from h2o_flexgen.evaluation.study.persistence import still_held, survival
from h2o_flexgen.evaluation.study.reading import OnLayer, read_text
from h2o_flexgen.evaluation.study.scores import Array, PowerLaw, fit_power_law, sorted_scores
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan

FEWEST_TOKENS = 16
PROMPT_PART = 4  # unless it is said otherwise, so many'th of the text is its prompt


@dataclass(frozen=True, eq=False)
class HeavyHitterStudy:
    model: str
    tokens: int
    prompt_len: int
    budget: float  # share of the text
    sparsity: Array  # (layers, heads)
    scores: Array  # (layers, kv_heads, tokens), accumulated, in the order of the text
    gone: Mapping[str, Gone]  # of the oracle and of every policy
    captured: Mapping[str, Array]  # the same: (layers, kv_heads), shares of the full cache's attention

    @property
    def slots(self) -> int:
        return _slots(self.budget, self.tokens)

    @property
    def names(self) -> tuple[str, ...]:
        """The oracle, and the policies in the order that they were asked for."""
        return tuple(self.gone)

    @cached_property
    def sorted_scores(self) -> Array:
        """Heaviest first."""
        return sorted_scores(self.scores)

    @cached_property
    def laws(self) -> tuple[tuple[PowerLaw, ...], ...]:
        """Of every layer, head by head."""
        return tuple(tuple(fit_power_law(head) for head in layer) for layer in self.sorted_scores)

    @cached_property
    def overlap(self) -> Mapping[tuple[str, str], Array]:
        """At the end of the text, for all pairs of names. (layers,)"""
        held = self._held_at_end
        return {(one, other): jaccard(held[one], held[other]) for one, other in product(self.names, self.names)}

    @cached_property
    def heaviest_found(self) -> Mapping[str, Array]:
        """Of as many of the heaviest tokens as half of the slots, the share that is held at the end. (layers,)"""
        count = max(1, self.slots // 2)
        return {name: heaviest_found(held, self.scores, count) for name, held in self._held_at_end.items()}

    @cached_property
    def survival(self) -> Mapping[str, Array]:
        """(tokens behind the prompt,)"""
        return {name: survival(gone, self.prompt_len) for name, gone in self.gone.items()}

    @property
    def later(self) -> int:
        """Tokens between the two times that `still_held` compares: as many as there are slots, where the text is so long."""
        return max(1, min(self.slots, (self.tokens - self.prompt_len) // 2))

    @cached_property
    def still_held(self) -> Mapping[str, Array]:
        """(layers,)"""
        return {name: still_held(gone, self.prompt_len, self.later) for name, gone in self.gone.items()}

    @cached_property
    def _held_at_end(self) -> Mapping[str, Held]:
        return {name: held_after(gone, self.tokens) for name, gone in self.gone.items()}

    def as_json(self) -> dict[str, object]:
        return report.as_json(self)

    def lines(self) -> list[str]:
        """For a terminal."""
        return report.lines(self)


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
    """`ids` is one text. Of it each policy keeps the share `budget`. The first `prompt_len` tokens (a quarter of the text, if
    nothing is said) are a prompt, attended whole and selected from once; the rest is read token by token. With 1 that is
    Algorithm 1 of the paper from the first token on, and `snapkv`, which looks at prompts, is then h2o.

    Codecs of weights and KV are those of the plan of `llm`; its KV policy does not count here. `on_layer` gets the layers
    that are done and their number."""
    prompt_len = max(1, len(ids) // PROMPT_PART) if prompt_len is None else prompt_len
    _check_text(llm, ids, prompt_len)
    keepers = _keepers(llm, policies, budget, len(ids), prompt_len)
    onlooker = Onlooker(keepers, _slots(budget, len(ids)), prompt_len)
    read_text(llm, ids, [*(keeper.attend for keeper in keepers.values()), onlooker.attend], on_layer)
    seen = onlooker.by_layer
    return HeavyHitterStudy(
        model=llm.name,
        tokens=len(ids),
        prompt_len=prompt_len,
        budget=budget,
        sparsity=np.stack([_array(layer.sparsity) for layer in seen]),
        scores=np.stack([_array(layer.scores) for layer in seen]),
        gone={foresight.NAME: _foreseen(seen), **{name: keeper.gone for name, keeper in keepers.items()}},
        captured={name: np.stack([_array(layer.captured[name]) for layer in seen]) for name in (foresight.NAME, *keepers)},
    )


def _check_text(llm: LLM, ids: Sequence[int], prompt_len: int) -> None:
    spec = llm.spec
    if len(ids) < FEWEST_TOKENS:
        raise ValueError(f"the text to study has {len(ids)} tokens; give one of {FEWEST_TOKENS} or more")
    if len(ids) > spec.max_positions:
        raise ValueError(
            f"the text to study has {len(ids)} tokens, but {spec.name} has {spec.max_positions} positions; give a shorter one"
        )
    if wrong := [token for token in ids if not 0 <= token < spec.vocab]:
        raise ValueError(f"the text to study has the token id {wrong[0]}; {spec.name} knows 0 to {spec.vocab - 1}")
    if not 0 < prompt_len < len(ids):
        raise ValueError(f"the prompt to study has {prompt_len} tokens of a text of {len(ids)}; give 1 to {len(ids) - 1}")


def _keepers(llm: LLM, names: Sequence[str], budget: float, tokens: int, prompt_len: int) -> Mapping[str, Keeper]:
    """Each is asked for its slots here, so that a budget that is too small is met before anything is loaded."""
    coding = Coding(llm.spec.kv_codec, getattr(torch, llm.spec.dtype), llm.spec.head_dim)
    keepers: dict[str, Keeper] = {}
    for name in names:
        policy = Plan.create(kv_policy=name, kv_budget=None if name == "full" else budget).policy
        if policy.keeps_all:
            raise ValueError(f"kv_policy {name!r} keeps everything, and there is nothing to study; name policies that evict")
        if name in keepers:
            raise ValueError(f"kv_policy {name!r} is named twice; name it once")
        keepers[name] = Keeper(policy, tokens, prompt_len, coding)
        _ = keepers[name].slots
    if not keepers:
        raise ValueError("no KV policy to study was named; name one or more")
    return keepers


def _slots(budget: float, tokens: int) -> int:
    return int(budget * tokens)


def _array(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.double().cpu().numpy())


def _foreseen(seen: Sequence[LayerSeen]) -> Gone:
    return np.asarray(torch.stack([layer.foreseen for layer in seen]).cpu().numpy(), dtype=np.int32)
