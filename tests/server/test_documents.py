"""The examples of docs/serving.md do what they show, against a server with a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OfChats
from openai.types.completion_create_params import CompletionCreateParamsBase as OfPrompts
from openai.types.embedding_create_params import EmbeddingCreateParams as OfEmbeddings
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OfResponses

from h2o_flexgen.jobs.line_fields import (
    CLASSIFY,
    DOCUMENTS,
    FIRST,
    OF_CHATS,
    OF_EMBEDDINGS,
    OF_LABELS,
    OF_PROMPTS,
    QUERY,
    RERANK,
    SCORE,
    SECOND,
    TEMPLATE,
    TOP_N,
)
from h2o_flexgen.llm import LLM
from h2o_flexgen.server import response_fields
from tests.helpers.tiny import save_classifier
from tests.helpers.tool_templates import HERMES
from tests.server.conftest import SEATS
from tests.server.served import MODEL, Served, served

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
CALLS_TOOLS = "Qwen/Qwen3-4B"  # a model in examples


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(llm, room=(96, 30), data=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def server_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model with words for tokens, and a template for tools."""
    folder = tmp_path_factory.mktemp("offload")
    demo = LLM("demo", dtype="float32", device="cpu", offload_dir=folder, gpu_batch_size=2, num_gpu_batches=1)
    with demo, served(demo, room=(300, 60), template=HERMES) as server:
        yield server


@pytest.fixture(scope="module")
def server_that_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranking") / "model"
    save_classifier("llama-gqa", folder, 1)
    with LLM(folder, dtype="float32", tokenizer="bytes", device="cpu", **SEATS) as llm, served(llm, room=(96, 30)) as server:
        yield server


def for_test(example: str, server: Served) -> str:
    changed = example.replace("http://127.0.0.1:8000", server.place.url)
    changed = changed.replace("facebook/opt-1.3b", MODEL).replace(CALLS_TOOLS, MODEL)
    assert changed != example
    return changed


LABELS = "Labels and ranks"
# url -> the heading of its fields in the page, what clients can send there (OpenAI's, where it knows the url), a body that is
# fine, and what is read here
INTERFACES: Mapping[str, tuple[str, set[str], dict[str, Any], frozenset[str]]] = {
    "/v1/chat/completions": (
        "Fields",
        {*OfChats.__annotations__, "stream"},
        {"messages": [{"role": "user", "content": "x"}]},
        OF_CHATS,
    ),
    "/v1/completions": ("Fields", {*OfPrompts.__annotations__, "stream"}, {"prompt": "x"}, OF_PROMPTS),
    "/v1/responses": ("Responses", {*OfResponses.__annotations__, "stream"}, {"input": "x"}, response_fields.KNOWN),
    "/v1/embeddings": ("Embeddings", {*OfEmbeddings.__annotations__}, {"input": "x"}, OF_EMBEDDINGS),
    CLASSIFY: (LABELS, {*OF_LABELS, "input"}, {"input": "x"}, OF_LABELS),
    SCORE: (LABELS, {*OF_LABELS, TEMPLATE}, {FIRST: "x", SECOND: "y"}, OF_LABELS),
    RERANK: (LABELS, {*OF_LABELS, TEMPLATE, TOP_N}, {QUERY: "x", DOCUMENTS: ["y"]}, OF_LABELS),
}


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows_of(heading: str) -> list[tuple[set[str], str]]:
    """The fields of each row of a table, and what the page says of them."""
    rows = re.findall(r"^\| (.*`.*) \| (.*) \|$", section(heading), re.MULTILINE)
    aside = r"`\w+` in `\w+`|, but for .*"  # fields of fields, and those of other tables
    return [({*re.findall(r"`(\w+)", re.sub(aside, "", named))}, said) for named, said in rows]


@pytest.mark.parametrize("url", INTERFACES)
def test_every_field_that_clients_can_send_is_named(url: str) -> None:
    heading, known, body, _ = INTERFACES[url]
    named = {*re.findall(r"`(\w+)", section(heading))}
    assert len(known) >= 5 and known - named - body.keys() - {"model"} == set()


@pytest.mark.parametrize("url", INTERFACES)
def test_no_field_of_clients_is_ignored(url: str, request: pytest.FixtureRequest) -> None:
    """Each is looked at, or refused by its name: none may be what no field is."""
    heading, known, body, _ = INTERFACES[url]
    server = request.getfixturevalue("server_that_ranks" if heading == LABELS else "server")
    with server.http() as http:
        answers = {name: http.post(url, json={**body, name: {"a": 1}}) for name in known}
    assert {name: answer.status_code for name, answer in answers.items() if answer.status_code not in (400, 404)} == {}
    assert {name for name, answer in answers.items() if answer.json()["error"]["param"] != name} == set()


@pytest.mark.parametrize("heading", ["Fields", "Responses", "Embeddings"])
def test_what_the_page_says_of_a_field_is_what_is_done(heading: str) -> None:
    """The fields that it calls refused are those that no code reads."""
    of_page = [(names, body) for own, _, body, names in INTERFACES.values() if own == heading]
    read = {name for names, body in of_page for name in (*names, *body)}
    for names, said in rows_of(heading):
        if said.startswith("refused"):
            assert not names & read, said
        else:
            assert names <= {*read, "stream", "stream_options"}, said


@pytest.mark.parametrize("place", range(len(examples("python"))))
def test_the_examples_in_python_run(
    place: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = examples("python")[place]
    server = request.getfixturevalue("server_with_tools" if CALLS_TOOLS in example else "server")
    waiting = threading.Event()
    monkeypatch.setattr("time.sleep", lambda seconds: waiting.wait(seconds / 100))
    exec(compile(for_test(example, server), "docs/serving.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("place", range(len(examples("bash"))))
def test_the_examples_for_a_shell_run(place: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    example = examples("bash")[place]
    server = request.getfixturevalue("server_that_ranks" if "/v1/rerank" in example else "server")
    script = ["bash", "-c", for_test(example, server)]
    run = subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path)
    events = [line.removeprefix("data: ") for line in run.stdout.splitlines() if line]
    assert events[-1] == "[DONE]" or {"choices", "input_file_id", "results"} & json.loads(events[-1]).keys()
    assert all("error" not in json.loads(event) for event in events if event != "[DONE]")
