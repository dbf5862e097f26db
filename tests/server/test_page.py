"""The page and what it asks for, over plain HTTP: it needs nothing from elsewhere, and says so."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from h2o_flexgen.cli.report.plan_report import PlanReport
from h2o_flexgen.cli.serve_work import facts_of
from h2o_flexgen.engine.arrivals import GIVEN_UP
from h2o_flexgen.llm import LLM
from h2o_flexgen.server.desk import LOST
from tests.helpers.contract import Case, Checkpoints
from tests.server.served import GEN_LEN, MODEL, PROMPT_LEN, Served, served
from tests.server.test_answers import metrics


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as server:
        yield server


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def test_the_page_says_that_it_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("connect-src") == "'self'" and policy.pop("img-src") == "data:"
    for kind in ("style", "script"):
        (own,) = re.findall(f"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        assert policy.pop(f"{kind}-src") == f"'sha256-{b64encode(sha256(own.encode()).digest()).decode()}'"
    names = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert policy == dict.fromkeys(names, "'none'"), "no other site shows it in a frame"


def test_the_page_names_nothing_of_elsewhere_and_writes_no_html(http: httpx.Client) -> None:
    text = http.get("/").text
    assert "//" not in re.sub(r"^ *// -- .*|  // .*", "", text, flags=re.MULTILINE), "an address"
    assert set(re.findall(r"\b(?:href|src)=\"([^\"]*)\"", text)) == {"data:,", "metrics", "health"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert not re.search(r"\bon\w+=\"|\bstyle=\"|@import|url\(", text)


def test_every_field_that_is_filled_in_has_a_label(http: httpx.Client) -> None:
    text = http.get("/").text
    labelled = re.sub(r"<label.*?</label>", "", text, flags=re.DOTALL)
    assert "<textarea" in text and not re.search("<(input|textarea|select)", labelled)


def test_the_page_has_words_for_every_end_of_a_completion(http: httpx.Client) -> None:
    (ends,) = re.findall(r"const ENDS = \{(.*?)\};", http.get("/").text, re.DOTALL)
    assert set(re.findall(r"(\w+): \"", ends)) == {"length", "stop", GIVEN_UP, LOST}


def test_the_state_is_told_as_the_metrics_are(http: httpx.Client, server: Served) -> None:
    http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}).raise_for_status()
    server.until(lambda: server.counts.totals()["passes"] == 4)
    status, measured = http.get("/status").json(), metrics(http.get("/metrics").text)
    assert status["now"] == {
        "running": measured["h2o_flexgen_requests_running"],
        "waiting": measured["h2o_flexgen_requests_waiting"],
        "rows_waiting": 0,
        "rows_in_background": 0,
        "rows_seated": 0,
        "seats": 4,
        "kv_bytes": 0,
        "kv_bytes_of_seats": measured["h2o_flexgen_kv_seats_bytes"],
    }
    begun = status["since_it_began"]
    assert (begun["prompt_tokens"], begun["generated_tokens"], begun["passes"]) == (3, 4, 4)
    assert begun["completions"] == {"length": 1} and begun["lane_busy_seconds"]["compute"] > 0
    assert 0 < status["seconds"]["counted"] <= status["seconds"]["now"] and status["is_ending"] is False


def test_the_model_and_its_plan_are_told_as_they_were_announced(http: httpx.Client, llm: LLM) -> None:
    status: dict[str, Any] = http.get("/status").json()
    assert (status["model"], status["longest_prompt"], status["most_tokens"]) == (MODEL, PROMPT_LEN, GEN_LEN)
    assert status["words"]["numbers"].startswith("weights in float32, products exact in float32")
    assert status["words"].keys() == {"model", "schedule", "KV", "numbers", "kernels"}
    host, disk = status["tiers"]
    assert (host["name"], disk["name"]) == ("CPU", "disk") and host["needed_bytes"] > sum(host["held_bytes"].values())
    assert host["held_bytes"]["weights"] == llm.spec.weight_bytes and not any(disk["held_bytes"].values())


def test_beside_an_accelerator_each_tier_has_its_share(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = Case(percent=(40, 30, 50, 25, 100, 0), device="pretended", gpu_batch_size=4)
    with case.open(checkpoints, offload) as llm:
        planned = llm.arrivals(6, 4).planned
        tiers = facts_of(MODEL, PlanReport.of(llm.loaded, planned)).tiers
        weights, kv = ([tier.held_bytes[kind] for tier in tiers] for kind in ("weights", "KV"))
        assert [tier.name for tier in tiers] == ["GPU", "CPU", "disk"]
        assert sum(weights) == llm.spec.weight_bytes and all(weights) and all(kv)
        assert all(tier.needed_bytes >= sum(tier.held_bytes.values()) for tier in tiers[:2])
        assert kv[2] <= tiers[2].needed_bytes < kv[2] + weights[2], "weights are read from where the checkpoint lies"


def test_where_keys_are_asked_for_the_page_is_shown_and_the_state_is_not(llm: LLM) -> None:
    key = "a-key-of-some-length"
    with served(llm, keys=(key,)) as server, server.http() as http:
        assert http.get("/").status_code == 200 and MODEL not in http.get("/").text
        assert http.get("/status").status_code == 401
        assert http.get("/status", headers={"authorization": f"Bearer {key}"}).json()["model"] == MODEL


def test_the_state_says_that_it_is_ending(llm: LLM) -> None:
    with served(llm) as server, server.http() as http:
        server.desk.close()
        assert http.get("/status").json()["is_ending"] is True
