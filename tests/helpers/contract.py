"""The contract of the engine, to be held for any plan: what it generates is what the resident loop generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2o_flexgen.checkpoints.checkpoint import Checkpoint, open_checkpoint
from h2o_flexgen.checkpoints.packed import plain_rows
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.model_spec import DTYPE_BYTES, ModelSpec, TensorSpec
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats.kernel_table import EXACT, INT8, PRODUCTS
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix, SteadyMatrix
from h2o_flexgen.kernels.operations import decode, encode
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import create_model, load_config, tensor_names
from h2o_flexgen.models.base import Model, Weights
from h2o_flexgen.planning import placement
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.head_budgets import EQUAL, HeadBudgets
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.policies.policy import KVPolicy
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.session.opened_model import OpenedModel
from tests.helpers import tiny
from tests.helpers.held_by_hand import likeliest_held, pattern_of
from tests.helpers.probes import OF_NO_MODEL, probe_for
from tests.helpers.quantised import METHODS, WIDE, save_quantised
from tests.helpers.resident import likeliest, resident_generate, weights_by_layer

Logits = dict[tuple[int, int], Tensor]  # (step, row of the workload) -> (vocab,)

POSITIONS_IN_KEYS = ("bloom", "bloom-between", "mpt", "mpt-clipped")  # which are then not packed
UNLIKE_HEADS = ("gemma4",)  # kinds of models that have more KV heads in some layers than in others
GATED = ("qwen3-5", "qwen3-5-moe", "qwen3-next")  # attention has a gate
# rows have a state in some layers
OF_MAMBA = (
    "bamba",
    "granite-h",
    "granite-h-dense",
    "falcon-h1",
    "falcon-h1-normed",
    "nemotron-h",
    "nemotron-h-latent",
    "nemotron-h-dense",
)
BESIDE_SCANS = ("falcon-h1", "falcon-h1-normed")  # attention stands beside a scan, and not where the host attends
KIMI = ("kimi-linear", "kimi-linear-ranked")
WITH_STATES = (*GATED, *KIMI, "lfm2", "lfm2-short", "lfm2-moe", *OF_MAMBA)
GGUF, WITH_HEAD = "gguf-", " with its head"  # checkpoints that are GGUF files; and whose head is packed, too

# what weights are written in and how products are made: of plain ones there is one kind
WEIGHTS = (PLAIN, EXACT), ("group4", EXACT), ("group8", EXACT), ("group4", INT8), ("group8", INT8)


# models in formats of checkpoints: what is kept as it is stored, and what becomes of it in fewer bits
PUBLISHED = (
    ("llama-gqa", "gguf-q4_0", PLAIN, EXACT),
    ("qwen3", "gguf-q4_1", PLAIN, EXACT),
    ("mistral", "gguf-q5_0", PLAIN, EXACT),
    ("llama31", "gguf-q5_1", PLAIN, EXACT),
    ("qwen2", "gguf-q8_0", PLAIN, EXACT),
    ("llama-gqa", "gguf-q4_K", PLAIN, EXACT),
    ("qwen3", "gguf-q5_K", PLAIN, EXACT),
    ("qwen2", "gguf-q6_K", PLAIN, EXACT),
    ("mistral", "gguf-mxfp4", PLAIN, EXACT),
    ("olmoe", "gguf-q4_0", PLAIN, EXACT),
    ("qwen2-moe", "gguf-q5_1", PLAIN, INT8),
    ("gpt-oss", "gguf-mxfp4", PLAIN, EXACT),
    ("glm4-moe", "gguf-q4_1", PLAIN, INT8),
    ("granite-moe", "gguf-q5_0", PLAIN, EXACT),
    ("granite", "gguf-iq4_nl", PLAIN, EXACT),
    ("llama31", "gguf-iq4_xs", PLAIN, INT8),
    ("qwen2", "gguf-bfloat16", "group4", EXACT),
    ("qwen3", "gguf-q8_0", "group4", EXACT),
    ("llama-gqa", "gguf-q4_0", PLAIN, INT8),
    ("llama31", "gguf-q6_K", PLAIN, INT8),
    ("qwen2", "awq", PLAIN, EXACT),
    ("llama-gqa", "gptq-ordered", PLAIN, INT8),
    ("qwen3", "compressed", PLAIN, INT8),
    ("mistral", "compressed-asymmetric" + WITH_HEAD, PLAIN, EXACT),
    ("llama-gqa", "fp8", PLAIN, EXACT),
    ("qwen3", "mxfp8", "group4", EXACT),
    ("opt", "compressed-fp8", PLAIN, EXACT),
    ("mistral", "mxfp4" + WITH_HEAD, PLAIN, INT8),
    ("gpt-oss", "mxfp4", PLAIN, EXACT),
    ("gpt-oss", "mxfp4", "group4", INT8),
    ("gpt-oss", "bfloat16", PLAIN, EXACT),
    ("gpt-oss", "float16", "group4", EXACT),
    ("glm4-moe-air", "bfloat16", PLAIN, EXACT),
    ("gemma4", "gguf-q4_0", PLAIN, INT8),
    ("gemma4-dense", "bfloat16", "group4", EXACT),
    ("deepseek-v3", "gguf-q4_0", PLAIN, EXACT),
    ("deepseek-v2", "gguf-q8_0", PLAIN, INT8),
    ("deepseek-v2-groups", "mxfp8", PLAIN, EXACT),
    ("glm4-lite", "bfloat16", "group4", INT8),
)

# plan options, one policy each, with budgets that tiny texts outgrow
POLICIES: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("kv_policy", "h2o"), ("heavy", 2), ("recent", 2)),
    (("kv_policy", "h2o"), ("heavy", 3), ("recent", 1), ("sinks", 1), ("score_decay", 0.9), ("grace", 2)),
    (("kv_policy", "h2o"), ("kv_budget", 0.5), ("hh_prompt_only", True)),
    (("kv_policy", "h2o-flexgen"), ("heavy", 2), ("recent", 2)),
    (("kv_policy", "local"), ("recent", 3)),
    (("kv_policy", "streaming"), ("sinks", 1), ("recent", 3)),
    (("kv_policy", "heavy"), ("heavy", 4)),
    (("kv_policy", "random"), ("kv_budget", 0.5)),
    (("kv_policy", "snapkv"), ("heavy", 2), ("recent", 2)),
    (("kv_policy", "tova"), ("heavy", 4)),
    (("kv_policy", "kvzip"), ("heavy", 2), ("recent", 2)),
    (("kv_policy", "h2o"), ("heavy", 3), ("recent", 2), ("value_norms", True)),
    (("kv_policy", "kvzap"), ("heavy", 2), ("recent", 2), ("probe", OF_NO_MODEL)),  # a case takes one of its model
    (("kv_policy", "keydiff"), ("heavy", 2), ("recent", 2)),
    (("kv_policy", "lagkv"), ("heavy", 3), ("recent", 1), ("sinks", 1)),
    (("kv_policy", "knorm"), ("heavy", 2), ("recent", 2)),
)

# what the KV heads of a model keep, layer by layer; a model with fewer heads has the first ones
Shares = tuple[tuple[float, ...], ...]
MIXED_HEADS: Shares = ((0.3, 1.0, 0.3, 0.6), (0.3, 0.3, 0.3, 0.3), (1.0, 1.0, 0.6, 0.3))
FEW_LOOK_BACK: Shares = ((0.25, 0.25, 0.25, 0.25), (0.95, 0.25, 0.25, 0.95), (0.45, 0.75, 0.45, 0.25))

# policies whose heads keep different shares of the same texts
BY_HEAD: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("kv_policy", "h2o"), ("head_shares", MIXED_HEADS)),
    (("kv_policy", "kvzip"), ("head_shares", FEW_LOOK_BACK)),
    (("kv_policy", "random"), ("head_shares", MIXED_HEADS), ("hh_prompt_only", True)),
    (("kv_policy", "tova"), ("head_shares", FEW_LOOK_BACK)),
    (("kv_policy", "local"), ("head_shares", MIXED_HEADS)),
    (("kv_policy", "kvzap"), ("head_shares", MIXED_HEADS), ("probe", OF_NO_MODEL)),
)


def opened(place: Path) -> Checkpoint:
    """The checkpoint of a folder or a GGUF file, by the names of its architecture."""
    return open_checkpoint(place, names=tensor_names(load_config(str(place))))


@dataclass(frozen=True)
class Case:
    """A plan and a workload. Its printed form repeats it."""

    kind: str = "opt"
    percent: tuple[float, ...] = (100, 0, 100, 0, 100, 0)
    lengths: tuple[int, ...] = (5, 9, 2, 7, 4)
    gen_len: int = 4
    gpu_batch_size: int = 2
    num_gpu_batches: int = 2
    buffers: int = 2
    sep_layer: bool = True
    overlap: bool = True
    schedule: str = "zigzag"
    device: str = "cpu"
    dtype: str = "float32"
    stored: str = "float32"
    policy: tuple[tuple[str, Any], ...] = ()  # plan options
    prefill_tokens: int = Plan.prefill_tokens
    weight_codec: str = PLAIN
    kv_codec: str = PLAIN
    state_dtype: str = Plan.state_dtype
    compute: str = EXACT
    attend_on: str = DEVICE
    held: tuple[str, ...] = ()  # what rows are held to in turn, an empty one to nothing

    @property
    def params(self) -> list[SamplingParams]:
        """Of each row."""
        patterns = [pattern_of(self.held, row) for row in range(len(self.lengths))]
        return [SamplingParams(self.gen_len, structured_outputs={"regex": own} if own else None) for own in patterns]

    def picked(self, rows: Sequence[int], made: Sequence[Tensor]) -> Tensor:
        """The tokens of these rows that follow from their logits so far: the likeliest, or the likeliest that may come."""
        if not self.held:
            return likeliest(made)
        tokens: list[list[int]] = [[] for _ in rows]
        for logits in made:
            for own, token in zip(tokens, likeliest_held(logits, rows, self.held, tokens)):
                own.append(token)
        return torch.tensor([own[-1] for own in tokens], device=made[-1].device)

    @property
    def plan_options(self) -> dict[str, Any]:
        names = ("gpu_batch_size", "num_gpu_batches", "buffers", "sep_layer", "schedule", "prefill_tokens")
        names += ("weight_codec", "kv_codec", "state_dtype", "compute", "attend_on")
        return {name: getattr(self, name) for name in names} | {"graphs": "auto", **self.policy_options}

    @property
    def policy_options(self) -> dict[str, Any]:
        options = dict(self.policy)
        if "head_shares" not in options:
            return options
        budgets = head_budgets(options.pop("head_shares"), kv_heads(self.kind), kv_layers(self.kind))
        return options | {"head_budgets": budgets, "kv_budget": budgets.budgets[0]}

    @property
    def kv_policy(self) -> KVPolicy:
        return Plan.create(**self.policy_options).policy

    def levels(self, spec: ModelSpec) -> tuple[Level, ...]:
        return Plan.create(**self.policy_options).levels(spec)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return distinct_prompts(self.lengths)

    def batches(self) -> list[tuple[int, ...]]:
        blocks = Workload(self.lengths, self.gen_len).blocks(self.gpu_batch_size, self.num_gpu_batches)
        return [batch.rows for block in blocks for batch in block.batches]

    def beside(self, spec: ModelSpec) -> list[frozenset[int]]:
        """For each batch, the attentions whose decode steps the host does, by number."""
        plan = Plan.create(**self.plan_options).with_percent(self.percent)
        found = []
        for block in Workload(self.lengths, self.gen_len).blocks(self.gpu_batch_size, self.num_gpu_batches):
            kv = placement.place(spec, plan, block).kv if self.attend_on == HOST and self.device != "cpu" else {}
            for batch in range(len(block.batches)):
                numbered = enumerate(spec.kv_layers)
                found.append(frozenset(number for number, layer in numbered if kv.get((layer, batch), DEVICE) != DEVICE))
        return found

    def open(self, checkpoints: Checkpoints, offload: Path, **options: Any) -> LLM:
        folder = checkpoints.folder(self.kind, self.stored)
        overlap = self.overlap or self.schedule == "flexgen_barrier"  # the barrier cannot do without
        chosen = {"dtype": self.dtype, "device": self.device, "overlap": overlap, "head_budgets": EQUAL}
        chosen |= {**self.plan_options, **options}
        if "probe" in chosen:
            chosen["probe"] = probe_for(checkpoints.opened(self.kind, self.stored, self.dtype).spec(Plan()))
        return LLM(str(folder), tokenizer="bytes", percent=self.percent, offload_dir=offload, **chosen)

    def __str__(self) -> str:
        defaults = type(self)()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(defaults, field.name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in changed) or "defaults"


@cache
def kv_heads(kind: str) -> int:
    return create_model(tiny.tiny_config(kind), "float32").spec.kv_heads


@cache
def kv_layers(kind: str) -> int:
    return len(create_model(tiny.tiny_config(kind), "float32").spec.kv_layers)


def head_budgets(shares: Shares, heads: int, layers: int | None = None) -> HeadBudgets:
    """These shares of the first heads and the first layers with attention, as a file of a model would have them."""
    own = tuple(of_layer[:heads] for of_layer in shares[:layers])
    return HeadBudgets("a tiny model", "made up", (fmean(chain.from_iterable(own)),), (own,))


def fits(kind: str, policy: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a policy is for a kind of models. What is told of each KV head is not, where layers have unlike numbers."""
    return kind not in UNLIKE_HEADS or not {"head_shares", "probe"} & dict(policy).keys()


