"""What is promised between the kernels and their twins in torch: a plan says the same with either, until a near tie is decided
the other way.

The two sum in another order, so their values differ in the last bits. Such a difference stays as small as it is until somebody
rounds or chooses: a value of 4 bits or of 8 that lay on the border of two codes, or a token whose score was that of another
one to the last bits. From there on a text may go another way. So both runs write down every such decision with what it was
made of: where they first part, what it was made of must be the same to the last bits, and the twin must decide as the kernel
did when it is handed the kernel's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import EXACT, TORCH
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import native
from h2o_flexgen.kernels.evict import Notes, evict_twin, weighed
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.group_codes import group_encode_twin
from h2o_flexgen.kernels.int8_product import Int8Rows, int8_rows_twin
from h2o_flexgen.kernels.routing import Chosen, RouterRule, RouterScores, route_twin
from h2o_flexgen.kv import slots
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models import mixture
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from tests.helpers.contract import POLICIES, Case, Checkpoints
from tests.helpers.samples import first_of
from tests.whole.test_fuzz import NEAR, random_case

H2O = [policy for policy in POLICIES if policy and policy[0] == ("kv_policy", "h2o")]
ROUNDING = "a factor in 8 bits"
LAST_BITS = 3e-5  # of the largest value: a few dozen roundings of float32, one behind the other


@dataclass(frozen=True)
class Decision:
    what: str
    made_of: Tensor  # in float32
    outcome: Tensor
    by_the_twin: Tensor  # made of the same

    @property
    def is_of_experts(self) -> bool:
        """Whether rows that were gathered for experts were rounded; others lie row by token."""
        return self.what == ROUNDING and self.made_of.dim() == 2

    @property
    def width(self) -> int:
        return self.made_of.shape[-1]

    def is_as_made_as(self, other: Decision) -> bool:
        """Up to the last bits, from the same."""
        if self.made_of.shape != other.made_of.shape:
            return False
        largest = self.made_of.abs().nan_to_num(posinf=0.0).max() if self.made_of.numel() else 0.0
        return bool(((self.made_of - other.made_of).abs().nan_to_num() <= LAST_BITS * largest).all())


def of_encoding(decisions: list[Decision], encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def encoding(self: Coding, values: Tensor) -> Tensor:
        kept = encode(self, values)
        twin = torch.empty_like(kept).view(-1, kept.shape[-1])
        group_encode_twin(FORMATS[self.format], values.reshape(-1, values.shape[-1]), twin)  # type: ignore[arg-type]
        decisions.append(Decision("encoding", values.float().clone(), kept.clone(), twin.view_as(kept)))
        return kept

    return encoding


def of_rounding(decisions: list[Decision], made: Callable[..., Any]) -> Callable[..., Any]:
    """What the factor of matrices becomes in 8 bits, once for all that it is multiplied with."""

    def making(self: Factor, function: Callable[..., Any], *runs: Any) -> Any:
        known = len(self._made)
        outcome = made(self, function, *runs)
        if len(self._made) > known and isinstance(outcome, Int8Rows):
            codes, twin = outcome.codes.clone(), int8_rows_twin(self.values).codes
            decisions.append(Decision(ROUNDING, self.values.float().clone(), codes, twin))
        return outcome

    return making


def of_eviction(decisions: list[Decision], evict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def evicting(image: Tensor, notes: Notes, *rest: Any) -> Tensor:
        noted = Notes(*(each.clone() if isinstance(each, Tensor) else each for each in notes))
        twin = evict_twin(image.clone(), noted, *rest)
        target = evict(image, notes, *rest)
        ranks = weighed(notes.scores, notes.worth)
        made_of = noted.positions.float() if ranks is None else ranks.clone()  # in layers with a window the oldest goes
        decisions.append(Decision("what goes", made_of, target.clone(), twin))
        return target

    return evicting


def of_prompt(decisions: list[Decision], best: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch chooses with and without kernels, so it is its own twin."""

    def choosing(self: SlotScores, now: KVStep, positions: Tensor, exists: Tensor, *known: Tensor | None) -> Tensor:
        made_of = self._rank(positions, *known).masked_fill(~exists, 0.0)
        chosen = best(self, now, positions, exists, *known)
        decisions.append(Decision("what is kept of a prompt", made_of, chosen.clone(), chosen.clone()))
        return chosen

    return choosing


def of_tokens(decisions: list[Decision], sample: Callable[..., Any]) -> Callable[..., Any]:
    def sampling(self: Sampler, logits: Tensor, *rest: Any) -> Any:
        tokens = logits.argmax(-1)
        decisions.append(Decision("the next token", logits.clone(), tokens, tokens))
        return sample(self, logits, *rest)

    return sampling


def of_experts(decisions: list[Decision], route: Callable[..., None]) -> Callable[..., None]:
    def routing(scored: RouterScores, rule: RouterRule, out: Chosen, total: Tensor) -> None:
        twin = Chosen(*(torch.empty_like(part) for part in out))
        route_twin(scored, rule, twin, None)
        route(scored, rule, out, total)
        decisions.append(Decision("which experts", scored.scores.float().clone(), out.numbers.clone(), twin.numbers))

    return routing


