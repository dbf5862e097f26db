"""Rows with adapters of their own stand in one block, and each says what it says where all rows have its adapter, or none has
one: that is what PEFT makes of it, and what the model says with the adapter in its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from h2o_flexgen.checkpoints.adapters import WEIGHTS
from h2o_flexgen.checkpoints.packed import stored_values
from h2o_flexgen.cli.slow import unrecorded_reason
from h2o_flexgen.core.prefix_groups import OWN_TOKENS, adapter_of, bytes_of, text_under, tokens_of, under
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.engine.graphs import BY_ADAPTERS, StepGraphs
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.row_adapters import LowRankStore
from h2o_flexgen.engine.row_maker import workload_of
from h2o_flexgen.engine.stores import prefix_files
from h2o_flexgen.engine.stores.prefix_files import SUFFIX, PrefixFiles
from h2o_flexgen.evaluation.answer_settings import model_settings
from h2o_flexgen.jobs.index import InputPart
from h2o_flexgen.jobs.output import Manifest
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.placement import device_of_layers, layers_of, only_layers
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import LoRARequest, SamplingParams
from h2o_flexgen.session.opened_model import OpenedModel
from h2o_flexgen.text.prompts import Prompt
from tests.checkpoints.test_adapters import RANK, changed, matrices_of, save_adapter, values_in, with_tensors
from tests.helpers import tiny
from tests.helpers.contract import Checkpoints
from tests.helpers.refusals import one_line
from tests.helpers.samples import every_nth
from tests.whole.test_arriving_prefixes import drawn
from tests.whole.test_drafts import always, guessing
from tests.whole.test_tokens_ahead import one_by_one
from tests.whole.test_tokens_ahead import streamed as held_streamed

IN_MEMORY, ON_DISK = (0, 0, 0, 100, 100, 0), (0, 0, 0, 0, 0, 0)
STEPS = 4
FOUR = SamplingParams(max_tokens=STEPS)
PROMPT = [5, 9, 2, 7, 4, 11]
NAMES = ("one", "two", "three", None)  # of the adapters of rows in a block
OF_PLANS = ("two", None)  # behind rows with other adapters
Found = tuple[list[tuple[int, ...]], dict[tuple[int, int], Tensor]]


def keep(logits: dict[tuple[int, int], Tensor], row: int, step: int, own: Tensor) -> None:
    logits[row, step] = own.clone()


def not_of_experts(name: str) -> bool:
    """Nor of their router, nor computed in parts."""
    return ".experts." not in name and not name.endswith((".gate.weight", "_gate.weight", ".kv_b_proj.weight"))


def shapes_of(base: Path, is_turned: bool = False) -> dict[str, tuple[int, int]]:
    """The linear layers of blocks, each with its outputs and inputs."""
    values = values_in(base)
    inside = [name for name in matrices_of(values) if ".layers." in name or ".h." in name]
    return {name: tuple(values[name].shape)[:: -1 if is_turned else 1] for name in inside if not_of_experts(name)}


@dataclass(frozen=True)
class Adapted:
    """A model and its adapters, by name: one of all matrices, one of every other, and one of the rest with another rank."""

    base: Path
    adapters: dict[str, Path]
    offload: Path

    @classmethod
    def of(cls, base: Path, folder: Path, offload: Path, is_turned: bool = False) -> Adapted:
        shapes = [*shapes_of(base, is_turned).items()]
        how = {"fan_in_fan_out": is_turned}
        made = {
            "one": save_adapter(folder / "one", dict(shapes), 1, **how),
            "two": save_adapter(folder / "two", dict(shapes[::2]), 2, use_rslora=True, **how),
            "three": save_adapter(folder / "three", dict(shapes[1::2]), 3, r=5, **how),
        }
        return cls(base, made, offload)

    def open(self, lora: bool = True, **options: Any) -> LLM:
        options = {"dtype": "float32", "percent": IN_MEMORY, "device": "cpu", **options}
        own = {"lora": self.adapters} if lora else {}
        return LLM(self.base, tokenizer="bytes", offload_dir=self.offload, **own, **options)

    def said(self, names: Sequence[str | None], prompts: Sequence[Sequence[int]] = (), **options: Any) -> Found:
        """The tokens of rows with these adapters, and their logits by row and step."""
        logits: dict[tuple[int, int], Tensor] = {}
        prompts = prompts or [PROMPT] * len(names)
        params = [SamplingParams(max_tokens=STEPS, lora_name=name) for name in names]
        with self.open(any(names), **options) as llm:
            made = llm.generate(prompts, params, on_logits=partial(keep, logits))
        return [one.token_ids for one in made], logits


@pytest.fixture(scope="module")
def llama(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    return Adapted.of(checkpoints.folder("llama-gqa"), folder, folder / "offload")


def assert_rows_are_those_of_blocks_of_their_own(
    adapted: Adapted, mixed: Found, by: float = 0, names: Sequence[str | None] = NAMES, **options: Any
) -> None:
    """Bit by bit, as the block has as many rows; but experts meet as many rows as choose them."""
    for name in names:
        row, alone = NAMES.index(name), adapted.said([name] * len(NAMES), **options)
        assert alone[0][row] == mixed[0][row], name
        for step in range(STEPS):
            assert torch.allclose(alone[1][row, step], mixed[1][row, step], rtol=0, atol=by), (name, step)


@pytest.mark.parametrize("kind", every_nth(["gpt2", "llama-gqa", "deepseek-v3", "phi3", "qwen3-next", "ernie-moe"], 2))
def test_rows_say_what_they_say_where_all_have_their_adapter_and_what_merged_models_say(
    kind: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    adapted = Adapted.of(checkpoints.folder(kind), tmp_path, offload, is_turned=kind == "gpt2")
    mixed = adapted.said(NAMES)
    has_experts = kind not in ("llama-gqa", "gpt2", "phi3")
    assert_rows_are_those_of_blocks_of_their_own(adapted, mixed, 1e-5 if has_experts else 0)
    plain = adapted.said([None] * len(NAMES))
    for row, name in enumerate(NAMES[:3]):
        assert name is not None
        merged = adapted.said([None] * len(NAMES), adapter=adapted.adapters[name])
        assert merged[0][row] == mixed[0][row]
        for step in range(STEPS):
            assert torch.allclose(merged[1][row, step], mixed[1][row, step], atol=1e-4), (name, step)
        assert not torch.allclose(plain[1][row, 0], mixed[1][row, 0], atol=1e-2), "it adds something"


PLANS: dict[str, dict[str, Any]] = {
    "on disk": {"percent": ON_DISK},
    "4 bits": {"weight_codec": "group4"},
    "int8": {"weight_codec": "group8", "compute": "int8"},
    "4 bits on disk, evicting": {"weight_codec": "group4", "percent": ON_DISK, "kv_policy": "h2o", "heavy": 4, "recent": 4},
    "16 bits": {"dtype": "bfloat16"},
    "batches": {"gpu_batch_size": 2, "num_gpu_batches": 2},
    "pieces": {"prefill_tokens": 4},
    "a device with memory of its own": {"device": "pretended", "percent": (30, 30, 20, 50, 40, 30)},
    "attended on the host": {"device": "pretended", "percent": (0, 50, 0, 100, 100, 0), "attend_on": "host"},
}


@pytest.mark.parametrize("plan", every_nth(PLANS, 2))
def test_under_every_plan_rows_are_those_of_blocks_of_their_own(plan: str, llama: Adapted, pretended: None) -> None:
    mixed = llama.said(NAMES, **PLANS[plan])
    assert_rows_are_those_of_blocks_of_their_own(llama, mixed, names=OF_PLANS, **PLANS[plan])
    assert len({*mixed[0]}) > 2, "adapters make a difference"


def test_beside_quantised_matrices_they_add_to_what_these_make(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    """Merging decodes them first, so that both agree up to the roundings of sums."""
    base, opened = checkpoints.folder("llama-gqa", "awq"), checkpoints.opened("llama-gqa", "awq", "float32")
    shapes = {name: one.shape for name, one in opened.model(Plan()).spec.tensors.items() if "layers.1" in name}
    adapter = save_adapter(tmp_path / "one", {name: (own[0], own[1]) for name, own in shapes.items() if len(own) == 2})
    adapted = Adapted(base, {"one": adapter}, offload)
    beside, merged = adapted.said(["one", None]), adapted.said([None] * 2, adapter=adapter)
    assert beside[0][0] == merged[0][0]
    assert all(torch.allclose(beside[1][0, step], merged[1][0, step], atol=1e-3) for step in range(STEPS))


# -- PEFT ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_peft_has_saved_is_what_peft_makes_of_it_beside_weights_and_merged(
    use_rslora: bool, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = checkpoints.folder("llama-gqa")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, use_rslora=use_rslora, init_lora_weights=False)
    torch.manual_seed(5)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1]
    adapted = Adapted(base, {"saved": tmp_path / "saved"}, offload)
    beside = adapted.said(["saved", None])[1][0, 0]
    merged = adapted.said([None, None], adapter=tmp_path / "saved")[1][0, 0]
    plain = adapted.said([None, None])[1][0, 0]
    assert torch.allclose(beside, wanted, atol=1e-4) and torch.allclose(merged, wanted, atol=1e-4)
    assert not torch.allclose(plain, wanted, atol=1e-1)


# -- rows that come and go, and what they share ----------------------------------------------------------------------------

HEAD, KEPT = drawn(40, 1), 32  # of a beginning as many are kept as whole pieces have


def streamed(llm: LLM, prompts: Sequence[Sequence[int]], names: Sequence[str | None], **heard: Any) -> list[Completion]:
    params = [SamplingParams(max_tokens=2 + place % 4, lora_name=name) for place, name in enumerate(names)]
    requests = [Request(prompt, own) for prompt, own in zip(prompts, params)]
    return sorted(llm.generate_stream(requests, **heard), key=lambda one: one.index)


@pytest.mark.parametrize("percent", [IN_MEMORY, ON_DISK])
def test_running_rows_with_adapters_join_and_leave(percent: tuple[int, ...], llama: Adapted) -> None:
    names = [NAMES[place % 4] for place in range(9)]
    prompts = [drawn(3 + place % 5, place) for place in range(9)]
    with llama.open(percent=percent, gpu_batch_size=2, num_gpu_batches=2) as llm:
        together = [one.token_ids for one in streamed(llm, prompts, names)]
        alone = [
            llm.generate([prompt], SamplingParams(max_tokens=2 + place % 4, lora_name=name))[0].token_ids
            for place, (prompt, name) in enumerate(zip(prompts, names))
        ]
    assert together == alone


def test_tokens_that_are_taken_ahead_have_the_adapters_of_their_rows(llama: Adapted) -> None:
    """A row then stands several times in a pass, once for each token."""
    pytest.importorskip("llguidance", reason="needs the extra [grammar]")
    held = SamplingParams(max_tokens=14, structured_outputs={"regex": "(ABCDEFG[0-9]{2}XYZ)*"})
    requests = [Request([*PROMPT, place], replace(held, lora_name=NAMES[place % 4])) for place in range(6)]
    with llama.open(percent=(0, 0, 100, 0, 100, 0), gpu_batch_size=3) as llm:
        found, passes = held_streamed(llm, requests)
        with one_by_one():
            wanted, more_passes = held_streamed(llm, requests)
        alone = [llm.generate([one.prompt], one.params)[0].token_ids for one in requests]
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted] == alone
    assert passes < 0.8 * more_passes and len({*alone}) > 2, "tokens were taken ahead, and adapters make a difference"


def test_guessed_tokens_are_checked_with_the_adapters_of_their_rows(llama: Adapted) -> None:
    prompts = [[*PROMPT, place] for place in range(6)]
    params = [SamplingParams(max_tokens=12, lora_name=NAMES[place % 4]) for place in range(6)]
    plan: dict[str, Any] = {"percent": (0, 0, 100, 0, 100, 0), "gpu_batch_size": 3}
    with llama.open(**plan) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, params)]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted)]
    with always(), guessing(texts, 3), llama.open(**plan, draft="ngram") as llm:
        found = [one.token_ids for one in llm.generate(prompts, params)]
        assert llm.stats is not None and llm.stats.drafted.accepted > 10
        running = sorted(llm.generate_stream(map(Request, prompts, params)), key=lambda one: one.index)
    assert found == [one.token_ids for one in running] == wanted
    assert len({*wanted}) > 2, "adapters make a difference"


def test_a_job_shares_prefixes_under_one_adapter_alone(llama: Adapted) -> None:
    names = [NAMES[place % 4] for place in range(8)]
    prompts, spared = [[*HEAD, place, place + 1] for place in range(8)], list[int]()
    with llama.open(gpu_batch_size=8) as llm:
        shared = streamed(llm, prompts, names, on_tick=lambda tick: spared.append(tick.spared_tokens))
    with llama.open(gpu_batch_size=8, shared_prefixes=False) as llm:
        apart = streamed(llm, prompts, names)
    assert [one.token_ids for one in shared] == [one.token_ids for one in apart]
    assert spared[-1] == len(NAMES) * len(HEAD), "each is computed once for two rows"
    assert len({one.token_ids[:2] for one in apart}) > 2, "adapters make a difference"


def arrived(llm: LLM, names: Sequence[str | None], room: int | None = 400, **asked: Any) -> list[Completion]:
    """One row after the other, so that each finds what those before it have left."""
    arrivals, found = llm.arrivals(60, 4, prefix_room=room), list[Completion]()
    for place, name in enumerate(names):
        prompt = Prompt(None, (*HEAD, place, place + 1))
        arrivals.offer(Request(prompt, SamplingParams(**{"max_tokens": 4, "lora_name": name, **asked})))
        found += [one.completion for one in llm.generate_arriving(arrivals)]
    return found


@pytest.mark.parametrize("arrive", [False, True])
def test_prompts_that_share_prefixes_have_the_log_probabilities_of_their_own_tokens(arrive: bool, llama: Adapted) -> None:
    def scored(**plan: Any) -> list[Completion]:
        asked: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": 1}
        with llama.open(gpu_batch_size=4, **plan) as llm:
            if arrive:
                return arrived(llm, ["one"] * 4, 400 if llm.plan.shared_prefixes else None, **asked)
            params = SamplingParams(lora_name="one", **asked)
            requests = [Request([*HEAD, place, place + 1], params) for place in range(4)]
            return sorted(llm.generate_stream(requests), key=lambda one: one.index)

    for shared, apart in zip(scored(), scored(shared_prefixes=False), strict=True):
        assert shared.token_ids == apart.token_ids
        found, wanted = (own.prompt_logprobs or () for own in (shared, apart))
        assert [one and one.chosen.token_id for one in found] == [None, *shared.prompt_token_ids[1:]]
        for one, other in zip(found[1:], wanted[1:], strict=True):
            assert one is not None and other is not None and one.chosen.token_id == other.chosen.token_id
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
            assert one.top[0].token_id == other.top[0].token_id


EACH_THRICE = [name for name in ("one", "two", None) for _ in range(3)]


def test_requests_that_arrive_share_prefixes_under_one_adapter_alone(llama: Adapted) -> None:
    with llama.open() as llm:
        found = arrived(llm, EACH_THRICE)
    assert [one.cached_tokens for one in found] == [0, 0, KEPT] * 3
    with llama.open(shared_prefixes=False) as llm:
        assert [one.token_ids for one in arrived(llm, EACH_THRICE, None)] == [one.token_ids for one in found]


def test_prefixes_that_last_are_found_under_the_same_adapter_whatever_its_number(llama: Adapted, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    with llama.open(prefix_dir=folder) as llm:
        first = arrived(llm, EACH_THRICE)
    assert len([*folder.glob(f"*{SUFFIX}")]) == 3
    turned = Adapted(llama.base, {name: llama.adapters[name] for name in ("three", "two", "one")}, llama.offload)
    with turned.open(prefix_dir=folder) as llm:
        again = arrived(llm, EACH_THRICE)
    assert [one.cached_tokens for one in again] == [KEPT] * 9
    assert [one.token_ids for one in again] == [one.token_ids for one in first]
    other = Adapted(llama.base, {"one": llama.adapters["three"]}, llama.offload)
    with other.open(prefix_dir=folder) as llm:
        found = arrived(llm, ["one", None])
    assert [one.cached_tokens for one in found] == [0, KEPT], "the name says nothing"
    assert len([*folder.glob(f"*{SUFFIX}")]) == 3, "none was taken for a damaged one"


def test_tokens_under_adapters_are_told_apart_and_found_again() -> None:
    for adapter in (0, 1, 1000):
        text = bytes_of(under(adapter, [7, OWN_TOKENS - 1]))
        assert adapter_of(text) == adapter and text_under(0, text) == bytes_of([7, OWN_TOKENS - 1])
        assert text_under(3, text) == bytes_of(under(3, [7, OWN_TOKENS - 1]))
        assert tokens_of(under(adapter, [7, OWN_TOKENS - 1])) == [7, OWN_TOKENS - 1]


def test_threads_that_meet_new_adapters_at_once_count_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, kind, text = list[str](), "ab" * 12, bytes_of(under(3, [7, 8, 9]))

    def interrupted(*given: Any, **how: Any) -> Any:
        """A hash that is not made before the other thread has come by."""
        monkeypatch.undo()
        files.of(text[:0])
        return blake2b(*given, **how)

    names = []
    for folder, is_interrupted in (("alone", False), ("beside", True)):
        (tmp_path / folder).mkdir()
        known.clear()
        with closing(PrefixFiles(tmp_path / folder, 1 << 20, kind, lambda: known)) as files:
            known.extend(["x", "y"])
            if is_interrupted:
                monkeypatch.setattr(prefix_files, "blake2b", interrupted)
            files.of(text[:0])
            known.append("z")
            files.write_behind(text, ())
            files.settle()
        names.append([one.name for one in (tmp_path / folder).iterdir()])
    assert names[0] == names[1] and len(names[0]) == 1


# -- what is counted, said and refused -------------------------------------------------------------------------------------


def test_they_are_counted_and_what_they_need_is_refused_where_it_is_not_there(llama: Adapted) -> None:
    def planned_of(llm: LLM) -> WorkloadPlan:
        return llm.planned(workload_of(llm.row_maker.rows([Prompt(None, tuple(PROMPT))], FOUR)))

    with llama.open() as llm, llama.open(lora=False) as bare:
        planned, plain = planned_of(llm), planned_of(bare)
        counted = planned.footprint.parts[HOST]["adapters"]
        halves = sum(one.numel() * 4 for folder in llama.adapters.values() for one in load_file(folder / WEIGHTS).values())
        assert halves < counted == planned.footprint.total(HOST) - plain.footprint.total(HOST)
        limits = llm.loaded.limits
        between = sum(limits.needs(one.footprint, HOST) for one in (planned, plain)) // 2
        llm.loaded.limits = replace(limits, host=between)
        assert "adapters" in one_line(lambda: llm.generate([PROMPT], FOUR))


def test_each_device_of_a_pipeline_counts_and_holds_what_is_beside_its_own_layers(llama: Adapted, pretended: None) -> None:
    plan: dict[str, Any] = {"device": "pretended", "percent": (100, 0, 100, 0, 100, 0), "gpu_batch_size": 4}
    with llama.open(**plan) as whole, llama.open(pipeline=2, num_gpu_batches=2, **plan) as parted:
        rows = [llm.row_maker.rows([Prompt(None, tuple(PROMPT))] * 4, FOUR) for llm in (whole, parted)]
        counted = [llm.planned(workload_of(own)).footprint for llm, own in zip((whole, parted), rows)]
        working = whole.loaded.site.adapters.working
        all_matrices = counted[0].parts[DEVICE]["adapters"] - working
        of_devices = [parts["adapters"] - working for parts in counted[1].devices]
        assert sum(of_devices) == all_matrices and min(of_devices) > 0
        allocated = list[int]()

        def alloc(nbytes: int) -> Tensor:
            allocated.append(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8)

        here = SimpleNamespace(compute=SimpleNamespace(alloc=alloc))
        for device in range(2):
            section = only_layers(parted.spec, layers_of(device_of_layers(parted.spec, 2), device))
            LowRankStore(parted.loaded.adapters, section, here).load()  # type: ignore[arg-type]
        assert sum(allocated) == all_matrices
    assert llama.said(NAMES, pipeline=2, num_gpu_batches=1, **plan)[0] == llama.said(NAMES)[0]


def test_answers_depend_on_the_adapters_that_there_are(llama: Adapted) -> None:
    settings = []
    for names in ((), ("one",), ("one", "two")):
        adapted = Adapted(llama.base, {name: llama.adapters[name] for name in names}, llama.offload)
        with adapted.open() as llm:
            settings.append(model_settings(llm)[0])
    assert len({str(one) for one in settings}) == 3
    for before, now in product(settings, repeat=2):
        begun = Manifest(0, 0, InputPart(0, ""), json.loads(json.dumps(before)), {})
        assert bool([*begun.differences(now)]) == (before is not now), "also where some are no longer given"
    with Adapted(llama.base, {"one": llama.adapters["two"]}, llama.offload).open() as llm:
        assert model_settings(llm)[0] != settings[1], "another one by the same name"


@pytest.mark.parametrize("plan", [{}, {"percent": ON_DISK}, {"weight_codec": "group4"}, {"dtype": "bfloat16"}], ids=str)
def test_recorded_steps_have_the_bits_of_those_that_are_not(plan: dict[str, Any], llama: Adapted) -> None:
    """Also behind a row that has left, with an adapter of its own."""

    def said(graphs: str) -> tuple[list[tuple[int, ...]], dict[tuple[int, int], Tensor], int]:
        logits: dict[tuple[int, int], Tensor] = {}
        params = [SamplingParams(max_tokens=16 - 5 * (name == "two"), lora_name=name, ignore_eos=True) for name in NAMES]
        with llama.open(graphs=graphs, **plan) as llm:
            made = llm.generate([PROMPT] * 4, params, on_logits=partial(keep, logits))
            assert llm.stats is not None and not llm.stats.unrecorded
            return [one.token_ids for one in made], logits, llm.stats.replayed

    found, wanted = said("on"), said("off")
    assert found[2] > 0 == wanted[2] and found[0] == wanted[0]
    assert all(torch.equal(found[1][place], logits) for place, logits in wanted[1].items())


TITLES = ["first", "one", "two", "last"]


def test_graphs_of_a_gpu_go_on_without_rows_that_have_adapters() -> None:
    def rows(*adapters: int) -> Any:
        return SimpleNamespace(parts=[SimpleNamespace(now=SimpleNamespace(is_prefill=False), ahead=(), adapters=adapters)])

    for is_gpu in (True, False):
        graphs = StepGraphs(SimpleNamespace(accelerator=is_gpu), False, lambda *_: True, lambda *_: ())  # type: ignore[arg-type]
        assert graphs.take(rows()) and not graphs.met_adapters
        assert graphs.take(rows(0, 1)) == (not is_gpu) and graphs.met_adapters == is_gpu
        assert graphs.unrecorded(TITLES) == (dict.fromkeys(("one", "two"), BY_ADAPTERS) if is_gpu else {})
    (line,) = unrecorded_reason({"a layer": BY_ADAPTERS})
    assert "rows have adapters" in line and line.endswith("each call of steps with adapters")
    graphs.met_adapters, graphs.refused = True, {2: "no kernel"}
    told = graphs.unrecorded(TITLES)
    assert told == {"one": BY_ADAPTERS, "two": "no kernel"}, "what holds for all steps is said"
    (line,) = unrecorded_reason(told)
    assert line == "one layer could not be recorded (two: no kernel), and Python made each call of each step; please report it"


def test_python_asks_as_with_vllm(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LoRARequest("one", 1, str(llama.adapters["one"]))
    with llama.open(lora=False) as llm:
        by_request = llm.generate([PROMPT] * 2, FOUR, lora_request=[asked, None])
        by_name = llm.generate([PROMPT] * 2, [replace(FOUR, lora_name="one"), FOUR])
        of_any_iterator = llm.generate(iter([PROMPT] * 2), FOUR, lora_request=iter([asked, None]))
        for_all = llm.generate([PROMPT] * 2, FOUR, lora_request=asked)
        chat = llm.chat([{"role": "user", "content": "a"}], FOUR, lora_request=asked)
        plain = llm.chat([{"role": "user", "content": "a"}], FOUR)
        spelled = LoRARequest("one", 1, os.path.relpath(llama.adapters["one"]))
        by_other_path = llm.generate([PROMPT], FOUR, lora_request=spelled)
        monkeypatch.setenv("HOME", str(llama.adapters["two"].parent))
        in_home = llm.generate([PROMPT], FOUR, lora_request=LoRARequest("two", 2, f"~/{llama.adapters['two'].name}"))
        not_in_home = llm.generate([PROMPT], FOUR, lora_request=LoRARequest("two", 2, llama.adapters["two"]))
        told = one_line(lambda: llm.generate([PROMPT], lora_request=LoRARequest("three", 3, "~nobody-here/three")))
        assert told.startswith("adapter ~nobody-here/three does not exist; "), "the home of an unknown user is no bug"
        told = one_line(lambda: llm.generate([PROMPT], lora_request=LoRARequest("one", 1, llama.adapters["two"])))
        assert told.startswith("adapter 'one' is ") and told.endswith("; give another name")
        told = one_line(lambda: llm.generate([PROMPT], FOUR, lora_request="one"))  # type: ignore[arg-type]
        assert told == "lora_request is 'one'; write LoRARequest(NAME, 1, PATH), or a list with one for each"
        told = one_line(lambda: llm.generate([PROMPT] * 3, FOUR, lora_request=[asked, None]))
        assert told == "3 prompts came with 2 adapters in lora_request; give one for all or one for each"
        told = one_line(lambda: llm.generate([PROMPT], replace(FOUR, lora_name="on")))
        assert told == "lora_name is 'on', which is no adapter here; did you mean one?"
        with llm.converse() as conversation:
            assert "has the adapter that it is opened" in one_line(
                lambda: conversation.reply("a", replace(FOUR, lora_name="one"))
            )
    assert [one.token_ids for one in by_request] == [one.token_ids for one in by_name]
    assert [one.token_ids for one in by_request] == [one.token_ids for one in of_any_iterator]
    assert for_all[1].token_ids == by_request[0].token_ids != by_request[1].token_ids
    assert by_other_path[0].token_ids == by_request[0].token_ids
    assert in_home[0].token_ids == not_in_home[0].token_ids
    assert chat[0].token_ids != plain[0].token_ids


def test_prompts_that_are_only_read_have_adapters(llama: Adapted) -> None:
    """Those of embeddings and scores; they are what a model has that the adapter was merged into."""
    asked = LoRARequest("one", 1, llama.adapters["one"])
    pairs = [(PROMPT, [5, 9]), (PROMPT, [5, 9]), (PROMPT, [5, 7])]
    with llama.open(lora=False) as llm:
        embedded, plain = llm.embed([PROMPT] * 2, lora_request=[asked, None])
        scored = [llm.score(pairs, by=by, lora_request=[asked, None, asked]) for by in ("prefill", "decode")]
        for_all = llm.score(pairs, lora_request=asked)
    with llama.open(lora=False, adapter=llama.adapters["one"]) as llm:
        (wanted,), own = llm.embed([PROMPT]), llm.score(pairs)
    assert embedded.embedding == pytest.approx(wanted.embedding, abs=1e-5)
    assert plain.embedding != pytest.approx(wanted.embedding, abs=1e-2)
    for found in scored:
        assert found[0].logprobs == pytest.approx(own[0].logprobs, abs=1e-4)
        assert found[1].logprobs != pytest.approx(own[1].logprobs, abs=1e-2)
        assert found[2].logprobs == pytest.approx(own[2].logprobs, abs=1e-4)
    assert [one.logprobs for one in for_all] == [pytest.approx(one.logprobs, abs=1e-4) for one in own]


@pytest.mark.parametrize("labels", [1, 3])
def test_labels_and_ranks_have_adapters(labels: int, offload: Path, tmp_path: Path) -> None:
    """They are those of a model that the adapter was merged into, and rows beside them have the model's own."""
    tiny.save_classifier("llama-gqa", tmp_path / "model", labels=labels)
    adapted = Adapted.of(tmp_path / "model", tmp_path, offload)
    asked = LoRARequest("one", 1, adapted.adapters["one"])

    def scored(llm: LLM, each: Sequence[LoRARequest | None] = (None, None)) -> list[Sequence[float]]:
        if labels > 1:
            return [one.scores for one in llm.classify([PROMPT] * 2, lora_request=each)]
        ranked = llm.rank("When?", ["At nine."] * 2, lora_request=each)
        return [[one.score] for one in sorted(ranked, key=lambda one: one.index)]

    with adapted.open(lora=False) as llm:
        (changed, beside), (plain, _), for_all = scored(llm, [asked, None]), scored(llm), scored(llm, [asked, asked])
    with adapted.open(lora=False, adapter=adapted.adapters["one"]) as llm:
        wanted, _ = scored(llm)
    assert [changed, *for_all] == [pytest.approx(wanted, abs=1e-4)] * 3
    assert beside == pytest.approx(plain, abs=1e-6) and plain != pytest.approx(wanted, abs=1e-3)


