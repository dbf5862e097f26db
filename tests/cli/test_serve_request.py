"""The serve command's flags, and the request that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli import serve_request
from h2o_flexgen.cli.serve_request import KeepRequest, ServeRequest, Time, parse, request_of
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from tests.helpers.refusals import one_line


def asked(*flags: object) -> ServeRequest:
    return request_of(parse([*map(str, flags)]))


def test_without_flags_the_model_of_the_package_is_served_to_this_machine_alone() -> None:
    request = asked()
    assert request.model.name == request.name == DEMO and isinstance(request.plan, PlanRequirements)
    assert (request.listen.host, request.listen.port, request.listen.key_file) == ("127.0.0.1", 8000, None)
    assert (request.gather_seconds, request.listen.most_body_bytes, request.keep) == (0.1, 4_000_000, None)


def test_flags_say_where_and_for_which_clients() -> None:
    where = ("--host", "::1", "--port", 0, "--api-key-file", "~/keys", "--max-body", "1GB", "--served-model-name", "mine")
    request = asked(*where, "--gather", "2s", "--queue", 5, "--rows", 7, "--prompt-len", 9, "--gen-len", 3, "--seed", 4)
    assert (request.listen.host, request.listen.port, request.name) == ("::1", 0, "mine")
    assert request.listen.key_file == Path("~/keys").expanduser() and request.listen.most_body_bytes == 10**9
    assert (request.gather_seconds, request.most_waiting, request.rows, request.seed) == (2.0, 5, 7, 4)
    assert (request.prompt_len, request.gen_len) == (9, 3)


def test_files_are_kept_where_a_folder_is_named() -> None:
    assert asked("--data-dir", "~/x").keep == KeepRequest(Path("~/x").expanduser(), 200_000_000)
    assert asked("--data-dir", "x", "--max-file", "3kB").keep == KeepRequest(Path("x"), 3000)
    said = "--max-file is for files that are kept; add --data-dir FOLDER, or leave it out"
    assert one_line(lambda: asked("--max-file", "3kB")) == said


def test_what_requests_share_has_the_room_that_is_asked_for() -> None:
    assert (asked().prefix_room, asked("--prefix-room", 0).prefix_room) == (None, 0)
    request = asked("--prefix-room", 2048, "--prefix-policy", "judged", "--kv-policy", "h2o")
    assert request.prefix_room == 2048 and request.plan.first_plan.copies_prefixes
    assert asked().site.prefix_dir is None
    site = asked("--prefix-dir", "x", "--prefix-dir-size", "2GB").site
    assert (site.prefix_dir, site.prefix_dir_size) == ("x", "2GB")


def test_adapters_are_given_in_their_order_with_their_weights() -> None:
    assert asked().model.adapter == ()
    assert asked("--model", "m", "--adapter", "b", "--adapter", "a=0.5").model.adapter == ("b", "a=0.5")


def test_a_plan_of_ones_own_is_taken_as_it_is() -> None:
    request = asked("--percent", 0, 50, 0, 100, 0, 100, "--gpu-batch-size", 3, "--kv-policy", "h2o")
    assert isinstance(request.plan, Plan) and request.plan.first_plan.gpu_batch_size == 3
    assert "is for a search" in one_line(lambda: asked("--percent", 0, 50, 0, 100, 0, 100, "--allow-4bit"))


@pytest.mark.parametrize(
    ("text", "found"), [("2s", 2.0), ("100ms", 0.1), ("0", 0.0), ("0.5", 0.5), ("1m", 60.0), ("1.5s", 1.5)]
)
def test_times_have_units(text: str, found: float) -> None:
    assert Time().typed(text) == pytest.approx(found)


@pytest.mark.parametrize("text", ["", "s", "2h", "-1s", "1e9s", "ms", "2 s x", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a time like 2s, 100ms or 0"):
        Time().typed(text)


def test_a_user_without_the_extra_is_told_how_to_get_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(serve_request, "find_spec", lambda name: None)
    said = "the server needs starlette, uvicorn and python-multipart, which the extra [serve] brings: pip install -e '.[serve]'"
    assert one_line(asked) == said
