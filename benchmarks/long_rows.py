"""How fast a whole model generates behind long rows, where steps attend all KV, a share of it, or what a policy keeps.

    python benchmarks/long_rows.py --layers 6 --rows 12 --tokens 16384
    python benchmarks/long_rows.py --layers 4 --rows 4 --batches 4 --tokens 16384 --kv disk --heads-alike 0.9 --steps-alike 0.9

Layers have the shapes of Qwen3-8B, as many as are asked for, with a vocabulary that is smaller by as much. Weights are random.
They lie in memory, and so does all KV, unless it lies on the disk. Prompts are not computed: each row gets random keys and
values, and under a policy random scores, as if it had been read. So what is measured are decode steps alone. The first is left
out, because it records. Ways take turns, each opened anew. A way's line names its busiest lane, and how much of the steps' time
that worked.

What heads and steps of a real model choose is alike, and of random weights it is not. `--heads-alike` is the share of queries
and keys that all heads of a layer have in common, and `--steps-alike` that of what tokens bring into the first layer. Lines
tell how much of the chosen was not brought, since several heads or steps before had it: to be held beside a real model.

`floor` is the time that reading takes a step at the rates of memory and disk that were measured before the first way. It reads
the weights of each batch, and of the KV what it attends, with the index of its keys. Where what was read stays, the share that
was there is not read from the disk. It is the share of all steps, and the first finds nothing. A disk may be faster later, and
then a step takes less than its floor.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from benchmarks.comparison.comparison import commit
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.judges import Written
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.models import base
from h2o_flexgen.models.base import Given, Model, Weights, nothing_to_attend
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.policies.recall import index_bytes
from h2o_flexgen.profiling.measure import describe_machine, memory_read_rate, offload_rates
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import READ

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "recall 10 %": {"kv_recall": 0.1},
    "recall 10 %, reuse": {"kv_recall": 0.1, "kv_recall_reuse": True},
    "recall 10 %, together": {"kv_recall": 0.1, "kv_recall_together": True},
    "recall 10 %, together, reuse": {"kv_recall": 0.1, "kv_recall_together": True, "kv_recall_reuse": True},
    "h2o 20 %": {"kv_policy": "h2o", "kv_budget": 0.2, "head_budgets": "equal"},
    "h2o 50 %, recall 10 %": {"kv_policy": "h2o", "kv_budget": 0.5, "kv_recall": 0.1, "head_budgets": "equal"},
}
PERCENT = {"memory": (0, 100, 0, 100, 0, 100), "disk": (0, 100, 0, 0, 0, 100)}
SPREAD = 0.02  # of weights
VALUE_BYTES = 2  # bfloat16
LESS = ", less the share that was there where what is read stays,"  # of the KV on the disk
DISK_BYTES = 2**30  # of the file by which the disk's rate is measured


class MadeUpPrompts:
    """Takes the place of the pass over prompts: layers hand on what they get, and caches get random keys and values."""

    def __init__(self, heads_alike: float) -> None:
        self._heads_alike = heads_alike
        self._kv: tuple[Tensor, Tensor] | None = None
        self._computed: Callable[..., Tensor] = base.computed
        self._attend: Callable[..., Tensor] = KVCache.attend

    @contextmanager
    def taken(self) -> Iterator[None]:
        prompts = self

        def attend(cache: KVCache, now: KVStep, tokens: NewTokens) -> Tensor:
            return prompts.kept(cache, now, tokens) if now.is_prefill else prompts._attend(cache, now, tokens)

        with patch.object(base, "computed", self.computed), patch.object(KVCache, "attend", attend):
            yield

    def computed(self, model: Model, layer: LayerSpec, x: Tensor, weights: Weights, given: Given) -> Tensor:
        if x.dim() < 3 or x.shape[1] == 1:
            return self._computed(model, layer, x, weights, given)
        if given.attend is nothing_to_attend:
            return x
        k, v = self._made(model, x)
        none = x.new_empty(*x.shape[:2], 0, k.shape[3])  # nothing asks
        given.attend(NewTokens(none, k, v, x=x))
        return x

    def _made(self, model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:2], model.spec.kv_heads, model.spec.head_dim)
        if self._kv is None or self._kv[0].shape != shape:
            keys = mixed(torch.randn(*shape[:2], 1, shape[3]), torch.randn(shape), self._heads_alike)
            self._kv = keys.to(x.dtype), torch.randn(shape).to(x.dtype)
        return self._kv

    @staticmethod
    def kept(cache: KVCache, now: KVStep, tokens: NewTokens) -> Tensor:
        """Keeps what the policy would keep of a prompt with these scores."""
        scores = cache.living(now.rows).scores
        has_scores = scores is not None and scores.scores is not None
        got = torch.rand(now.rows, tokens.k.shape[2], tokens.k.shape[1]) if has_scores else None
        cache._enforce_budget(now, scores, Written(tokens.x, tokens.k, tokens.v, now.slots.new), None, got)
        return tokens.q


def mixed(common: Tensor, own: Tensor, alike: float) -> Tensor:
    """Of the same variance, of which this share is the common one's."""
    return alike**0.5 * common + (1 - alike) ** 0.5 * own


