"""Tables and pictures of cells that are made up."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from h2o_flexgen.evaluation.cells import Cell, Figure, mean
from h2o_flexgen.evaluation.grid import BudgetShare, Grid
from h2o_flexgen.evaluation.results import Results, _scale, details, draw_quality, panel_title, panels_of, style, tables
from h2o_flexgen.evaluation.tasks.perplexity import BoundPerplexity, Perplexity
from h2o_flexgen.evaluation.tasks.recall import RecallTask
from h2o_flexgen.evaluation.tasks.task import Shown
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.evaluation.test_grid import sized

GRID = Grid(("full", "h2o", "local"), (BudgetShare(100), BudgetShare(5), BudgetShare(20)))
BOUND = BoundPerplexity(((1, 2, 3, 4),), 1, 9, ByteTokenizer(300))
KINDS = ("visible questions", "hidden questions")


def results() -> tuple[Results, ...]:
    losses = {("full", 100): (1.0, 1.2), ("h2o", 20): (1.1, 1.3), ("h2o", 5): (1.5, 1.7), ("local", 20): (2.0, 2.2)}
    settings = {(one.policy, -one.amount.order): one for one in GRID.settings(sized)}
    perplexity, recall = {}, {}
    for place, values in losses.items():
        figure = Figure("perplexity", sum(values), 0.25, 2, examples=values)
        perplexity[settings[place]] = Cell({}, (figure,), 1.0)
        right = [1.0, 0.0, place[1] / 100, 1.0]
        figures = [mean("accuracy", right, kind) for kind in KINDS]
        figures += [mean("accuracy", right[:2], KINDS[0], "depth", at) for at in ("0 %", "50 %")]
        recall[settings[place]] = Cell({}, tuple(figures), 1.0)
    return (Results("perplexity", Perplexity.shown, BOUND, perplexity), Results("recall", RecallTask.shown, BOUND, recall))


def test_a_table_has_a_row_per_policy_a_column_per_budget_and_relations_to_the_full_cache() -> None:
    lines = list(tables(results()))
    assert lines[:12] == [
        "## perplexity",
        "",
        "1 of 9 windows of 4 tokens, of which the last 3 are scored.",
        "",
        "**perplexity per token (lower is better)**",
        "",
        "| policy | 100 % | 20 % | 5 % |",
        "|---|---|---|---|",
        "| full | 2.2 ± 0.25 | - | - |",
        "| h2o | 2.2 ± 0.25 | 2.4 ± 0.25 (x 1.105) | 3.2 ± 0.25 (x 1.649) |",
        "| local | 2.2 ± 0.25 | 4.2 ± 0.25 (x 2.718) | - |",
        "",
    ]
    assert sum(line.startswith("**share of answers") for line in lines) == 2
    assert "| h2o | 0.75 ± 0.25 | 0.55 ± 0.26 (x 0.7333) | 0.5125 ± 0.28 (x 0.6833) |" in lines


def test_fewer_bits_are_compared_with_kv_as_it_is_in_whatever_order_they_were_asked_for() -> None:
    settings = Grid(("full",), (BudgetShare(100),), kv_codecs=("group4", "plain")).settings(sized)
    cells = {
        one: Cell({}, (Figure("perplexity", 2.0, None, 1, examples=(loss,)),), 1.0) for one, loss in zip(settings, (0.5, 0.25))
    }
    lines = list(tables((Results("perplexity", Perplexity.shown, BOUND, cells),)))
    assert "| full, KV 4 bits | 2 (x 1.284) |" in lines and "| full | 2 |" in lines


def test_details_tell_figures_by_kind_of_example() -> None:
    lines = list(details(results()))
    assert lines[2] == "| policy and depth | 0 % | 50 % |"
    assert lines[4] == "| full, 100 % | 0.5 (2) | 0.5 (2) |"
    assert len(lines) == 9


def test_no_two_lines_of_a_picture_look_alike_and_none_is_hidden_by_a_later_one() -> None:
    for count in (1, 2, 11, 24):
        drawn = [style(number, count) for number in range(count)]
        assert len({(one["color"], one["linestyle"]) for one in drawn}) == count
        assert count > 12 or len({one["color"] for one in drawn}) == len({one["marker"] for one in drawn}) == count
        for size in ("linewidth", "markersize"):
            sizes = [one[size] for one in drawn]
            assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == count


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_quality(panels_of(results()), tmp_path / "picture.png", "made up")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_titles_say_nothing_twice_and_shares_begin_at_nothing() -> None:
    from matplotlib.figure import Figure as Page

    share = Shown("accuracy", "share that is right", True, None, is_share=True)
    assert panel_title("perplexity", Shown("perplexity", "perplexity per token", False, None), "") == "perplexity per token"
    assert panel_title("recall", share, "hidden questions") == "recall: share that is right, hidden questions"
    for shown, values, limits, scale in (
        (share, [0.001, 0.9], (0, 1.05), "linear"),
        (Shown("loss", "loss", False, None), [3.0, 3.5], (0, None), "linear"),
        (Shown("perplexity", "perplexity", False, None), [70.0, 3000.0], (None, None), "log"),
    ):
        axes = Page().subplots()
        axes.plot(values)
        _scale(axes, shown.is_share, values)
        bottom, top = axes.get_ylim()
        assert axes.get_yscale() == scale and all(one in (None, found) for one, found in zip(limits, (bottom, top)))
