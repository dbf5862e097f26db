"""The peers of the comparison, on tiny models: those that are installed run, the others are skipped with what they lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.baselines.__main__ import RUN
from benchmarks.baselines.accelerate_offload import on_cpu
from benchmarks.baselines.deepspeed_zero import zero_config
from benchmarks.baselines.hugging_face import cached, empty_cache, generate_greedily, lengthen_cache, loading, prompts_of
from benchmarks.baselines.jit_builds import building_in
from benchmarks.baselines.request import Answer, Request
from benchmarks.baselines.sizes import kv_bytes, weight_bytes
from benchmarks.baselines.systems import system_named
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.samples import first_of, slow
from tests.helpers.tiny import BLOCKS, VOCAB, save_tiny

ROOT = Path(__file__).parents[2]
PEERS = ["transformers", "accelerate", "airllm", "flexgen", slow("deepspeed")]  # the last one compiles
LAYOUTS = ["opt", "llama-gqa", "neox-parallel"]


@pytest.fixture(scope="module", params=first_of(LAYOUTS, 1))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return str(folder)


def asked(checkpoint: str, scratch: Path, **changes: Any) -> Any:
    plain = Request("transformers", checkpoint, "float32", "cpu", 2, 12, 10, None, None, None, str(scratch))
    return replace(plain, **changes)


def answer_of(request: Any) -> Any:
    """From a process of its own, as compare.py runs it."""
    command = [sys.executable, "-m", "benchmarks.baselines", RUN, request.to_json()]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        input="\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    word, answer = done.stdout.splitlines()
    assert word == "ready"
    return Answer.from_json(answer)


@pytest.mark.parametrize("peer", [slow(peer) if peer == "accelerate" else peer for peer in PEERS])
def test_a_peer_that_is_installed_answers(peer: str, checkpoint: str, tmp_path: Path) -> None:
    """Every peer with every layout, each whole or shortened: every two of the three meet. One has a process of its own."""
    places = PEERS.index(peer) if peer in PEERS else 0, LAYOUTS.index(Path(checkpoint).name.rstrip("0123456789"))
    steps = None if sum(places) % 2 else 2
    request = asked(checkpoint, tmp_path, system=peer, steps=steps)
    lacking = system_named(peer).missing(request)
    if lacking is not None:
        pytest.skip(f"{peer}: {lacking}")
    alone = peer == "deepspeed" or (peer == PEERS[1] and not places[1])
    answer = answer_of(request) if alone else system_named(peer).run(request, lambda: None)
    assert len(answer.step_seconds) == (9 if steps is None else 2)
    assert answer.prefill_seconds > 0 and min(answer.step_seconds) > 0
    assert answer.peak_host_bytes > 0 and answer.versions["torch"] and answer.placement
    assert ("last step, 21 tokens held" in answer.notes) == (steps is not None)


@pytest.mark.parametrize("steps", [None, 2])
def test_continuous_batching_answers_and_says_what_generate_says(
    steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama-gqa", tmp_path)
    request = asked(str(tmp_path), tmp_path, system="continuous batching", steps=steps, options={"batch_tokens": 16})
    system = system_named("continuous batching")
    if (lacking := system.missing(request)) is not None:
        pytest.skip(lacking)
    from benchmarks.baselines.hugging_face import Course

    said: list[list[list[int]]] = []
    answer_as_before = Course.answer
    monkeypatch.setattr(
        Course, "answer", lambda self, *words: said.append(self.tokens.tolist()) or answer_as_before(self, *words)
    )
    answer = system.run(request, lambda: None)
    assert len(answer.step_seconds) == (9 if steps is None else 2) and answer.prefill_seconds > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **loading(request)).eval()
    whole = generate_greedily(model, replace(request, steps=None), VOCAB)
    assert said == [whole.tokens.tolist() if steps is None else whole.tokens[:, :1].tolist()]


def test_the_loop_says_what_generate_says(checkpoint: str, tmp_path: Path) -> None:
    request = asked(checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **loading(request)).eval()
    prompts = prompts_of(request, VOCAB)
    assert len({tuple(row) for row in prompts.tolist()}) == request.rows
    wanted = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0
    )
    assert generate_greedily(model, request, VOCAB).tokens.tolist() == wanted[:, 12:].tolist()


def test_a_shortened_run_begins_like_a_whole_one(checkpoint: str, tmp_path: Path) -> None:
    request = asked(checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **loading(request)).eval()
    whole = generate_greedily(model, request, VOCAB)
    shortened = generate_greedily(model, replace(request, steps=2), VOCAB)
    assert shortened.tokens.tolist() == whole.tokens[:, :1].tolist()


def test_steps_that_reach_past_the_end_are_refused(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 steps do not fit in the second half of 10 tokens"):
        generate_greedily(None, asked(checkpoint, tmp_path, steps=4), VOCAB)


def test_a_lengthened_cache_has_the_length_and_the_positions_that_follow(checkpoint: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **loading(asked(checkpoint, tmp_path))).eval()
    tokens = torch.arange(2 * 5).reshape(2, 5)
    with torch.inference_mode():
        cache = model(input_ids=tokens, past_key_values=empty_cache(model), use_cache=True).past_key_values
        held = [(keys.clone(), values.clone()) for keys, values in states_of(cache)]
        lengthen_cache(cache, 9)
        assert cache.get_seq_length() == 9
        for (keys, values), (keys_before, values_before) in zip(states_of(cache), held):
            assert keys.shape == values.shape == (*keys_before.shape[:2], 9, keys_before.shape[3])
            assert torch.equal(keys[:, :, :5], keys_before) and torch.equal(values[:, :, :5], values_before)
        implied = model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        assert implied.past_key_values.get_seq_length() == 10
        lengthened = [(keys[:, :, :9], values[:, :, :9]) for keys, values in states_of(implied.past_key_values)]
        again = rebuilt(model, lengthened)
        said = model(input_ids=tokens[:, :1], past_key_values=again, use_cache=True, position_ids=torch.full((2, 1), 9))
        torch.testing.assert_close(implied.logits, said.logits)


def test_what_a_layer_held_is_given_back_before_the_next_one_grows(checkpoint: str, tmp_path: Path) -> None:
    """Or a system that is lengthened would need the keys and values of all layers twice, which no step does."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **loading(asked(checkpoint, tmp_path))).eval()
    with torch.inference_mode():
        cache = model(
            input_ids=torch.arange(10).reshape(2, 5), past_key_values=empty_cache(model), use_cache=True
        ).past_key_values
        held = [weakref.ref(states) for both in states_of(cache) for states in both]
        update, alive = cache.update, list[int]()

        def noted(*given: Any) -> Any:
            alive.append(sum(one() is not None for one in held))
            return update(*given)

        cache.update = noted
        lengthen_cache(cache, 9)
    assert len(held) > 2 and alive == [*range(len(held), 0, -2)]


