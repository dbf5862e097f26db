"""GGUF files as models: configs, tokens and logits are those of transformers with the weights that the `gguf` package decodes;
what would be computed otherwise than the file means is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import PretrainedConfig, PreTrainedModel

from h2o_flexgen.checkpoints import gguf_format
from h2o_flexgen.checkpoints.model_places import demo_folder
from h2o_flexgen.checkpoints.stored_architecture import GgufModel
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix
from h2o_flexgen.core import buffer_layout
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM
from h2o_flexgen.evaluation.answer_settings import folder_digest
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.disk import DiskFiles, FilePiece
from h2o_flexgen.models import create_model, load_config, qwen_next
from h2o_flexgen.models.rotary import Rope
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers import gguf_files
from tests.helpers.contract import opened
from tests.helpers.gguf_files import FAMILIES, FORMATS, USUAL_EPS, eps_key, save_gguf
from tests.helpers.gguf_vocabularies import PREFIX, metadata_of_folder
from tests.helpers.refusals import one_line
from tests.helpers.samples import every_nth
from tests.helpers.tiny import KINDS, of_each_type
from tests.kernels.variants import used

NOT_IN_FILES = (
    "falcon-sequential",
    "llama-yarn",
    "qwen2-near",
    "qwen3-moe-near",
    "gpt-oss-far",
)  # nothing in the file says what they do
RELATIVES = [kind for kind, (of, _) in KINDS.items() if of in FAMILIES and kind not in NOT_IN_FILES]
PROMPTS = [[3, 50, 7, 112, 9, 21, 4], [8, 30], [77, 5, 5, 90, 13]]
RESIDENT, IN_HOST, ON_DISK = (100, 0, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100), (0, 0, 0, 0, 0, 0)
STEPS = 5
OPENED: Mapping[str, Any] = {"tokenizer": "bytes", "dtype": "float32", "device": "cpu"}
LENGTH_BYTES, TYPE_BYTES = 8, 4  # before a key, and between it and its value


def generated(file: Path, percent: Sequence[float], offload: Path, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens that the engine makes of the file, and their log-probabilities."""
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=1)
    options = {"tokenizer": "bytes", "dtype": "float32", "device": "cpu", "gpu_batch_size": 2, **options}
    with LLM(file, percent=percent, offload_dir=offload, **options) as llm:
        made = llm.generate(PROMPTS, params)
    tokens = [list(row.token_ids) for row in made]
    return tokens, [[step.chosen.logprob for step in row.logprobs or ()] for row in made]


def expected(model: PreTrainedModel) -> tuple[list[list[int]], list[list[float]]]:
    """The same of transformers."""
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        found = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=STEPS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        logprobs.append(torch.cat(found.logits).log_softmax(-1).amax(-1).tolist())
    return tokens, logprobs


@pytest.mark.parametrize("format", every_nth(FORMATS, 3))
def test_every_form_gives_the_tokens_and_logits_of_its_decoded_weights_on_every_tier(format: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    model = save_gguf("llama-gqa", file, format, num_hidden_layers=2, vocab_size=113)
    tokens, logprobs = expected(model)
    for percent in (RESIDENT, IN_HOST, ON_DISK):
        found_tokens, found_logprobs = generated(file, percent, tmp_path / "offload")
        assert found_tokens == tokens
        np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4, rtol=0)


# one of each model_type says long texts in tests/models/test_families.py
@pytest.mark.parametrize("kind", every_nth((kind for kind in RELATIVES if kind not in of_each_type(RELATIVES)), 2))
def test_every_relative_gives_the_tokens_and_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tokens, logprobs = expected(save_gguf(kind, file, "q8_0", "q4_1", tensors_per_part=9))
    part = sorted(tmp_path.glob("tiny-*.gguf"))[1]
    found_tokens, found_logprobs = generated(part, (50, 0, 50, 50, 100, 0), tmp_path / "offload")
    assert found_tokens == tokens
    np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["olmoe", "glm4-moe", "gemma4"])
