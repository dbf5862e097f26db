"""Adapters are merged once, exactly as by hand: a model with them is the model whose weights are W + f * (B @ A)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from h2o_flexgen.checkpoints.adapters import CONFIG, WEIGHTS, merged_adapters
from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.evaluation.answer_settings import model_settings
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import ModelRequest
from tests.helpers.contract import Checkpoints, as_stored
from tests.helpers.refusals import one_line
from tests.helpers.samples import every_nth
from tests.helpers.tiny import save_tiny

RANK = 3
PROMPTS = [[5, 9, 2, 7, 4], [11, 3]]
LOOKED_AT = SamplingParams(max_tokens=4, logprobs=5)
Values = dict[str, Tensor]


def values_in(folder: Path) -> Values:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def matrices_of(values: Values) -> list[str]:
    """What adapters change in practice: the matrices of blocks."""
    return [name for name, one in values.items() if one.dim() == 2 and name.endswith(".weight") and "embed" not in name]


def save_adapter(folder: Path, names: Mapping[str, tuple[int, int]], seed: int = 1, **config: Any) -> Path:
    """An adapter of these matrices, each with its outputs and inputs, as PEFT saves it."""
    generator, tensors = torch.Generator().manual_seed(seed), Values()
    rank = config.get("r", RANK)
    for name, (outputs, inputs) in names.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, "use_dora": False}
    (folder / CONFIG).write_text(json.dumps({**said, "target_modules": ["q_proj"], "modules_to_save": None, **config}))
    return folder


def merged_by_hand(base: Path, out: Path, *adapters: tuple[Path, float], is_turned: bool = False) -> Path:
    """A folder of the model with what adapters add, each (folder, factor): W + factor * (B @ A), in float32."""
    shutil.copytree(base, out)
    for file in out.glob("*.safetensors"):
        values = load_file(file)
        for folder, factor in adapters:
            halves = load_file(folder / WEIGHTS)
            for name in values.keys() & {f"{key[17:-14]}.weight" for key in halves}:
                a, b = (halves[f"base_model.model.{name.removesuffix('weight')}lora_{half}.weight"].float() for half in "AB")
                delta = (b @ a).T if is_turned else b @ a
                values[name] = values[name].float() + delta * factor
        save_file(values, file, metadata={"format": "pt"})
    return out


def said(folder: Path, offload: Path, **options: Any) -> tuple[list[Any], list[Tensor]]:
    logits: list[Tensor] = []
    options = {"dtype": "float32", **options}
    with LLM(folder, tokenizer="bytes", device="cpu", offload_dir=offload, percent=(0, 0, 0, 100, 100, 0), **options) as llm:
        completions = llm.generate(PROMPTS, LOOKED_AT, on_logits=lambda row, step, made: logits.append(made.clone()))
    return [(one.token_ids, one.logprobs) for one in completions], logits


def assert_same(found: tuple[list[Any], list[Tensor]], wanted: tuple[list[Any], list[Tensor]]) -> None:
    assert found[0] == wanted[0] and len(found[1]) == len(wanted[1]) == 8
    assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1]))


KINDS = ("llama-gqa", "opt", "neox-parallel", "gpt2", "phi3", "falcon-grouped", "mixtral", "deepseek-v3", "ernie-moe", "qwen3")


@pytest.mark.parametrize("kind", every_nth(KINDS, 3))
def test_a_model_with_an_adapter_is_the_model_that_was_merged_by_hand(
    kind: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    base, is_turned = checkpoints.folder(kind), kind == "gpt2"
    values = values_in(base)
    shapes = {name: tuple(values[name].shape)[:: -1 if is_turned else 1] for name in matrices_of(values)}
    adapter = save_adapter(tmp_path / "adapter", shapes, fan_in_fan_out=is_turned)
    by_hand = merged_by_hand(base, tmp_path / "merged", (adapter, 8 / RANK), is_turned=is_turned)
    wanted = said(by_hand, offload)
    assert wanted[0] != said(base, offload)[0], "it says something else than without"
    assert_same(said(base, offload, adapter=adapter), wanted)
    assert_same(said(base, offload, adapter=adapter, weight_codec="group4"), said(by_hand, offload, weight_codec="group4"))


def test_factors_are_those_of_their_kind_and_of_their_modules(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    base = checkpoints.folder("llama-gqa")
    name = "model.layers.1.mlp.up_proj.weight"
    shapes = {name: tuple(values_in(base)[name].shape)}
    for place, (config, factor) in enumerate(
        (
            ({"use_rslora": True}, 8 / sqrt(RANK)),
            ({"alpha_pattern": {"up_proj": 5}}, 5 / RANK),
            ({"alpha_pattern": {"down_proj": 5}}, 8 / RANK),
            ({"rank_pattern": {"layers.1.mlp.up_proj": RANK}, "r": RANK + 2}, 8 / RANK),
        )
    ):
        adapter = tmp_path / f"adapter-{place}"
        save_adapter(adapter, shapes, **{**config, "r": RANK})
        (adapter / CONFIG).write_text(json.dumps({**json.loads((adapter / CONFIG).read_text()), **config}))
        by_hand = merged_by_hand(base, tmp_path / f"merged-{place}", (adapter, factor))
        assert_same(said(base, offload, adapter=adapter), said(by_hand, offload))


def test_several_are_added_in_their_order_each_with_its_weight(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    base = checkpoints.folder("qwen3")
    values = values_in(base)
    names = matrices_of(values)
    one, two = (
        save_adapter(tmp_path / f"of {seed}", {name: tuple(values[name].shape) for name in own}, seed)
        for seed, own in ((1, names[::2]), (2, names[::3]))
    )
    by_hand = merged_by_hand(base, tmp_path / "merged", (one, 8 / RANK * 0.5), (two, 8 / RANK * -1.25))
    assert_same(said(base, offload, adapter=[f"{one}=0.5", f"{two}=-1.25"]), said(by_hand, offload))


def test_values_are_rounded_once_to_the_type_that_is_computed_with(offload: Path, tmp_path: Path) -> None:
    """Of a checkpoint in bfloat16: in float32 nothing of what is added is lost, and else it is rounded at the end alone."""
    base = tmp_path / "base"
    save_tiny("llama-gqa", base, torch.bfloat16)
    values = values_in(base)
    adapter = save_adapter(tmp_path / "adapter", {name: tuple(values[name].shape) for name in matrices_of(values)})
    by_hand = merged_by_hand(base, tmp_path / "merged", (adapter, 8 / RANK))
    assert_same(said(base, offload, adapter=adapter), said(by_hand, offload))
    for file in by_hand.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, metadata={"format": "pt"})
    assert_same(said(base, offload, adapter=adapter, dtype="bfloat16"), said(by_hand, offload, dtype="bfloat16"))


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2"])
def test_tables_of_tokens_have_thin_matrices_the_other_way_round(
    kind: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    base, name = checkpoints.folder(kind), "model.embed_tokens"
    rows, width = values_in(base)[f"{name}.weight"].shape
    generator, adapter = torch.Generator().manual_seed(3), save_adapter(tmp_path / "adapter", {})
    a, b = torch.randn(RANK, rows, generator=generator), torch.randn(width, RANK, generator=generator)
    save_file({f"base_model.model.{name}.lora_embedding_{half}": one for half, one in (("A", a), ("B", b))}, adapter / WEIGHTS)
    by_hand = tmp_path / "merged"
    shutil.copytree(base, by_hand)
    for file in by_hand.glob("*.safetensors"):
        values = load_file(file)
        if f"{name}.weight" in values:
            values[f"{name}.weight"] += (b @ a).T * (8 / RANK)
        save_file(values, file, metadata={"format": "pt"})
    found, wanted = said(base, offload, adapter=adapter), said(by_hand, offload)
    assert found[0] == wanted[0] and all(torch.allclose(one, two, atol=1e-4) for one, two in zip(found[1], wanted[1]))
    assert found[0] != said(base, offload)[0]


def test_quantised_matrices_are_decoded_first(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    base = checkpoints.folder("llama-gqa", "awq")
    opened = checkpoints.opened("llama-gqa", "awq", "float32")
    assert opened.checkpoint is not None
    model = opened.model(Plan())
    values = {name: as_stored(opened.checkpoint, one)[1].float().clone() for name, one in model.spec.tensors.items()}
    names = [name for name in matrices_of(values) if "layers.1" in name]
    adapter = save_adapter(tmp_path / "adapter", {name: tuple(values[name].shape) for name in names})
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((base / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({key: one for key, one in config.items() if key != "quantization_config"}))
    save_file({name: one.contiguous() for name, one in values.items()}, plain / "model.safetensors")
    by_hand = merged_by_hand(plain, tmp_path / "merged", (adapter, 8 / RANK))
    found, wanted = said(base, offload, adapter=adapter), said(by_hand, offload)
    assert [one[0] for one in found[0]] == [one[0] for one in wanted[0]]
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(found[1], wanted[1]))


@pytest.mark.parametrize("kinds", [("gate_up_proj", "down_proj"), ("down_proj",)])
def test_parameters_of_all_experts_are_changed_as_peft_changes_them(
    kinds: tuple[str, ...], checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, own = checkpoints.folder("olmoe"), {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
    targets = [f"mlp.experts.{kind}" for kind in kinds]
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=targets, **own)
    torch.manual_seed(5)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        wanted = model(torch.tensor(PROMPTS[:1])).logits[0, -1]
        for half in (one for name, one in model.named_parameters() if ".experts." in name and ".lora_" in name):
            half.zero_()
        without = model(torch.tensor(PROMPTS[:1])).logits[0, -1]
    logits: list[Tensor] = []
    with LLM(base, tokenizer="bytes", device="cpu", dtype="float32", offload_dir=offload, adapter=tmp_path / "saved") as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), on_logits=lambda row, step, made: logits.append(made.clone()))
    assert torch.allclose(logits[0], wanted, atol=1e-4) and not torch.allclose(without, wanted, atol=1e-2)
    beside = one_line(lambda: LLM(base, tokenizer="bytes", device="cpu", lora={"one": tmp_path / "saved"}))
    assert "changes model.layers.0.mlp.experts.0." in beside and "merge it: --adapter FOLDER" in beside


# -- the copy in the cache -------------------------------------------------------------------------------------------------


def test_each_is_merged_once_and_never_taken_for_another(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = checkpoints.folder("llama-gqa")
    values = values_in(base)
    shapes = {name: tuple(values[name].shape) for name in matrices_of(values)[:3]}
    one, two = (save_adapter(tmp_path / f"of {seed}", shapes, seed) for seed in (1, 2))
    heard = list[object]()
    for place, given in enumerate((one, f"{one}=0.5", two, [one, two], [two, one]), start=1):
        first = said(base, offload, adapter=given)
        assert len([*cache_folder("packed").iterdir()]) == place
        again = said(base, offload, adapter=given, on_stage=lambda stage, *rest: heard.append(stage))
        assert_same(again, first)
    assert len([*cache_folder("packed").iterdir()]) == 5 and "packing" not in {str(stage) for stage in heard}
    (copy, *_) = [*cache_folder("packed").iterdir()]
    assert sum(file.stat().st_size for file in copy.glob("*.safetensors")) < 3 * 4096 * 4, "nothing else is copied"


def test_answers_and_prefixes_of_another_adapter_are_other_ones(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    base = checkpoints.folder("llama-gqa")
    shape = tuple(values_in(base)["model.layers.0.mlp.up_proj.weight"].shape)
    adapter = save_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj.weight": shape})
    settings, identities = [], []
    for given in (None, adapter, f"{adapter}=2"):
        with LLM(base, tokenizer="bytes", device="cpu", offload_dir=offload, adapter=given) as llm:
            settings.append(model_settings(llm)[0])
            identities.append(llm.loaded.opened.identity)
    assert len({str(one) for one in settings}) == len({*identities}) == 3


# -- what is refused -------------------------------------------------------------------------------------------------------


def changed(**config: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))

    return change


def with_tensors(**tensors: Tensor) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        own = {f"base_model.model.{name}": one for name, one in tensors.items()}
        save_file({**load_file(folder / WEIGHTS), **own}, folder / WEIGHTS)

    return change


UP = "model.layers.0.mlp.up_proj"
REFUSED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (changed(peft_type="IA3"), "is of the kind 'IA3', and only LORA can be used; give another adapter"),
    "DoRA": (changed(use_dora=True), "is of the kind DoRA (use_dora), and only LoRA and rsLoRA can be used"),
    "biases": (changed(bias="all"), "has biases of its own (bias 'all'), which are not used"),
    "whole modules": (changed(modules_to_save=["lm_head"]), "sets modules_to_save (['lm_head']), which is not supported"),
    "parameters": (changed(target_parameters=["a"]), "sets target_parameters (['a']), which is not supported"),
    "a later kind": (changed(new_option=True), "sets new_option (True), which is not supported"),
    "PiSSA": (changed(init_lora_weights="pissa"), "is for a model that its training changed first (init_lora_weights 'pissa')"),
    "no rank": (changed(r=0), f"has the r 0 for {UP}, which is no number above 0"),
    "another rank": (changed(r=4), "has halves of the shapes (56, 3) and (3, 32) for model.layers.0.mlp.up_proj, and its"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "is no JSON"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot be read (No such file or directory)"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no adapter_model.safetensors; save it as safetensors"),
    "cut off": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 20), "adapter_model.safetensors"),
    "halves of other parameters": (
        lambda folder: (
            changed(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])(folder),
            with_tensors(**{f"model.layers.0.mlp.experts.lora_{half}.weight": torch.ones(2 * RANK, 2 * RANK) for half in "AB"})(
                folder
            ),
        ),
        "has halves for model.layers.0.mlp.experts that are not of its gate_up_proj and down_proj",
    ),
    "magnitudes": (
        with_tensors(**{f"{UP}.lora_magnitude_vector": torch.ones(56)}),
        "has the tensor 'base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector' (float32, (56,)), no half of",
    ),
    "one half": (
        with_tensors(**{"model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(RANK, 56)}),
        "has only one half of model.layers.0.mlp.down_proj",
    ),
    "another base": (
        with_tensors(**{f"h.0.proj.lora_{half}.weight": torch.ones(RANK, RANK) for half in "AB"}),
        "changes h.0.proj, and ",
    ),
    "another shape": (
        with_tensors(**{f"model.layers.0.mlp.down_proj.lora_{half}.weight": torch.ones(RANK, RANK) for half in "AB"}),
        "is of another model: model.layers.0.mlp.down_proj.weight of ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_adapter_of_this_model_is_refused(what: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints.folder("qwen3")
    adapter = save_adapter(tmp_path / "adapter", {f"{UP}.weight": (56, 32)})
    change, told = REFUSED[what]
    change(adapter)
    line = one_line(lambda: LLM(base, tokenizer="bytes", device="cpu", adapter=adapter))
    assert str(adapter) in line and told in line


def test_what_is_given_is_read_as_it_is_meant(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_adapter(tmp_path / "a=2", {f"{UP}.weight": (56, 32)})
    found = merged_adapters(["a=2", "a=2=-3"], None).each
    assert [(str(one.folder), one.weight) for one in found] == [("a=2", 1.0), ("a=2", -3.0)]
    assert (
        one_line(lambda: merged_adapters(["a=much"], None))
        == "adapter 'a=much' has the weight 'much'; give PATH, or PATH=WEIGHT with a number"
    )
    (tmp_path / "b.gguf").touch()
    assert one_line(lambda: merged_adapters(["b.gguf"], None)).startswith("adapter 'b.gguf' is a GGUF file, for matrices as ")
    dummy = {"tokenizer": "bytes", "device": "cpu", "dummy_weights": True}
    told = one_line(lambda: LLM(checkpoints.folder("qwen3"), adapter="a=2", **dummy))
    assert told.startswith("adapter a=2 cannot be merged into random weights; ")
    told = one_line(lambda: LLM(checkpoints.folder("qwen3", "gguf-q8_0"), adapter="a=2", tokenizer="bytes", device="cpu"))
    assert told.startswith("adapter 'a=2' is for matrices as safetensors have them, and ")


@pytest.mark.parametrize("model", [None, Path("model.gguf")])
def test_a_place_that_is_none_is_refused_first(model: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"GGU")
    (tmp_path / "lora.bin").write_bytes(b"GGUF")
    for place, told in {
        "b": "adapter b does not exist; give the folder that PEFT has saved, or a GGUF file",
        "b.gguf": "adapter b.gguf does not exist; give the folder that PEFT has saved, or a GGUF file",
        "text": "adapter text is a file; give a folder with weights and their config, or a .gguf file",
        "lora.bin": "adapter lora.bin is a file; it is a GGUF file, but its name does not end in .gguf; rename it, or ",
    }.items():
        assert one_line(lambda place=place: merged_adapters([place], model)).startswith(told)
        for given in ({"adapter": (place,)}, {"lora_modules": (("x", place),)}):
            asked: Any = replace(ModelRequest("demo", "demo"), **given)
            assert one_line(asked.refuse_missing).startswith(told)