@contextmanager
def written_down() -> Iterator[list[Decision]]:
    decisions: list[Decision] = []
    with (
        patch.object(Coding, "encode", of_encoding(decisions, Coding.encode)),
        patch.object(Factor, "made", of_rounding(decisions, Factor.made)),
        patch.object(Factor, "arranged", of_rounding(decisions, Factor.arranged)),
        patch.object(slots, "evict", of_eviction(decisions, slots.evict)),
        patch.object(SlotScores, "_best", of_prompt(decisions, SlotScores._best)),
        patch.object(mixture, "route", of_experts(decisions, mixture.route)),
        patch.object(Sampler, "sample", of_tokens(decisions, Sampler.sample)),
    ):
        yield decisions


def decisions_of(case: Case, checkpoints: Checkpoints, offload: Path) -> tuple[list[Decision], list[tuple[int, ...]]]:
    with case.open(checkpoints, offload, graphs="off") as llm, written_down() as decisions:
        completions = llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len, ignore_eos=True))
    return decisions, [tuple(completion.token_ids) for completion in completions]


def together(decisions: Iterable[Decision]) -> list[Decision]:
    """Kernels round the rows of several experts in one call, twins expert by expert: one after the other is one decision. Twins
    round the rows of a head again for each of its parts."""
    found: list[Decision] = []
    before: Decision | None = None
    for one in decisions:
        if before is not None and before.what == one.what == ROUNDING and torch.equal(before.made_of, one.made_of):
            continue
        before = one
        if found and all(each.is_of_experts for each in (found[-1], one)) and found[-1].width == one.width:
            last = found.pop()
            pairs = (last.made_of, one.made_of), (last.outcome, one.outcome), (last.by_the_twin, one.by_the_twin)
            one = Decision(ROUNDING, *map(torch.cat, pairs))
        found.append(one)
    return found


def first_that_part(mine: Sequence[Decision], twins: Sequence[Decision]) -> tuple[Decision, Decision] | None:
    for one, other in zip(mine, twins):
        assert one.what == other.what
        if not torch.equal(one.outcome, other.outcome):
            return one, other
        assert one.is_as_made_as(other), f"{one.what} is the same, but what it was made of is not"
    return None


def hold(seed: int, checkpoints: Checkpoints, offload: Path) -> str | None:
    """Says what the two parted at, if they did."""
    random = Random(seed)
    drawn = replace(random_case(random, ["cpu"]), stored="float32", policy=random.choice(H2O), kv_codec="group4")
    if drawn.kind in NEAR:
        drawn = replace(drawn, kind="qwen3")
    if drawn.weight_codec == PLAIN:  # of a form in which the checkpoint no longer is
        drawn = replace(drawn, compute=EXACT)
    case = replace(drawn, lengths=tuple(random.randint(2, 30) for _ in drawn.lengths), gen_len=random.randint(6, 16))
    mine, tokens = decisions_of(case, checkpoints, offload)
    with patch.object(native, "_loaded", lambda: (native.TORCH, None)):
        twins, twin_tokens = decisions_of(case, checkpoints, offload)
    parted = first_that_part(together(mine), together(twins))
    if parted is None:
        assert tokens == twin_tokens, f"seed {seed}: Case({case})"
        return None
    one, other = parted
    assert one.is_as_made_as(other), f"seed {seed}: {one.what} was made of other values. Case({case})"
    for each in parted:
        assert torch.equal(each.outcome, each.by_the_twin), f"seed {seed}: {one.what} depends on which decides. Case({case})"
    return f"{one.what}, {'the same' if tokens == twin_tokens else 'other'} tokens"


needs_kernels = pytest.mark.skipif(native.in_use() == TORCH, reason="no kernels were built")


@needs_kernels
@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_with_or_without_kernels_a_plan_says_the_same_until_a_near_tie(
    seed: int, checkpoints: Checkpoints, offload: Path
) -> None:
    hold(seed, checkpoints, offload)


@needs_kernels
@pytest.mark.fuzz
def test_many_more_plans_with_and_without_kernels(fuzz_seed: int, checkpoints: Checkpoints, offload: Path) -> None:
    print(f"seed {fuzz_seed}: parted at {hold(fuzz_seed, checkpoints, offload)}")


def test_what_was_made_of_other_values_is_no_near_tie() -> None:
    values = torch.tensor([1.0, 2.0])
    one = Decision("encoding", values, torch.tensor([1]), torch.tensor([1]))
    near, far = replace(one, made_of=values + 1e-6), replace(one, made_of=values + 1e-3)
    assert one.is_as_made_as(near) and not one.is_as_made_as(far)
    assert first_that_part([one], [near]) is None
    with pytest.raises(AssertionError):
        first_that_part([one], [far])
