"""Head budgets and their file: what is written is read again, and what is wrong with a file is said in a line that names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_flexgen.checkpoints.derived import HEAD_BUDGETS, kept_file
from h2o_flexgen.checkpoints.model_places import DEMO_MODELS, SMOLLM2, folders_beside
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.head_budgets import FILE, HeadBudgets, read_head_budgets, write_head_budgets, written
from h2o_flexgen.policies.levels import levels_of
from h2o_flexgen.session import open_request
from h2o_flexgen.session.open_request import asked_plan, head_budgets_of, heads_of_another
from tests.planning.worlds import tiny_spec

BY_HEAD = HeadBudgets("a model", "a text", (0.2, 0.5), (((0.35, 0.05), (0.1, 0.3)), ((0.9, 0.1), (0.4, 0.6))))
WRONG = {
    "not JSON": ("{", "is no JSON"),
    "a list": ("[]", "is no object"),
    "half a file": ("{}", "model is missing"),
    "no source": (["source", None], "source is None, which is no text"),
    "no list": (["shares", 3], "shares are 3, which is no list"),
    "layers missing, whatever is left": (["shares", [[[0.9, 0.9]], [[0.9, 0.1]]]], "layers and kv_heads are 2 and 2"),
    "layers missing": (["shares", [[[0.35, 0.05]], [[0.9, 0.1]]]], "layers and kv_heads are 2 and 2, but it has 1 layers"),
    "layers missing at one budget": (["shares", [BY_HEAD.shares[0], [[0.9, 0.1]]]], "at 0.5 are not 2 layers of 2 heads"),
    "heads missing": (["shares", [[[0.35, 0.05], [0.2]], BY_HEAD.shares[1]]], "at 0.2 are not 2 layers of 2 heads"),
    "no heads at all": (["shares", [[[], []], [[], []]]], "but it has 2 layers of 0 KV heads"),
    "not a number": (["shares", [[["many", 0.05], [0.1, 0.3]], BY_HEAD.shares[1]]], "'many', which is no number"),
    "a truth": (["shares", [[[True, 0.05], [0.1, 0.3]], BY_HEAD.shares[1]]], "True, which is no number"),
    "NaN": (["shares", [[[float("nan"), 0.05], [0.1, 0.3]], BY_HEAD.shares[1]]], "nan, which is no number"),
    "endless": (["shares", [[[10**400, 0.05], [0.1, 0.3]], BY_HEAD.shares[1]]], "which is no number"),
    "above 1": (["shares", [[[1.35, 0.05], [-0.9, 0.3]], BY_HEAD.shares[1]]], "at 0.2 have a share outside 0 to 1"),
    "another mean": (["shares", [[[0.5, 0.5], [0.5, 0.5]], BY_HEAD.shares[1]]], "have shares that are 0.500 on average"),
    "budgets in disorder": (["budgets", [0.5, 0.2]], r"\[0.5, 0.2\]; give them ascending"),
    "a budget too many": (["budgets", [0.2, 0.5, 0.7]], "3 budgets and shares for 2"),
    "a block too many": (["blocks", [1, 3, 5]], r"\[1, 3, 5\], which are no 2 blocks one behind the other"),
    "blocks in disorder": (["blocks", [3, 1]], r"\[3, 1\], which are no 2 blocks one behind the other"),
    "no block": (["blocks", [1, -3]], "blocks have -3, which is no whole number from 0"),
    "other sizes than it says": (["layers", 3], "layers and kv_heads are 3 and 2, but it has 2 layers of 2 KV heads"),
}


def in_file(folder: Path, budgets: HeadBudgets = BY_HEAD) -> Path:
    write_head_budgets(budgets, folder / FILE)
    return folder / FILE


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    read = read_head_budgets(in_file(tmp_path))
    assert read == BY_HEAD and read.checksum == BY_HEAD.checksum
    assert read.shape == (2, 2)


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_wrong_is_refused_in_a_line_with_its_name(change: str | list[object], said: str, tmp_path: Path) -> None:
    file = tmp_path / FILE
    changed = change if isinstance(change, str) else json.dumps({**json.loads(written(BY_HEAD)), str(change[0]): change[1]})
    file.write_text(changed, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as refused:
        read_head_budgets(file)
    assert str(refused.value).startswith(str(file)) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"head budgets {tmp_path / FILE} cannot be read"):
        read_head_budgets(tmp_path / FILE)


def test_another_models_budgets_are_refused_with_their_file(tmp_path: Path) -> None:
    other = HeadBudgets("a model", "a text", (0.3,), (((0.1, 0.2, 0.6),),))
    with pytest.raises(
        ValueError, match=f"head budgets {tmp_path / FILE} are of a model, 1 layers of 3 KV heads, but tiny"
    ) as refused:
        read_head_budgets(in_file(tmp_path, other)).refuse_other(tiny_spec())
    assert str(refused.value).endswith("measure them for this model, or give --head-budgets equal")


def test_budgets_of_other_blocks_are_refused_and_files_that_name_none_are_not(tmp_path: Path) -> None:
    spec, here = tiny_spec(), replace(BY_HEAD, blocks=(0, 1))
    assert spec.kv_blocks == (0, 1) and read_head_budgets(in_file(tmp_path, here)) == here != BY_HEAD
    there = read_head_budgets(in_file(tmp_path, replace(BY_HEAD, blocks=(1, 3))))
    assert BY_HEAD.suits(spec) and here.suits(spec) and not there.suits(spec)
    here.refuse_other(spec)
    with pytest.raises(
        ValueError, match="2 KV heads in the blocks 1, 3, but tiny has 2 layers of 2 in the blocks 0, 1; measure"
    ):
        there.refuse_other(spec)


def test_a_head_that_is_left_nothing_keeps_one_token() -> None:
    budgets = HeadBudgets("a model", "a text", (0.3,), (((0.6, 0.0),) * 2,))
    least = levels_of(Plan.create(kv_policy="h2o", kv_budget=0.3).policy, budgets, tiny_spec())[-1]
    assert least.heads == ((1,),) * 2 and least.policy.occupancy(Batch((0,), (40,)), 4).budgets[0].slots == 1


def test_shares_alone_make_the_checksum(tmp_path: Path) -> None:
    other = HeadBudgets("b", "another text", BY_HEAD.budgets, BY_HEAD.shares)
    swapped = HeadBudgets("a model", "a text", BY_HEAD.budgets, (((0.05, 0.35), (0.1, 0.3)), BY_HEAD.shares[1]))
    assert other.checksum == BY_HEAD.checksum != swapped.checksum


def test_the_own_file_lies_in_the_models_folder_or_beside_its_gguf_file(tmp_path: Path) -> None:
    in_file(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert head_budgets_of("own", str(tmp_path)) == head_budgets_of("own", str(tmp_path / "model.gguf")) == BY_HEAD
    assert head_budgets_of(tmp_path / FILE, "any") == head_budgets_of(BY_HEAD, "any") == BY_HEAD


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"kv_policy": "h2o"}, BY_HEAD),
        ({"kv_policy": "h2o", "kv_budget": 0.3, "head_budgets": "auto"}, BY_HEAD),
        ({"kv_policy": "h2o", "head_budgets": "equal"}, None),
        ({}, None),
        ({"kv_policy": "h2o", "heavy": 3, "recent": 3}, None),
        ({"kv_policy": "h2o", "kv_budget": 0.3, "recent": 3}, None),
        ({"kv_policy": "h2o", "sinks": 4}, None),  # what some heads would be left has no room for these
        ({"kv_policy": "snapkv"}, None),
        ({"kv_policy": "streaming"}, None),
    ],
)
def test_what_evicts_takes_the_models_own_unless_that_could_be_refused(
    options: dict[str, object], taken: HeadBudgets | None, tmp_path: Path
) -> None:
    in_file(tmp_path)
    assert asked_plan(None, None, options, (), str(tmp_path)).head_budgets == taken
    assert asked_plan(None, None, options, (), str(tmp_path), dummy_weights=True).head_budgets is None


def test_of_several_gguf_files_in_a_folder_none_has_them_unasked(tmp_path: Path) -> None:
    in_file(tmp_path)
    asked, own = {"kv_policy": "h2o"}, str(tmp_path / "own.gguf")
    for part in ("own.gguf", "other-00001-of-00002.gguf", "other-00002-of-00002.gguf"):
        (tmp_path / part).write_bytes(b"GGUF")
    assert asked_plan(None, None, asked, (), own).head_budgets is None
    assert asked_plan(None, None, {**asked, "head_budgets": "own"}, (), own).head_budgets == BY_HEAD
    (tmp_path / "own.gguf").unlink()  # the parts are one model
    for number in (1, 2):
        part = str(tmp_path / f"other-0000{number}-of-00002.gguf")
        assert asked_plan(None, None, asked, (), part).head_budgets == BY_HEAD


def test_a_model_of_another_shape_leaves_them_alone_unless_they_are_asked_for(tmp_path: Path) -> None:
    config = json.loads((DEMO_MODELS["demo"] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    in_file(tmp_path)
    asked, model = {"kv_policy": "h2o"}, str(tmp_path)
    assert asked_plan(None, None, asked, (), model).head_budgets is None and heads_of_another(model) == BY_HEAD
    assert asked_plan(None, None, {**asked, "head_budgets": "own"}, (), model).head_budgets == BY_HEAD
    like = HeadBudgets("a model", "a text", (0.3,), (((0.3,) * config["num_key_value_heads"],) * 3,))
    in_file(tmp_path, like)
    assert asked_plan(None, None, asked, (), model).head_budgets == like and heads_of_another(model) is None


def test_those_that_came_with_the_package_are_taken_without_a_look_at_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_request, "load_config", lambda _: pytest.fail("the model was looked at"))
    taken = asked_plan(None, None, {"kv_policy": "h2o"}, (), SMOLLM2.name).head_budgets
    assert taken == read_head_budgets(SMOLLM2.folder / FILE)


def test_a_damaged_file_that_nothing_named_is_refused_with_how_to_do_without(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{tmp_path / FILE} is no JSON .*, or give --head-budgets equal$"):
        asked_plan(None, None, {"kv_policy": "h2o"}, (), str(tmp_path))
    assert asked_plan(None, None, {"kv_policy": "h2o", "head_budgets": "equal"}, (), str(tmp_path)).head_budgets is None


def test_those_that_were_measured_here_are_taken_for_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    asked = {"kv_policy": "h2o"}
    assert asked_plan(None, None, asked, (), str(folder)).head_budgets is None
    kept = kept_file(str(folder), HEAD_BUDGETS)
    assert kept is not None and kept.name.startswith("a-model-")
    kept.parent.mkdir(parents=True)
    write_head_budgets(BY_HEAD, kept)
    assert asked_plan(None, None, asked, (), str(folder)).head_budgets == BY_HEAD
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert asked_plan(None, None, asked, (), str(folder)).head_budgets is None
    assert kept_file(str(tmp_path), HEAD_BUDGETS) is None


def test_what_is_not_there_is_said_with_how_to_measure_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there are no head budgets of {tmp_path} in {tmp_path}; make the file .*calibrate"):
        head_budgets_of("own", str(tmp_path))
    with pytest.raises(ValueError, match="there are no head budgets of facebook/opt-30b on the hub"):
        head_budgets_of("own", "facebook/opt-30b")
    with pytest.raises(ValueError, match="head_budgets is a int"):
        head_budgets_of(3, "any")


def test_the_fetched_models_own_travel_with_the_package_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    copy = tmp_path / SMOLLM2.file
    copy.write_bytes(b"GGUF")
    assert folders_beside(SMOLLM2.name)[-1] == folders_beside(str(copy))[-1] == SMOLLM2.folder
    assert folders_beside(str(copy))[0] == tmp_path


def test_a_plan_takes_them_for_a_share_of_what_is_evicted_and_names_them_by_their_checksum() -> None:
    plan = Plan.create(kv_policy="h2o", kv_budget=0.2, head_budgets=BY_HEAD)
    assert plan.as_json()["head_budgets"] == {"model": "a model", "source": "a text", "checksum": BY_HEAD.checksum}
    assert Plan().as_json()["head_budgets"] is None
    for options, said in (
        ({"kv_policy": "full"}, "'full' keeps everything"),
        ({"kv_policy": "h2o", "heavy": 3, "recent": 3}, "head budgets share out a kv_budget"),
        ({"kv_policy": "h2o", "head_budgets": "a file"}, "head_budgets is a str"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan.create(**{"head_budgets": BY_HEAD, **options})


@pytest.mark.parametrize("policy", ["h2o", "kvzip", "keydiff"])
def test_heads_that_are_left_nothing_keep_a_slot(policy: str) -> None:
    none = HeadBudgets("a model", "a text", (0.2,), (((0.8, 0.0), (0.0, 0.0)),))
    most, least = Plan.create(kv_policy=policy, kv_budget=0.2, head_budgets=none).levels(tiny_spec(blocks=2))
    assert (most.heads, least.heads) == (((0,), ()), ((1,), (0, 1)))
    slots = [level.policy.occupancy(Batch((0,), (40,)), 10).budgets[0].slots for level in (most, least)]
    assert slots == [40, 1]


@pytest.mark.parametrize(
    "policy, said", [("streaming", "of which 4 are sinks"), ("snapkv", "no recent"), ("lagkv", "protects 4")]
)
def test_more_slots_than_head_budgets_leave_a_head_are_refused(policy: str, said: str) -> None:
    few = HeadBudgets("a model", "a text", (0.2,), (((0.73, 0.01), (0.05, 0.01)),))
    *_, least = Plan.create(kv_policy=policy, kv_budget=0.2, head_budgets=few).levels(tiny_spec(blocks=2))
    with pytest.raises(ValueError, match=rf"by head budgets some heads keep 0\.0\d+ of a text: kv_policy '{policy}' .*{said}"):
        least.policy.occupancy(Batch((0,), (40,)), 10)
