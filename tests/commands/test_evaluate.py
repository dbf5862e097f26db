"""The evaluate command, from its arguments to its files: what it measures, how it goes on where it stopped, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import evaluate
from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli import evaluate_work
from h2o_flexgen.evaluation.cells import FILE, Cells
from h2o_flexgen.evaluation.tasks.perplexity import BoundPerplexity
from h2o_flexgen.llm import LLM
from h2o_flexgen.session.loaded_model import LoadedModel
from tests.helpers.commands import Result, called
from tests.helpers.real_tokenizers import SENTENCES, save_byte_level
from tests.helpers.tiny import save_tiny

GRID = ("--policies", "full,h2o,local", "--budgets", "100,20")
SMALL = ("--window", 48, "--examples", 2, "--gen-len", 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder, vocab_size=320)
    save_byte_level(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(" ".join(f"{number}: {SENTENCES[number % 3]}" for number in range(40)), encoding="utf-8")
    return file


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path, model: Path, text: Path) -> Any:
    """With a folder for what is offloaded that must be gone afterwards."""

    def call(*argv: object, dtype: str = "float32") -> Result:
        common = ("--model", model, "--text", text, "--device", "cpu", "--dtype", dtype, "--offload-dir", offload)
        return called(evaluate.main, capfd, *common, *argv)

    return call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policy of every cell of perplexity that is measured."""
    found: list[str] = []
    measure = BoundPerplexity.measure

    def noted(self: BoundPerplexity, llm: LLM, *rest: Any) -> Any:
        found.append(llm.plan.kv_policy)
        return measure(self, llm, *rest)

    monkeypatch.setattr(BoundPerplexity, "measure", noted)
    return found


# -- what it says --------------------------------------------------------------------------------------------------------


def test_tables_are_printed_and_the_last_line_is_json_of_every_cell(command: Any) -> None:
    result = command(*GRID, *SMALL, "--tasks", "perplexity,agreement")
    document = result.json
    assert document.keys() >= {"model", "command", "identity", "machine", "versions", "tasks"}
    assert document["tasks"].keys() == {"perplexity", "agreement"}
    for task in document["tasks"].values():
        assert [(cell["policy"], cell["kept"]) for cell in task["cells"]] == [
            ("full", "100 %"),
            ("h2o", "20 %"),
            ("local", "20 %"),
        ]
        for cell in task["cells"]:
            assert all(figure["count"] == 2 and "examples" not in figure for figure in cell["figures"])
    agreement = {cell["policy"]: cell["figures"][0] for cell in document["tasks"]["agreement"]["cells"]}
    assert (agreement["full"]["name"], agreement["full"]["value"]) == ("equal", 1.0)
    relation = document["tasks"]["perplexity"]["cells"][1]["in_relation_to_full"]["perplexity"]
    figures = [cell["figures"][0]["value"] for cell in document["tasks"]["perplexity"]["cells"]]
    assert relation["ratio"] == pytest.approx(figures[1] / figures[0])
    assert sum(line.startswith("| h2o |") for line in result.out) == 5  # figures of the two tasks


