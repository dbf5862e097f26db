"""The manifest: what it keeps, what it says of other settings, and that it is never half there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_flexgen.jobs.index import InputPart
from h2o_flexgen.jobs.output import OF_WEIGHTS, Manifest, manifest_file
from tests.helpers.refusals import one_line

MANIFEST = Manifest(
    created=17,
    seed=3,
    checked=InputPart(100, "abc"),
    settings={"temperature": 0.7, "stop": ("a", "b"), "biases": {5: 1.0}},
    noted={"torch": "2"},
)


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = manifest_file(tmp_path / "out.jsonl")
    assert path.name == "out.manifest.json"
    assert Manifest.read(path) is None
    MANIFEST.with_run({"began": 18}).write(path)
    read = Manifest.read(path)
    assert read is not None and (read.created, read.seed, read.checked, read.runs) == (
        17,
        3,
        InputPart(100, "abc"),
        ({"began": 18},),
    )
    assert list(read.differences(MANIFEST.settings)) == [] and list(read.notes(MANIFEST.noted)) == []
    assert [file.name for file in tmp_path.iterdir()] == ["out.manifest.json"]


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "out.manifest.json"
    MANIFEST.write(path)
    read = Manifest.read(path)
    assert read is not None
    now = {"temperature": 0.5, "stop": ["a", "b"], "top_k": 3}
    assert list(read.differences(now)) == ["temperature was 0.7 and is 0.5", "top_k was None and is 3"]
    assert list(read.notes({"torch": "3"})) == ["torch was '2' when the job began, and is '3'"]


def test_another_model_is_told_by_its_name_and_not_by_a_digest() -> None:
    begun = replace(MANIFEST, settings={OF_WEIGHTS: "a914"}).with_run({"model": "smollm2"}).with_run({"model": "demo"})
    assert list(begun.differences({OF_WEIGHTS: "8bc3"}, "demo")) == ["the model was 'smollm2' and is 'demo'"]
    for same in (begun.differences({OF_WEIGHTS: "8bc3"}, "smollm2"), begun.differences({OF_WEIGHTS: "8bc3"})):
        assert list(same) == ["the model's weights were other ones"]


def test_a_result_is_that_of_the_last_run() -> None:
    assert MANIFEST.with_run({}).result is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"form": 0}', '{"form": 1, "created": 1}', "\0"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.manifest.json"
    path.write_text(text)
    assert one_line(lambda: Manifest.read(path)).startswith(f"{path} is no manifest that is understood")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("checked", {"nbytes": "abc", "digest": "abc"}),
        ("checked", {"nbytes": 1, "digest": None}),
        ("checked", {"nbytes": 1}),
        ("noted", None),
        ("runs", {}),
        ("runs", [1]),
        ("result", 1),
        ("seed", True),
        ("more", 1),
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(tmp_path: Path, name: str, wrong: object) -> None:
    path = tmp_path / "out.manifest.json"
    MANIFEST.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: wrong}))
    assert one_line(lambda: Manifest.read(path)).startswith(f"{path} is no manifest that is understood")


def test_no_two_outputs_share_a_manifest(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("a", "a.jsonl", "a.job-manifest.json", "a.jsonl.jsonl")]
    assert len({manifest_file(output) for output in outputs}) == len(outputs)


def test_a_job_that_was_begun_with_the_older_name_of_its_manifest_goes_on_with_it(tmp_path: Path) -> None:
    output, older = tmp_path / "a", tmp_path / "a.manifest.json"
    older.touch()
    assert manifest_file(output).name == "a.job-manifest.json", "it is of a job that is gone"
    output.touch()
    assert manifest_file(output) == older
    (tmp_path / "a.jsonl").touch()
    assert manifest_file(output).name == "a.job-manifest.json", "it is of the other output"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    said = one_line(lambda: MANIFEST.write(tmp_path / "none" / "out.manifest.json"))
    assert "cannot be written (No such file or directory)" in said
