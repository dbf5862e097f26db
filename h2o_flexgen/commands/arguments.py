"""The arguments of the main command: FlexGen's flags with FlexGen's meaning, and ours. Parsing them imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from h2o_flexgen.kv.policy import POLICIES
from h2o_flexgen.planning.machine import DEVICES
from h2o_flexgen.planning.model_spec import DTYPE_BYTES
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.schedule import SCHEDULES

DUMMY_PATH = "_DUMMY_"
FEWER_BATCH, BREAKDOWN = "fewer_batch", "breakdown"
AUTO_LOG = "auto"
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
TRACEBACK = 3  # the level of --verbose that shows where an error comes from

# without --model: small enough for any machine, and with a share on every tier
DEMO = {
    "demo": True,
    "model": "facebook/opt-125m",
    "dummy_weights": True,
    "prompt_len": 64,
    "gen_len": 16,
    "num_gpu_batches": 2,
    "percent": [20, 30, 20, 30, 100, 0],
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A beginning of a flag is enough, as published FlexGen commands have it (`--cpu`, `--debug`)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.model is None and args.path in (None, DUMMY_PATH):
        parser.set_defaults(**DEMO)
        args = parser.parse_args(argv)
    _refuse(args)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m h2o_flexgen.run",
        description="Generate text with a model that is larger than the GPU, or than the memory; measure how fast it goes. "
        "Without --model: a small OPT with random weights, nothing is downloaded.",
    )
    parser.set_defaults(demo=False)
    _add_model(parser)
    _add_prompts(parser)
    _add_plan(parser)
    _add_sampling(parser)
    _add_output(parser)
    _add_later(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", help="hub name (facebook/opt-30b) or local folder of a checkpoint")
    add("--path", help=f"folder that has the checkpoint, or {DUMMY_PATH} for random weights, as in FlexGen")
    add("--dummy-weights", action="store_true", help="random weights in the model's shapes: for speed, nothing is downloaded")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPE_BYTES),
        help="what is computed with (auto: the fast type of the device)",
    )
    add(
        "--device",
        default="auto",
        help=f"auto, {' or '.join(DEVICES)}, or one of several with its number, like {DEVICES[-1]}:1",
    )
    add("--gpu-mem", metavar="SIZE", help="no more than this is held on the GPU, like 16GB or 14.9GiB (default: what is free)")
    add(
        "--cpu-mem", metavar="SIZE", help="no more than this is held in CPU memory by the whole process (default: what is free)"
    )
    add("--offload-dir", metavar="FOLDER", help="where KV, activations and random weights go on disk; left as it was found")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="FILE", help='a prompt per line, or (.jsonl) a {"prompt": ...} per line')
    add("--num-prompts", type=int, metavar="N", help="how many made-up prompts (default: one block); of given ones the first N")
    add("--prompt-len", type=int, metavar="TOKENS", help="of made-up prompts (default 512)")
    add("--gen-len", type=int, default=32, metavar="TOKENS", help="generated for each prompt, at most")
    add("--cut-gen-len", type=int, metavar="TOKENS", help="run only so many and project the time of the rest")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("plan").add_argument
    add("--gpu-batch-size", type=int, default=Plan.gpu_batch_size, metavar="ROWS", help="sequences computed at once")
    add(
        "--num-gpu-batches",
        type=int,
        default=Plan.num_gpu_batches,
        metavar="N",
        help="batches that share a pass over the weights",
    )
    add(
        "--percent",
        type=int,
        nargs=6,
        default=[100, 0, 100, 0, 100, 0],
        metavar=("W_GPU", "W_CPU", "KV_GPU", "KV_CPU", "ACT_GPU", "ACT_CPU"),
        help="per cent of weights, KV and activations on GPU and in CPU memory; the rest of each is on disk",
    )
    add(
        "--sep-layer", type=_switch, nargs="?", const=True, default=True, metavar="0|1", help="attention and MLP are two layers"
    )
    add(
        "--pin-weight",
        type=_switch,
        nargs="?",
        const=True,
        default=True,
        metavar="0|1",
        help="page-locked CPU memory for a GPU",
    )
    add("--overlap", type=_switch, nargs="?", const=True, default=True, metavar="0|1", help="0: one slot, nothing overlaps")
    add("--slots", type=int, default=Plan.slots, metavar="N", help="layers whose weights may be under way or in use at once")
    add("--schedule", default=Plan.schedule, choices=tuple(SCHEDULES))
    add("--kv-policy", default=Plan.kv_policy, choices=tuple(POLICIES))
    add("--dry-run", action="store_true", help="print the plan and its bytes per tier; nothing is loaded or written")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, help="0 (default): greedy")
    add("--top-k", type=int, default=0, metavar="K")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--repetition-penalty", type=float, default=1.0, metavar="R")
    add("--seed", type=int, help="repeats a run with a temperature")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be given several times")
    add("--stop-token-id", action="append", type=int, default=[], metavar="ID", help="ends a text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on to --gen-len behind the end of the text")
    add("--logprobs", type=int, nargs="?", const=0, metavar="N", help="of each token, and of the N likeliest")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--verbose",
        type=int,
        nargs="?",
        const=2,
        default=1,
        metavar="LEVEL",
        help="0: no texts; 1: the first texts; 2: all texts and the timeline; 3: where errors come from",
    )
    add("--trace", metavar="FILE", help="the last block, task by task, for ui.perfetto.dev or chrome://tracing")
    add(
        "--log-file",
        nargs="?",
        const=AUTO_LOG,
        metavar="FILE",
        help="append the summary here (no FILE: a name made of the plan)",
    )
    add("--no-log", action="store_true", help="write no log, whatever --log-file says")
    add(
        "--debug-mode",
        choices=(FEWER_BATCH, BREAKDOWN),
        help="fewer_batch: 20 layers of the first decode step, then project; breakdown: no overlap, seconds per operation",
    )


def _add_later(parser: argparse.ArgumentParser) -> None:
    """Flags of published FlexGen commands for what this version cannot do: known, so that they can be refused by name."""
    add = parser.add_argument_group("FlexGen's flags that this version refuses when they are on").add_argument
    add("--compress-weight", action="store_true", help=argparse.SUPPRESS)
    add("--compress-cache", action="store_true", help=argparse.SUPPRESS)
    add("--cpu-cache-compute", "--cpu", action="store_true", help=argparse.SUPPRESS)
    add("--attn-sparsity", type=float, default=1.0, help=argparse.SUPPRESS)


def _switch(text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text.lower() in TRUE


def _refuse(args: argparse.Namespace) -> None:
    switched_on = {
        "--compress-weight": args.compress_weight,
        "--compress-cache": args.compress_cache,
        "--cpu-cache-compute": args.cpu_cache_compute,
        "--attn-sparsity": args.attn_sparsity != 1.0,
    }
    if found := [flag for flag, is_on in switched_on.items() if is_on]:
        raise ValueError(f"{found[0]} is not supported by this version; leave it out")
    if args.cut_gen_len is not None and args.cut_gen_len < 2:
        raise ValueError(f"--cut-gen-len is {args.cut_gen_len}; give 2 or more: a decode step must be measured to be projected")
    if args.cut_gen_len is not None and args.debug_mode == FEWER_BATCH:
        raise ValueError(f"--cut-gen-len and --debug-mode {FEWER_BATCH} both cut the run short; give one of them")
    if args.debug_mode == FEWER_BATCH and args.schedule == "row_by_row":
        raise ValueError(
            f"--debug-mode {FEWER_BATCH} needs all batches in one decode step; row_by_row has none: use --cut-gen-len"
        )
