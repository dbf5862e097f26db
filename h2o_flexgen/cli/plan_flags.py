"""A plan as flags of the run command: parsed there, they ask for the same plan."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields

from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.options import KVOptions
from h2o_flexgen.quant.codec import BY_BITS, PLAIN

OTHERS = ("dtype", "device", "gpu_mem", "cpu_mem", "threads", "offload_dir")  # that are passed on where somebody gave them
AUTO = "auto"


def run_flags(plan: Plan, args: Namespace) -> list[str]:
    """What is as the run command has it anyway is left out."""
    return [*_model(args), *_work(args), *_placement(plan), *_kv(plan), *_others(args)]


def as_line(flags: list[str]) -> str:
    return shlex.join(flags)


def _model(args: Namespace) -> Iterator[str]:
    for name in ("model", "path"):
        if (value := getattr(args, name)) is not None:
            yield from (f"--{name}", str(value))
    if args.dummy_weights:
        yield "--dummy-weights"


def _work(args: Namespace) -> Iterator[str]:
    if args.num_prompts is not None:
        yield from ("--num-prompts", str(args.num_prompts))
    yield from ("--prompt-len", str(args.prompt_len), "--gen-len", str(args.gen_len))


def _placement(plan: Plan) -> Iterator[str]:
    yield from ("--percent", *(f"{share:g}" for share in plan.percent))
    yield from ("--gpu-batch-size", str(plan.gpu_batch_size), "--num-gpu-batches", str(plan.num_gpu_batches))
    if plan.schedule != Plan.schedule:
        yield from ("--schedule", plan.schedule)
    if plan.slots == 1:
        yield from ("--overlap", "0")
    elif plan.slots != Plan.slots:
        yield from ("--slots", str(plan.slots))
    for flag, kept, usual in (
        ("--sep-layer", plan.sep_layer, Plan.sep_layer),
        ("--pin-weight", plan.pin_weight, Plan.pin_weight),
    ):
        if kept != usual:
            yield from (flag, str(int(kept)))
    if plan.prefill_tokens != Plan.prefill_tokens:
        yield from ("--prefill-tokens", str(plan.prefill_tokens))
    bits = {codec: str(number) for number, codec in BY_BITS.items()}
    for flag, codec in (("--compress-weight", plan.weight_codec), ("--compress-cache", plan.kv_codec)):
        if codec != PLAIN:
            yield from (flag, bits[codec])


def _kv(plan: Plan) -> Iterator[str]:
    if plan.kv_policy == Plan.kv_policy:
        return
    yield from ("--kv-policy", plan.kv_policy)
    for option in fields(KVOptions):
        value = getattr(plan.kv_options, option.name)
        if value is True:
            yield f"--{option.name.replace('_', '-')}"
        elif value != option.default:
            yield from (f"--{option.name.replace('_', '-')}", str(value))


def _others(args: Namespace) -> Iterator[str]:
    for name in OTHERS:
        value = getattr(args, name)
        if value is not None and value != AUTO:
            yield from (f"--{name.replace('_', '-')}", str(value))