def test_a_router_may_be_packed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most files have it in float32. A product reads its bytes as those of any other matrix."""
    file = tmp_path / "tiny.gguf"
    monkeypatch.setattr(gguf_files, "ROUTERS", ())
    tokens, logprobs = expected(save_gguf(kind, file, "q8_0", seed=3))
    routers = [name for name in opened(file).matrices if name.endswith((".mlp.gate.weight", ".router.proj.weight"))]
    assert routers
    found_tokens, found_logprobs = generated(file, (50, 0, 50, 50, 100, 0), tmp_path / "offload")
    assert found_tokens == tokens
    np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4, rtol=0)


def test_a_packed_router_in_fp32_is_decoded_to_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel reads its bytes, and all else has 16 bits."""
    monkeypatch.setattr(gguf_files, "ROUTERS", ())
    model = save_gguf("glm4-moe", tmp_path / "tiny.gguf", "q8_0", seed=3)
    with used(TORCH):
        _, found = generated(tmp_path / "tiny.gguf", RESIDENT, tmp_path / "offload", dtype="bfloat16")
    firsts = [[own[0] for own in each] for each in (found, expected(model)[1])]
    np.testing.assert_allclose(*firsts, atol=0.2, rtol=0)


def saved_with_tokenizer(folder: Path) -> Path:
    """A file with a vocabulary, as files of models have it."""
    place = demo_folder("demo-llama")
    assert place is not None
    values = metadata_of_folder(place, "gpt-2")
    save_gguf(
        "llama-mha", folder / "tiny.gguf", num_hidden_layers=1, vocab_size=len(values[f"{PREFIX}tokens"]), metadata=values
    )
    return folder / "tiny.gguf"


def test_a_file_is_run_without_transformers(tmp_path: Path) -> None:
    """Its import takes longer than everything else before a first token."""
    code = "import sys; from h2o_flexgen import run; status = run.main(sys.argv[1:])"
    code += "; print([name for name in ('transformers', 'huggingface_hub', 'sympy', 'scipy') if name in sys.modules], status)"
    flags = ("--model", str(saved_with_tokenizer(tmp_path)), "--prompt", "hello there", "--gen-len", "1")
    ran = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[] 0", ran.stderr


def test_the_header_of_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read, starts = saved_with_tokenizer(tmp_path), gguf_format._start, list[Path]()

    def watched(header: gguf_format.HeaderBytes) -> tuple[int, int]:
        starts.append(header.path)
        return read(header)

    monkeypatch.setattr(gguf_format, "_start", watched)
    with LLM(file, offload_dir=tmp_path / "offload", device="cpu") as llm:
        assert llm.tokenizer.reads_texts and starts == [file]


def _experts(tensor: gguf.ReaderTensor) -> int:
    return int(tensor.shape[2]) if len(tensor.shape) > 2 else 1


