"""lm-evaluation-harness says of our engine what it says of its own `hf`: metric by metric, and request by request."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny
from tests.helpers.real_tokenizers import VOCABS, save_byte_fallback, save_byte_level
from tests.helpers.samples import slow

for name in ("lm_eval", "accelerate"):
    pytest.importorskip(name, reason=f"{name} is not installed")  # accelerate is what `hf` imports

TOKENIZERS = {"opt": "byte_level", "llama-gqa": "byte_fallback", "neox-parallel": "byte_level"}
CHOICES = [
    {"question": "The quick brown", "choices": [" fox", " dog jumps over", " hello"], "answer": 0},
    {"question": "Pack my box with five dozen jugs, then rest. " * 4, "choices": ["Pack", "jugs"], "answer": 1},
    {"question": "naïve café:", "choices": [" über 10 €", " 日本語", " then", " x"], "answer": 2},
    {"question": "hello ", "choices": ["world", "hello world hello"], "answer": 1},
    {"question": "x", "choices": ["y", "yz", "z", " "], "answer": 3},
]
TEXTS = [
    {"text": "The quick brown fox jumps over the lazy dog."},
    {"text": "hello world hello " * 40},  # several windows
    {"text": "jugs"},
    {"text": "Pack my box with five dozen jugs, then rest. 日本語"},
]
STARTS = [{"start": text["text"], "goal": "fox"} for text in TEXTS] + [{"start": "hello", "goal": "o"}]

MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
}
UNTIL = {
    "output_type": "generate_until",
    "doc_to_text": "{{start}}",
    "doc_to_target": "{{goal}}",
    "generation_kwargs": {"until": ["zz", "\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS = {"choices": (MULTIPLE_CHOICE, CHOICES), "texts": (ROLLING, TEXTS), "starts": (UNTIL, STARTS)}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files, as a person would write them."""
    import yaml

    folder = tmp_path_factory.mktemp("tasks")
    for name, (config, documents) in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
        kept = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}  # not in the user's own
        data = {"dataset_path": "json", "dataset_kwargs": kept, "test_split": "test"}
        task = {"task": f"own_{name}", **data, **config, "num_fewshot": 0, "metadata": {"version": 1}}
        (folder / f"own_{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, tokenizer in TOKENIZERS.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        end = 1 if tokenizer == "byte_level" else 2
        tiny.save_tiny(kind, folders[kind], vocab_size=VOCABS[tokenizer], eos_token_id=end)
        {"byte_level": save_byte_level, "byte_fallback": save_byte_fallback}[tokenizer](folders[kind])
    return folders


Results = dict[str, Any]


def evaluated(model: Any, tasks: Path, names: tuple[str, ...] = tuple(TASKS), **options: Any) -> Results:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    own = [f"own_{name}" for name in names]
    found = simple_evaluate(model, tasks=own, task_manager=manager, bootstrap_iters=0, log_samples=True, **options)
    assert found is not None
    return found


class WhenAsked(dict[str, Results]):
    """Results by kind; each is worked out once, when it is asked for."""

    def __init__(self, results_of: Callable[[str], Results]) -> None:
        super().__init__()
        self._results_of = results_of

    def __missing__(self, kind: str) -> Results:
        self[kind] = found = self._results_of(kind)
        return found


@pytest.fixture(scope="module")
def by_hf(models: dict[str, Path], tasks: Path) -> Iterator[dict[str, Results]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        from lm_eval.models.huggingface import HFLM

        yield WhenAsked(lambda kind: evaluated(HFLM(str(models[kind]), device="cpu", dtype="float32", batch_size=3), tasks))


def own_model(folder: Path, offload: Path, **options: Any) -> Any:
    from h2o_flexgen.evaluation.lm_eval_model import LmEvalModel

    return closing(LmEvalModel(str(folder), device="cpu", dtype="float32", offload_dir=offload, **options))


def answers(results: Results, name: str) -> list[Any]:
    """What the model said, request by request, in the order of the documents."""
    samples = sorted(results["samples"][f"own_{name}"], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def assert_same(found: Results, wanted: Results) -> None:
    for name in TASKS:
        mine, theirs = (results["results"][f"own_{name}"] for results in (found, wanted))
        assert mine.keys() == theirs.keys()
        for metric, value in theirs.items():
            assert mine[metric] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), metric
    for own, other in zip(answers(found, "choices"), answers(wanted, "choices"), strict=True):
        for (logprob, is_greedy), (wanted_logprob, wanted_greedy) in zip(own, other, strict=True):
            assert float(logprob) == pytest.approx(float(wanted_logprob), abs=1e-3) and str(is_greedy) == str(wanted_greedy)
    for own, other in zip(answers(found, "texts"), answers(wanted, "texts"), strict=True):
        assert float(own[0]) == pytest.approx(float(other[0]), abs=1e-3)
    assert answers(found, "starts") == answers(wanted, "starts")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        slow("opt", {"gpu_batch_size": 2, "num_gpu_batches": 2}),
        ("llama-gqa", {"percent": "0;50;0;0;0;100", "batch_size": 3}),  # KV on disk
        slow("neox-parallel", {"percent": (0, 0, 0, 0, 0, 0), "batch_size": "auto"}),
    ],
    ids=str,
)
def test_metrics_and_answers_are_those_of_hf(
    kind: str, options: dict[str, Any], models: dict[str, Path], tasks: Path, by_hf: dict[str, Results], offload: Path
) -> None:
    with own_model(models[kind], offload, **options) as model:
        found = evaluated(model, tasks)
    assert_same(found, by_hf[kind])
    assert found["config"]["kv_policy"] == "full"


