"""The page in a browser: a person sees the model, its plan and what is done, and tries a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.llm import LLM
from tests.server.browsers import Visit, browsing, visiting
from tests.server.served import GEN_LEN, MODEL, PROMPT_LEN, Served, served
from tests.server.test_desk import breaking, ended

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as server:
        yield server


@pytest.fixture
def visit(browser: Any, server: Served) -> Iterator[Visit]:
    with visiting(browser, server.place.url) as visit:
        yield visit
        assert visit.complaints == [] and all(one.startswith((server.place.url, "data:")) for one in visit.requests)


def test_the_model_its_plan_and_what_is_done_are_seen(visit: Visit, server: Served, tmp_path: Path) -> None:
    visit.shows("#state", "serving")
    assert visit.text("#model") == MODEL and visit.page.title() == f"{MODEL} · h2o_flexgen"
    assert visit.page.locator(".tier h3").all_text_contents() == ["CPU memory", "disk"]
    assert "100 % · " in visit.text(".tier >> nth=0") and "products exact in float32" in visit.text("#words")
    visit.page.click("text=a message of a chat")
    visit.ask("Hi", tokens=5)
    visit.shows("#outcome", "5 tokens in ")
    visit.shows("#lanes", "compute")
    visit.shows("#so-far", "Completions ended: 1 at the length limit.")
    visit.shows("#outcome", "tokens/s for this answer, from Run to its end; it ended at the length limit")
    assert visit.text("#now-title") == "Now, for all requests together"
    assert "generated for all requests" in visit.text("figcaption")
    for width, dark in ((1180, False), (1180, True), (360, False)):
        visit.page.set_viewport_size({"width": width, "height": 800})
        visit.page.emulate_media(color_scheme="dark" if dark else "light")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert (tmp_path / "page.png").stat().st_size > 10_000


def test_what_is_streamed_is_what_the_api_says(visit: Visit, server: Served) -> None:
    with server.client() as client:
        said = client.completions.create(model=MODEL, prompt="The ferry", max_tokens=20, temperature=0).choices[0].text
    visit.ask("The ferry", tokens=20)
    visit.shows("#outcome", "it ended at the length limit")
    assert visit.text("#answer") == said


def test_it_is_stopped_in_the_middle_with_a_key_of_the_keyboard_too(visit: Visit, server: Served) -> None:
    before = ended(server).get("abort", 0)
    for number, stop in enumerate(("click", "press"), start=1):
        with server.held():
            visit.ask("x", tokens=GEN_LEN)
            visit.shows("#outcome", "computing")
            assert visit.page.is_disabled("#run")
            visit.page.click("#stop") if stop == "click" else visit.page.keyboard.press("Escape")
            visit.shows("#outcome", "stopped")
            server.until(lambda number=number: ended(server).get("abort") == before + number)
        assert visit.page.is_enabled("#run") and visit.page.is_disabled("#stop")
        server.until(lambda: server.desk.now.rows_seated == 0)


def test_errors_are_shown_as_what_they_are(visit: Visit, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    visit.page.fill("#prompt", "x" * (PROMPT_LEN + 1))
    visit.page.press("#prompt", "Control+Enter")
    visit.shows("#outcome.wrong", f"400 context_length_exceeded: the prompt has {PROMPT_LEN + 1} tokens, and no more than")

    def fail(logits: Any, place: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        breaking(broken, lambda params, step: step == 2, fail)
        visit.ask("x")
        visit.shows("#outcome.wrong", "computation_failed: the computation has failed: ")
    visit.ask("x", tokens=2)
    visit.shows("#outcome:not(.wrong)", "2 tokens in")


def test_whatever_a_text_says_it_stays_a_text(browser: Any, server: Served) -> None:
    def renamed(route: Any) -> None:
        status = route.fetch().json()
        route.fulfill(body=json.dumps({**status, "model": name}), content_type="application/json")

    name = "<b>bold</b>"
    with visiting(browser, "about:blank") as visit:
        visit.page.route("**/status", renamed)
        visit.page.goto(server.place.url)
        visit.shows("#model", name)
        assert visit.page.locator("h1 b").count() == 0 and visit.complaints == []


def test_where_keys_are_asked_for_there_is_a_field_for_one(browser: Any, llm: LLM) -> None:
    key = "schlüssel-à"
    with visiting(browser, "about:blank") as visit:
        with served(llm, keys=(key,)) as server:
            visit.page.goto(server.place.url)
            visit.shows("#state", "asks for a key")
            assert visit.page.is_hidden("#main")
            for given, place, said in (("wrong-key", "#refused", "no such API key"), (key, "#state", "serving")):
                visit.page.fill("#key", given)
                visit.page.press("#key", "Enter")
                visit.shows(place, said)
            visit.ask("x", tokens=3)
            visit.shows("#outcome", "3 tokens in")
            assert visit.page.is_hidden("#locked")
        visit.shows("#state", "the server cannot be reached")
