"""The engine as a model of HELM: what its client answers, request by request, and whole runs of the installed `helm-run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import LLM, SamplingParams
from tests.helpers import tiny
from tests.helpers.real_tokenizers import VOCABS, save_byte_level
from tests.scripts.loading import load_script

pytest.importorskip("helm.clients.client", reason="needs the extra [helm]")

from helm.common.cache import BlackHoleCacheConfig, SqliteCacheConfig
from helm.common.media_object import MultimediaObject
from helm.common.request import Request, RequestResult
from helm.proxy.retry import NonRetriableException

from h2o_flexgen.helm import MODELS, Client

IN_MEMORY: dict[str, Any] = {"percent": (0, 100, 0, 100, 0, 100), "gpu_batch_size": 4, "num_gpu_batches": 1}
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", **IN_MEMORY}
PROMPTS = ["The quick brown", "Pack my box with five dozen", "hello", "café: über 10 €", "The", "jugs, then rest. The", "a b c"]
START = "<s>"
Make = Callable[..., Client]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "neox"
    tiny.save_tiny("neox-parallel", folder, vocab_size=VOCABS["byte_level"], eos_token_id=1)
    save_byte_level(folder)
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Make]:
    def client(cache: Any = None, **options: Any) -> Client:
        given = {"model": str(model), "offload_dir": str(tmp_path / "offload"), "gather": 0.01, **ENGINE}
        return Client(cache or BlackHoleCacheConfig(), **{**given, **options})

    yield client
    MODELS.close()


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(model), offload_dir=tmp_path_factory.mktemp("offload"), **ENGINE) as opened:
        yield opened


def asked(prompt: str, **options: Any) -> Request:
    return Request(model_deployment="h2o_flexgen/x", model="h2o_flexgen/x", prompt=prompt, **{"max_tokens": 6, **options})


def greedy(prompt: str, **options: Any) -> Request:
    return asked(prompt, temperature=0.0, **options)


def hold_together(result: RequestResult) -> None:
    """A completion's tokens are those of its text, and its log-probability is theirs."""
    assert result.success and result.error is None
    for one in result.completions:
        assert "".join(token.text for token in one.tokens) == one.text
        assert one.logprob == pytest.approx(sum(token.logprob for token in one.tokens))


# -- one request -----------------------------------------------------------------------------------------------------------


def test_threads_get_what_the_engine_generates(make: Make, llm: LLM) -> None:
    wanted = llm.generate(PROMPTS, SamplingParams(max_tokens=6, logprobs=0))
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        clients = list(threads.map(lambda _: make(), PROMPTS))  # HELM makes them in this way, one in each thread
        results = list(threads.map(lambda client, prompt: client.make_request(greedy(prompt)), clients, PROMPTS))
    assert len({id(client._model) for client in clients}) == 1, "the model was opened several times"
    for result, one in zip(results, wanted, strict=True):
        hold_together(result)
        (completion,) = result.completions
        assert one.logprobs is not None
        assert (completion.text, completion.finish_reason) == (one.text, {"reason": "length"})
        assert [token.logprob for token in completion.tokens] == pytest.approx([step.chosen.logprob for step in one.logprobs])


