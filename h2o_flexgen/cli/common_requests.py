"""The parts of a request that commands share: which model, where it runs, which plan, how it samples. Each is read once from
the flags, and nothing is set afterwards. Nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.cli.flags import DUMMY_PATH
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.option import options_of
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.formats.kernel_table import INT8
from h2o_flexgen.formats.table import BY_BITS
from h2o_flexgen.planning.machine import Machine, find_machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements, refuse_to_search_pipelines
from h2o_flexgen.planning.search import BUFFERS, THROUGHPUT
from h2o_flexgen.policies.by_attention import H2O
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import EQUAL
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.policies.recall import RECALLED
from h2o_flexgen.sampling.params import SAMPLING, LoRARequest, SamplingParams
from h2o_flexgen.session.open_request import (
    HEAD_BUDGETS,
    PROBE,
    ModelRequest,
    SiteRequest,
    loras_of,
    measures_heads,
    named_by_files,
    refuse_other_device,
    with_known_heads,
)

DEMO_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 0}  # sampling of the package's own model by default
BITS = 4  # bits of the codec that --allow-4bit allows
GPUS, PIPELINE = "--gpus", "--pipeline"
WHERE_FOUND = f"where --percent is {AUTO}"  # of flags of a search
PACK = "--compress-weight (4 bits) or --compress-weight 8"


# -- the model -------------------------------------------------------------------------------------------------------------


def model_of(flags: Namespace) -> ModelRequest:
    found = choose_model(flags.model, flags.path, flags.dummy_weights)
    own = replace(found, dtype=flags.dtype, tokenizer=getattr(flags, "tokenizer", AUTO), adapter=tuple(flags.adapter))
    made = replace(own, lora_modules=loras_of(getattr(flags, "lora_modules", ()), "--lora"))
    asked = {HEAD_BUDGETS: getattr(flags, HEAD_BUDGETS, EQUAL)}  # of commands that run a plan
    return replace(made, measures_heads=measures_heads(asked, made.dummy_weights, made.adapter))


def choose_model(model: str | None, path: str | None, dummy_weights: bool) -> ModelRequest:
    dummy_weights = dummy_weights or path == DUMMY_PATH
    if path is None or dummy_weights:
        name = model or path or ""
        return ModelRequest(name, name, dummy_weights)
    folder = _folder_in(local_path(path), model)
    return ModelRequest(model or folder.name, str(folder), dummy_weights)


def _folder_in(path: Path, model: str | None) -> Path:
    """`<path>/<name>`, the same without the owner's name, or `<path>` itself, which may also be a GGUF file."""
    if is_gguf(path):
        return path
    inside = [path / model, path / model.rpartition("/")[2]] if model else []
    for folder in (*inside, path):
        if (folder / "config.json").is_file():
            return folder
    places = " or ".join(str(folder) for folder in dict.fromkeys((*inside, path)))
    raise ValueError(f"--path {path} has no checkpoint: there is no config.json in {places}")


def adapter_of_all(model: ModelRequest) -> LoRARequest | None:
    """The adapter of --lora, where all rows have the same."""
    (name, place), *others = dict.fromkeys(model.lora_modules) or [("", "")]
    if others:
        named = f"--lora is {name}={place} and {'='.join(others[0])}"
        raise ValueError(
            f"{named}, and all texts have one adapter here; give one, or merge several: --adapter PATH, once for each"
        )
    return LoRARequest(name, lora_path=place) if name else None


# -- where it runs ---------------------------------------------------------------------------------------------------------


def site_of(flags: Namespace) -> SiteRequest:
    """The site that the flags ask for. A command without some flag leaves that open."""
    names = [one.name for one in fields(SiteRequest)]
    if getattr(flags, "gpus", 1) > 1 and ":" in flags.device:
        raise ValueError(
            f"--device {flags.device} is one, and {GPUS} {flags.gpus} takes as many from the first on; leave one out"
        )
    if getattr(flags, "gpus", 1) > 1 and getattr(flags, "pipeline", 1) > 1:
        processes = f"{GPUS} {flags.gpus} starts processes with a GPU each"
        raise ValueError(f"{processes}, and {PIPELINE} {flags.pipeline} has one process use several; leave one of them out")
    return SiteRequest(**{name: getattr(flags, name) for name in names if hasattr(flags, name)}, by_flags=True)


def named_machine(flags: Namespace) -> Machine | None:
    """The machine of --machine; None stands for this one."""
    if flags.machine is None:
        return None
    machine = find_machine(flags.machine)
    if flags.device != AUTO:
        refuse_other_device(machine, flags.device)
    return machine


# -- the plan --------------------------------------------------------------------------------------------------------------


