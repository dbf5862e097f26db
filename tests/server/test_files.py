"""Files that clients leave with a server: what comes back is what was sent, and nothing is left of what broke off."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from psutil import Process

from h2o_flexgen.llm import LLM
from h2o_flexgen.server import stored_batches
from h2o_flexgen.server.listening import Limits
from h2o_flexgen.server.stored_batches import NewFile, StoredFiles, data_folder, write_document
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.refusals import one_line
from tests.server.served import Served, served
from tests.server.test_refusals import error, head

MOST = 100_000
TEXT = b'{"custom_id": "a"}\r\n--boundary\r\n\xff\x00\r\n'  # parts of forms are told apart by more than their looks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "deep"


@pytest.fixture(scope="module")
def server(llm: LLM, data: Path) -> Iterator[Served]:
    with served(llm, data=data, most_file_bytes=MOST) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


@pytest.fixture(autouse=True)
def emptied(client: OpenAI, data: Path) -> Iterator[None]:
    yield
    for file in client.files.list():
        client.files.delete(file.id)
    assert [*(data / "files").iterdir()] == []


def test_a_file_comes_back_as_it_was_sent(client: OpenAI, data: Path) -> None:
    sent = [client.files.create(file=(f"{place} ü.jsonl", TEXT * place), purpose="batch") for place in range(4)]
    for place, file in enumerate(sent):
        assert (file.filename, file.bytes, file.purpose, file.object) == (
            f"{place} ü.jsonl",
            len(TEXT) * place,
            "batch",
            "file",
        )
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).content == TEXT * place
        assert (data / "files" / f"{file.id}.jsonl").read_bytes() == TEXT * place, "a newcomer finds it under its id"
    assert client.files.delete(sent[1].id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(sent[1].id)
    assert [file.id for file in client.files.list(order="asc")] == [sent[place].id for place in (0, 2, 3)]


def test_files_are_listed_by_pages(client: OpenAI, http: httpx.Client) -> None:
    ids = [client.files.create(file=("x", b"x"), purpose="batch").id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the client asks for all pages"
    page = http.get("/v1/files", params={"limit": 2, "order": "asc", "after": ids[1]}).json()
    assert [file["id"] for file in page["data"]] == ids[2:4]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, ids[2], ids[3])
    assert not http.get("/v1/files", params={"limit": 2, "after": ids[2]}).json()["has_more"]
    assert not list(client.files.list(purpose="batch_output"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"limit": "0"}, "limit is '0'; allowed is a whole number from 1 to 10000"),
        ({"order": "up"}, "order is 'up'; allowed are asc and desc"),
        ({"after": "x"}, "after is 'x', which is not among these"),
        ({"befor": "x"}, "unknown parameter 'befor'"),
    ],
)
def test_a_page_that_is_none_is_refused(http: httpx.Client, asked: dict[str, str], said: str) -> None:
    assert error(http.get("/v1/files", params=asked), 400)["message"].startswith(said)


FINE: dict[str, Any] = {"files": {"file": ("x", b"x")}, "data": {"purpose": "batch"}}


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"data": {"purpose": "fine-tune"}}, 400, "purpose is 'fine-tune'; the only one that is known here is \"batch\""),
        ({"data": {}}, 400, "purpose is ''; the only"),
        (
            {"data": {"purpose": "batch", "expires_after[anchor]": "x"}},
            400,
            "unknown field 'expires_after': nothing expires here",
        ),
        ({"files": [("file", ("x", b"x")), ("file", ("y", b"y"))]}, 400, "file stands there twice; send one"),
        ({"files": [("fil", ("x", b"x"))]}, 400, "unknown field 'fil'; did you mean file?"),
        ({"files": {"purpose": (None, b"batch")}, "data": {}}, 400, "file is missing; send a form with a file and its purpose"),
        ({"data": {"purpose": "batch", "purpose[0]": "x"}}, 400, "unknown field 'purpose[0]'"),
        ({"data": {"purpose": "x" * 70_000}}, 400, "the form cannot be read: it has more than 65.54 kB beside its file"),
        (
            {"files": {"file": ("x", b"x" * 9, "text/plain", {"x-long": "x" * 70_000})}},
            400,
            "the form cannot be read: ",
        ),
        ({"files": {"file": ("x", b"x" * (MOST + 1))}}, 413, "the file has more than 100.00 kB, which is the limit here"),
        (
            {"headers": {"origin": "https://elsewhere.example"}},
            403,
            "pages of 'https://elsewhere.example' may ask this server for nothing",
        ),
        ({"files": None}, 415, "the content type is 'application/x-www-form-urlencoded'; send a form, as multipart/form-data"),
    ],
)
def test_a_form_that_is_none_is_refused(http: httpx.Client, form: dict[str, Any], status: int, said: str) -> None:
    assert error(http.post("/v1/files", **{**FINE, **form}), status)["message"].startswith(said)


def test_a_form_that_ends_too_early_is_refused(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    request = http.build_request("POST", "/v1/files", **FINE)
    headers = {"content-type": request.headers["content-type"]}
    for content in (b"", request.read()[:-10], b"garbage"):
        said = error(http.post("/v1/files", content=content, headers=headers), 400)
        assert said["message"].startswith("the form cannot be read: ") and said["code"] == "invalid_form"
    assert caplog.records == [], "it is no matter for the log of the server"


def test_pages_of_this_server_may_do_what_those_of_others_may_not(http: httpx.Client, server: Served) -> None:
    assert http.post("/v1/files", **FINE, headers={"origin": server.place.url}).status_code == 200
    for ask in (lambda **own: http.post("/v1/batches/x/cancel", **own), lambda **own: http.delete("/v1/files/x", **own)):
        for origin in ("null", "https://elsewhere.example", server.place.url + "1"):
            assert error(ask(headers={"origin": origin}), 403)["code"] == "other_origin"
        error(ask(headers={"origin": server.place.url}), 404)


def begun_upload(server: Served) -> socket.socket:
    raw = server.connected()
    form = {"content-type": "multipart/form-data; boundary=xyz", "content-length": "90000"}
    part = b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    raw.sendall(head("POST /v1/files", form) + part + b"x" * 30_000)
    return raw


def test_an_upload_that_breaks_off_leaves_nothing(server: Served, data: Path) -> None:
    with begun_upload(server):
        server.until(lambda: any((data / "files").iterdir()))
    server.until(lambda: not any((data / "files").iterdir()))


def test_an_upload_that_is_too_slow_is_not_waited_for(llm: LLM, tmp_path: Path) -> None:
    limits = Limits(body_seconds=0.01)
    with served(llm, data=tmp_path, most_file_bytes=1000, limits=limits) as server, begun_upload(server) as raw:
        told = b"".join(iter(lambda: raw.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 408") and b"the body did not come to its end in 0.02 s" in told
    assert [*(tmp_path / "files").iterdir()] == []


def test_a_disk_that_is_full_is_told_and_leaves_nothing(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(NewFile, "settle", fail)
        with pytest.raises(openai.InternalServerError, match=r"cannot be written \(No space left on device\)") as caught:
            client.files.create(file=("x", b"x"), purpose="batch")
    assert caught.value.status_code == 507 and not list(client.files.list())


def test_a_file_whose_document_cannot_be_written_leaves_nothing(
    client: OpenAI, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, said: object) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(stored_batches, "write_document", fail)
        with pytest.raises(openai.InternalServerError):
            client.files.create(file=("x", b"x"), purpose="batch")
    assert [*(data / "files").iterdir()] == [] and not list(client.files.list())


def test_a_removal_that_fails_can_be_asked_for_again(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError(24, "Too many open files")

    file = client.files.create(file=("x", b"x"), purpose="batch")
    with monkeypatch.context() as full:
        full.setattr(stored_batches, "sync_folder", fail)
        with pytest.raises(openai.InternalServerError):
            client.files.delete(file.id)
    assert client.files.retrieve(file.id) == file and client.files.delete(file.id).deleted


def test_bytes_come_from_anywhere_and_where_they_are_gone_that_is_said(
    server: Served, client: OpenAI, http: httpx.Client, data: Path
) -> None:
    file = client.files.create(file=("x", TEXT * 90), purpose="batch")
    assert http.get(f"/v1/files/{file.id}/content", headers={"range": "bytes=2-5"}).content == TEXT[2:6]
    assert http.head(f"/v1/files/{file.id}/content").headers["content-length"] == str(len(TEXT) * 90)
    lines = data / "files" / f"{file.id}.jsonl"
    server.until(lambda: not [one for one in Process().open_files() if one.path == str(lines)])
    lines.unlink()
    assert error(http.get(f"/v1/files/{file.id}/content"), 404)["code"] == "file_not_found"


def test_looking_does_not_wait_for_the_disk(
    server: Served, client: OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_go = threading.Event(), threading.Event()

    def slow(path: Path, said: Any) -> None:
        is_writing.set()
        assert may_go.wait(PATIENCE_SECONDS)
        write_document(path, said)

    file = client.files.create(file=("x", b"x"), purpose="batch")
    wish = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    asks: list[Callable[[], httpx.Response]] = [
        lambda: http.post("/v1/files", **FINE),
        lambda: http.post("/v1/batches", json=wish),
    ]
    for ask in asks:
        with monkeypatch.context() as held, ThreadPoolExecutor(1) as other:
            held.setattr(stored_batches, "write_document", slow)
            answer = other.submit(ask)
            try:
                assert is_writing.wait(PATIENCE_SECONDS)
                for path in ("/v1/files", f"/v1/files/{file.id}", "/v1/batches", "/metrics"):
                    assert http.get(path).status_code == 200
            finally:
                may_go.set()
            assert answer.result().status_code == 200
        is_writing.clear()
        may_go.clear()
    server.until(lambda: all(batch.status == "failed" for batch in client.batches.list()))


def test_what_a_killed_server_was_about_to_do_is_removed(tmp_path: Path) -> None:
    with data_folder(tmp_path, "--data-dir") as folder:
        files = StoredFiles(folder.files)
        with files.new() as new:
            new.write(b"kept")
            kept = files.keep(new, "x.jsonl", "batch")
        (folder.files / ".file-1.jsonl").write_bytes(b"on its way in")
        (folder.files / "file-2.jsonl").write_bytes(b"not yet there, or on its way out")
        again = StoredFiles(folder.files)
        assert again.all() == [kept] and again.lines(kept.id).read_bytes() == b"kept"
        assert sorted(path.name for path in folder.files.iterdir()) == [f"{kept.id}.json", f"{kept.id}.jsonl"]
        document = folder.files / f"{kept.id}.json"
        assert json.loads(document.read_text())["filename"] == "x.jsonl"
        document.write_text('{"form": 2}')
        assert one_line(lambda: StoredFiles(folder.files)) == f"{document} is not understood by this version; move it away"


def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    def used(path: Path) -> str:
        return one_line(lambda: data_folder(path, "--data-dir").__enter__())

    for _ in range(2):
        with data_folder(tmp_path, "--data-dir"):
            told = f"--data-dir {tmp_path} is another server's, which runs; wait for its end, or give another folder"
            assert used(tmp_path) == told
    assert used(tmp_path / "lock").startswith(f"--data-dir {tmp_path}/lock cannot be used (")


def test_without_a_folder_whoever_asks_is_told_how_to_give_one(llm: LLM) -> None:
    with served(llm) as server, server.client() as client:
        for ask in (client.files.list, client.batches.list, lambda: client.files.create(file=("x", b"x"), purpose="batch")):
            with pytest.raises(openai.NotFoundError, match="start it with --data-dir FOLDER") as caught:
                ask()
            assert caught.value.code == "no_data_dir"


def test_files_too_need_a_key(llm: LLM, tmp_path: Path) -> None:
    with served(llm, keys=("a-long-key",), data=tmp_path) as server, server.http() as http:
        for path in ("/v1/files", "/v1/files/x/content", "/v1/batches"):
            error(http.get(path), 401)
        error(http.post("/v1/files", **FINE), 401)