def test_loglikelihoods_by_decode_equal_those_in_one_pass(
    models: dict[str, Path], tasks: Path, by_hf: dict[str, Results], offload: Path
) -> None:
    """A policy that could evict, with room for all."""
    with own_model(models["llama-gqa"], offload, kv_policy="h2o", kv_budget=1.0, head_budgets="equal") as model:
        assert_same(evaluated(model, tasks), by_hf["llama-gqa"])


def test_with_eviction_values_are_others_and_finite(
    models: dict[str, Path], tasks: Path, by_hf: dict[str, Results], offload: Path
) -> None:
    with own_model(models["llama-gqa"], offload, kv_policy="h2o", kv_budget=0.2, recent=1, gpu_batch_size=8) as model:
        found = evaluated(model, tasks, ("texts", "starts"))
        assert model.llm.stats.generated_tokens > 0
    own, full = ([float(one[0]) for one in answers(results, "texts")] for results in (found, by_hf["llama-gqa"]))
    assert all(math.isfinite(value) and value < 0 for value in own)
    assert abs(own[1] - full[1]) > 0.01 and own != full
    assert found["config"]["kv_options"]["kv_budget"] == 0.2


def requests_of(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]  # type: ignore[arg-type]


def test_texts_that_are_too_long_lose_their_left_ends_with_one_warning(
    models: dict[str, Path], offload: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lm_eval.models.huggingface import HFLM

    long = [("hello world " * 30 + word, " jugs" * count) for word, count in (("fox", 1), ("dog", 7), ("Pack", 3))]
    asked = requests_of("loglikelihood", *long, ("short", " one"))
    hf = HFLM(str(models["opt"]), device="cpu", dtype="float32", max_length=32)
    wanted = hf.loglikelihood(asked, disable_tqdm=True)
    started = requests_of("generate_until", *((text, {"until": ["zz"], "max_gen_toks": 9}) for text, _ in long))
    continued = hf.generate_until(started, disable_tqdm=True)
    with own_model(models["opt"], offload, max_length=32) as model, caplog.at_level(logging.WARNING, "h2o_flexgen"):
        found = model.loglikelihood(asked, disable_tqdm=True)
        assert [record.getMessage() for record in caplog.records if record.name.startswith("h2o")] == [
            "3 of 4 texts are too long for the 32 tokens of a context: their left ends are cut off"
        ]
        assert model.generate_until(started, disable_tqdm=True) == continued
        with pytest.raises(ValueError, match="a continuation has 41 tokens, but max_length is 32"):
            model._loglikelihood_tokens([(None, [5], [6] * 41)])
        with pytest.raises(ValueError, match="max_gen_toks is 32, but max_length is 32"):
            model.generate_until(requests_of("generate_until", ("a", {"max_gen_toks": 32})))
    for (score, is_greedy), (wanted_score, wanted_greedy) in zip(found, wanted, strict=True):
        assert score == pytest.approx(wanted_score, abs=1e-3) and is_greedy == wanted_greedy


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_become_tokens_as_in_hf(kind: str, models: dict[str, Path], offload: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    for add_bos_token in (None, True, False):
        hf = HFLM(str(models[kind]), device="cpu", dtype="float32", add_bos_token=add_bos_token)
        with own_model(models[kind], offload, add_bos_token=add_bos_token) as model:
            assert (model.prefix_token_id, model.eot_token_id, model.max_length) == (
                hf.prefix_token_id,
                hf.eot_token_id,
                hf.max_length,
            )
            for text in ("hello world", " two  spaces ", "<s>said already", "日本語", "", "</s>"):
                for special in (None, True, False):
                    assert model.tok_encode(text, special) == hf.tok_encode(text, special), (text, special)
            for pair in (("hello", " world"), ("hello ", "world"), ("naïve", "té"), ("<s>a", "b")):
                assert model._encode_pair(*pair) == hf._encode_pair(*pair)
            assert model.tokenizer_name == hf.tokenizer_name


def test_a_chat_template_is_applied(models: dict[str, Path], offload: Path) -> None:
    with own_model(models["opt"], offload) as model:
        model.tokenizer.chat_template = (
            "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        )
        said = [{"role": "user", "content": "hello"}]
        assert model.apply_chat_template(said) == "user: hello\nassistant:"
        assert model.apply_chat_template([{"role": "system", "content": "be kind"}, *said]) == "user: hello\nassistant:"
        answering = [*said, {"role": "assistant", "content": "well"}]
        assert model.apply_chat_template(answering, add_generation_prompt=False) == "user: hello\nassistant: well"
        assert model.chat_template(True) == model.tokenizer.chat_template
        model.tokenizer.chat_template = "{{ 'x' * 10000000000 }}"
        with pytest.raises(ValueError, match=r"chat template refuses these messages .*far more than write down a talk"):
            model.apply_chat_template(said)


def test_requests_with_options_of_their_own_come_back_in_their_order(models: dict[str, Path], offload: Path) -> None:
    def ask(*options: dict[str, Any]) -> list[Any]:
        return requests_of("generate_until", *(("hello world", one) for one in options))

    greedy, sampled = {"max_gen_toks": 6}, {"max_gen_toks": 6, "do_sample": True, "temperature": 1.5, "top_k": 40}
    with own_model(models["opt"], offload) as model:
        texts = model.generate_until(ask(sampled, greedy, {"max_gen_toks": 3}, sampled, {**greedy, "until": "x"}, greedy))
        assert texts[1] == texts[5] and texts[5].startswith(texts[2]) and len(texts[2]) < len(texts[5])
        assert texts[0] != texts[3], "rows with one set of options are drawn each for itself"
        assert texts[4] == texts[1].split("x")[0]
        with pytest.raises(ValueError, match=r"num_beams is 4, which is not supported; known are temperature, top_k"):
            model.generate_until(ask({**greedy, "num_beams": 4}))
        with pytest.raises(ValueError, match="temperature is -1"):
            model.generate_until(ask({**sampled, "temperature": -1.0}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_polizy": "h2o"}, r"unknown model argument 'kv_polizy'; did you mean kv_policy\?"),
        ({"max_lenght": 9}, r"unknown model argument 'max_lenght'; did you mean max_length\?"),
        ({"plan": 1}, "unknown model argument 'plan'"),
        ({"percent": "0;many"}, r"percent is '0;many'; write six numbers, like 0;50;0;100;0;100"),
        ({"percent": "0;50"}, r"percent is '0;50'; write six numbers, like 0;50;0;100;0;100"),
        ({"batch_size": "large"}, "batch_size is 'large'; give a number of rows"),
        ({"batch_size": 3, "gpu_batch_size": 4}, "both batch_size 3 and gpu_batch_size 4 are given"),
        ({"max_length": 10**6}, f"max_length is 1000000; .* takes 2 to {tiny.POSITIONS}"),
        ({"pretrained": ""}, "add pretrained=NAME or pretrained=FOLDER"),
        ({"kv_policy": "h20"}, "'h20' is unknown"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str, models: dict[str, Path]) -> None:
    from h2o_flexgen.evaluation.lm_eval_model import LmEvalModel

    with pytest.raises(ValueError, match=message) as caught:
        LmEvalModel(**{"pretrained": str(models["opt"]), "device": "cpu", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 4),
        ({"batch_size": 6}, 6),
        ({"batch_size": "6"}, 6),
        ({"batch_size": "auto"}, 4),
        ({"batch_size": "auto:4", "max_batch_size": 2}, 2),
        ({"batch_size": 1, "gpu_batch_size": 5}, 5),
        ({"batch_size": "auto", "gpu_batch_size": 5}, 5),
    ],
)
def test_sizes_of_batches_come_from_the_harness_or_from_the_plan(
    options: dict[str, Any], size: int, models: dict[str, Path], offload: Path
) -> None:
    with own_model(models["opt"], offload, **options) as model:
        assert model.batch_size == size == model.llm.plan.gpu_batch_size


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    from h2o_flexgen.evaluation.lm_eval_model import LmEvalModel

    tiny.save_tiny("opt", tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer that reads words; put its files beside the model"):
        LmEvalModel(str(tmp_path), device="cpu")


def test_its_own_command_line_knows_the_model_and_argument_strings(
    models: dict[str, Path],
    tasks: Path,
    by_hf: dict[str, Results],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lm_eval.tasks import TaskManager

    from h2o_flexgen.lm_eval import main

    only_ours = partialmethod(TaskManager.__init__, include_defaults=False)  # thousands of files are read for the others
    monkeypatch.setattr(TaskManager, "__init__", only_ours)
    arguments = f"pretrained={models['llama-gqa']},dtype=float32,percent=0;50;0;0;0;100,offload_dir={tmp_path / 'offload'}"
    command = ["lm_eval", "--model", "h2o_flexgen", "--include_path", str(tasks), "--model_args"]
    asked = [arguments, "--device", "cpu", "--tasks", "own_choices,own_texts", "--batch_size", "auto"]
    monkeypatch.setattr(sys, "argv", [*command, *asked, "--output_path", str(tmp_path / "out")])
    assert not main()
    said = capsys.readouterr().out
    assert "own_choices" in said and "word_perplexity" in said
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    for name in ("own_choices", "own_texts"):
        for metric, value in by_hf["llama-gqa"]["results"][name].items():
            if isinstance(value, float):
                assert found[name][metric] == pytest.approx(value, rel=1e-3), metric
    monkeypatch.setattr(sys, "argv", [*command, f"pretrained={models['opt']},kv_polizy=h2o", "--tasks", "own_texts"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: unknown model argument 'kv_polizy'; did you mean kv_policy?"


def test_the_name_can_be_registered_twice_and_leads_to_the_class() -> None:
    from lm_eval.api.registry import get_model

    from h2o_flexgen.evaluation.lm_eval_model import LmEvalModel
    from h2o_flexgen.lm_eval import NAME, register

    register()
    register()
    assert get_model(NAME) is LmEvalModel
