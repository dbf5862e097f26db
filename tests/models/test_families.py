"""Every family of models over long texts, from folders of several files and from GGUF files in parts: greedy tokens and logits
are those of transformers. What the documents say of the families is held against the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from h2o_flexgen import __version__
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import MODELS, architecture, create_model, load_config
from h2o_flexgen.models.latent import LatentAttention
from h2o_flexgen.models.mixture import MixtureOfExperts
from h2o_flexgen.models.whole_configs import TEXT_PARTS
from h2o_flexgen.sampling.params import SamplingParams
from tests.checkpoints.test_gguf_model import RELATIVES
from tests.helpers.contract import as_stored, opened
from tests.helpers.gguf_files import save_gguf
from tests.helpers.samples import slow
from tests.helpers.tiny import KINDS, of_each_type, save_tiny, tiny_config

STEPS, STEPS_IN_GGUF = 32, 20  # what is computed is the same: what differs is read before
BEYOND = {"mistral": 64, "phi3": 64}  # have windows and rotations of so many tokens
PROMPTS = [[3, 50, 7, 112, 9, 21, 4], [8, 30], [77, 5, 5, 90, 13], [60]]
WAYS: Sequence[dict[str, Any]] = [{}, {}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 6}]  # of each prompt
VARIED = 20  # different tokens at least, in all texts: a model that repeats itself proves little
ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS, CHANGES = ROOT / "docs" / "checkpoints.md", ROOT / "CHANGELOG.md"
# model types with files that have the name of the other one
READ_AS = {"glm4_moe_lite": "deepseek_v3", "gemma4_unified_text": "gemma4_text"}
FIRST = ("opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")  # the families of 0.1.0; others have no version yet

Saved = Callable[[str, Path], tuple[Path, PreTrainedModel]]


def in_folder(kind: str, place: Path) -> tuple[Path, PreTrainedModel]:
    model = save_tiny(kind, place, max_shard_size="40KB", seed=3)
    assert len([*place.glob("*.safetensors")]) > 1
    return place, model


def in_gguf(kind: str, place: Path) -> tuple[Path, PreTrainedModel]:
    model = save_gguf(kind, place / "tiny.gguf", "q8_0", "q4_1", tensors_per_part=9, seed=3)
    return sorted(place.glob("tiny-*.gguf"))[1], model


CASES = [(kind, in_folder) for kind in of_each_type([*KINDS])] + [(kind, in_gguf) for kind in of_each_type(RELATIVES)]
IDS = [f"{kind}-{save.__name__}" for kind, save in CASES]
# the long texts of a default run: short ones of all families are those of transformers, too
LONG = [case if place % 5 == 0 or case[0] in BEYOND else slow(*case) for place, case in enumerate(CASES)]


@pytest.mark.parametrize(("kind", "save"), LONG, ids=IDS)
def test_long_texts_are_those_of_transformers(kind: str, save: Saved, tmp_path: Path) -> None:
    place, model = save(kind, tmp_path)
    where = {"percent": (40, 30, 100, 0, 100, 0), "offload_dir": tmp_path / "offload", "device": "cpu"}
    with LLM(place, tokenizer="bytes", dtype="float32", gpu_batch_size=4, **where) as llm:
        steps = STEPS_IN_GGUF if save is in_gguf else BEYOND.get(kind, STEPS)
        lengths = [min(steps, llm.spec.max_positions - len(prompt)) for prompt in PROMPTS]
        ways = [SamplingParams(length, ignore_eos=True, logprobs=1, **way) for length, way in zip(lengths, WAYS)]
        rows = llm.generate(PROMPTS, ways)
    for prompt, way, row in zip(PROMPTS, WAYS, rows, strict=True):
        text = [*prompt, *row.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0, len(prompt) - 1 : -1]  # type: ignore[operator]
        chosen = torch.tensor(row.token_ids)
        assert way or torch.equal(logits.argmax(-1), chosen)
        found = torch.tensor([step.chosen.logprob for step in row.logprobs or ()])
        expected = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert len(set(chain.from_iterable(row.token_ids for row in rows))) >= VARIED


def in_one_file(kind: str, place: Path, save: Saved) -> Path:
    if save is in_gguf:
        save_gguf(kind, place / "whole.gguf", "q8_0", "q4_1", seed=3)
        return place / "whole.gguf"
    save_tiny(kind, place / "whole", seed=3)
    return place / "whole"


@pytest.mark.parametrize(("kind", "save"), LONG, ids=IDS)
def test_one_file_has_what_several_have(kind: str, save: Saved, tmp_path: Path) -> None:
    several, _ = save(kind, tmp_path)
    one = in_one_file(kind, tmp_path, save)
    spec, whole, parts = create_model(load_config(str(one)), "float32").spec, opened(one), opened(several)
    assert len(whole.files) == 1 < len(parts.files)
    for tensor in spec.tensors.values():
        assert torch.equal(as_stored(whole, tensor)[1], as_stored(parts, tensor)[1]), tensor.name


# -- the table of models ---------------------------------------------------------------------------------------------------


def table() -> dict[str, list[str]]:
    """The cells behind the model_type, by it."""
    text = CHECKPOINTS.read_text(encoding="utf-8").partition("## Models")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a model stands there twice"
    return {model_type: cells.split(" | ") for model_type, cells in rows}


def said(is_so: bool) -> str:
    return "yes" if is_so else "no"


def cells_of(model_type: str) -> list[str]:
    """Folders, GGUF, experts, windows, latents, since when."""
    kind, own = architecture(model_type), [name for name, (of, _) in KINDS.items() if of == model_type]
    has_windows = any(window for name in own for window in create_model(tiny_config(name), "float32").spec.windows)
    in_files = kind.gguf or (architecture(READ_AS[model_type]).gguf if model_type in READ_AS else None)
    gguf = "no" if in_files is None else f"{'as ' * (kind.gguf is None)}`{in_files.name}`"
    since = "0.1.0" if model_type in FIRST else "unreleased"
    traits = issubclass(kind, MixtureOfExperts), has_windows, issubclass(kind, LatentAttention)
    return ["yes", gguf, *map(said, traits), since]


def test_the_table_of_models_is_true() -> None:
    found = table()
    assert found.keys() == MODELS.keys() | TEXT_PARTS.keys()
    assert {model_type: found[model_type] for model_type in MODELS} == {each: cells_of(each) for each in MODELS}
    for name, part in TEXT_PARTS.items():
        assert found[name][0] == f"its text: {', '.join(f'`{own}`' for own in part.kinds.values())}"
    versions = re.findall(r"^## \[(.+)\]", CHANGES.read_text(encoding="utf-8"), re.MULTILINE)
    assert {cells[-1].split()[-1] for cells in found.values()} <= {version.lower() for version in versions}
    assert versions[:2] == ["Unreleased", __version__], "the newest version is that of the package"