def states_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [cached(cache, layer) for layer in range(len(cache.layers))]


def rebuilt(model: Any, states: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    return cache


@pytest.mark.parametrize("kind", LAYOUTS)
def test_accelerate_finds_the_layers_of_every_model(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    save_tiny(kind, tmp_path)
    device_map = on_cpu(asked(str(tmp_path), tmp_path, options={"resident_layers": 1}))["device_map"]
    places = [place for name, place in device_map.items() if name.rpartition(".")[2].isdigit()]
    assert places == ["cpu", *["disk"] * (BLOCKS - 1)]
    assert set(device_map.values()) == {"cpu", "disk"} and any("embed" in name for name in device_map)


def test_what_does_not_fit_in_memory_is_missing_for_transformers(checkpoint: str, tmp_path: Path) -> None:
    small = asked(checkpoint, tmp_path, host_bytes=1000)
    assert "do not fit in memory, the cap is 0.00 GB" in system_named("transformers").missing(small)
    assert system_named("transformers").missing(replace(small, host_bytes=None)) is None


def test_weights_and_kv_are_counted_from_headers_alone(tmp_path: Path) -> None:
    model = save_tiny("llama-gqa", tmp_path)
    request = asked(str(tmp_path), tmp_path, dtype="bfloat16")
    assert weight_bytes(request) == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert kv_bytes(request) == 2 * 21 * BLOCKS * 2 * (2 * 12) * 2  # rows, tokens, layers, keys and values, heads, bytes


def test_missing_says_what_is_lacking(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    request = asked(str(tmp_path), tmp_path)
    nowhere = patch("benchmarks.baselines.installed.find_spec", return_value=None)
    with nowhere:
        assert "pip install accelerate" in system_named("accelerate").missing(request) or "transformers" in system_named(
            "accelerate"
        ).missing(request)
        assert "DS_BUILD_OPS=0" in system_named("deepspeed").missing(request)
        assert system_named("airllm").missing(request) == "airllm is not installed: pip install airllm"
    everything = patch("benchmarks.baselines.installed.find_spec", return_value=object())
    with everything:
        assert "AirLLM has no opt" in system_named("airllm").missing(request)
        assert "CUDA devices only" in system_named("flexgen").missing(request)
        assert "float16 only" in system_named("flexgen").missing(replace(request, device="cuda"))
        with patch("benchmarks.baselines.deepspeed_zero.shutil.which", return_value=None):
            assert "g++" in system_named("deepspeed").missing(request)
        with patch("benchmarks.baselines.deepspeed_zero.find_library", return_value=None):
            assert "libaio" in system_named("deepspeed").missing(request)


def test_a_killed_build_does_not_hang_the_next_one(tmp_path: Path) -> None:
    mark = tmp_path / "async_io" / "lock"
    mark.parent.mkdir()
    mark.touch()
    with patch.dict(os.environ), building_in(tmp_path):
        assert not mark.exists() and os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
        mark.touch()  # a build that lives
    assert mark.exists() and os.environ.get("TORCH_EXTENSIONS_DIR") != str(tmp_path)


def test_a_build_waits_for_one_that_lives(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from benchmarks.baselines.jit_builds import building_in\n"
    script += "with building_in(Path(sys.argv[1])): print('in', flush=True)"
    with building_in(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=1)
    said, _ = other.communicate(timeout=PATIENCE_SECONDS)
    assert said.split() == [b"in"]


def test_deepspeeds_buffers_hold_the_largest_parameter(tmp_path: Path) -> None:
    save_tiny("llama-gqa", tmp_path)
    offload = zero_config(asked(str(tmp_path), tmp_path))["zero_optimization"]["offload_param"]
    assert (offload["device"], offload["buffer_size"], offload["nvme_path"]) == ("nvme", VOCAB * 32, str(tmp_path))
    in_memory = zero_config(asked(str(tmp_path), tmp_path, options={"tier": "cpu"}))["zero_optimization"]["offload_param"]
    assert in_memory["device"] == "cpu" and "buffer_size" not in in_memory


def test_words_survive_the_way_between_processes(tmp_path: Path) -> None:
    request = asked("somewhere", tmp_path, options={"resident_layers": 2})
    assert Request.from_json(request.to_json()) == request
    assert json.loads(request.to_json())["options"] == {"resident_layers": 2}