def test_a_folder_gets_results_tables_and_a_picture(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    result = command(*GRID, *SMALL, "--tasks", "perplexity", "--output", folder)
    assert json.loads((folder / "results.json").read_text()) == result.json  # perplexity has no figures by kind
    table = (folder / "table.md").read_text()
    assert "python -m h2o_flexgen.evaluate --model" in table
    assert all(line in table for line in result.out if line.startswith("|"))
    assert (folder / "picture.png").exists() == (find_spec("matplotlib") is not None)
    assert len((folder / FILE).read_bytes().splitlines()) == 3


def test_without_matplotlib_only_the_picture_is_missing(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_work, "find_spec", lambda name: None)
    folder = tmp_path / "results"
    result = command(*GRID, *SMALL, "--tasks", "perplexity", "--output", folder)
    assert result.said[-1] == "no picture.png: it needs matplotlib; install it, or the extra [plot]"
    assert {file.name for file in folder.iterdir()} == {FILE, "results.json", "table.md"}


def test_bits_are_a_part_of_the_grid(command: Any) -> None:
    flags = ("--policies", "full,h2o", "--budgets", "20", "--kv-bits", "plain,4", "--weight-bits", "4")
    cells = command(*flags, *SMALL, "--tasks", "perplexity").json["tasks"]["perplexity"]["cells"]
    assert [(cell["policy"], cell["kv_codec"], cell["weight_codec"]) for cell in cells] == [
        ("full", "plain", "group4"),
        ("h2o", "plain", "group4"),
        ("full", "group4", "group4"),
        ("h2o", "group4", "group4"),
    ]
    assert len({cell["figures"][0]["value"] for cell in cells}) == 4


def test_products_are_a_part_of_the_grid_for_packed_weights(command: Any) -> None:
    flags = ("--policies", "full", "--budgets", "100", "--weight-bits", "plain,4", "--compute", "exact,int8")
    result = command(*flags, *SMALL, "--tasks", "perplexity")
    cells = result.json["tasks"]["perplexity"]["cells"]
    assert [(cell["weight_codec"], cell["compute"]) for cell in cells] == [
        ("plain", "exact"),
        ("group4", "exact"),
        ("group4", "int8"),
    ]
    assert len({cell["figures"][0]["value"] for cell in cells}) == 3
    assert any(line.startswith("| full, weights 4 bits, products int8 | ") for line in result.out)


def test_sizes_in_slots_and_options_beside_them(command: Any) -> None:
    flags = ("--policies", "h2o,local", "--kv-sizes", "full,16", "--sinks", 1, "--tasks", "perplexity")
    result = command(*flags, *SMALL)
    options = [(cell["kept"], cell["options"]) for cell in result.json["tasks"]["perplexity"]["cells"]]
    assert options == [("full", {}), ("16", {"heavy": 8, "recent": 8, "sinks": 1}), ("16", {"recent": 16})]
    assert "| policy | 16 | full |" in result.out


# -- going on ------------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_measured_again(command: Any, tmp_path: Path, measured: list[str]) -> None:
    flags = (*SMALL, "--tasks", "perplexity", "--output", tmp_path)
    first = command("--policies", "full,h2o", "--budgets", "100,20", *flags)
    assert measured == ["full", "h2o"]
    again = command("--policies", "full,h2o,local", "--budgets", "100 %,20,20%", *flags)
    assert measured == ["full", "h2o", "local"]
    assert again.said[0].startswith("found safetensors: ") and again.said[1] == f"3 cells; 2 are in {tmp_path} already"
    assert again.json["tasks"]["perplexity"]["cells"][:2] == first.json["tasks"]["perplexity"]["cells"]
    assert command(*GRID, *flags).json["tasks"] == again.json["tasks"] and len(measured) == 3
    command(*GRID, *flags, "--fresh")
    assert len(measured) == 6


def test_cells_outlive_a_fresh_command_that_is_refused(command: Any, tmp_path: Path, measured: list[str]) -> None:
    flags = (*SMALL, "--tasks", "perplexity", "--output", tmp_path)
    command(*GRID, *flags)
    assert "leave one of them out" in command("--policies", "h2o", "--budgets", "1", *flags, "--fresh").error
    command(*GRID, *flags)
    assert len(measured) == 3


def test_whatever_decides_a_value_makes_another_cell(
    command: Any, tmp_path: Path, text: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--policies", "h2o", "--budgets", "20", "--tasks", "perplexity", "--output", tmp_path)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("dog", "cat"))
    command(*flags, *SMALL)
    for change in (("--examples", 3), ("--window", 40), ("--text", other), ("--sinks", 1), ("--kv-bits", 8)):
        command(*flags, *SMALL, *change)
    command(*flags, *SMALL, "--weight-bits", 4, "--compute", "exact,int8")
    command(*flags, *SMALL, "--tokenizer", "bytes")
    command(*flags, *SMALL, dtype="bfloat16")
    assert len(measured) == 10
    command(*flags, *SMALL, "--gpu-batch-size", 1, "--percent", 0, 0, 0, 0, 0, 0)  # which decides nothing
    assert len(measured) == 10


def test_other_weights_make_other_cells(command: Any, tmp_path: Path, measured: list[str]) -> None:
    folder = tmp_path / "other-model"
    save_tiny("llama-gqa", folder, vocab_size=320, seed=1)
    save_byte_level(folder)
    flags = ("--policies", "h2o", "--budgets", "20", *SMALL, "--tasks", "perplexity", "--output", tmp_path)
    command(*flags)
    command(*flags, "--model", folder)
    assert len(measured) == 2


def test_an_interrupted_command_says_what_is_kept_and_goes_on(
    command: Any, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*GRID, *SMALL, "--tasks", "perplexity", "--output", tmp_path)
    add = Cells.add

    def interrupting(self: Cells, cell: Any) -> None:
        add(self, cell)
        if len(measured) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Cells, "add", interrupting)
        result = command(*flags)
    assert result.status == 130
    assert result.said[-2:] == [f"2 of 3 cells in {tmp_path}; the same command goes on from there", "interrupted"]
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-30])  # as if it had been killed while it wrote
    assert len(command(*flags).json["tasks"]["perplexity"]["cells"]) == 3
    assert measured == ["full", "h2o", "h2o", "local"]