def save_model(folder: Path, args: argparse.Namespace) -> None:
    config = config_of(args)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: made(name, shape, config["num_key_value_heads"], args) for name, shape in shapes_of(config)}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def shapes_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config["head_dim"]
    heads, kv_heads = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    yield from ((f"{name}.weight", (vocab, width)) for name in ("model.embed_tokens", "lm_head"))
    yield "model.norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        yield from ((f"{of}{norm}_layernorm.weight", (width,)) for norm in ("input", "post_attention"))
        yield from ((f"{of}self_attn.{name}_norm.weight", (dim,)) for name in "qk")
        projections = ("q", heads), ("k", kv_heads), ("v", kv_heads)
        yield from ((f"{of}self_attn.{name}_proj.weight", (out, width)) for name, out in projections)
        yield f"{of}self_attn.o_proj.weight", (width, heads)
        yield from ((f"{of}mlp.{name}_proj.weight", (inner, width)) for name in ("gate", "up"))
        yield f"{of}mlp.down_proj.weight", (width, inner)


def made(name: str, shape: tuple[int, ...], kv_heads: int, args: argparse.Namespace) -> Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.randn(shape)
    if "embed_tokens" in name:
        return mixed(torch.randn(1, shape[1]), values, args.steps_alike).to(torch.bfloat16)
    if "q_proj" in name or "k_proj" in name:
        groups = values.view(kv_heads, -1, shape[1])
        values = mixed(torch.randn(1, *groups.shape[1:]), groups, args.heads_alike).reshape(shape)
    return (values * SPREAD).to(torch.bfloat16)


