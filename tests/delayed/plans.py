"""The plans that are tried where lanes are late: those in which any two choices of the contract meet, as far as they go; those
with graphs; those of models with experts, windows and caps; those in which several devices compute; and those in which steps
choose what they attend. Texts are held to forms where llguidance is installed. Without a GPU a few plans stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice

from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.table import PLAIN
from tests.helpers.contract import BY_HEAD, POLICIES, WEIGHTS, Case
from tests.helpers.pairwise import covering
from tests.whole.test_contract import CHOICES, LIKE_OTHERS

STAYING, MOVING = (100, 0, 100, 0, 100, 0), (0, 50, 100, 0, 100, 0)  # all weights are there, or come through buffers
MOST = 60  # plans of the contract


@dataclass(frozen=True)
class Planned:
    """`limits`: the tokens of each row, where not all have as many. `streams`: rows take the places of others."""

    case: Case
    limits: tuple[int, ...] = ()
    streams: bool = False
    has_graphs: bool = False

    @property
    def is_pipeline(self) -> bool:
        return dict(self.case.policy).get("pipeline", 1) > 1

    @property
    def graphs(self) -> str:
        return "on" if self.has_graphs else "off"

    def __str__(self) -> str:
        more = [f"limits={self.limits}"] * bool(self.limits) + ["streams"] * self.streams + ["graphs"] * self.has_graphs
        return ", ".join([str(self.case), *more])


def of_the_contract() -> list[Planned]:
    choices = {**CHOICES, "kind": (*CHOICES["kind"], *LIKE_OTHERS)}
    return [Planned(Case(**values)) for values in islice(covering(choices, seed=7), MOST)]


def with_graphs() -> list[Planned]:
    policies, found = (*POLICIES[:3], *POLICIES[6:10], *BY_HEAD[:2], POLICIES[12]), list[Planned]()
    for place, policy in enumerate(policies):
        format, product = WEIGHTS[place % len(WEIGHTS)]
        case = Case(
            ("opt", "llama-gqa", "neox-parallel", "gemma3")[place % 4],
            (STAYING, MOVING)[place // 2 % 2],
            (5, 9, 2, 7),
            8,
            schedule=("zigzag", "row_by_row", "flexgen_barrier")[place % 3],
            policy=policy,
            weight_codec=format,
            compute=product,
            kv_codec=("plain", "group4")[place // 2 % 2],
        )
        found.append(Planned(case, has_graphs=True))
    for percent in (STAYING, MOVING):
        leaving = Case("llama-gqa", percent, (5, 9, 2, 7), gpu_batch_size=4, sep_layer=False, policy=POLICIES[1])
        found.append(Planned(leaving, (24, 3, 9, 16), has_graphs=True))
        joining = Case("opt", percent, (5, 9, 2, 7, 4, 6), num_gpu_batches=1)
        found.append(Planned(joining, (12, 7, 12, 8, 9, 10), streams=True, has_graphs=True))
    return found


def of_other_models() -> list[Planned]:
    """Experts and windows, windows and caps on scores, experts alone: what can be captured of them is."""
    found = list[Planned]()
    for place, kind in enumerate(("gpt-oss", "gemma2", "olmoe") * 2):
        format, product = WEIGHTS[place % len(WEIGHTS)]
        case = Case(
            kind,
            (MOVING, STAYING)[place % 2],
            (5, 9, 2, 7),
            8,
            policy=POLICIES[(1, 0, 3)[place % 3]],
            weight_codec=format,
            compute=product,
            kv_codec=(PLAIN, "group4")[place // 3],
        )
        found.append(Planned(case, has_graphs=True))
    return found


def of_pipelines() -> list[Planned]:
    """What one device makes, another one goes on with: the weights of both move, or stay."""
    places = (MOVING, (0, 100, 100, 0, 100, 0), STAYING, (0, 50, 0, 100, 100, 0))
    return [
        Planned(
            Case(
                ("opt", "llama-gqa")[number % 2],
                percent,
                (5, 9, 2),
                6,
                gpu_batch_size=1,
                num_gpu_batches=2 + number % 2,
                policy=(("pipeline", 2), *POLICIES[number]),
                prefill_tokens=(1024, 12)[number // 2],
            )
        )
        for number, percent in enumerate(places)
    ]


def of_choosing_steps() -> list[Planned]:
    """Steps that attend a share of what is kept, or of what a policy has left: on the device, also as graphs, where the
    processor attends, and where the device brings what they choose from the host, or from the disk.
    None has rows that come and go: a GPU gives rows other last bits when they are alone, and 4 bits may round them apart."""
    usual = Case("llama-gqa", STAYING, (45, 30, 62), 6, policy=(("kv_recall", 0.5),))
    beside = replace(usual, percent=(100, 0, 0, 100, 100, 0), attend_on=HOST)
    evicting = (("kv_policy", "h2o"), ("kv_budget", 0.7), *usual.policy)
    return [
        Planned(usual),
        Planned(replace(usual, kv_codec="group4", num_gpu_batches=1)),
        Planned(replace(beside, kind="opt", policy=evicting)),
        Planned(replace(beside, gpu_batch_size=4, prefill_tokens=40)),
        Planned(replace(beside, attend_on=DEVICE)),
        Planned(replace(beside, attend_on=DEVICE, kv_codec="group4", policy=evicting, percent=(50, 50, 30, 70, 100, 0))),
        Planned(replace(beside, attend_on=DEVICE, percent=(100, 0, 0, 0, 100, 0))),
        Planned(replace(beside, attend_on=DEVICE, kind="opt", policy=evicting, percent=(50, 50, 20, 30, 100, 0))),
        Planned(usual, has_graphs=True),
        Planned(replace(usual, kind="opt", percent=MOVING, kv_codec="group4", policy=evicting), has_graphs=True),
    ]


def for_a_trial() -> list[Planned]:
    """One that fetches nothing ahead, so that tasks are forgotten before others need them; and one with graphs."""
    home = (0, 100, 0, 100, 0, 100)
    forgetting = Case("opt", home, (5, 9), 8, num_gpu_batches=1, sep_layer=False, overlap=False)
    return [Planned(forgetting), Planned(replace(forgetting, percent=(0, 100, 100, 0, 100, 0)), has_graphs=True)]


def on_a_gpu() -> Sequence[Planned]:
    found = [*of_the_contract(), *with_graphs(), *of_other_models(), *of_pipelines(), *of_choosing_steps()]
    return found if find_spec("llguidance") else [replace(one, case=replace(one.case, held=())) for one in found]
