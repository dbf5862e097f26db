"""HeavyHitterStudy: what a study of attention has found, as tables for a terminal and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from statistics import fmean

import numpy as np
import torch

from h2o_flexgen.calibration.text_reading import OnLayer, TextReading, read_texts
from h2o_flexgen.evaluation.study.readers import (
    ORACLE,
    THRESHOLD,
    Array,
    Gone,
    Held,
    Keeper,
    Onlooker,
    PowerLaw,
    coding_of,
    even_scores,
    fit_power_law,
    heaviest_found,
    held_after,
    jaccard,
    of_layers,
    share_of_heaviest,
    sorted_scores,
    still_held,
    studied_policies,
    survival,
)
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.positions import of_windows

PARTS = (0.05, 0.1, 0.2)  # shares of the tokens, the heaviest first
AGES = (1, 2, 4)  # in multiples of the number of slots
CURVE_POINTS = 64


def slots_of(budget: float, tokens: int) -> int:
    return int(budget * tokens)


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
        return slots_of(self.budget, self.tokens)

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
        return _as_json(self)

    def lines(self) -> list[str]:
        """The tables for a terminal."""
        return [*_of_attention(self), "", *_of_policies(self), "", *_of_overlap(self)]


# -- for a terminal ----------------------------------------------------------------------------------------------------------


def _of_attention(study: HeavyHitterStudy) -> Iterator[str]:
    yield f"attention of {study.model} over {study.tokens} tokens, of which {study.prompt_len} are the prompt"
    parts = [f"top {100 * part:g} %" for part in PARTS]
    rows = [
        [str(layer), percent(study.sparsity[layer].mean()), *_of_curve(study.laws[layer], study.sorted_scores[layer])]
        for layer in range(len(study.sparsity))
    ]
    every_law = [law for laws in study.laws for law in laws]
    rows.append(["all", percent(study.sparsity.mean()), *_of_curve(every_law, study.sorted_scores)])
    even = sorted_scores(even_scores(study.tokens))
    rows.append(["even", "", *_of_curve([fit_power_law(even)], even)])
    yield from table(["layer", "sparsity", "exponent", "r2", *parts], rows)
    yield f"sparsity: entries below {100 * THRESHOLD:g} % of their row's largest; exponent, r2: power law of scores by rank"
    yield "top: of all attention, what the heaviest tokens hold; even: if every query gave the same to all that it sees"


def _of_curve(laws: Sequence[PowerLaw], curves: Array) -> list[str]:
    fitted = [f"{fmean(law.exponent for law in laws):.2f}", f"{fmean(law.r_squared for law in laws):.2f}"]
    return [*fitted, *(percent(share_of_heaviest(curves, part).mean()) for part in PARTS)]


def _of_policies(study: HeavyHitterStudy) -> Iterator[str]:
    yield f"tokens that the policies keep at a budget of {100 * study.budget:g} %, {study.slots} slots"
    ages = [age for age in AGES if age * study.slots < study.tokens - study.prompt_len]
    rows = [
        [
            name,
            percent(study.captured[name].mean()),
            percent(study.heaviest_found[name].mean()),
            percent(study.still_held[name].mean()),
            *(percent(study.survival[name][age * study.slots]) for age in ages),
        ]
        for name in study.names
    ]
    columns = ["policy", "attention", "heaviest", "stays", *(f"after {age * study.slots}" for age in ages)]
    yield from table(columns, rows)
    yield "attention: what is held of what the full cache attends; heaviest: half as many as slots, of the whole text"
    yield f"stays: of what is held, the share that is held {study.later} tokens later too"
    yield "after: of the tokens after the prompt, the share that is still held so many tokens later"


def _of_overlap(study: HeavyHitterStudy) -> Iterator[str]:
    yield "overlap at the end of the text: tokens that both hold, of those that either holds"
    rows = [[one, *(f"{study.overlap[one, other].mean():.2f}" for other in study.names)] for one in study.names]
    yield from table(["", *study.names], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under one another; numbers end where their heading ends."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  ".join(cells).rstrip()


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# -- JSON ------------------------------------------------------------------------------------------------------------------


def _as_json(study: HeavyHitterStudy) -> dict[str, object]:
    """All figures by layer; curves at enough ranks and ages for a picture."""
    ranks = _spread(study.tokens)
    even = sorted_scores(even_scores(study.tokens))
    return {
        "model": study.model,
        "tokens": study.tokens,
        "prompt_len": study.prompt_len,
        "budget": study.budget,
        "slots": study.slots,
        "sparsity": {
            "threshold": THRESHOLD,
            "mean": float(study.sparsity.mean()),
            "by_layer_and_head": study.sparsity.tolist(),
        },
        "accumulated_scores": {
            "power_law_by_layer_and_head": [[asdict(law) for law in laws] for laws in study.laws],
            "held_by_heaviest": {f"{part:g}": share_of_heaviest(study.sorted_scores, part).mean(-1).tolist() for part in PARTS},
            "even": {
                "power_law": asdict(fit_power_law(even)),
                "held_by_heaviest": {f"{part:g}": float(share_of_heaviest(even, part)) for part in PARTS},
            },
            "ranks": [rank + 1 for rank in ranks],
            "mean_curve_by_layer": study.sorted_scores.mean(1)[:, ranks].tolist(),
        },
        "policies": {name: _policy(study, name) for name in study.names},
        "overlap": {
            one: {other: study.overlap[one, other].tolist() for other in study.names if other != one} for one in study.names
        },
    }


def _policy(study: HeavyHitterStudy, name: str) -> dict[str, object]:
    ages = _spread(study.tokens - study.prompt_len)
    return {
        "captured_attention_by_layer": study.captured[name].mean(-1).tolist(),
        "heaviest_found_by_layer": study.heaviest_found[name].tolist(),
        "still_held_later": {"tokens": study.later, "by_layer": study.still_held[name].tolist()},
        "survival": {"ages": ages, "share": study.survival[name][ages].tolist()},
    }


def _spread(count: int) -> list[int]:
    """Places below `count`, close together at first and then farther and farther apart, ending with the last one."""
    places: Iterable[float] = np.geomspace(1, count, CURVE_POINTS)
    return sorted({round(place) - 1 for place in places})


FEWEST_TOKENS = 16
PROMPT_PART = 4  # by default a quarter of the text is its prompt


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
    onlooker = Onlooker(keepers, slots_of(budget, len(ids)), prompt_len)
    readers = [*(keeper.attend for keeper in keepers.values()), onlooker.attend]
    read_texts(llm.loaded.reading, [TextReading(ids, attend) for attend in readers], on_layer)
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


def _array(by_layer: Sequence[torch.Tensor]) -> Array:
    return np.asarray(torch.stack([*by_layer]).double().cpu().numpy())