# -- a study -------------------------------------------------------------------------------------------------------------


def test_a_study_says_where_attention_goes_and_leaves_pictures(command: Any, tmp_path: Path) -> None:
    result = command(
        "--study", "heavy-hitters", "--window", 48, "--policies", "full,h2o,local", "--budgets", "25", "--output", tmp_path
    )
    assert result.out[0].startswith("attention of ") and "over 48 tokens" in result.out[0]
    assert (result.json["budget"], result.json["slots"]) == (0.25, 12)
    assert result.json["policies"].keys() == {"oracle", "h2o", "local"}
    assert json.loads((tmp_path / "study.json").read_text()) == result.json
    assert (tmp_path / "study.txt").read_text().splitlines() == result.out[:-1]
    assert any(tmp_path.glob("*.png")) == (find_spec("matplotlib") is not None)


def test_a_study_is_of_one_budget_and_one_number_of_bits(command: Any) -> None:
    study = ("--study", "heavy-hitters")
    assert "--study takes one budget below 100, and 2 are given" in command(*study, "--budgets", "50,20").error
    assert "--study takes one budget below 100, and 0 are given" in command(*study, "--budgets", "100").error
    assert "--study takes one --kv-bits, and 2 are given" in command(*study, "--kv-bits", "plain,4").error
    assert (
        "--study takes one --compute, and 2 are given" in command(*study, "--weight-bits", 4, "--compute", "exact,int8").error
    )
    unused = {"--kv-sizes": 64, "--sinks": 2, "--tasks": "recall", "--depths": 20, "--gen-len": 8, "--seed": 1}
    for flag, value in unused.items():
        assert f"--study heavy-hitters takes no {flag}; leave it out" in command(*study, flag, value).error
    facts = ("--study", "facts")
    assert "--study facts takes no --window; leave it out" in command(*facts, "--window", 64).error
    assert "--study facts takes one number for --lengths, and 2 are given" in command(*facts, "--lengths", "64,96").error


def test_a_study_of_facts_says_which_readers_find_them(command: Any, tmp_path: Path) -> None:
    facts = ("--lengths", 200, "--examples", 1, "--mentions", 1, "--question", "hidden", "--depths", 50)
    result = command("--model", DEMO, "--study", "facts", *facts, "--policies", "full,h2o,local", "--output", tmp_path)
    assert result.out[1] == "texts of 200 tokens, facts said once at 50 % of the text, questions hidden"
    assert result.json["policies"].keys() == {"h2o", "local"} and result.json["budget"] == 0.2
    assert json.loads((tmp_path / "study.json").read_text()) == result.json
    assert (tmp_path / "study.txt").read_text().splitlines() == result.out[:-1]
    assert (tmp_path / "facts.png").exists() == (find_spec("matplotlib") is not None)