def kept_as(kind: str, kv_codec: str) -> str:
    """The codec of KV, or none where a kind of models cannot have it."""
    return PLAIN if kind in POSITIONS_IN_KEYS else kv_codec


def of_stores(policy: tuple[tuple[str, Any], ...]) -> tuple[object, ...]:
    """What decides which bytes are kept and moved for a policy, and what passes compute."""
    kept = Case(policy=policy).kv_policy
    return kept.score_words, kept.judge, kept.echoes, kept.last_queries, kept.sees, kept.options.hh_prompt_only


# those that differ from an earlier one in no more than which tokens rank lowest
ALIKE = [policy for place, policy in enumerate(POLICIES) if of_stores(policy) in map(of_stores, POLICIES[:place])]
UNLIKE = [policy for policy in POLICIES if policy not in ALIKE]  # each moves or computes what no other one does


def distinct_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts without repetition, so that a row with another one's data shows."""
    random = Random(seed)
    prompts = [[random.randrange(tiny.VOCAB) for _ in range(length)] for length in lengths]
    while len({tuple(prompt) for prompt in prompts}) < len(prompts):
        prompts = [[random.randrange(tiny.VOCAB) for _ in range(length)] for length in lengths]
    return prompts


@dataclass(frozen=True)
class Read:
    """The weights of a checkpoint as they are under a plan. Nothing writes into them."""

    model: Model
    weights: Sequence[Weights]  # of every layer, decoded
    packed: Mapping[str, Tensor]  # by the name of a tensor: the units of those that are kept in bytes

    @classmethod
    def of(cls, opened: OpenedModel, plan: Plan, device: str) -> Read:
        assert opened.checkpoint is not None
        model = opened.model(plan)
        tensors: dict[str, Tensor] = {}
        packed: dict[str, Tensor] = {}
        for name, tensor in model.spec.tensors.items():
            data, tensors[name] = as_stored(opened.checkpoint, tensor)
            if tensor.format != PLAIN:
                is_kept = tensor.format == opened.checkpoint.stored_as(name).format
                kept = data if is_kept else encoded_with(tensor.format, tensors[name])
                tensors[name] = decoded_with(tensor.format, kept, tensor.shape, getattr(torch, model.spec.dtype))
                units = -(-tensor.shape[0] // FORMATS[tensor.format].rows_together)
                packed[name] = kept.view(units, -1).to(device)
        weights = [{name: one.to(device) for name, one in layer.items()} for layer in weights_by_layer(model, tensors)]
        return cls(model, weights, packed)


@dataclass
class Checkpoints:
    """Tiny checkpoints, each made when first asked for, with what was read of them and what the resident loop made of it."""

    root: Path
    hf_models: dict[tuple[str, str], PreTrainedModel] = field(default_factory=dict)
    read: dict[tuple[object, ...], Read] = field(default_factory=dict)
    resident: dict[tuple[object, ...], list[Tensor]] = field(default_factory=dict)
    known: dict[tuple[str, str, str], OpenedModel] = field(default_factory=dict)

    def folder(self, kind: str, stored: str = "float32") -> Path:
        """The folder of a checkpoint, or its GGUF file."""
        is_gguf, head = stored.startswith(GGUF), stored.endswith(WITH_HEAD)
        place = self.root / f"{kind}-{stored}{'.gguf' * is_gguf}"
        if (kind, stored) in self.hf_models:
            return place
        if is_gguf:
            pytest.importorskip("gguf")  # writes such files, and is missing where only torch and transformers are
            from tests.helpers.gguf_files import save_gguf

            made = save_gguf(kind, place, stored.removeprefix(GGUF))
        elif stored in DTYPE_BYTES:
            made = tiny.save_tiny(kind, place, getattr(torch, stored), max_shard_size="40KB")
        else:
            method = METHODS[stored.removesuffix(WITH_HEAD)]
            made = save_quantised(kind, place, method, torch.float32, files=2, head=head, **WIDE).model
        self.hf_models[kind, stored] = made
        return place

    def opened(self, kind: str, stored: str, dtype: str) -> OpenedModel:
        key = kind, stored, dtype
        if key not in self.known:
            self.known[key] = OpenedModel.of(str(self.folder(kind, stored)), False, dtype, Site())
        return self.known[key]

    def spec(self, case: Case) -> ModelSpec:
        """The shapes of a case's model as it is kept under its plan."""
        return self.opened(case.kind, case.stored, case.dtype).spec(Plan.create(**case.plan_options))

    def hf_model(self, kind: str, stored: str = "float32") -> PreTrainedModel:
        self.folder(kind, stored)
        return self.hf_models[kind, stored]

    def greedy(self, case: Case, row: int, steps: int) -> tuple[list[int], Tensor]:
        """The greedy text of transformers for one row alone."""
        return self.continued(case.kind, case.prompts[row], steps, case.stored)

    def continued(self, kind: str, text: Sequence[int], steps: int, stored: str = "float32") -> tuple[list[int], Tensor]:
        """What transformers gives behind a text: its tokens, and its logits (steps, vocab)."""
        prompt = torch.tensor([text])
        mask = torch.ones_like(prompt)  # otherwise every token 0 of a prompt counts as padding
        model: Any = self.hf_model(kind, stored)
        generated = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        return generated.sequences[0, prompt.shape[1] :].tolist(), torch.cat(generated.logits)

    def model(
        self,
        kind: str,
        stored: str,
        dtype: str,
        device: str = "cpu",
        format: str = PLAIN,
        compute: str | None = None,
        state_dtype: str = Plan.state_dtype,
    ) -> tuple[Model, list[Weights]]:
        """The model's weights. A codec's weights are computed with as decoded; where it is said how to `compute`, they are
        matrices in its bytes, except a table that rows are looked up in; and plain ones beside rounded products are steady."""
        key = kind, stored, dtype, device, format, compute or EXACT, state_dtype
        if key not in self.read:
            plan = Plan(weight_codec=format, compute=compute or EXACT, state_dtype=state_dtype)
            self.read[key] = Read.of(self.opened(kind, stored, dtype), plan, device)
        read = self.read[key]
        weights = [dict(own) for own in read.weights]
        if compute is not None:
            for layer, own in zip(read.model.spec.layers, weights):
                for name, tensor in layer.tensors:
                    if tensor.format != PLAIN and name != layer.token_table:
                        room = DecodeBuffer(torch.empty_like(own[name]))
                        own[name] = PackedMatrix(
                            read.packed[tensor.name], tensor.format, tensor.shape[0], room, PRODUCTS[compute]
                        )
                    elif compute == INT8 and name in dict(layer.products):
                        own[name] = SteadyMatrix(own[name])
        return read.model, weights

    def resident_logits(self, case: Case, rows: Sequence[int], beside: frozenset[int] = frozenset()) -> list[Tensor]:
        """The resident loop's logits of a batch, for every step (rows, vocab), computed once for all plans with this batch;
        `beside`: the attentions that the host does in decode."""
        prompts = [case.prompts[row] for row in rows]
        by_token, device = case.device != "cpu", "cuda" if case.device == "cuda" else "cpu"
        key = (
            case.kind,
            case.stored,
            case.dtype,
            by_token,
            device,
            case.gen_len,
            case.policy,
            case.prefill_tokens,
            case.weight_codec,
            case.kv_codec,
            case.state_dtype,
            case.compute,
            beside,
            case.held and tuple(pattern_of(case.held, row) for row in rows),
            *map(tuple, prompts),
        )
        if key not in self.resident:
            forms = case.weight_codec, case.compute, case.state_dtype
            model, weights = self.model(case.kind, case.stored, case.dtype, device, *forms)
            made = resident_generate(
                model,
                weights,
                prompts,
                case.gen_len,
                by_token,
                case.levels(self.spec(case)),
                case.prefill_tokens,
                case.kv_codec,
                beside=beside,
                pick=partial(case.picked, rows),
            )
            self.resident[key] = [step.cpu() for step in made]
        return self.resident[key]


def as_stored(checkpoint: Checkpoint, tensor: TensorSpec) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor in the format of its checkpoint, and its values."""
    found, stored = checkpoint.located(tensor), checkpoint.stored_as(tensor.name)
    if isinstance(found, StoredTensor) and found.arranged is not None:
        made = torch.cat([*plain_rows(found, 1)]).contiguous()
        return made.view(torch.uint8).flatten(), made
    own = replace(tensor, format=stored.format, itemsize=stored.itemsize)
    data = torch.zeros(own.nbytes, dtype=torch.uint8)
    if isinstance(found, StoredMatrix) and found.make is not None:
        found.make(data)
    else:
        for start, place in found.segments:
            with place.file.open("rb") as file:
                file.seek(place.offset)
                data[start : start + place.nbytes] = torch.frombuffer(bytearray(file.read(place.nbytes)), dtype=torch.uint8)
    if isinstance(found, StoredTensor):
        values = data.view(getattr(torch, found.dtype))
        return data, values.view(tensor.shape)
    return data, decoded_with(stored.format, data, tensor.shape, torch.float32)


def encoded_with(format: str, values: Tensor) -> Tensor:
    data = torch.empty(FORMATS[format].nbytes(tuple(values.shape), values.itemsize), dtype=torch.uint8)
    encode(format, values, data)
    return data


def decoded_with(format: str, data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    decode(format, data, out)
    return out


@contextmanager
def recorded_logits() -> Iterator[Logits]:
    """A context that records what every Sampler is handed."""
    logits: Logits = {}
    sample = Sampler.sample

    def record(self: Sampler, given: Tensor, params: Any, rows: Sequence[int], steps: Sequence[int], *rest: Any) -> Any:
        for place, (row, step) in enumerate(zip(rows, steps)):
            known = logits.setdefault((step, row), given[place].clone())  # a row that is held may be sampled again
            assert torch.equal(known, given[place]), f"row {row} was sampled twice at step {step}"
        return sample(self, given, params, rows, steps, *rest)

    with patch.object(Sampler, "sample", record):
        yield logits


def generate_with(llm: LLM, case: Case, params: SamplingParams | None = None) -> tuple[list[Completion], Logits]:
    with recorded_logits() as logits:
        return llm.generate(case.prompts, params or case.params), logits


def hold_contract(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    with case.open(checkpoints, offload) as llm:
        compare(case, checkpoints, *generate_with(llm, case))


def compare(case: Case, checkpoints: Checkpoints, completions: Sequence[Completion], logits: Logits) -> None:
    """Asserts that tokens and logits equal, bit for bit, those of the resident loop over the same batches."""
    assert [completion.index for completion in completions] == list(range(len(case.lengths))), case
    assert len(logits) == len(case.lengths) * case.gen_len, case
    for rows, beside in zip(case.batches(), case.beside(checkpoints.spec(case)), strict=True):
        expected = checkpoints.resident_logits(case, rows, beside)
        for place, row in enumerate(rows):
            tokens = [int(case.picked(rows, expected[: step + 1])[place]) for step in range(case.gen_len)]
            assert list(completions[row].token_ids) == tokens, f"row {row}: {case}"
            for step in range(case.gen_len):
                assert torch.equal(logits[step, row].cpu(), expected[step][place]), f"step {step}, row {row}: {case}"


def compare_each_alone(case: Case, limits: Sequence[int], checkpoints: Checkpoints, completions: Sequence[Completion]) -> None:
    """Asserts that each row has the tokens that the resident loop gives it alone; `limits`: how many of them."""
    for row, (completion, limit) in enumerate(zip(completions, limits, strict=True)):
        alone = checkpoints.resident_logits(replace(case, gen_len=limit), (row,))
        tokens = [int(case.picked((row,), alone[: step + 1])[0]) for step in range(limit)]
        assert list(completion.token_ids) == tokens, f"row {row}: {case}"
