"""Labels and ranks: a checkpoint that classifies gives each prompt the scores that transformers give it, under any plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import LLM, Classification, SamplingParams
from h2o_flexgen.core.labels import APART, NUMBERS, TOGETHER, Labels
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.sampling.pooling import ClassifyParams, PoolingParams
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.word_tokenizer import WordTokenizer
from tests.helpers import tiny
from tests.helpers.real_tokenizers import saved_tokenizer
from tests.helpers.refusals import one_line
from tests.whole.test_embed import drawn, near

ON_DISK, MIXED = (0, 0) * 3, (30, 30, 20, 50, 40, 30)
NAMES = {0: "bad", 1: "so so", 2: "good"}
KINDS = ("llama-gqa", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "gpt2", "phi3")
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"percent": ON_DISK, "gpu_batch_size": 2, "kv_policy": "h2o", "heavy": 2, "recent": 2},
    {"percent": MIXED, "gpu_batch_size": 3, "num_gpu_batches": 2, "prefill_tokens": 12, "kv_codec": "group4"},
)
PAD = 7


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "tokenizer": "bytes", "device": "cpu", **options})


def by_transformers(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return scores


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny.save_classifier(kind, tmp_path / "model", id2label=NAMES, pad_token_id=PAD)
    prompts = [*drawn(), [5, 9, PAD, 4, PAD, PAD], [PAD, PAD]]
    options = PLANS[KINDS.index(kind) % len(PLANS)]
    with opened(tmp_path / "model", offload_dir=tmp_path / "offload", **options) as llm:
        found = llm.classify(prompts)
    for one, ids in zip(found, prompts, strict=True):
        wanted = by_transformers(model, ids)
        assert near(one.scores, wanted), ids
        assert torch.tensor(one.probs).allclose(wanted.softmax(-1), atol=1e-5)
        assert one.label == NAMES[int(wanted.argmax())] and one.prompt_token_ids == tuple(ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("classifier") / "model"
    tiny.save_classifier("llama-gqa", place, id2label=NAMES)
    return place


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder, gpu_batch_size=4) as llm:
        yield llm


def test_scores_are_the_same_under_all_plans_and_in_streams(folder: Path, llm: LLM, tmp_path: Path) -> None:
    wanted = [one.scores for one in llm.classify(drawn())]
    for options in PLANS[1:]:
        with opened(folder, offload_dir=tmp_path, **options) as other:
            for one, own in zip(other.classify(drawn()), wanted, strict=True):
                assert near(one.scores, torch.tensor(own), 1e-6)
    requests = [Request(ids, ClassifyParams() if place % 2 else PoolingParams()) for place, ids in enumerate(drawn())]
    found = sorted(llm.generate_stream(requests), key=lambda one: one.index)
    embedded = llm.embed(drawn())
    for place, one in enumerate(found):
        assert one.embedding is not None
        own = wanted[place] if place % 2 else embedded[place].embedding
        assert list(one.embedding) == pytest.approx(list(own), abs=1e-6)


def test_a_prompt_that_is_cut_says_so(llm: LLM) -> None:
    (cut, whole), (short,) = llm.classify(["abcdefg", "ab"], truncate=4), llm.classify(["abcd"])
    assert (cut.truncated_tokens, whole.truncated_tokens) == (3, 0) and near(cut.scores, torch.tensor(short.scores))
    assert isinstance(cut, Classification) and llm.classify([]) == []


@pytest.mark.parametrize(
    ("problem", "labels", "kept"),
    [(None, 3, TOGETHER), (None, 1, APART), (TOGETHER, 1, APART), (APART, 3, APART), (NUMBERS, 2, NUMBERS)],
)
def test_probabilities_are_those_of_the_problem(problem: str | None, labels: int, kept: str) -> None:
    own = Labels.of({str(number): f"l{number}" for number in range(labels)}, problem, None, "x")
    scores = torch.tensor([-800.0, 0.5, 3.0][-labels:])
    wanted = {TOGETHER: scores.softmax(-1), APART: scores.sigmoid(), NUMBERS: scores}[kept]
    assert own.problem == kept and torch.tensor(own.shares(scores.tolist())).allclose(wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"problem_type": "guessing"}, "problem_type"),
    ],
)
def test_a_broken_config_is_refused_in_one_line(change: dict[str, Any], words: str, folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, **change}))
    assert words in one_line(lambda: opened(copied))


def test_what_a_model_has_no_head_for_is_refused_in_one_line(llm: LLM, tmp_path: Path) -> None:
    for call in (
        lambda: llm.generate(["a"], SamplingParams(3)),
        lambda: llm.score([("a", "b")]),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.converse(),
        lambda: [*llm.generate_stream(["a"])],
    ):
        assert "scores texts by labels and picks no tokens; use classify, rank or embed" in one_line(call)  # type: ignore[arg-type]
    assert "3 labels ('bad, so so, good'), and ranking takes a model with one" in one_line(lambda: llm.rank("a", ["b"]))
    assert "unknown argument 'truncate_prompt_tokens': it is called truncate" in one_line(
        lambda: llm.classify(["a"], truncate_prompt_tokens=3)
    )
    tiny.save_tiny("llama-gqa", tmp_path / "other")
    with opened(tmp_path / "other") as other:
        for ask in (lambda: other.classify(["a"]), lambda: other.rank("a", ["b"])):
            assert "has no head for classification" in one_line(ask)
    with pytest.raises(ValueError, match="a head for classification is not read of the architecture opt"):
        tiny.save_classifier("opt", tmp_path / "opt")
        opened(tmp_path / "opt")


def test_scores_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    model = tiny.save_classifier("llama-gqa", tmp_path / "model")
    model.score.weight.data.fill_(torch.inf)
    model.save_pretrained(tmp_path / "model")
    with opened(tmp_path / "model") as llm, pytest.raises(TaskFailed, match="the classification of prompt 0 is not finite"):
        llm.classify(["abc"])


# -- ranks -------------------------------------------------------------------------------------------------------------------

DOCUMENTS = ["A ferry crosses.", "Rain.", "It leaves at nine."]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    place = tmp_path_factory.mktemp("judge") / "model"
    return tiny.save_classifier("qwen3", place, labels=1), place


def test_documents_are_ranked_by_the_one_score(judge: tuple[Any, Path]) -> None:
    model, place = judge
    with opened(place, gpu_batch_size=2) as llm:
        found = llm.rank("When?", DOCUMENTS)
        best = llm.rank("When?", DOCUMENTS, top_n=1)
        written = llm.rank("When?", DOCUMENTS, template="Q{query}{document}!{query}")
        cut = llm.rank("When?", DOCUMENTS, truncate=9)
        ids = {one: llm.tokenizer.encode(f"When?{one}") for one in DOCUMENTS}
        of_template = {one: llm.tokenizer.encode(f"QWhen?{one}!When?") for one in DOCUMENTS}
    for ranked, read in ((found, ids), (written, of_template)):
        assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
        assert sorted(one.index for one in ranked) == [0, 1, 2]
        for one in ranked:
            assert one.document == DOCUMENTS[one.index]
            assert one.score == pytest.approx(float(by_transformers(model, read[one.document]).sigmoid()[0]), abs=1e-5)
    assert best == found[:1]
    assert {one.index: one.truncated_tokens for one in cut} == {n: len(ids[one]) - 9 for n, one in enumerate(DOCUMENTS)}


def test_a_pair_is_put_together_as_the_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = saved_tokenizer("byte_level", tmp_path)
    own = load_tokenizer(tmp_path, {}, 1000)
    assert isinstance(own, WordTokenizer)
    wanted = own.of_transformers("When?", "At nine.")["input_ids"]
    assert own.encode_pair("When?", "At nine.") == tokenizer.encode_pair("When?", "At nine.") == list(wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"query": ""}, "the query is ''; it is a text"),
        ({"documents": "one"}, "the documents are 'one'; give a list of texts"),
        ({"documents": [""]}, "a document is ''; a document is a text"),
        ({"template": "{query}"}, "it is a text with {query} and {document} in it"),
        ({"top_n": 0}, "top_n is 0"),
        ({"top_k": 2}, "unknown argument 'top_k': it is called top_n"),
    ],
)
def test_what_cannot_be_ranked_is_refused_in_one_line(given: Any, words: str, judge: tuple[Any, Path]) -> None:
    with opened(judge[1]) as llm:
        asked: dict[str, Any] = {"query": "a", "documents": ["b"], **given}
        assert words in one_line(lambda: llm.rank(**asked))