def measured(model: str, way: Mapping[str, object], args: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    options = {"gpu_batch_size": args.rows, "num_gpu_batches": args.batches, "prefill_tokens": args.tokens}
    options |= {"percent": PERCENT[args.kv], "threads": args.threads, "offload_dir": args.offload_dir}
    rows = args.rows * args.batches
    made_up = MadeUpPrompts(args.heads_alike)
    with LLM(model, tokenizer="bytes", dtype="bfloat16", device="cpu", **options, **way) as llm, made_up.taken():
        prompts = [[2 + row] * args.tokens for row in range(rows)]
        llm.generate(prompts, SamplingParams(max_tokens=args.steps + 2, ignore_eos=True))
        assert llm.stats is not None
        (run,) = llm.stats.blocks
        there = there_of(run)
        floor = floor_of(llm.spec, way, args, rates, there)
    seconds = statistics.median(run.step_seconds[1:])
    return {
        "tokens_per_second": rows / seconds,
        "seconds_of_a_step": seconds,
        "steps": run.step_seconds,
        "floor": floor,
        "share_of_the_floor": floor / seconds,
        "lanes": lanes_of(run, first=2),
        "chosen_there": there,
    }


def floor_of(
    spec: ModelSpec, way: Mapping[str, Any], args: argparse.Namespace, rates: Mapping[str, float], there: float | None = None
) -> float:
    """Seconds in which a step reads what it needs at these rates. `there`: the share of what it chose that it did not bring."""
    share: float | None = way.get("kv_recall")
    weights = VALUE_BYTES * sum(prod(tensor.shape) for layer in spec.layers[1:] for _, tensor in layer.tensors)
    slots = args.batches * args.rows * args.tokens * way.get("kv_budget", 1) * spec.kv_heads * args.layers
    attended, index = 2 * VALUE_BYTES * spec.head_dim * slots, 0
    if share is not None:
        attended, index = attended * share, index_bytes(share, spec) * slots
    from_memory = args.batches * weights + index + (0 if args.kv == "disk" else attended)
    stays = there if there is not None and way.get("kv_recall_reuse") else 0.0
    from_disk = attended * (1 - stays) if args.kv == "disk" else 0
    return max(from_memory / rates["memory"], from_disk / rates["disk"])


def lanes_of(run: BlockRun, first: int) -> dict[str, float]:
    """The share of the time of the steps from this one on in which each lane had work."""
    spans = sorted((span for span in run.trace.spans if span.key.step >= first), key=lambda span: span.start)
    begun, ended = spans[0].start, max(span.end for span in spans)
    worked: defaultdict[str, float] = defaultdict(float)
    until: defaultdict[str, float] = defaultdict(lambda: begun)
    for span in spans:  # what a lane does may overlap
        worked[span.lane] += max(span.end - max(span.start, until[span.lane]), 0) / (ended - begun)
        until[span.lane] = max(span.end, until[span.lane])
    return dict(worked)


def there_of(run: BlockRun) -> float | None:
    """The share of what steps chose on the disk that they did not bring: other heads or steps before had it."""
    read, spared = run.moved_bytes.get(READ, 0), run.skipped_bytes.get(READ, 0)
    return spared / (read + spared) if spared else None


def rates_of(args: argparse.Namespace) -> dict[str, float]:
    """Bytes per second that a sum reads from memory, and that reads of large pieces bring from the disk on which KV lies."""
    return {"memory": memory_rate(args.threads), "disk": disk_rate(args.offload_dir) if args.kv == "disk" else inf}


def memory_rate(threads: int | None) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return max(memory_read_rate() for _ in range(3))
    finally:
        torch.set_num_threads(before)


def disk_rate(folder: Path | None) -> float:
    place = local_path(folder or default_offload_folder())  # as LLM has it
    place.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place) as own:
        return offload_rates(Path(own), DISK_BYTES, 3)[1]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=6, help="of the model, which has 36")
    add("--rows", type=int, default=16)
    add("--tokens", type=int, default=16384, help="of each row, before it generates")
    add("--batches", type=int, default=1, help="of so many rows each")
    add("--kv", choices=PERCENT, default="memory", help="where KV lies")
    add("--offload-dir", type=Path, help="where KV lies, if on the disk")
    add("--heads-alike", type=float, default=0.0)
    add("--steps-alike", type=float, default=0.0)
    add("--steps", type=int, default=8, help="that are measured")
    add("--turns", type=int, default=2)
    add("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    add("--narrow", type=int, default=1, help="divides widths, for a try")
    add("--threads", type=int)
    add_output(parser)
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> dict[str, object]:
    narrow = {name: QWEN3_8B[name] // args.narrow for name in ("hidden_size", "intermediate_size")}
    tokens = QWEN3_8B["vocab_size"] * args.layers // QWEN3_8B["num_hidden_layers"] // args.narrow
    return {**QWEN3_8B, **narrow, "vocab_size": tokens, "num_hidden_layers": args.layers}


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    rates = rates_of(args)
    with TemporaryDirectory() as folder:
        save_model(Path(folder), args)
        for _ in range(args.turns):
            for way in args.ways:
                found[way].append(one := measured(folder, WAYS[way], args, rates))
                print(told(way, one), flush=True)
    tell(document_of(args, found, rates), args.output)
    return 0


def document_of(args: argparse.Namespace, found: Mapping[str, Sequence[Mapping[str, Any]]], rates: Mapping[str, float]) -> Any:
    """In the form that scripts/readme_results.py makes a table of."""
    left_out = {"output", "offload_dir", *(["narrow"] if args.narrow == 1 else [])}
    asked = {name: value for name, value in vars(args).items() if name not in left_out and value is not None}
    rows = args.rows * args.batches
    where = "in memory" if args.kv == "memory" else "on the disk"
    alike = f"heads {args.heads_alike:.0%} and steps {args.steps_alike:.0%} alike"
    return {
        "title": f"{args.layers} layers of Qwen3-8B behind {rows} rows of {args.tokens} tokens, KV {where}, {alike}",
        "machine": {**describe_machine(open_device("cpu")), "kernels": in_use()},
        "command": shlex.join(["python", "benchmarks/long_rows.py", *words_of(asked)]),
        "commit": commit(),
        "ceiling": f"weights, index and attended KV{'' if args.kv == 'memory' else LESS} at {spoken(rates)}",
        "unit": "tokens/s",
        "higher_is_better": True,
        "rows": [
            {"name": name_of(way, runs), "measured": middle(runs, "tokens_per_second"), "ceiling": rows / middle(runs, "floor")}
            for way, runs in found.items()
        ],
        "arguments": asked,
        "bytes_per_second": rates,
        "runs": found,
    }


def words_of(asked: Mapping[str, Any]) -> Iterator[str]:
    for name, value in asked.items():
        yield f"--{name.replace('_', '-')}"
        yield from map(str, value if isinstance(value, list) else [value])


def spoken(rates: Mapping[str, float]) -> str:
    return " and ".join(f"{rate / 1e9:.1f} GB/s of {what}" for what, rate in rates.items() if rate < inf)


def middle(runs: Sequence[Mapping[str, Any]], figure: str) -> float:
    return statistics.median(run[figure] for run in runs)


def name_of(way: str, runs: Sequence[Mapping[str, Any]]) -> str:
    return way if runs[0]["chosen_there"] is None else f"{way} ({middle(runs, 'chosen_there'):.0%} of the chosen was there)"


def told(way: str, one: Mapping[str, Any]) -> str:
    busiest = max(one["lanes"], key=one["lanes"].get)
    speed, share = f"{one['tokens_per_second']:8.2f} tokens/s", f"floor {one['share_of_the_floor']:.0%}"
    there = "" if one["chosen_there"] is None else f"   {one['chosen_there']:.0%} of the chosen was there"
    lane = f"{busiest} {one['lanes'][busiest]:.0%}"
    return f"{way:28} {speed}   {one['seconds_of_a_step']:.3f} s a step   {share}   {lane}{there}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
