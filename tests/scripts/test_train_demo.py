"""scripts/train_demo: what it teaches from, the start that knows how to look back, how looks are measured, and short runs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints.model_places import ARCHITECTURES, held_out_prose
from h2o_flexgen.evaluation.tasks.recall import Recall
from tests.scripts.loading import PROJECT

SCRIPTS = PROJECT / "scripts"
VOCAB = 300


@pytest.fixture(scope="module", autouse=True)
def _scripts_are_found() -> Any:
    """As for a script that is started: what lies beside it can be imported."""
    sys.path.insert(0, str(SCRIPTS))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield
    sys.dont_write_bytecode = before
    sys.path.remove(str(SCRIPTS))


def run_script(*flags: object) -> int:
    import train_demo

    return int(train_demo.main([*map(str, flags)]))


# -- what it learns from -------------------------------------------------------------------------------------------------


def made_recall() -> Recall:
    """A token for every character."""
    return Recall.of(held_out_prose()[:20_000], lambda text: [ord(one) % VOCAB for one in text], [0])


def test_a_row_is_the_same_whenever_it_is_asked_for_and_has_as_many_tokens() -> None:
    from demo_training.rows import RowMaker

    maker = RowMaker(made_recall(), VOCAB, 0.6, 3)
    rows = [maker.row(number, 200, 0.2) for number in range(20)]
    assert rows == [maker.row(number, 200, 0.2) for number in range(20)]
    assert all(len(row.tokens) == len(row.weights) == 200 for row in rows)
    assert len(set(rows)) == 20


def test_only_what_can_be_known_is_asked_for() -> None:
    """Every answer that weighs anything has been said before in its row."""
    from demo_training.rows import ANSWER, RowMaker

    maker, found = RowMaker(made_recall(), VOCAB, 1.0, 3), 0
    for number in range(30):
        row = maker.row(number, 1500, 0.0)
        places = [place for place, weight in enumerate(row.weights) if weight == ANSWER]
        starts = [place for place in places if place - 1 not in places]
        for start in starts:
            end = next(place for place in range(start, 1501) if place == 1500 or row.weights[place] != ANSWER)
            answer, before = bytes(min(one, 255) for one in row.tokens[start:end]), row.tokens[:start]
            assert answer in bytes(min(one, 255) for one in before)
            found += 1
    assert found > 50


def test_rounds_say_the_same_tokens_again() -> None:
    from demo_training.rows import AGAIN, RowMaker

    maker = RowMaker(made_recall(), VOCAB, 0.6, 3)
    for number in range(10):
        row = maker.row(number, 400, 1.0)
        first = row.weights.index(AGAIN)
        assert set(row.weights[first:]) == {AGAIN}
        once = first - 1
        assert all(row.tokens[place] == row.tokens[place - once] for place in range(first, 400))


def test_passages_that_are_held_out_are_not_learned(tmp_path: Path) -> None:
    from demo_training.corpus import held_out_passages, read_books

    (tmp_path / "one.txt").write_text("\n\n".join(f"Paragraph {number} of it." for number in range(1000)), encoding="utf-8")
    books = read_books(tmp_path)
    kept, learned = books[0].held_out.split("\n"), "\n".join(books[0].learned).split("\n")
    assert len(kept) + len(learned) == 1000 and not set(kept) & set(learned)
    assert 25 <= len(kept) <= 35
    assert held_out_passages(books, 60).split() == "\n".join(kept[:2]).split()


# -- the start -----------------------------------------------------------------------------------------------------------


def started(architecture: str) -> Any:
    from demo_training.shapes import SHAPES
    from demo_training.warm_start import warm_start

    torch.manual_seed(0)
    model = SHAPES[architecture].build(VOCAB)
    warm_start(model, 0)
    return model.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_looks_back_before_it_has_learned_anything(architecture: str) -> None:
    """Tokens in any order, twice: the second time every one is told by the first."""
    model, tokens = started(architecture), random.Random(0).sample(range(2, VOCAB), 100)
    with torch.no_grad():
        said = model(torch.tensor([[0, *tokens, *tokens]])).logits[0].argmax(-1)
    right = sum(int(said[101 + place]) == tokens[place + 1] for place in range(99))
    assert right >= 10  # where one in 300 would be chance


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_looks_are_those_of_attention(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from demo_training import looks

    length = 80
    tokens = torch.tensor([random.Random(seed).choices(range(2, VOCAB), k=length) for seed in (1, 2)])
    model = started(architecture)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = torch.stack(model(tokens, output_attentions=True).attentions)  # layers, rows, heads, queries, keys
    asked = torch.arange(looks.NEAR, length)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: asked)
    monkeypatch.setattr(looks, "SAMPLED", len(asked))
    measured = looks.Looks(model)
    with torch.no_grad():
        logits = model(tokens).logits
        near, far = measured.take()
    is_near = torch.arange(length) > asked[:, None] - looks.NEAR
    shares = attention[..., asked, :]
    assert near.item() == pytest.approx((shares * is_near).sum(-1).mean().item(), abs=1e-4)
    assert (near + far).item() == pytest.approx(1 - shares[..., 0].mean().item(), abs=1e-4)
    measured.close()
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, logits, atol=1e-3)


def test_a_number_of_steps_decides_rates_and_lengths_whatever_the_clock_says() -> None:
    from demo_training.learn import Progress, Settings, stage_at

    settings = Settings(minutes=1e-9, steps=8, matrix_rate=0.0, table_rate=0.0, near_price=0.0, far_price=0.0)
    progress = Progress(settings)
    assert [progress.after(step) for step in (0, 2, 8)] == [0.0, 0.25, 1.0]
    assert [stage_at(progress.after(step)).length for step in range(9)] == [256, 256, 512, 512, *[1024] * 5]


# -- the whole script ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_short_run_leaves_a_model_that_opens_and_its_curve(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo_training import learn

    monkeypatch.setattr(learn, "STAGES", (learn.Stage(0.0, 128, 512, 0.15),))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text(held_out_prose()[:60_000].replace("\n", "\n\n"), encoding="utf-8")
    flags = ("--corpus", tmp_path / "books", "--output", tmp_path / "made", "--architecture", architecture)
    assert run_script(*flags, "--steps", 1, "--device", "cpu", "--dtype", "float32") == 0
    curve = [json.loads(line) for line in (tmp_path / "made" / "curve.json").read_text().splitlines()]
    assert [point["step"] for point in curve] == [1]
    assert all(0 <= point["near"] + point["far"] <= 1.01 for point in curve)
    with LLM(str(tmp_path / "made")) as llm:
        assert len(llm.generate(["The old man"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_a_corpus_without_books_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "nowhere"
    expected = {
        tmp_path: f"the corpus {tmp_path} has no text files (*.txt) with text in them; give a folder of books",
        nowhere: f"the corpus {nowhere} is no folder; give a folder of books (*.txt)",
    }
    for folder, said in expected.items():
        assert run_script("--corpus", folder, "--output", tmp_path / "made") == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"train_demo: {said}"
    assert not (tmp_path / "made").exists()
