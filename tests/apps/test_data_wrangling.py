"""The data-wrangling command, from its arguments to its result: every task, what it refuses, and how it goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from h2o_flexgen.apps import made_up_tables
from h2o_flexgen.apps.data_wrangling.__main__ import main
from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS
from h2o_flexgen.apps.made_up_tables import MadeUpDataSet
from h2o_flexgen.jobs.output import JobOutput
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.helpers.commands import Result, called
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.tiny import VOCAB, save_tiny

PLAIN = ("--dtype", "float32", "--tokenizer", "bytes", "--device", "cpu", "--verbose", "0")
SMALL = ("--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "4", "--num-gpu-batches", "1")
ROWS = 7


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder, max_position_embeddings=1200)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for name in ("Beer", "Restaurant", "Hospital"):
        MadeUpDataSet(DATA_SETS[name], ROWS).write(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path, llama: Path, tables: Path, out: Path) -> Callable[..., Result]:
    where = ("--model", llama, "--offload-dir", offload, "--data-dir", tables, "-o", out)
    return partial(called, main, capfd, *where, *PLAIN, *SMALL)


BEER = ("--task", "entity_match", "--data-set", "Beer")


def answered(out: Path, answers: list[str | None]) -> None:
    """Writes answers into the records of a job; a request whose answer is None has no record then."""
    lines = {}
    for line in out.read_text().splitlines():
        record = json.loads(line)
        lines[int(record["custom_id"].rpartition("-")[2])] = record
    kept = []
    for number, answer in zip(sorted(lines), answers, strict=True):
        lines[number]["response"]["body"]["choices"][0]["text"] = answer
        kept += [] if answer is None else [json.dumps(lines[number]) + "\n"]
    out.write_text("".join(kept))


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_name("out.result.json").read_text())
    return found


# -- what comes out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task, name", [("entity_match", "Beer"), ("impute", "Restaurant"), ("detect_errors", "Hospital")])
def test_every_task_runs_to_its_end_and_its_answers_are_judged(command: Any, out: Path, task: str, name: str) -> None:
    flags = ("--task", task, "--data-set", name, "-k", 2)
    ran = command(*flags)
    assert ran.status == 0, ran.err
    found = ran.json
    speed = found["speed"]
    assert (found["rows"], found["task"], found["made_of"]["data_set"], speed["rows"]) == (ROWS, task, name, ROWS)
    assert speed["computed_tokens"] < speed["prompt_tokens"], "what prompts share is computed once"
    whole = ROWS * (speed["longest_prompt"] + DATA_SETS[name].gen_len)
    assert speed["flexgen_tokens_per_second"] == pytest.approx(whole / speed["seconds"], rel=1e-3)
    expected = [one["expected"] for one in result_of(out)["answers"]]
    answered(out, [f" {one} " for one in expected])
    found = command(*flags, "--resume").json
    assert found["accuracy"] == 1.0 and found["speed"] is None and found["unclear"] == 0
    if task != "impute":
        assert found["counts"]["true_yes"] == expected.count("Yes") and found["precision"] == found["f1"] == 1.0


def test_people_are_told_how_good_and_how_fast(command: Any, out: Path) -> None:
    ran = command(*BEER, "-k", 1, "--num-run", 3, "--verbose", 1)
    told = "\n".join(ran.out)
    assert ran.status == 0 and "data      Beer (entity_match): 3 of 7 rows of test\n" in told
    assert "tokens/s as FlexGen's table has it: every row counts as " in told and "accuracy 0.000" in told
    assert "unclear   3 answers are neither Yes nor No, and count as wrong; the first is " in told


def test_sharing_makes_no_difference_to_the_answers(command: Any, out: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart.jsonl"
    shared = command(*BEER, "-k", 2).json
    alone = command(*BEER, "-k", 2, "--shared-prefixes", 0, "-o", apart).json
    texts = [
        {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in map(json.loads, file.open())}
        for file in (out, apart)
    ]
    assert texts[0] == texts[1]
    assert alone["speed"]["computed_tokens"] > 2 * shared["speed"]["computed_tokens"]


def test_an_answer_ends_with_its_line(command: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always wants a new line is asked no further."""
    sample = Sampler.sample

    def new_line(self: Sampler, logits: Tensor, *others: Any, **more: Any) -> Any:
        logits[:, ByteTokenizer(VOCAB).encode("\n")[-1]] = 1e4
        return sample(self, logits, *others, **more)

    monkeypatch.setattr(Sampler, "sample", new_line)
    ran = command(*BEER, "-k", 1, "--gen-len", 20)
    assert ran.status == 0 and ran.json["speed"]["generated_tokens"] == ROWS and ran.json["unclear"] == ROWS
    assert {one["text"] for one in result_of(out)["answers"]} == {""}
    line = json.loads(out.with_name("out.requests.jsonl").read_text().splitlines()[0])
    assert (line["max_tokens"], line["stop"], line["temperature"]) == (20, ["\n"], 0)