# -- what it refuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--budgets", "0"), "a budget of 0 per cent is not possible; give above 0 and at most 100"),
        (("--budgets", "20,101"), "a budget of 101 per cent is not possible"),
        (("--budgets", "many"), "--budgets has 'many', which is no number"),
        (("--budgets", ","), "--budgets is empty"),
        (("--kv-sizes", "0"), "a KV size of 0 slots is not possible"),
        (("--kv-sizes", "64.5"), "--kv-sizes has '64.5', which is no number"),
        (("--budgets", "20", "--kv-sizes", "64"), "--budgets and --kv-sizes both say how much is kept"),
        (("--policies", "full,snapvk"), "'snapvk', which is unknown; known: full, h2o"),
        (("--policies", "full,snapvk"), "did you mean snapkv?"),
        (("--tasks", "perplexty"), "did you mean perplexity?"),
        (("--kv-bits", "3"), "--kv-bits has '3', which is unknown; known: plain, 4, 8"),
        (("--compute", "exact,int9"), "--compute has 'int9', which is unknown; known: exact, int8"),
        (("--compress-cache",), "--compress-cache is a part of the grid here; say --kv-bits"),
        (("--policies", "local", "--sinks", "2"), "--sinks is taken by none of the policies local"),
        (("--sinks", "-1"), "--sinks: '-1' is not allowed"),
        (("--examples", "0"), "--examples: '0' is not allowed; give a whole number from 1 to 1000000"),
        (("--window", "-5"), "--window: '-5' is not allowed"),
        (("--depths", "20,120"), "--depths has 120; give a number from 0 to 100"),
        (("--depths", "nan"), "--depths has 'nan', which is no number"),
        (("--lengths", "0"), "--lengths has 0; give a whole number from 1 to 10000000"),
        (("--fresh",), "--fresh is about the cells that --output keeps"),
        (("--text", "nowhere.txt"), "text nowhere.txt cannot be read (No such file or directory)"),
        (("--articles", "some.jsonl", "--tasks", "recall"), "--articles is about xsum, and --tasks has recall"),
        (("--tasks", "xsum"), "xsum needs articles and their summaries; give --articles"),
        (("--output", "{text}"), "cannot be written (File exists); give another folder"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_opened(
    command: Any, text: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    def opened(*arguments: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(evaluate_work, "open_llm", opened)
    if "xsum" in flags:
        pytest.importorskip("rouge_score")
    assert problem in command(*(flag.format(text=text) for flag in flags)).error


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--window", 4096), "--window is 4096, but"),
        (("--text", "{short}"), "tokens, but a window takes 48; give a longer text or a smaller --window"),
        (
            ("--policies", "streaming", "--kv-sizes", 4),
            "of which 4 are sinks; give it recent ones as well (this is streaming at 4;",
        ),
        (("--policies", "h2o", "--budgets", 1), "has a budget of 0 slots for a prompt of 12"),
        (("--tasks", "recall", "--lengths", 4000), "--lengths has 4000, but"),
        (("--compute", "exact,int8"), "--compute int8 is for weights that are packed into whole numbers, and those of"),
        (("--tasks", "recall", "--lengths", 40), "tokens, but its length is 40; ask for longer texts"),
    ],
)
def test_what_only_the_model_can_tell_is_one_line_before_it_is_loaded(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[object, ...], problem: str
) -> None:
    def loaded(self: LoadedModel) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(LoadedModel, "_load", loaded)
    (tmp_path / "short.txt").write_text("too short")
    words = [str(flag).format(short=tmp_path / "short.txt") for flag in flags]
    assert problem in command("--tasks", "perplexity", *SMALL, *words).error


def test_a_model_without_a_tokenizer_is_refused_by_the_names_of_the_files_that_are_missing(
    command: Any, tmp_path: Path
) -> None:
    save_tiny("llama-gqa", tmp_path, vocab_size=320)
    error = command("--model", tmp_path, "--tasks", "perplexity", *SMALL).error
    assert f"{tmp_path} has no tokenizer (it has none of tokenizer.json, " in error


def test_a_file_with_nothing_in_it_is_no_text(command: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    assert "is empty; give a file with a text in it" in command("--text", tmp_path / "empty.txt").error
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text (byte 0)" in command("--text", tmp_path / "bytes.txt").error


def test_arguments_are_parsed_and_refused_without_torch() -> None:
    code = "import sys, h2o_flexgen.evaluate as one; one.main(['--budgets', '0']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "False", run.stderr