def plan_of(flags: Namespace, without: Collection[str] = ()) -> Plan:
    """The plan that the flags ask for, `without` some of its options; what is not given is as in a plan."""
    if flags.hh_all and flags.hh_prompt_only:
        raise ValueError("--hh-all evicts generated tokens and --hh-prompt-only keeps them; give one of them")
    names = [name for name in Plan.option_names() if name not in without]
    given = {name: value for name in names if (value := getattr(flags, name, None)) is not None}
    if {HEAD_BUDGETS, PROBE} & given.keys():
        given |= named_by_files(given, choose_model(flags.model, flags.path, flags.dummy_weights).source)
    plan = Plan.create(**{**given, "kv_policy": _policy_name(flags)})
    plan = plan if HEAD_BUDGETS in without else _with_heads(flags, plan)
    plan = plan if flags.percent in (None, AUTO) else plan.with_percent(flags.percent)
    if plan.has_own_buffers and flags.buffers not in (None, Plan.buffers):
        raise ValueError(
            f"--buffers {flags.buffers} changes nothing: schedule {plan.schedule} has buffers of its own; leave it out"
        )
    if not flags.overlap and flags.buffers not in (None, 1):
        raise ValueError(f"--buffers {flags.buffers} changes nothing: --overlap 0 takes one buffer; leave one of them out")
    return plan if flags.overlap else plan.without_overlap()


def _with_heads(flags: Namespace, plan: Plan) -> Plan:
    """The plan with the head budgets that are known of the model, if nothing else is asked for."""
    asked, is_random = {HEAD_BUDGETS: getattr(flags, HEAD_BUDGETS, None)}, flags.dummy_weights or flags.path == DUMMY_PATH
    if not measures_heads(asked, is_random, getattr(flags, "adapter", ())) or not plan.suits_any_head_budgets:
        return plan
    return with_known_heads(plan, choose_model(flags.model, flags.path, False).source)


def _policy_name(flags: Namespace) -> str:
    """The policy's name. Published commands of H2O say only --hh-ratio 0.1 --hh-all."""
    if flags.kv_policy is not None:
        return str(flags.kv_policy)
    given = flags.hh_all or getattr(flags, HEAD_BUDGETS, None) not in (None, AUTO)  # which is the default
    of_eviction = (one for name, one in options_of(KVOptions).items() if name not in Full.accepts)
    given = given or any(getattr(flags, one.name) is not one.default for one in of_eviction)
    return H2O.name if given else Plan.kv_policy


def asked_of(flags: Namespace, plan: Plan) -> PlanRequirements:
    """What is asked of a search: given sizes are the only ones it may take; where none is given, it may take any."""
    refuse_to_search_pipelines(plan)
    packed = BY_BITS[BITS]
    four_bits = (packed, plan.kv_codec), (plan.weight_codec, packed), (packed, packed)
    return PlanRequirements(
        plan=plan,
        batch_sizes=() if flags.gpu_batch_size is None else (flags.gpu_batch_size,),
        batches=() if flags.num_gpu_batches is None else (flags.num_gpu_batches,),
        codecs=four_bits if flags.allow_4bit else (),
        computes=(INT8,) if flags.allow_int8 else (),
        recalls=(RECALLED,) if flags.allow_recall else (),
        buffers=BUFFERS if flags.buffers is None else (),
        attend_on=(plan.attend_on,) if plan.attend_on == HOST else (DEVICE, HOST),
        latency_limit=flags.latency_limit,
        prefer=flags.prefer,
    )


def refuse_search_options(flags: Namespace, otherwise: str) -> None:
    """Refuses options of a search where there is none; `otherwise` says how to have one."""
    is_limited, is_preferred = flags.latency_limit is not None, flags.prefer != THROUGHPUT
    lossy = {"--allow-4bit": flags.allow_4bit, "--allow-int8": flags.allow_int8, "--allow-recall": flags.allow_recall}
    asked = {**lossy, "--latency-limit": is_limited, "--prefer": is_preferred}
    if found := next((flag for flag, is_given in asked.items() if is_given), None):
        raise ValueError(f"{found} is for a search, and this plan is given; leave it out, or {otherwise}")


# -- sampling --------------------------------------------------------------------------------------------------------------


def sampling_of(flags: Namespace) -> SamplingParams:
    """The sampling that the flags ask for; the seed is the whole call's."""
    if flags.min_tokens > flags.gen_len:
        generated = f"--gen-len has {flags.gen_len} generated"
        raise ValueError(f"--min-tokens {flags.min_tokens} cannot be reached: {generated}; give {flags.gen_len} or fewer")
    asked = {name: value for name, value in vars(flags).items() if name in SAMPLING and name != "seed"}
    return SamplingParams(**asked, max_tokens=flags.gen_len)