def test_a_dry_run_writes_the_prompts_and_shows_the_plan(command: Any, out: Path) -> None:
    ran = command(*BEER, "-k", 2, "--dry-run")
    assert ran.status == 0 and ran.json["num_prompts"] == ROWS
    prompts = [json.loads(line)["prompt"] for line in out.with_name("out.requests.jsonl").read_text().splitlines()]
    assert len(prompts) == ROWS and all(one.count("Are Product A and Product B the same?") == 4 for one in prompts)
    assert not out.exists()


def test_examples_by_hand_stand_before_every_question(command: Any, out: Path, tmp_path: Path) -> None:
    file = tmp_path / "examples.txt"
    file.write_text("A? Yes\n\nB? No\n")
    assert command(*BEER, "--examples-file", file, "--no-instruction", "--num-run", 2, "--split", "valid").status == 0
    lines = [json.loads(line) for line in out.with_name("out.requests.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["valid-2", "valid-3"]
    assert all(line["prompt"].startswith("A? Yes\n\nB? No\n\nProduct A is name: ") for line in lines)


def test_prompts_that_are_too_long_have_no_answer(command: Any, out: Path) -> None:
    ran = command(*BEER, "-k", 7)
    assert ran.status == 1 and ran.said[-1].startswith("7 of 7 requests failed")
    assert ran.json["accuracy"] == 0.0 and ran.json["counts"]["unclear_yes"] + ran.json["counts"]["unclear_no"] == ROWS
    assert all("the prompt has" in one["error"] and one["said"] == "not there" for one in result_of(out)["answers"])
    told = "\n".join(command(*BEER, "-k", 7, "--resume", "--verbose", 1).out)
    assert "failed    7 rows have no answer, and count as wrong; the first: line 1: the prompt has" in told


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-k", 99), "--examples 99 is more than there are:"),
        (("--examples-file", "x.txt", "-k", 2), "--examples is about examples that are drawn"),
        (("--examples-file", "none.txt"), "--examples-file none.txt cannot be read"),
        (("--columns", ","), "--columns is empty"),
        (("--columns", "Beer_Name,colour"), "--columns has 'colour', and line 1 of"),
        (("--data-set", "Bear"), "did you mean Beer?"),
        (("--data-dir", "nowhere"), "--data-dir nowhere is no folder; unpack https://"),
        (("--task", "impute", "--data-set", "Buy"), "has no data set Buy: there is no"),
        (("--task", "impute", "--data-set", "Restaurant", "--balanced"), "--balanced is for answers of Yes and No"),
        (("-k", 1, "--metrics", "out.jsonl/x"), "--metrics out.jsonl/x cannot be written"),
        (("-k", 1, "--allow-4bit"), "--allow-4bit is for a search"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(command: Any, tmp_path: Path, flags: Any, said: str) -> None:
    assert said in command(*BEER, *flags).error and [*tmp_path.glob("out*")] == []


def test_files_that_are_others_stay(command: Any, out: Path) -> None:
    prompts, result = out.with_name("out.requests.jsonl"), out.with_name("out.result.json")
    assert "is a file of this job; give another file" in command(*BEER, "-k", 1, "--metrics", result).error
    prompts.write_text("precious\n")
    assert "has other things than prompts of such a job" in command(*BEER, "-k", 1).error
    assert prompts.read_text() == "precious\n" and not out.exists()


# -- going on --------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_ended(command: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = JobOutput.add

    def failing(self: JobOutput, place: int, line: bytes, failed: bool) -> None:
        if self.finished.num_done >= 3:
            raise KeyboardInterrupt
        add(self, place, line, failed)

    whole = command(*BEER, "-k", 2).json
    texts = result_of(out)["answers"]
    out.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(JobOutput, "add", failing)
        assert command(*BEER, "-k", 2, "--resume").status == 130
    assert "is there already; --resume goes on with it" in command(*BEER, "-k", 2).error
    ran = command(*BEER, "-k", 2, "--resume").json
    assert result_of(out)["answers"] == texts and ran["speed"]["rows"] == ROWS - 3
    assert {name: ran[name] for name in ("accuracy", "counts")} == {name: whole[name] for name in ("accuracy", "counts")}


def test_more_rows_may_be_asked_for_and_nothing_else_changed(command: Any, out: Path, tables: Path, tmp_path: Path) -> None:
    assert command(*BEER, "-k", 2, "--num-run", 3).json["rows"] == 3
    grown = command(*BEER, "-k", 2, "--resume").json
    assert (grown["rows"], grown["speed"]["rows"]) == (ROWS, ROWS - 3)
    before = out.with_name("out.requests.jsonl").read_bytes()
    assert "this job asks about 7 rows, and 2 are fewer;" in command(*BEER, "-k", 2, "--num-run", 2, "--resume").error
    for changed, said in (
        (("-k", 1), "examples was 2 and is 1"),
        (("-k", 2, "--seed", 3), "examples_seed was 0 and is 3"),
        (("-k", 2, "--no-instruction"), "instruction was True and is False"),
        (("-k", 2, "--separator", ";"), "separator was '.' and is ';'"),
        (("-k", 2, "--gen-len", 4), "--gen-len was 3 and is 4"),
        (("-k", 2, "--compress-cache"), "--compress-cache was 'plain' and is"),
    ):
        assert said in command(*BEER, *changed, "--resume").error
    assert out.with_name("out.requests.jsonl").read_bytes() == before


def test_tables_that_have_changed_are_refused(command: Any, out: Path, tmp_path: Path) -> None:
    own = MadeUpDataSet(DATA_SETS["Beer"], ROWS).write(tmp_path)
    flags = (*BEER, "--data-dir", own, "-k", 0)
    assert command(*flags).status == 0
    table = own / "tableA.csv"
    table.write_text(re.sub("(?m) [a-z]", " other", table.read_text()))
    error = command(*flags, "--resume").error
    assert "tables have changed since the job was begun: line 1 of " in error and "--resume-anyway goes on" in error
    assert command(*flags, "--resume-anyway").status == 0


def test_what_is_killed_goes_on(tables: Path, out: Path, tmp_path: Path) -> None:
    """A process of its own is killed once it has written a record."""
    flags = ("--data-dir", tables, "-o", out, *BEER, "-k", "1", "--verbose", "0", "--dtype", "float32", "--device", "cpu")
    run = [sys.executable, "-m", "h2o_flexgen.apps.data_wrangling", *map(str, flags), "--gpu-batch-size", "1"]
    run += ["--num-gpu-batches", "1", "--percent", "0", "100", "0", "100", "0", "100", "--model", "demo-opt"]
    with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and not (out.exists() and b"\n" in out.read_bytes()):
            assert time.monotonic() < until
            time.sleep(0.002)
        process.kill()
    done = out.read_bytes().count(b"\n")
    assert done >= 1
    assert main([*run[3:], "--resume"]) == 0
    assert len(result_of(out)["answers"]) == ROWS and len({json.loads(line)["custom_id"] for line in out.open()}) == ROWS


# -- tables that are made up -----------------------------------------------------------------------------------------------


def test_the_maker_of_tables_says_where_they_are(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = called(made_up_tables.main, capfd, "Buy", tmp_path, "--rows", 3)
    assert ran.status == 0 and Path(ran.out[-1]) == tmp_path / "data_imputation" / "Buy"
    assert (tmp_path / "data_imputation" / "Buy" / "test.csv").read_text().startswith("name,description,manufacturer\n")
    assert called(made_up_tables.main, capfd, "Bought", tmp_path).status == 2