@pytest.mark.parametrize("buffers", [2, 3])
def test_blocks_are_read_straight_to_where_they_lie_in_a_page(
    buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever place that is; what small tensors share pages for goes through a buffer."""
    model = save_gguf("qwen3-moe", file := tmp_path / "tiny.gguf", "q4_0", decoder_sparse_step=1)
    monkeypatch.setattr(buffer_layout, "PAGE_ALIGNED_FROM", 256)
    straight, whole, within = set[int](), DiskFiles._read_run, set[int]()

    def watched(self: DiskFiles, run: Sequence[FilePiece]) -> None:
        with_pages = [piece for piece in run if piece.pages is not None]
        straight.update(piece.offset for piece in with_pages)
        within.update(piece.out.data_ptr() % buffer_layout.ALIGNMENT for piece in with_pages)
        whole(self, run)

    monkeypatch.setattr(DiskFiles, "_read_run", watched)
    made = generated(file, ON_DISK, tmp_path / "offload", buffers=buffers)
    matrices = [one for one in GGUFReader(file).tensors if one.tensor_type == gguf.GGMLQuantizationType.Q4_0]
    places = {
        one.data_offset + number * one.n_bytes // count
        for one in matrices
        for count in [_experts(one)]
        for number in range(count)
    }
    assert straight == places and len(within) > 1
    tokens, logprobs = expected(model)
    assert made[0] == tokens
    np.testing.assert_allclose(made[1], logprobs, atol=1e-4, rtol=0)


MEANT = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MEANT += ("vocab_size", "tie_word_embeddings", "max_position_embeddings", "hidden_act")


@pytest.mark.parametrize("kind", RELATIVES)
def test_the_config_says_what_the_model_was_written_from(kind: str, tmp_path: Path) -> None:
    model = save_gguf(kind, tmp_path / "tiny.gguf", num_hidden_layers=2)
    found, meant = load_config(str(tmp_path / "tiny.gguf")), model.config
    names = [name for name in MEANT if hasattr(meant, name)]
    assert len(names) >= len(MEANT) - 3  # Gemma calls its activation otherwise, and GPT-2 and Falcon widths, too
    assert {name: getattr(found, name) for name in names} == {name: getattr(meant, name) for name in names}
    eps = eps_key(meant)
    assert getattr(found, eps, USUAL_EPS) == pytest.approx(getattr(meant, eps, USUAL_EPS))
    if kind.startswith(("llama", "qwen3")):
        assert found.attention_bias == meant.attention_bias
    meant.experts_apart = meant.projections_are_apart = meant.mlps_are_apart = True  # as files have them
    spec, theirs = create_model(found, "float32").spec, create_model(meant, "float32").spec
    assert spec == theirs  # the sliding window is the reach of positions
    assert {found.bos_token_id, found.eos_token_id, found.pad_token_id} == {None}


def test_tokens_with_a_meaning_are_taken_from_the_file(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.padding_token_id": 0}
    save_gguf("qwen3", tmp_path / "tiny.gguf", num_hidden_layers=1, metadata=ids)
    found = load_config(str(tmp_path / "tiny.gguf"))
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 7, 0)


def test_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    model: Any = save_gguf("llama31", tmp_path / "tiny.gguf", head_dim=64, hidden_size=256, num_hidden_layers=1)
    frequencies = Rope.of(load_config(str(tmp_path / "tiny.gguf"))).rotary(64)._on(torch.device("cpu"))
    plain = Rope("default", model.config.rope_parameters["rope_theta"], 1.0, {}).rotary(64)._on(torch.device("cpu"))
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert (frequencies < plain).any() and (frequencies == plain).any()


@pytest.mark.parametrize(("kind", "is_rounded"), [("llama-yarn", True), ("gpt-oss", False)])
def test_frequencies_of_yarn_are_those_of_transformers(kind: str, is_rounded: bool, tmp_path: Path) -> None:
    """gpt-oss alone does not round the waves between which it blends."""
    _, values = KINDS[kind]
    rope = {**values["rope_scaling"], "truncate": is_rounded}
    model: Any = save_gguf(kind, tmp_path / "tiny.gguf", num_hidden_layers=1, rope_scaling=rope)
    rotary = Rope.of(load_config(str(tmp_path / "tiny.gguf"))).rotary(16)
    torch.testing.assert_close(rotary._on(torch.device("cpu")), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert rotary.stretch == pytest.approx(model.model.rotary_emb.attention_scaling) and rotary.stretch > 1


def test_divisors_that_are_none_are_refused(tmp_path: Path) -> None:
    config = load_config(str(_saved(tmp_path)))
    for divisors in ([1.0], [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")], "12345678", 8):
        config.rope_divisors = divisors
        assert "rope_divisors" in one_line(lambda: create_model(config, "float32"))


def _saved(folder: Path, **options: Any) -> Path:
    save_gguf("llama-mha", folder / "tiny.gguf", num_hidden_layers=1, **options)
    return folder / "tiny.gguf"


def test_matrices_lie_packed_where_the_file_has_them(tmp_path: Path) -> None:
    file = _saved(tmp_path, format="q5_0", table_format="q8_0")
    checkpoint, data = opened(file), file.read_bytes()
    assert {matrix.format for matrix in checkpoint.matrices.values()} == {"q5_0", "q8_0"}
    assert checkpoint.stored_as("model.norm.weight").itemsize == 4 and checkpoint.files == (file,)
    rows = {one.name: one for one in GGUFReader(file).tensors}
    for name, theirs in (
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        matrix = checkpoint.matrices[name]
        ((start, stored),) = matrix.segments
        assert isinstance(matrix, StoredMatrix) and start == 0 and checkpoint.stored_as(name).format == matrix.format
        assert data[stored.offset :][: stored.nbytes] == rows[theirs].data.tobytes()


# -- what is refused ---------------------------------------------------------------------------------------------------


def opened_whole(file: Path) -> None:
    create_model(load_config(str(file)), "float32")
    opened(file)


def edited(
    folder: Path, values: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, drop: Sequence[str] = ()
) -> Path:
    """A tiny file without some keys and tensors and with others."""
    reader, values, tensors = GGUFReader(_saved(folder)), values or {}, tensors or {}
    writer = GGUFWriter(folder / "edited.gguf", values.pop("general.architecture", "llama"))
    for key, field in reader.fields.items():
        if key not in (*drop, *values, "general.architecture") and not key.startswith("GGUF."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for one in reader.tensors:
        if one.name not in (*drop, *tensors):
            writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "edited.gguf"


def test_an_edited_file_is_opened_where_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    opened_whole(edited(tmp_path, {"llama.logit_scale": 1.0, "llama.expert_count": 0, "llama.rope.scaling.type": "none"}))


@pytest.mark.parametrize(
    ("kind", "factor", "share", "is_read"),
    [
        ("linear", 4.0, 1.0, False),
        (None, 4.0, 1.0, False),  # linear is meant where no kind is said
        ("linear", 4.0, 0.0, True),
        ("linear", 4.0, -1.0, True),
        ("linear", 1.0, 1.0, True),  # nothing is scaled
        ("none", 4.0, 1.0, True),
        ("yarn", 4.0, 1.0, True),
        ("yarn", 4.0, 0.0, False),
        ("yarn", 4.0, 0.5, False),
    ],
)
def test_positions_are_scaled_only_as_kind_and_mix_both_say(
    kind: str | None, factor: float, share: float, is_read: bool, tmp_path: Path
) -> None:
    said = {"llama.rope.scaling.factor": factor, "llama.rope.scaling.yarn_ext_factor": share}
    file = edited(tmp_path, said | ({} if kind is None else {"llama.rope.scaling.type": kind}))
    if is_read:
        found = load_config(str(file)).rope_parameters["rope_type"]
        assert found == (kind if factor != 1.0 and kind != "none" else "default")
    else:
        message = one_line(lambda: opened_whole(file))
        assert (
            f"{share} as 'llama.rope.scaling.yarn_ext_factor', but positions are scaled by the kind {kind or 'linear'}"
            in message
        )


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"general.architecture": "bert"}, "'bert', which is not read; docs/checkpoints.md lists all that are"),
        ({"general.architecture": "qwen3vl"}, "known and like it: qwen3"),
        ({"general.architecture": "mistral"}, "known and like it: mistral4, mistral3; docs/checkpoints.md lists all"),
        ({"general.type": "adapter"}, "'adapter'"),
        ({"llama.expert_count": 8}, "no blk.0.ffn_gate_exps.weight"),
        ({"llama.expert_gating_func": 2}, "llama.expert_gating_func"),
        ({"llama.leading_dense_block_count": 1}, "llama.leading_dense_block_count"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.rope.freq_base_swa": 1e4}, "llama.rope.freq_base_swa"),
        ({"llama.rope.scaling.type": "longrope"}, "none, linear and yarn"),
        ({"llama.rope.scaling.yarn_attn_factor": 0.5}, "llama.rope.scaling.yarn_attn_factor"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, "num_attention_heads"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads"),
        ({"llama.embedding_length": 1 << 30}, "hidden_size"),
        ({"llama.block_count": -1}, "num_hidden_layers"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base"),
        ({"llama.rope.freq_base": 0.5}, "rope_theta"),
        ({"tokenizer.ggml.tokens": ["x"] * 200}, "200 tokens"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_metadata_of_models_that_are_not_run_are_refused(values: dict[str, Any], word: str, tmp_path: Path) -> None:
    file = edited(tmp_path, dict(values))
    message = one_line(lambda: opened_whole(file))
    assert word in message and "edited.gguf" in message


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("mixtral", "llama.expert_weights_norm", False),
        ("qwen3", "qwen3.expert_count", 4),
        ("olmoe", "olmoe.expert_count", 0),
        ("gpt-oss", "gpt-oss.expert_gating_func", 1),
        ("gpt-oss", "gpt-oss.attention.sliding_window_pattern", 4),
        ("gpt-oss", "gpt-oss.expert_weights_scale", 2.5),
        ("glm4-moe", "glm4moe.expert_group_count", 4),
        ("glm4-moe", "glm4moe.leading_dense_block_count", 9),
        ("glm4-moe", "glm4moe.rope.dimension_sections", [2, 2, 0, 0]),
        ("granite-moe", "granitemoe.rope.scaling.finetuned", False),
        ("granite", "granite.rope.scaling.finetuned", False),
    ],
)
def test_layers_of_an_architecture_that_do_otherwise_are_refused(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    save_gguf(kind, tmp_path / "tiny.gguf", num_hidden_layers=1, metadata={key: value})
    assert key in one_line(lambda: opened_whole(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, [True, True, True]),
        ({"full_attention_interval": 2}, [True, False, True]),
        ({"full_attention_interval": 0}, [True, True, True]),
        ({"attention.recurrent_layers": array("B", [1, 0, 0, 1])}, [True, False, False]),
        ({"attention.recurrent_layers": array("B", [1, 0])}, "but it has 3 blocks"),
        ({"attention.recurrent_layers": 3}, "which is no list of yes or no"),
        ({"full_attention_interval": "often"}, "which is no whole number"),
    ],
)
def test_blocks_with_the_delta_rule_are_those_that_a_file_says(said: Mapping[str, Any], found: list[bool] | str) -> None:
    values = {f"qwen35.{key}": value for key, value in {"block_count": 3, **said}.items()}
    file = GgufModel(gguf_format.Gguf(gguf_format.Metadata(Path("a.gguf"), values), ()), qwen_next.OF_FILES, "qwen3_5_text")
    kinds = qwen_next.OF_FILES.keys["layer_types"]
    if isinstance(found, str):
        assert found in one_line(lambda: kinds(file))
    else:
        assert [kind == qwen_next.LINEAR for kind in kinds(file)] == found


def test_gates_of_gpt_oss_lie_packed_where_the_file_has_them(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    save_gguf("gpt-oss", file, "mxfp4", num_hidden_layers=1)
    checkpoint, data = opened(file), file.read_bytes()
    theirs = {one.name: one for one in GGUFReader(file).tensors}
    for part in ("gate", "up", "down"):
        ((_, stored),) = checkpoint.matrices[f"model.layers.0.mlp.experts.4.{part}_proj.weight"].segments
        assert data[stored.offset :][: stored.nbytes] == theirs[f"blk.0.ffn_{part}_exps.weight"].data[4].tobytes()


@pytest.mark.parametrize("key", ["llama.embedding_length", "llama.context_length", "general.architecture", "token_embd.weight"])
def test_what_is_missing_is_named(key: str, tmp_path: Path) -> None:
    file = edited(tmp_path, drop=[key]) if not key.startswith("general") else _without_architecture(tmp_path)
    message = one_line(lambda: opened_whole(file))
    assert key in message and file.name in message


def _without_architecture(folder: Path) -> Path:
    file = _saved(folder)
    file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectura"))
    return file


ONES = np.ones(8, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("blk.0.attn_q_norm.weight", ONES, "no layer of a llama model"),
        ("blk.0.ffn_gate_inp.weight", ONES, "no layer of a llama model"),
        ("blk.1.attn_norm.weight", ONES, "no layer of a llama model"),
        ("blk.00.attn_norm.weight", ONES, "no layer of a llama model"),
        ("blk.0.attn_output.scale", ONES, "no layer of a llama model"),
        ("rope_freqs.weight", ONES[:3], "[3]"),
        ("rope_freqs.weight", ONES.astype(np.float16), "float16"),
        ("token_embd.weight", ONES, "token_embd.weight"),
    ],
)
def test_tensors_that_mean_something_else_are_refused(name: str, value: Any, word: str, tmp_path: Path) -> None:
    file = edited(tmp_path, tensors={name: value})
    message = one_line(lambda: opened_whole(file))
    assert name in message and word in message and "edited.gguf" in message


def test_no_more_divisors_are_read_than_the_widest_head_has(tmp_path: Path) -> None:
    wide = 2 * MOST_HEAD_DIM
    sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), wide)
    values = {f"llama.{name}": size for name, size in sizes.items()}
    file = edited(tmp_path, values, {"rope_freqs.weight": np.ones(wide // 2, dtype=np.float32)})
    assert f"instead of {MOST_HEAD_DIM // 2} values" in one_line(lambda: load_config(str(file)))


def test_a_part_that_has_metadata_alone_belongs_to_the_identity_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "GGUFWriter", partial(GGUFWriter, small_first_shard=True))
    digests = set()
    for theta in (100.0, 200.0):
        (tmp_path / f"{theta}").mkdir()
        save_gguf("llama-mha", tmp_path / f"{theta}" / "m.gguf", tensors_per_part=100, num_hidden_layers=1, rope_theta=theta)
        first = tmp_path / f"{theta}" / "m-00001-of-00002.gguf"
        assert first not in opened(first).files
        digests.add(folder_digest(first))
    assert len(digests) == 2


def test_a_tensor_of_another_shape_or_none_is_named(tmp_path: Path) -> None:
    file = edited(tmp_path, tensors={"blk.0.attn_norm.weight": ONES}, drop=["blk.0.ffn_up.weight"])
    spec, checkpoint = create_model(load_config(str(file)), "float32").spec, opened(file)
    assert "(8,)" in one_line(lambda: checkpoint.locate([spec.tensors["model.layers.0.input_layernorm.weight"]]))
    assert "mlp.up_proj" in one_line(lambda: checkpoint.locate([spec.tensors["model.layers.0.mlp.up_proj.weight"]]))


@pytest.fixture(scope="module")
def whole_numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, int]]:
    """A file, and where its metadata have the whole numbers of its architecture."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    save_gguf("glm4-moe", file)
    keys = {key: field for key, field in GGUFReader(file).fields.items() if key.startswith("glm4moe.")}
    return file, {key: int(field.offset) for key, field in keys.items() if field.types == [gguf.GGUFValueType.UINT32]}


def with_number(file: Path, key: str, begin: int, number: int, folder: Path) -> Path:
    """The file with another number behind a key."""
    data, edited = bytearray(file.read_bytes()), folder / "edited.gguf"
    at = begin + LENGTH_BYTES + len(key) + TYPE_BYTES
    data[at : at + 4] = number.to_bytes(4, "little")
    edited.write_bytes(data)
    return edited


@pytest.mark.parametrize("wrong", [0, 1, 3, 2**31 - 1, 2**32 - 1])
def test_no_whole_number_of_the_metadata_ends_in_anything_but_one_line(
    wrong: int, whole_numbers: tuple[Path, Mapping[str, int]], tmp_path: Path
) -> None:
    file, places = whole_numbers
    assert len(places) > 10
    for key, begin in places.items():
        edited = with_number(file, key, begin, wrong, tmp_path)
        try:
            with LLM(edited, offload_dir=tmp_path / "offload", **OPENED) as llm:
                llm.generate([[3, 50, 7]], SamplingParams(max_tokens=2))
        except ValueError as error:
            assert "\n" not in str(error), key


def test_rows_that_are_no_whole_blocks_are_named(whole_numbers: tuple[Path, Mapping[str, int]], tmp_path: Path) -> None:
    (file, places), key = whole_numbers, "glm4moe.feed_forward_length"
    edited = with_number(file, key, places[key], 3, tmp_path)
    said = one_line(lambda: LLM(edited, offload_dir=tmp_path / "offload", **OPENED))
    assert "but the model's config asks for (3, 64)" in said


def test_a_folder_with_a_gguf_file_is_answered_with_its_name(tmp_path: Path) -> None:
    file = _saved(tmp_path)
    assert str(file) in one_line(lambda: load_config(str(tmp_path)))
    assert "missing" in one_line(lambda: load_config(str(tmp_path / "none.gguf")))


def test_a_head_that_is_missing_is_the_table_of_tokens(tmp_path: Path) -> None:
    for tied in (True, False):
        model = save_gguf("llama-mha", tmp_path / "tiny.gguf", num_hidden_layers=1, tie_word_embeddings=tied)
        assert isinstance(model.config, PretrainedConfig)
        spec = create_model(load_config(str(tmp_path / "tiny.gguf")), "float32").spec
        assert ("lm_head.weight" in spec.tensors) is not tied
        json.dumps(vars(load_config(str(tmp_path / "tiny.gguf"))))