def test_a_conversation_has_the_adapter_that_it_is_opened_with(llama: Adapted) -> None:
    turns = [PROMPT * 3, [4, 8], [15, 16]]
    found = []
    for given, request in (
        ({}, LoRARequest("one", 1, llama.adapters["one"])),
        ({"adapter": llama.adapters["one"]}, None),
        ({}, None),
    ):
        with llama.open(lora=False, prefill_tokens=8, **given) as llm, llm.converse(64, lora_request=request) as talk:
            found.append([talk.reply(turn, FOUR).completion.token_ids for turn in turns])
    assert found[0] == found[1] != found[2]


# -- files of llama.cpp ------------------------------------------------------------------------------------------------------


def as_gguf(folder: Path, model: Any, file: Path, alpha: float = 8.0, kind: str = "adapter", method: str = "lora") -> Path:
    """What PEFT has saved, as llama.cpp's converter writes it for a GGUF file of this model."""
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import FAMILIES, _rows_in_file, name_in_file

    family, halves = FAMILIES[model.config.model_type], dict[str, Tensor]()
    for key, values in load_file(folder / WEIGHTS).items():
        module, half = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        own = values[_rows_in_file(model.config, family, module, len(values))] if half == "B" else values
        halves[f"{name_in_file(f'{module}.weight', family.names)}.lora_{half.lower()}"] = own
    return save_gguf_adapter(file, family.architecture, halves, alpha, kind, method)