def test_a_text_ends_before_a_stop_and_so_do_its_tokens(make: Make) -> None:
    client = make()
    (whole,) = client.make_request(greedy("The", max_tokens=12)).completions
    stop = whole.text[len(whole.text) // 2 :][:3]
    result = client.make_request(greedy("The", max_tokens=12, stop_sequences=["no such text", stop]))
    hold_together(result)
    (cut,) = result.completions
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == {"reason": "stop"}
    assert len(cut.tokens) < len(whole.tokens)


def test_an_end_of_text_is_named_as_helm_names_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make()
    ids = client._model.llm.generate(["The"], SamplingParams(max_tokens=6))[0].token_ids
    monkeypatch.setattr(client._model.llm.tokenizer, "eos_ids", frozenset({ids[3]}))
    (found,) = client.make_request(greedy("The")).completions
    assert found.finish_reason == {"reason": "endoftext"} and len(found.tokens) == ids.index(ids[3])


def test_completions_differ_and_can_be_had_again(make: Make) -> None:
    client, request = make(), asked("The quick", temperature=1.0, num_completions=3, top_p=0.95, max_tokens=8)
    first, again = client.make_request(request), client.make_request(request)
    other = client.make_request(asked("The quick", temperature=1.0, num_completions=3, top_p=0.95, max_tokens=8, random="1"))
    hold_together(first)
    assert len({one.text for one in first.completions}) == 3
    assert first.completions == again.completions != other.completions
    MODELS.close()
    assert make(seed=1).make_request(request).completions != first.completions
    (one, two) = make().make_request(greedy("The quick", num_completions=2)).completions
    assert one == two


@pytest.mark.parametrize("start", ["", START])
@pytest.mark.parametrize("tokens", [0, 5])
def test_an_echoed_prompt_has_the_log_probabilities_of_the_model(start: str, tokens: int, make: Make, model: Path) -> None:
    """The start token is there once, whether the tokenizer puts it before the text or HELM."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "The naïve fox, über 10 €"
    result = make().make_request(greedy(start + text, echo_prompt=True, max_tokens=tokens))
    (found,) = result.completions
    assert found.text.startswith(start + text) and result.success
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0]
    wanted = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    first = 1 if start else 0
    assert [token.logprob for token in found.tokens[first : first + len(wanted)]] == pytest.approx(wanted, abs=1e-4)
    assert len(found.tokens) == first + len(wanted) + tokens
    assert "".join(token.text for token in found.tokens[first:]) == found.text[len(start) :]
    assert not start or found.tokens[0].logprob == 0.0


def test_a_chat_is_written_down_by_the_models_template(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make(chat=True)
    template = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(client._model.llm.get_tokenizer(), "chat_template", template)
    of_prompt = client.make_request(greedy("Hi", echo_prompt=True)).completions
    said = [{"role": "user", "content": "Hi"}]
    of_messages = client.make_request(greedy("", messages=said, echo_prompt=True)).completions
    assert of_prompt == of_messages and of_prompt[0].text.startswith("[user]Hi")


# -- what is wrong ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": "a b c d " * 100}, "positions"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p is 0"),
        ({"embedding": True}, "embeddings"),
        ({"multimodal_prompt": MultimediaObject()}, "multimodal_prompt"),
        ({"prompt": "", "messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_its_result_and_not_tried_again(
    options: dict[str, Any], said: str, make: Make
) -> None:
    result = make().make_request(asked(**{"prompt": "The", "temperature": 0.0, **options}))
    assert not result.success and said in result.error and result.completions == []
    assert result.error_flags.is_retriable is False and result.error_flags.is_fatal is None
    assert "prompt 0" not in result.error


@pytest.mark.parametrize(("error", "raised"), [(ValueError("no room"), NonRetriableException), (OSError("no disk"), OSError)])
def test_an_error_of_the_engine_is_raised(
    error: Exception, raised: type[Exception], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> Iterator[object]:
        raise error

    client = make()
    monkeypatch.setattr(client._model.llm, "generate_arriving", fail)
    with pytest.raises(raised, match=str(error)):
        client.make_request(greedy("The"))
    monkeypatch.undo()
    assert client.make_request(greedy("The")).success


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_polcy": "h2o"}, "did you mean kv_policy"),
        ({"gather": -1}, "gather is -1; allowed is a number from 0 to 3600, in seconds"),
        ({"rows": 0}, "rows is 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_unknown_arguments_are_refused_when_the_client_is_made(options: dict[str, Any], said: str, make: Make) -> None:
    with pytest.raises(ValueError, match=said):
        make(**options)


# -- HELM's cache ----------------------------------------------------------------------------------------------------------


def test_what_is_cached_is_not_computed_again_and_other_settings_are_other_answers(make: Make, tmp_path: Path) -> None:
    cache = SqliteCacheConfig(str(tmp_path / "cache.sqlite"))
    first = make(cache).make_request(greedy("The quick"))
    MODELS.close()
    elsewhere = make(cache, gpu_batch_size=2, gather=0)  # says the same
    again = elsewhere.make_request(greedy("The quick"))
    assert (first.cached, again.cached) == (False, True) and first.completions == again.completions
    assert elsewhere._model.desks._thread is None
    for options, request in (
        ({"kv_policy": "h2o", "kv_budget": 0.5}, greedy("The quick")),
        ({"kv_codec": "group4"}, greedy("The quick")),
        ({}, greedy("The quick", echo_prompt=True)),
        ({}, greedy("The quick", random="2")),
        ({}, greedy("The quick", stop_sequences=["x"])),
    ):
        assert not make(cache, **options).make_request(request).cached


# -- helm-run --------------------------------------------------------------------------------------------------------------

PLUGIN = """
from helm.benchmark.adaptation.adapter_spec import ADAPT_GENERATION, ADAPT_LANGUAGE_MODELING
from helm.benchmark.adaptation.adapter_spec import ADAPT_MULTIPLE_CHOICE_SEPARATE_ORIGINAL as SEPARATE, AdapterSpec
from helm.benchmark.metrics.common_metric_specs import get_basic_metric_specs, get_language_modeling_metric_specs
from helm.benchmark.run_spec import RunSpec, run_spec_function
from helm.benchmark.scenarios.scenario import (
    CORRECT_TAG, TEST_SPLIT, TRAIN_SPLIT, Input, Instance, Output, Reference, Scenario, ScenarioSpec
)

METHODS = {"generation": ADAPT_GENERATION, "language": ADAPT_LANGUAGE_MODELING, "choice": SEPARATE}


class Foxes(Scenario):
    name, description, tags = "foxes", "Texts of the test.", []

    def __init__(self, method):
        super().__init__()
        self.is_text = method == "language"

    def get_instances(self, output_path):
        answers = ["fox", "dog", "jugs"]
        if self.is_text:  # longer than the model's context
            texts = [f"naïve café: {one}" + " jumps over the lazy dog." * 20 for one in answers]
            return [Instance(Input(text=one), [], TEST_SPLIT) for one in texts]
        return [self._instance(number, answers) for number in range(9)]

    def _instance(self, number, answers):
        references = [Reference(Output(text=one), [CORRECT_TAG] if one == answers[number % 3] else []) for one in answers]
        return Instance(Input(text=f"The quick brown {number}"), references, TRAIN_SPLIT if number < 2 else TEST_SPLIT)


@run_spec_function("foxes")
def foxes(method):
    adapter = AdapterSpec(
        method=METHODS[method], input_prefix="", output_prefix=" ", max_train_instances=0 if method == "language" else 1,
        max_tokens=4 if method == "generation" else 0, temperature=0.0, num_outputs=1,
        stop_sequences=[], model="", model_deployment="",
    )
    metrics = get_language_modeling_metric_specs([]) if method == "language" else get_basic_metric_specs(["exact_match"])
    spec = ScenarioSpec(class_name="foxes.Foxes", args={"method": method})
    return RunSpec(name=f"foxes:method={method}", scenario_spec=spec, adapter_spec=adapter, metric_specs=metrics)
"""


def shown(text: str) -> str:
    """What a run says of errors, without the lines that tell how it goes."""
    return "\n".join(line for line in text.splitlines() if " INFO " not in line)[-3000:]


def run(folder: Path, *arguments: str) -> None:
    """Runs helm-run in a folder, without a network, with a plugin beside it."""
    code = "import sys; from helm.benchmark.run import main; sys.exit(main())"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(folder)])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, "--plugins", "foxes", "--suite", "s", "--max-eval-instances", "6", *arguments]
    environment = {**os.environ, **offline, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, shown(done.stdout + done.stderr)


def test_a_run_of_several_models_and_kinds_of_requests(model: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "foxes.py").write_text(PLUGIN, encoding="utf-8")
    config, offload = load_script("helm_config"), tmp_path / "offload"
    sizes = ("--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "4", "--dtype", "float32", "--device", "cpu")
    common = (str(model), "--output", str(tmp_path / "prod_env"), *sizes, "--offload-dir", str(offload))
    for kept in ((), ("--kv-budget", "0.5")):
        assert config.main([*common, *kept]) == 0
    entries = [f"foxes:method={method}" for method in ("generation", "language", "choice")]
    models = ["h2o_flexgen/neox", "h2o_flexgen/neox-h2o-0.5"]
    run(tmp_path, "--run-entries", *entries, "--models-to-run", *models, "-n", "8")
    runs = tmp_path / "benchmark_output/runs/s"
    for entry, name in product(entries, models):
        folder = runs / f"{entry},model={name.replace('/', '_')}"
        state, stats = (json.loads((folder / f"{file}.json").read_text()) for file in ("scenario_state", "stats"))
        results = [(one["request"], one["result"]["completions"][0]) for one in state["request_states"]]
        for _, found in results:
            assert found["logprob"] == pytest.approx(sum(token["logprob"] for token in found["tokens"]))
            assert found["logprob"] < 0
        if "generation" in entry and name == models[0]:
            wanted = llm.generate([request["prompt"] for request, _ in results], SamplingParams(max_tokens=4))
            assert [found["text"] for _, found in results] == [one.text for one in wanted]
        if "language" in entry:
            assert len(results) > 3, "no text was longer than the context"
            assert any(one["name"]["name"] == "perplexity" for one in stats)
            for request, found in results:
                assert request["prompt"].removeprefix(START) == "".join(one["text"] for one in found["tokens"])
                assert len(found["tokens"]) == len(llm.tokenizer.encode_more(request["prompt"])) <= tiny.POSITIONS
    assert not list(offload.rglob("*")), "the process left files behind"
