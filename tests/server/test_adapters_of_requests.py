"""Requests ask for adapters by the name of the model, over HTTP, in batches of a server and in jobs over files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from h2o_flexgen import batch
from h2o_flexgen.jobs.line_fields import ModelNames
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.checkpoints.test_adapters import matrices_of, save_adapter, values_in
from tests.helpers.commands import called
from tests.helpers.contract import Checkpoints
from tests.helpers.refusals import one_line
from tests.server.served import MODEL, Served, served
from tests.server.test_batches import batch_of, ended, records

PROMPT = "The ferry"
FOUR = 4
OF_REQUEST = {f"{MODEL}:one": "one", "two": "two", MODEL: None}  # names that requests have, and their adapters


@pytest.fixture(scope="module")
def adapters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, values = tmp_path_factory.mktemp("adapters"), values_in(checkpoints.folder("llama-gqa"))
    shapes = {name: tuple(values[name].shape) for name in matrices_of(values) if ".layers." in name}
    return {name: save_adapter(folder / name, shapes, seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints, adapters: dict[str, Path]) -> Iterator[LLM]:
    how: dict[str, Any] = {"dtype": "float32", "tokenizer": "bytes", "device": "cpu"}
    with LLM(checkpoints.folder("llama-gqa"), lora=adapters, gpu_batch_size=2, num_gpu_batches=2, **how) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(checkpoints: Checkpoints, adapters: dict[str, Path]) -> dict[str, str]:
    """What each says, of the model with its adapter merged."""
    found = {}
    for name, adapter in OF_REQUEST.items():
        merged = adapters.get(adapter or "")
        with LLM(checkpoints.folder("llama-gqa"), adapter=merged, dtype="float32", tokenizer="bytes", device="cpu") as llm:
            found[name] = llm.generate([PROMPT], SamplingParams(max_tokens=FOUR))[0].text
    assert len({*found.values()}) == 3, "adapters make a difference"
    return found


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(llm, data=tmp_path_factory.mktemp("data")) as server:
        yield server


def test_a_request_gets_the_adapter_that_its_model_names(server: Served, alone: dict[str, str]) -> None:
    with server.client() as client:
        assert [one.id for one in client.models.list()] == [MODEL, f"{MODEL}:one", f"{MODEL}:two"]
        for name in ("one", f"{MODEL}:one"):
            model = client.models.retrieve(name)
            assert (model.id, model.parent) == (f"{MODEL}:one", MODEL)  # type: ignore[attr-defined]
        for name, text in alone.items():
            asked: Any = {"prompt": PROMPT, "max_tokens": FOUR, "temperature": 0}
            answer = client.completions.create(model=name, **asked)
            assert answer.choices[0].text == text
            assert answer.model == {"two": f"{MODEL}:two"}.get(name, name)
            pieces = client.completions.create(model=name, stream=True, **asked)
            assert "".join(piece.choices[0].text for piece in pieces) == text
        by_field = client.completions.create(model=MODEL, extra_body={"lora_name": "two"}, **asked)
        assert by_field.choices[0].text == alone["two"]
        said = [client.responses.create(model=name, input=PROMPT, max_output_tokens=FOUR, temperature=0) for name in alone]
        assert len({one.output_text for one in said}) > 1 and said[1].model == f"{MODEL}:two"
        vectors = [client.embeddings.create(model=name, input=PROMPT).data[0].embedding for name in alone]
        assert len({tuple(one) for one in vectors}) == 3


def test_a_model_or_an_adapter_that_is_not_here_is_refused(server: Served) -> None:
    with server.client() as client:
        for name in ("three", f"{MODEL}:three", f"{MODEL}:"):
            with pytest.raises(openai.NotFoundError, match="is not here"):
                client.completions.create(model=name, prompt=PROMPT)
        with pytest.raises(openai.NotFoundError, match="did you mean tiny:one"):
            client.models.retrieve(f"{MODEL}:on")
        with pytest.raises(openai.BadRequestError, match="lora_name is 'one', and model names 'two'; give one of them"):
            client.completions.create(model="two", prompt=PROMPT, extra_body={"lora_name": "one"})
        with pytest.raises(openai.BadRequestError, match="lora_name is 'three', which is no adapter here"):
            client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"lora_name": "three"})


def body(name: str) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPT, "max_tokens": FOUR, "temperature": 0}


def lines_of(names: list[str]) -> list[dict[str, Any]]:
    told = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": f"{place}", **told, "body": body(name)} for place, name in enumerate(names)]


def test_lines_of_a_batch_have_adapters_by_their_models(server: Served, alone: dict[str, str]) -> None:
    with server.client() as client:
        done = ended(server, client, batch_of(client, [body(name) for name in alone]))
        found = records(client, done.output_file_id)
    texts = [found[f"{place}"]["response"]["body"]["choices"][0]["text"] for place in range(3)]
    assert texts == [*alone.values()]


def test_lines_of_a_job_have_adapters_by_their_models(
    capfd: pytest.CaptureFixture[str],
    checkpoints: Checkpoints,
    adapters: dict[str, Path],
    alone: dict[str, str],
    offload: Path,
    tmp_path: Path,
) -> None:
    base = checkpoints.folder("llama-gqa")
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    how = ("--dtype", "float32", "--tokenizer", "bytes", "--device", "cpu", "--offload-dir", offload)
    given = [part for name, folder in adapters.items() for part in ("--lora", f"{name}={folder}")]
    command = partial(called, batch.main, capfd, "--model", base, *how, "-i", file, "-o", out)
    names = [f"{base}:one", "two", str(base)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines_of(names)))
    assert command(*given).status == 0
    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, out.read_text().splitlines())}
    assert [found[f"{place}"]["choices"][0]["text"] for place in range(3)] == [*alone.values()]
    assert found["1"]["model"] == f"{base}:two"
    other = command(*given[2:], "--lora", f"one={adapters['two']}", "--resume")
    assert other.status and "lora was {'one': " in " ".join(other.err), "answers of another adapter are not gone on with"
    bare = command("--resume")
    assert bare.status and "lora was {'one': " in " ".join(bare.err), "nor without one"
    file.write_text(json.dumps(lines_of(["three"])[0]) + "\n")
    bad = command(*given, "-o", tmp_path / "other.jsonl")
    assert bad.status and "the model 'three' is not here" in " ".join(bad.err)
    assert "give NAME=PATH" in " ".join(command("--lora", "one", "-o", tmp_path / "third.jsonl").err)


def test_names_are_those_of_the_model_and_of_its_adapters() -> None:
    names = ModelNames("a/b:c", ["one"])
    assert [names.adapter(asked) for asked in (None, "a/b:c", "one", "a/b:c:one")] == [None, None, "one", "one"]
    assert names.read({"model": "one", "n": 1}) == {"model": "one", "n": 1, "lora_name": "one"}
    assert "is not here; ask for 'a/b:c' or 'a/b:c:one'" in one_line(lambda: names.adapter("a/b:one"))