def save_gguf_adapter(
    file: Path,
    architecture: str,
    halves: Mapping[str, Tensor],
    alpha: float = 8.0,
    kind: str = "adapter",
    method: str = "lora",
) -> Path:
    writer = pytest.importorskip("gguf").GGUFWriter(file, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", method)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, half in halves.items():
        writer.add_tensor(name, half.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind, stored", [("llama-gqa", "gguf-q8_0"), ("qwen3", "gguf-bfloat16")])
def test_adapters_in_gguf_files_are_those_that_peft_has_saved(
    kind: str, stored: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    model, file = checkpoints.hf_model(kind, stored), checkpoints.folder(kind, stored)
    model.save_pretrained(tmp_path / "base")
    of_folder = Adapted.of(tmp_path / "base", tmp_path, offload)
    made = {"one": as_gguf(of_folder.adapters["one"], model, tmp_path / "one.gguf")}
    found, wanted = (one.said(["one", None]) for one in (Adapted(file, made, offload), of_folder))
    assert found[0] == wanted[0]
    for place, own in wanted[1].items():
        assert torch.allclose(found[1][place], own, atol=2e-3), place
    assert found[0][0] != found[0][1]


OF_GGUF = {  # what tensors of GGUF files are in models
    "llama-gqa": {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "output.weight": "lm_head.weight",
    },
    "olmoe": {
        "blk.1.ffn_down_exps.weight": "model.layers.1.mlp.experts.{}.down_proj.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    },
}


@pytest.mark.parametrize("kind", OF_GGUF)
def test_adapters_in_gguf_files_are_merged_into_decoded_matrices(
    kind: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    """Those of all experts, too, which are one tensor in the file. What is added is computed here from what the file says."""
    file, opened = checkpoints.folder(kind, "gguf-q4_0"), checkpoints.opened(kind, "gguf-q4_0", "float32")
    shapes = {name: one.shape for name, one in opened.spec(Plan()).tensors.items()}
    halves, added = dict[str, Tensor](), dict[str, Tensor]()
    for there, name in OF_GGUF[kind].items():
        each = [own for number in range(8) if (own := name.format(number)) in shapes][: 1 if "{" not in name else None]
        outputs, inputs = shapes[each[0]]
        a, b = torch.randn(len(each), RANK, inputs), torch.randn(len(each), outputs, RANK)
        halves |= {f"{there}.lora_a": a.squeeze(0), f"{there}.lora_b": b.squeeze(0)}
        added |= {own: b[number] @ a[number] * (8 / RANK * 0.5) for number, own in enumerate(each)}
    made = save_gguf_adapter(tmp_path / "made.gguf", "olmoe" if kind == "olmoe" else "llama", halves)
    merged = OpenedModel.of(str(file), False, "float32", Site(), adapters=[f"{made}=0.5"])
    assert merged.checkpoint is not None and opened.checkpoint is not None and len(added) >= 3
    for name, tensor in opened.spec(Plan()).tensors.items():
        found, wanted = (
            torch.cat([*stored_values(one.checkpoint.located(tensor), 1)]) for one in (merged, opened) if one.checkpoint
        )
        assert torch.equal(found, wanted.float() + added[name] if name in added else wanted), name
    adapted = Adapted(file, {}, offload)
    logits = adapted.said([None] * 2, adapter=f"{made}=0.5")[1], adapted.said([None] * 2)[1]
    assert not torch.allclose(logits[0][0, 0], logits[1][0, 0], atol=1e-3), "a run has them"


def test_gguf_files_that_are_no_adapters_of_this_model_are_refused(
    checkpoints: Checkpoints, llama: Adapted, offload: Path, tmp_path: Path
) -> None:
    base, stored = checkpoints.folder("llama-gqa", "gguf-q8_0"), checkpoints.hf_model("llama-gqa", "gguf-q8_0")
    stored.save_pretrained(tmp_path / "base")
    folder = Adapted.of(tmp_path / "base", tmp_path, offload).adapters["two"]

    def told(given: Path, model: Path = base) -> str:
        return one_line(lambda: Adapted(model, {"one": given}, offload).open())

    def changed_file(**changes: Any) -> Path:
        return as_gguf(folder, changes.pop("model", stored), tmp_path / f"{len([*tmp_path.iterdir()])}.gguf", **changes)

    assert "is a GGUF file; give the model's folder of safetensors, or the adapter as a GGUF file" in told(folder)
    assert "'one' is a GGUF file, for matrices as these have them, and the model is none" in told(changed_file(), llama.base)
    assert "is a GGUF file of the type 'model', no adapter" in told(base)
    assert "is of the kind 'dora', and only LORA can be used" in told(changed_file(method="dora"))
    other = changed_file(model=checkpoints.hf_model("qwen3", "gguf-bfloat16"))
    assert "is for models of the architecture 'qwen3', and this one is 'llama'" in told(other)
    head = save_adapter(tmp_path / "head", {"lm_head.weight": (128, 32)})
    line = told(as_gguf(head, stored, tmp_path / "head.gguf"))
    changes = "and an adapter beside the weights changes no tables, heads and experts; merge it: --adapter FILE"
    assert f"changes output.weight, {changes}" in line
    halves = {
        f"blk.0.ffn_up_exps.weight.lora_{half}": torch.ones(4, *shape) for half, shape in (("a", (3, 64)), ("b", (96, 3)))
    }
    experts = save_gguf_adapter(tmp_path / "experts.gguf", "olmoe", halves)
    line = told(experts, checkpoints.folder("olmoe", "gguf-q4_0"))
    assert f"changes blk.0.ffn_up_exps.weight of expert 0, {changes}" in line


@pytest.mark.parametrize(
    ("name", "path", "told"),
    [
        (5, "f", "lora_name is 5; "),
        ("", "f", "lora_name is ''; "),
        ("a=b", "f", "lora_name is 'a=b'; "),
        ("a:b", "f", "lora_name is 'a:b'; "),
        ("a", ["f"], "lora_path is ['f']; "),
        ("a", "", "lora_path is ''; "),
    ],
)
def test_what_names_no_adapter_is_refused(name: Any, path: Any, told: str) -> None:
    assert one_line(lambda: LoRARequest(name, 1, path)).startswith(f"{told}write LoRARequest(NAME, 1, PATH)")


UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def halves_of(module: str, outputs: int, inputs: int) -> Any:
    return with_tensors(
        **{f"{module}.lora_A.weight": torch.ones(RANK, inputs), f"{module}.lora_B.weight": torch.ones(outputs, RANK)}
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "DoRA": (changed(use_dora=True), "is of the kind DoRA (use_dora)"),
    "biases": (changed(bias="lora_only"), "has biases of its own"),
    "whole modules": (changed(modules_to_save=["lm_head"]), "sets modules_to_save (['lm_head']), which is not supported"),
    "another base": (halves_of("h.0.proj", 3, 3), "changes h.0.proj, and "),
    "another shape": (halves_of(DOWN, 3, 3), f"is of another model: {DOWN}.weight has the shape (32, 56), and what is to be "),
    "a head": (
        halves_of("lm_head", 128, 32),
        "changes lm_head, and an adapter beside the weights changes no tables, heads and experts",
    ),
    "a table": (
        halves_of("model.embed_tokens", 128, 32),
        "changes model.embed_tokens, and an adapter beside the weights changes no ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_adapter_of_this_model_is_refused(what: str, llama: Adapted, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", {f"{UP}.weight": shapes_of(llama.base)[f"{UP}.weight"]})
    change, told = REFUSED[what]
    change(adapter)
    line = one_line(Adapted(llama.base, {"one": adapter}, llama.offload).open)
    assert str(adapter) in line and told in line


def test_adapters_of_experts_and_their_routers_are_refused_by_name(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    base, spec = checkpoints.folder("olmoe"), checkpoints.opened("olmoe", "float32", "float32").spec(Plan())
    for place, part in enumerate((".experts.0.up_proj.", ".gate.")):
        name = next(name for name in spec.tensors if part in name)
        given = save_adapter(tmp_path / str(place), {name: (spec.tensors[name].shape[0], spec.tensors[name].shape[1])})
        told = one_line(Adapted(base, {"one": given}, offload).open)
        assert (
            f"changes {name.removesuffix('.weight')}, and an adapter beside the weights changes no tables, heads and experts"
            in told
        )


def test_what_takes_no_adapters_is_refused(checkpoints: Checkpoints, llama: Adapted, tmp_path: Path) -> None:
    for given, told in (
        (["one"], "lora is 'one'; give NAME=PATH, where NAME has no = and no :"),
        (["a:b=c"], "lora is 'a:b=c'; give NAME=PATH"),
        ({"a=b": "c"}, "lora is {'a=b': 'c'}; give {NAME: PATH}"),
    ):
        assert told in one_line(lambda given=given: LLM(llama.base, tokenizer="bytes", device="cpu", lora=given))
    gguf = Adapted(checkpoints.folder("llama-gqa", "gguf-q8_0"), llama.adapters, llama.offload)
    assert "is a GGUF file; give the model's folder of safetensors" in one_line(gguf.open)
    for kind, part, told in (
        ("mixtral", ".experts.0.", "changes no tables, heads and experts; merge it: --adapter FOLDER"),
        ("deepseek-v3", ".kv_b_proj.", "which is computed in parts; merge it: --adapter FOLDER"),
    ):
        base = checkpoints.folder(kind)
        name, value = next((name, value) for name, value in values_in(base).items() if part in name)
        adapter = save_adapter(tmp_path / kind, {name: tuple(value.shape)})
        assert told in one_line(Adapted(base, {"one": adapter}, llama.offload).open)
