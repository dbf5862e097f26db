"""The options that an LLM is given by name: a plan, or options that make one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature

from h2o_flexgen.checkpoints.model_places import file_beside
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.core.option import by_own_names
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements, refuse_to_search_pipelines
from h2o_flexgen.planning.search import BUFFERS
from h2o_flexgen.policies import head_budgets
from h2o_flexgen.policies.head_budgets import OWN, HeadBudgets, read_head_budgets
from h2o_flexgen.sampling.foreign_options import OPTIONS

HEAD_BUDGETS, PROBE = "head_budgets", "probe"  # options of plans that may be named by a file


def asked_plan(
    plan: Plan | None,
    percent: Sequence[float] | str | None,
    options: Mapping[str, object],
    other_names: Sequence[str],
    model: str,
) -> Plan:
    """The given plan, or one made of the options; its shares mean nothing if a plan is to be found."""
    refuse_unknown("option", options, [*Plan.option_names(), *other_names], OPTIONS)
    if isinstance(percent, str) and percent != AUTO:
        raise ValueError(f"percent is {shown(percent)}; give six numbers, or {AUTO!r} to have a plan found")
    if plan is None:
        asked = Plan.create(**{**options, **named_by_files(options, model)})
        return asked if percent is None or isinstance(percent, str) else asked.with_percent(percent)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a {type(plan).__name__}; give a Plan, or leave it out and name its options here")
    if other := next(iter([*options, *(["percent"] if percent is not None else [])]), None):
        raise ValueError(f"both plan and {other} are given; put {other} into the plan, or leave the plan out")
    return plan


def named_by_files(options: Mapping[str, object], model: str) -> dict[str, object]:
    """Those of the options that may be named by a file, as plans take them."""
    readers: Mapping[str, Callable[[object, str], object]] = {HEAD_BUDGETS: head_budgets_of, PROBE: probe_of}
    return {name: read(options[name], model) for name, read in readers.items() if options.get(name) is not None}


def probe_of(given: object, model: str) -> Probe:
    """A probe itself, that of a file, or the one that lies beside the model."""
    if isinstance(given, Probe):
        return given
    from h2o_flexgen.checkpoints.probe_file import FILE, read_probe

    if given == OWN:
        return read_probe(file_beside(model, FILE, "is no probe", "--probe"))
    if isinstance(given, (str, os.PathLike)):
        return read_probe(given)
    raise ValueError(f"probe is a {type(given).__name__}; give a Probe, the path of a file, or {OWN!r}")


def head_budgets_of(given: object, model: str) -> HeadBudgets:
    """Head budgets themselves, those of a file, or those that lie beside the model."""
    if isinstance(given, HeadBudgets):
        return given
    if given == OWN:
        return read_head_budgets(file_beside(model, head_budgets.FILE, "are no head budgets", "--output"))
    if isinstance(given, (str, os.PathLike)):
        return read_head_budgets(given)
    raise ValueError(f"head_budgets is a {type(given).__name__}; give HeadBudgets, the path of a file, or {OWN!r}")


def arguments_of(function: Callable[..., object]) -> list[str]:
    """The arguments that the function names."""
    return [name for name, one in signature(function).parameters.items() if one.kind is not Parameter.VAR_KEYWORD]


def what_is_searched(plan: Plan, options: Mapping[str, object]) -> PlanRequirements:
    """The sizes that are searched: those that were given are kept."""
    refuse_to_search_pipelines(plan)
    sizes, batches = ((getattr(plan, name),) if name in options else () for name in ("gpu_batch_size", "num_gpu_batches"))
    return PlanRequirements(plan, sizes, batches, buffers=() if "buffers" in by_own_names(options, Plan) else BUFFERS)


def adapters_of(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """The folders of adapters, each with its weight behind it, of one or of several."""
    each = [given] if given is None or isinstance(given, (str, os.PathLike)) else [*given]
    return tuple(name_of("adapter", one) for one in each if one is not None)


def name_of(what: str, given: object) -> str:
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"{what} is a {type(given).__name__}; give a name on the hub, or a folder")
    return str(given)
