"""Tasks: what each measures is what transformers, or a few lines of our own, say of the same tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o_flexgen.evaluation.cells import Cells, Figure
from h2o_flexgen.evaluation.grid import BudgetShare, Evaluation, Setting
from h2o_flexgen.evaluation.tasks.agreement import Agreement
from h2o_flexgen.evaluation.tasks.perplexity import BoundPerplexity, Perplexity
from h2o_flexgen.evaluation.tasks.recall import RECALL_TASKS, BoundRecall, RecallTask
from h2o_flexgen.evaluation.tasks.task import MOST_EXAMPLES, Bound, EvaluationTask, TaskOptions
from h2o_flexgen.evaluation.tasks.xsum import XSum, first_line, read_articles, rouge
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.given_texts import Text, start_tokens, windows

WINDOW = 64


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), dtype="float32", device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def hf_model(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager").float().eval()


class NoListener:
    """Listens to an evaluation; counts the tokens that are done."""

    def __init__(self) -> None:
        self.done = 0

    def begin(self, doing: str) -> None:
        assert doing

    def advance(self, tokens: int) -> None:
        self.done += tokens


def figures(bound: Bound, model: Path, folder: Path, *settings: Setting, **options: Any) -> list[dict[str, Figure]]:
    """Of each setting, by name and panel."""

    def opened(plan: Plan) -> LLM:
        return LLM(str(model), plan=plan, dtype="float32", device="cpu", offload_dir=folder)

    evaluation = Evaluation({}, settings, {"task": bound}, Plan(**{"gpu_batch_size": 3, **options}), Cells())
    listener, total = NoListener(), evaluation.num_tokens
    evaluation.run(opened, folder, listener)
    assert listener.done == total and evaluation.num_missing == 0
    cells = [evaluation.find("task", setting) for setting in settings]
    return [{one.name + one.panel: one for one in cell.figures if not one.by} for cell in cells if cell is not None]


# -- perplexity ----------------------------------------------------------------------------------------------------------


def bound_perplexity(llm: LLM, text: Text) -> BoundPerplexity:
    return Perplexity.of(TaskOptions(texts=(text,), window=WINDOW, examples=4)).bind(llm)


def hf_losses(hf_model: Any, bound: BoundPerplexity) -> list[float]:
    losses = []
    for ids in bound.windows:
        labels = torch.tensor([[-100] * bound.prompt_len + list(ids[bound.prompt_len :])])
        with torch.inference_mode():
            losses.append(float(hf_model(torch.tensor([ids]), labels=labels).loss))
    return losses


def test_the_perplexity_of_the_full_cache_is_that_of_transformers(
    llm: LLM, hf_model: Any, text: Text, tiny_llama: Path, tmp_path: Path
) -> None:
    bound = bound_perplexity(llm, text)
    losses = hf_losses(hf_model, bound)
    (found,) = figures(bound, tiny_llama, tmp_path, Setting("full", BudgetShare(100)))
    figure = found["perplexity"]
    assert list(figure.examples) == pytest.approx(losses, abs=1e-4)
    assert math.log(figure.value) == pytest.approx(sum(losses) / 4, abs=1e-4)
    nats = sum(losses) * (WINDOW - WINDOW // 4)
    assert bound.sizes == ((WINDOW // 4, WINDOW - WINDOW // 4),)
    scored = [llm.tokenizer.decode(ids[WINDOW // 4 :]) for ids in bound.windows]
    assert found["bits_per_byte"].value == pytest.approx(
        nats / math.log(2) / sum(len(one.encode()) for one in scored), rel=1e-4
    )


def test_what_is_evicted_is_missing_and_a_budget_of_all_evicts_nothing(
    llm: LLM, text: Text, tiny_llama: Path, tmp_path: Path
) -> None:
    settings = Setting("full", BudgetShare(100)), Setting("h2o", BudgetShare(100)), Setting("local", BudgetShare(10))
    full, all_kept, local = figures(bound_perplexity(llm, text), tiny_llama, tmp_path, *settings)
    assert all_kept["perplexity"].examples == full["perplexity"].examples
    assert local["perplexity"].examples != full["perplexity"].examples


def test_figures_do_not_depend_on_the_plan(llm: LLM, text: Text, tiny_llama: Path, tmp_path: Path) -> None:
    bound, setting = bound_perplexity(llm, text), Setting("h2o", BudgetShare(20))
    (here,) = figures(bound, tiny_llama, tmp_path, setting)
    on_disk = Plan().with_percent((0, 0, 0, 0, 0, 0))
    (there,) = figures(
        bound, tiny_llama, tmp_path, setting, weights=on_disk.weights, kv=on_disk.kv, gpu_batch_size=1, num_gpu_batches=2
    )
    for name, figure in here.items():  # products of other numbers of rows may round their last bits differently
        assert there[name].value == pytest.approx(figure.value, rel=1e-5)


def test_windows_are_whole_evenly_spread_and_begin_as_texts_do(llm: LLM, text: Text) -> None:
    start = start_tokens(llm.tokenizer)
    assert start == [0]  # as the tokenizer puts it before every text
    ids = llm.tokenizer.encode_more(text.content)
    found = windows((text, text), llm.tokenizer, 11, 6)
    assert found.of_texts == 2 * (len(ids) // 10)
    whole = [(0, *ids[place : place + 10]) for place in range(0, len(ids) - 9, 10)] * 2
    assert found.ids == tuple(whole[place * len(whole) // 6] for place in range(6))
    assert len(windows((text,), llm.tokenizer, 11, 10**6).ids) == len(ids) // 10


@pytest.mark.parametrize(
    ("task", "prose", "asked", "message"),
    [
        (Perplexity, "hello", {"window": 64}, r"text a has \d+ tokens, but a window takes 64; .* a smaller --window"),
        (Perplexity, None, {"window": 3}, "--window is 3, but .* has 1024 positions; give 4 to 1024"),
        (Agreement, None, {"window": 1025}, "--window is 1025, but .* has 1024 positions; give 4 to 1024"),
        (
            RecallTask,
            None,
            {"lengths": (1024,)},
            r"texts of 1024 tokens need 1\d+ positions .* has 1024; give shorter --lengths",
        ),
        (RecallTask, None, {"lengths": (512, 2048)}, "--lengths has 2048, but .* has 1024 positions"),
        (RecallTask, "The ferry left.", {"lengths": (512,)}, r"prose for recall has \d+ .* need \d+; give a longer --text"),
    ],
)
def test_what_the_model_or_the_text_is_too_short_for_is_refused(
    llm: LLM, text: Text, task: type[EvaluationTask], prose: str | None, asked: dict[str, Any], message: str
) -> None:
    texts = (text, text) if prose is None else (Text("a", prose),)
    with pytest.raises(ValueError, match=message):
        task.of(TaskOptions(texts=texts, **asked)).bind(llm)


# -- agreement -----------------------------------------------------------------------------------------------------------


def test_the_full_cache_agrees_with_itself(llm: LLM, text: Text, tiny_llama: Path, offload: Path) -> None:
    bound = Agreement.of(TaskOptions(texts=(text,), window=WINDOW, examples=4, gen_len=9)).bind(llm)
    (found,) = figures(bound, tiny_llama, offload, Setting("full", BudgetShare(100)))
    assert (found["equal"].value, found["until_first"].value) == (1.0, 1.0)
    assert found["kl"].value == 0.0


def test_agreement_is_what_transformers_says_of_the_tokens_of_the_full_cache(
    llm: LLM, hf_model: Any, text: Text, tiny_llama: Path, offload: Path
) -> None:
    bound = Agreement.of(TaskOptions(texts=(text,), window=WINDOW, examples=3, gen_len=9)).bind(llm)
    h2o = Setting("h2o", BudgetShare(20))
    (found,) = figures(bound, tiny_llama, offload, h2o)
    equal, lost, until_first = [], [], []
    with LLM(str(tiny_llama), plan=h2o.plan(Plan()), dtype="float32", device="cpu") as other:
        for prompt in bound.prompts:
            with torch.inference_mode():
                ids = hf_model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)[0]
                said = hf_model(ids[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            tokens, own = ids[len(prompt) :].tolist(), []
            other.generate(
                [prompt], bound._greedy, forced=[tokens], on_logits=lambda row, n, one, own=own: own.append(one.clone())
            )
            heard = torch.stack(own).double().log_softmax(-1)
            same = (heard.argmax(-1) == torch.tensor(tokens)).tolist()
            equal.append(sum(same) / 9)
            lost.append(float((said.exp() * (said - heard)).sum(-1).mean()))
            free = other.generate([prompt], bound._greedy)[0].token_ids
            until_first.append(next((place for place in range(9) if free[place] != tokens[place]), 9) / 9)
    assert list(found["equal"].examples) == pytest.approx(equal)
    assert list(found["until_first"].examples) == pytest.approx(until_first)
    assert list(found["kl"].examples) == pytest.approx(lost, abs=1e-4)
    assert found["kl"].value > 0 and found["equal"].value < 1


def test_fewer_bits_are_compared_with_the_model_as_it_is(llm: LLM, text: Text, tiny_llama: Path, offload: Path) -> None:
    bound = Agreement.of(TaskOptions(texts=(text,), window=WINDOW, examples=2, gen_len=5)).bind(llm)
    (found,) = figures(bound, tiny_llama, offload, Setting("full", BudgetShare(100), kv_codec="group4"))
    assert found["kl"].value > 0


# -- recall --------------------------------------------------------------------------------------------------------------


def bound_recall(llm: LLM, text: Text, **asked: Any) -> BoundRecall:
    return RecallTask.of(TaskOptions(texts=(text,), examples=1, lengths=(700,), depths=(0.0, 1.0), **asked)).bind(llm)


def test_recall_has_as_many_questions_of_each_kind_and_the_same_for_the_same_seed(llm: LLM, text: Text) -> None:
    bound = bound_recall(llm, text)
    assert len(bound.examples) == 2 * len(RECALL_TASKS)
    assert all(len(one.context) + len(one.question) + len(one.answer) <= 700 for one in bound.examples)
    assert bound_recall(llm, text).identity == bound.identity
    assert bound_recall(llm, text, seed=1).identity != bound.identity
    assert bound_recall(llm, text, questions=("hidden",)).identity != bound.identity


def test_prose_without_full_stops_fills_texts_too(llm: LLM) -> None:
    task = RecallTask.of(
        TaskOptions(texts=(Text("long.txt", "the ferry left and nobody waved and " * 500),), lengths=(900,), depths=(0.0,))
    )
    assert all(len(one.context) > 400 for one in task.bind(llm).examples)


def test_an_answer_is_right_if_greedy_decoding_says_it(
    llm: LLM, hf_model: Any, text: Text, tiny_llama: Path, tmp_path: Path
) -> None:
    """The answers that are expected are changed into those that transformers gives, but for some."""
    bound = bound_recall(llm, text)
    examples = []
    for number, one in enumerate(bound.examples):
        ids = torch.tensor([[*one.context, *one.question]])
        with torch.inference_mode():
            said = hf_model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
        said[-1] = (said[-1] + (number % 4 == 0)) % 300  # a quarter is wrong in its last token
        examples.append(replace(one, answer=tuple(said)))
    (found,) = figures(BoundRecall(tuple(examples), bound.questions), tiny_llama, tmp_path, Setting("full", BudgetShare(100)))
    assert {name: figure.value for name, figure in found.items()} == {
        "accuracyvisible questions": 0.75,
        "accuracyhidden questions": 0.75,
    }


def test_accuracy_is_told_by_task_length_and_depth(llm: LLM, text: Text, tiny_llama: Path, tmp_path: Path) -> None:
    bound = bound_recall(llm, text)
    evaluation = Evaluation({}, (Setting("full", BudgetShare(100)),), {"recall": bound}, Plan(), Cells())
    evaluation.run(lambda plan: LLM(str(tiny_llama), plan=plan, device="cpu"), tmp_path, NoListener())
    cell = evaluation.find("recall", evaluation.settings[0])
    assert cell is not None
    of_hidden = [figure for figure in cell.figures if figure.panel == "hidden questions"]
    ways = {by: [figure.at for figure in of_hidden if figure.by == by] for by in ("task", "length", "depth")}
    assert ways == {"task": list(RECALL_TASKS), "length": ["700"], "depth": ["0 %", "100 %", "spread"]}
    for by in ways:
        assert sum(figure.count for figure in of_hidden if figure.by == by) == len(bound.examples)


# -- summaries -----------------------------------------------------------------------------------------------------------


def test_rouge_is_that_of_the_usual_package() -> None:
    pytest.importorskip("rouge_score")
    texts = ["the cat sat on the mat", "nothing of it", "police killed the gunman"]
    summaries = ("the cat was on the mat", "a storm has hit the coast", "police kill the gunman")
    found = {figure.name: figure for figure in rouge(texts, summaries)}
    # by hand: words in common 5 of 6 and 6; pairs 3 of 5 and 5; longest sequence 5
    assert found["rouge1"].examples == pytest.approx((5 / 6, 0, 1.0), abs=1e-8)
    assert found["rouge2"].examples == pytest.approx((3 / 5, 0, 1.0), abs=1e-8)
    assert found["rougeL"].examples == pytest.approx((5 / 6, 0, 1.0), abs=1e-8)


def test_a_summary_is_the_first_line_that_says_anything() -> None:
    assert first_line("\n  \n A storm has hit the coast. \nAnd more.") == "A storm has hit the coast."
    assert first_line(" \n") == ""


def articles(tmp_path: Path, lengths: tuple[int, ...]) -> str:
    file = tmp_path / "articles.jsonl"
    lines = [
        {"article": f"{number} " + "hello world " * length, "summary_gt": "hello"} for number, length in enumerate(lengths)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(file)


def test_articles_are_cut_from_the_left_where_the_model_has_no_room_and_it_is_said(llm: LLM, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    asked = TaskOptions(articles=articles(tmp_path, (2, 2000)), gen_len=24)
    bound = XSum.of(asked).bind(llm)
    whole = llm.tokenizer.encode("1 " + "hello world " * 2000)
    assert [len(prompt) for prompt in bound.prompts][1] == 1024 + 1 - 24
    start = start_tokens(llm.tokenizer)
    kept = len(bound.prompts[1]) - len(start)
    assert bound.prompts[1] == (*start, *whole[-kept:])
    assert "1 of 2 articles are longer" in bound.notes[1]


def test_a_model_that_says_the_summary_has_it_all(llm: LLM, tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    bound = XSum.of(TaskOptions(articles=articles(tmp_path, (2, 5, 3)), gen_len=12)).bind(llm)
    said = [one.text for one in llm.generate(bound.prompts, SamplingParams(max_tokens=12, stop="###"))]
    own = replace(bound, summaries=tuple(map(first_line, said)))
    assert own.identity != bound.identity != replace(bound, eos_ids=frozenset({5})).identity
    (found,) = figures(own, tiny_llama, tmp_path, Setting("full", BudgetShare(100)))
    wordy = [bool(first_line(text).strip()) and any(letter.isalnum() and letter.isascii() for letter in text) for text in said]
    assert found["rouge1"].examples == tuple(map(float, wordy))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is no JSON; mend or remove it"),
        ("[]", "line 2 is no {"),
        ('{"summary": "a"}', "line 2 has no field article; add it or remove the line"),
        ('{"article": "a"}', "line 2 has no field summary_gt or summary"),
        ('{"article": "a", "summary": 3}', "line 2: the field summary is no text"),
        ('{"article": " ", "summary": "a"}', "line 2: the field article is no text"),
        ("", "line 2 is no JSON"),
    ],
)
def test_a_line_that_is_no_article_is_refused_by_its_number(tmp_path: Path, line: str, problem: str) -> None:
    pytest.importorskip("rouge_score")
    file = tmp_path / "articles.jsonl"
    good = '{"article": "a", "summary": "b"}'
    file.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError) as caught:
        XSum.of(TaskOptions(articles=str(file)))
    assert problem in str(caught.value)


def test_articles_are_lines_of_json_whatever_their_file_is_called(tmp_path: Path) -> None:
    file = Path(articles(tmp_path, (2, 3)))
    read = read_articles(str(file))
    assert len(read) == 2 and read_articles(str(file.rename(tmp_path / "a.json"))) == read


def test_an_empty_file_or_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    (tmp_path / "empty.jsonl").write_text("\n")
    for file, problem in ((tmp_path / "empty.jsonl", "is empty"), (tmp_path / "none.jsonl", "cannot be read")):
        with pytest.raises(ValueError, match=problem):
            XSum.of(TaskOptions(articles=str(file)))
    with pytest.raises(ValueError, match="give --articles"):
        XSum.of(TaskOptions())


def test_without_the_package_for_rouge_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("h2o_flexgen.evaluation.tasks.xsum.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"xsum needs rouge-score; .*\[eval\]"):
        XSum.of(TaskOptions(articles=articles(tmp_path, (2,))))


def test_more_questions_than_can_be_made_are_refused_before_one_is() -> None:
    task = RecallTask(TaskOptions((Text("prose", "Some prose."),), lengths=(64,), depths=(0.0, 0.5), examples=MOST_EXAMPLES))
    llm = cast("LLM", SimpleNamespace(spec=SimpleNamespace(max_positions=1024), tokenizer=None, name="tiny"))
    with pytest.raises(ValueError, match=r"--examples 1000000 makes 8000000 questions, .* the most is 100000"):
        task.bind(llm)
