"""Labels, scores and ranks as clients of vLLM ask for them, alone and in batches: they are those of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from h2o_flexgen.llm import LLM
from tests.helpers.tiny import save_classifier
from tests.server.conftest import SEATS
from tests.server.served import MODEL, PROMPT_LEN, Served, served
from tests.server.test_batches import batch_of, ended

TEXTS = ["The ferry", "A boat", "It rains all day"]
NAMES = {0: "calm", 1: "stormy"}
KEY = "a key of the server"


def serving(folder: Path, labels: int, data: Path | None = None, **options: Any) -> Iterator[Served]:
    save_classifier("llama-gqa", folder, labels, **({"id2label": NAMES} if labels == 2 else {}))
    with (
        LLM(folder, dtype="float32", tokenizer="bytes", device="cpu", **SEATS) as llm,
        served(llm, data=data, **options) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def labelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("labelling")
    yield from serving(folder / "model", 2, folder / "data")


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranking")
    yield from serving(folder / "model", 1, folder / "data", keys=(KEY,))


def alone(server: Served) -> LLM:
    return LLM(server.llm.name, dtype="float32", tokenizer="bytes", device="cpu")


def asked(server: Served, url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    with httpx.Client(base_url=server.place.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        answer = http.post(url, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_labels_are_those_of_the_engine(labelling: Served) -> None:
    answer = asked(labelling, "/classify", {"input": TEXTS, "user": "me"})
    with alone(labelling) as llm:
        wanted = llm.classify(TEXTS)
    assert answer["id"].startswith("classify-") and (answer["object"], answer["model"]) == ("list", MODEL)
    tokens = sum(map(len, TEXTS))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert "completion_tokens" not in answer["usage"]
    for place, (one, own) in enumerate(zip(answer["data"], wanted, strict=True)):
        assert (one["index"], one["label"], one["num_classes"]) == (place, own.label, 2)
        assert one["probs"] == pytest.approx(own.probs, abs=1e-6)
    (cut,) = asked(labelling, "/classify", {"input": "x" * 40, "truncate": True})["data"]
    assert cut["truncated_tokens"] == 40 - PROMPT_LEN


def test_ranks_and_scores_are_those_of_the_engine(ranking: Served) -> None:
    template = "{document}?{query}"
    with alone(ranking) as llm:
        wanted, written = llm.rank("When", TEXTS), llm.rank("When", TEXTS, template=template)
    answer = asked(ranking, "/v1/rerank", {"query": "When", "documents": TEXTS})
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] == sum(map(len, TEXTS)) + 3 * 4
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [(o.index, o.document) for o in wanted]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([one.score for one in wanted], abs=1e-6)
    best = asked(ranking, "/v1/rerank", {"query": "When", "documents": TEXTS, "top_n": 1, "template": template})["results"]
    assert [one["index"] for one in best] == [written[0].index]
    scores = {one.index: one.score for one in wanted}
    for first in ("When", ["When"] * 3):
        told = asked(ranking, "/v1/score", {"text_1": first, "text_2": TEXTS})
        assert told["id"].startswith("score-") and [one["object"] for one in told["data"]] == ["score"] * 3
        assert [one["score"] for one in told["data"]] == pytest.approx([scores[place] for place in range(3)], abs=1e-6)


def test_batches_answer_as_the_server_does(labelling: Served, ranking: Served) -> None:
    each = (
        (labelling, "/classify", [{"input": text} for text in TEXTS]),
        (ranking, "/v1/score", [{"text_1": "When", "text_2": text} for text in TEXTS]),
        (ranking, "/v1/rerank", [{"query": "When", "documents": [text]} for text in TEXTS]),
    )
    for server, url, bodies in each:
        with OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client:
            batch = ended(server, client, batch_of(client, bodies, url))
            assert batch.status == "completed", batch.errors
            lines = [*map(json.loads, client.files.content(batch.output_file_id).text.splitlines())]
        for line in lines:
            told = asked(server, url, bodies[int(line["custom_id"])])
            (one,), (wanted,) = (
                next(own[name] for name in ("data", "results") if name in own) for own in (line["response"]["body"], told)
            )
            assert numbers(one) == pytest.approx(numbers(wanted), abs=1e-6)


def numbers(one: dict[str, Any]) -> list[float]:
    found: list[float] = one.get("probs") or [one[name] for name in ("score", "relevance_score") if name in one]
    return found


@pytest.mark.parametrize(
    ("url", "body", "param", "words"),
    [
        ("/classify", {"input": None}, "input", "input is missing"),
        ("/classify", {"input": "a", "pooling": "mean"}, "pooling", "unknown field 'pooling'"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "it is called truncate"),
        ("/v1/score", {"text_1": "a"}, None, "text_2 is null; it is a text"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts and text_2 has 1"),
        ("/v1/rerank", {"query": "a"}, None, "documents is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n is 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": True}, "return_documents", "always returned"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, "picks no tokens"),
    ],
)
def test_what_is_not_taken_is_refused_in_one_line(
    url: str, body: dict[str, Any], param: str | None, words: str, ranking: Served
) -> None:
    error = asked(ranking, url, body, 400)["error"]
    assert words in error["message"] and "\n" not in error["message"] and error["param"] == param


def test_models_without_the_head_are_refused_by_name(llm: LLM, labelling: Served) -> None:
    with served(llm) as other:
        for url, body in (("/classify", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
            assert "has no head for classification" in asked(other, url, body, 400)["error"]["message"]
    said = asked(labelling, "/v1/score", {"text_1": "a", "text_2": "b"}, 400)["error"]["message"]
    assert "has 2 labels ('calm, stormy'), and ranking takes a model with one; use classify" in said


def test_labels_ask_for_a_key(ranking: Served) -> None:
    with ranking.http() as http:
        for url in ("/classify", "/v1/score", "/v1/rerank"):
            assert http.post(url, json={"input": "a"}).status_code == 401
