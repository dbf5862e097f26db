"""What a policy loses, as it was measured: the package's file says what was published, and each plan finds its own figures."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest

from h2o_flexgen.checkpoints.model_places import SMOLLM2
from h2o_flexgen.cli.report.kept_by_policy import FILE, Survival, facts_kept, survival_under
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.head_budgets import FILE as HEADS
from h2o_flexgen.policies.head_budgets import read_head_budgets

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"
OWN = read_head_budgets(SMOLLM2.folder / HEADS)
NEW = ("figures", "seconds")


def cells(file: Path) -> dict[str, object]:
    """Figures about all questions, by what was measured."""
    found = json.loads(file.read_text(encoding="utf-8"))["tasks"]["recall"]["cells"]
    settings = [json.dumps({name: one[name] for name in one if name not in NEW}, sort_keys=True) for one in found]
    return {asked: [figure for figure in one["figures"] if not figure.get("by")] for asked, one in zip(settings, found)}


def test_the_file_of_the_package_has_the_published_figures() -> None:
    published: dict[str, object] = {}
    for file in sorted(RESULTS.glob("smollm2-recall-512*.json")):
        published |= cells(file) if "twice" not in file.name else {}
    own = cells(SMOLLM2.folder / FILE)
    assert len(own) > 20 and {asked: published[asked] for asked in own} == own


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"kv_budget": 0.2, "head_budgets": OWN}, (0.2, 0.923, 0.708)),
        ({"head_budgets": OWN}, (0.2, 0.923, 0.708)),  # the default
        ({"kv_budget": 0.45, "head_budgets": OWN}, (0.2, 0.923, 0.708)),  # at least that
        ({"kv_budget": 0.5, "head_budgets": OWN}, (0.5, 1.0, 0.969)),
        ({"kv_budget": 0.2}, (0.2, 0.4, 0.354)),
        ({"kv_budget": 0.2, "value_norms": True}, (0.2, 0.431, 0.369)),
    ],
)
def test_what_survives_is_what_was_measured_with_no_more_kept(options: dict[str, object], kept: tuple[float, ...]) -> None:
    found = survival_under(Plan.create(kv_policy="h2o", **options), SMOLLM2.name)
    assert found is not None and found.questions == 96
    assert (found.budget, found.visible, found.hidden) == pytest.approx(kept, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_policy": "h2o", "kv_budget": 0.04},
        {"kv_policy": "h2o", "heavy": 100, "recent": 100},
        {"kv_policy": "h2o", "kv_codec": "group4"},
        {"kv_policy": "h2o", "kv_budget": 0.2, "sinks": 2},
        {"kv_policy": "kvzip"},  # with head budgets alone
    ],
)
def test_what_was_not_measured_is_not_known(options: dict[str, object]) -> None:
    assert survival_under(Plan.create(**options), SMOLLM2.name) is None
    assert survival_under(Plan.create(kv_policy="h2o"), "demo") is None


def test_what_survives_is_said_with_the_texts_that_it_was_measured_on(tmp_path: Path) -> None:
    plan = Plan.create(kv_policy="h2o", kv_budget=0.2)
    assert facts_kept(plan, SMOLLM2.name).words[0].endswith("(96 questions about texts of 512 tokens)")
    found = json.loads((SMOLLM2.folder / FILE).read_text(encoding="utf-8"))
    del found["tasks"]["recall"]["notes"]
    (tmp_path / FILE).write_text(json.dumps(found), encoding="utf-8")
    assert facts_kept(plan, str(tmp_path)).words[0].endswith("(96 questions)")


def test_steps_that_read_a_share_are_not_what_others_are_held_against(tmp_path: Path) -> None:
    found = json.loads((SMOLLM2.folder / FILE).read_text(encoding="utf-8"))
    cells = found["tasks"]["recall"]["cells"]
    weaker = [{**figure, "value": figure["value"] / 2} for figure in cells[0]["figures"]]
    cells.insert(0, {**cells[0], "options": {"kv_recall": 0.05}, "figures": weaker})
    (tmp_path / FILE).write_text(json.dumps(found), encoding="utf-8")
    plan = Plan.create(kv_policy="tova")
    assert survival_under(plan, str(tmp_path)) == survival_under(plan, SMOLLM2.name)


def test_results_beside_several_gguf_files_are_of_none(tmp_path: Path) -> None:
    copy(SMOLLM2.folder / FILE, tmp_path)
    plan, own = Plan.create(kv_policy="tova"), tmp_path / "own.gguf"
    own.write_bytes(b"GGUF")
    assert survival_under(plan, str(own)) is not None
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert survival_under(plan, str(own)) is None


def test_results_beside_a_model_are_its_own(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text((SMOLLM2.folder / FILE).read_text(encoding="utf-8"), encoding="utf-8")
    assert isinstance(survival_under(Plan.create(kv_policy="tova"), str(tmp_path)), Survival)
    (tmp_path / FILE).write_text('{"tasks": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{FILE} is no results.json of evaluate --tasks recall"):
        survival_under(Plan.create(kv_policy="tova"), str(tmp_path))
