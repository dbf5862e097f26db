"""LLM as Python users meet it: nothing that is asked for is dropped in silence, and every stage is told."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from h2o_flexgen import LLM, Machine, Plan, SamplingParams
from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.reports import Stage
from h2o_flexgen.planning.machine import find_machine
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.profiling import profile_cache
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.session import loaded_model
from h2o_flexgen.session.plan_finder import PlanFinder
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.real_tokenizers import save_byte_level
from tests.helpers.refusals import one_line
from tests.helpers.tiny import VOCAB, save_tiny

Told = list[tuple[Stage, int, int]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bufers": 3}, r"unknown option 'bufers'; did you mean buffers\?"),
        ({"cpu_men": "8GB"}, r"unknown option 'cpu_men'; did you mean cpu_mem\?"),
        ({"plan": Plan(), "slotz": 3}, "unknown option 'slotz'"),
        ({"plan": Plan(), "slots": 3}, "both plan and slots are given"),
        ({"plan": "auto"}, "plan is a str; give a Plan, or leave it out and name its options here"),
        ({"plan": Plan(), "percent": (0, 100, 0, 100, 0, 100)}, "both plan and percent are given"),
        ({"schedule": "zigzagg"}, "'zigzagg' is unknown; known: zigzag"),
        ({"kv_policy": "h20"}, "'h20' is unknown; known: full, h2o"),
        ({"kv_policy": "local", "heavy": 3}, "'local' does not take heavy"),
        ({"percent": (0, 0, 0)}, "percent takes six numbers"),
        ({"schedule": "flexgen_barrier", "overlap": False}, "schedule='flexgen_barrier' cannot do without overlap"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_a_model_is_looked_for(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LLM("/no/such/model", **options)  # type: ignore[arg-type]
    assert "--" not in str(caught.value), "Python knows no flags"


def test_a_plan_is_taken_as_it_is(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    plan = Plan(gpu_batch_size=3, schedule=list(SCHEDULES)[-1]).with_percent((0, 100, 0, 100, 0, 100))
    with LLM(str(tmp_path), plan=plan, device="cpu") as llm:
        assert llm.loaded.requested == llm.plan == plan
    with LLM(str(tmp_path), plan=plan, device="cpu", overlap=False) as llm:
        assert llm.plan == plan.without_overlap()


def test_another_plan_can_be_adopted_until_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=10**9, used=0, free=10**9))
    save_tiny("opt", tmp_path / "model")
    packed = Plan(weight_codec="group4").with_percent((50, 50, 0, 100, 0, 100))
    with LLM(str(tmp_path / "model"), device="cpu") as llm:
        assert llm.loaded.packing is None and llm.limits.disk == 10**9
        llm.adopt(packed)
        assert llm.loaded.requested == packed and llm.plan == packed.folded()
        assert llm.spec.layers[1].matrices[0].format == "tiles4"
        assert llm.loaded.packing is not None and llm.limits.disk == 10**9 - llm.loaded.packing[1] < 10**9
        (found,) = llm.generate([[7, 8]], SamplingParams(max_tokens=2))
        assert len(found.token_ids) == 2
        with pytest.raises(ValueError, match="are already loaded under another plan; make a new LLM"):
            llm.adopt(Plan())
    with pytest.raises(ValueError, match="is closed"):
        llm.adopt(Plan())


def test_converting_bin_files_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny("opt", tmp_path / "model", safe=False)
    told: Told = []
    for times in (1, 2):
        with LLM(str(tmp_path / "model"), device="cpu", on_stage=lambda *one: told.append(one)):
            sizes = [(done, total) for stage, done, total in told if stage is Stage.CONVERTING]
        assert len(told) == len(sizes) > 3, f"a second time it is there already ({times})"
        assert sizes == sorted(sizes) and sizes[-1][0] == sizes[-1][1] > 0


def test_random_weights_tell_how_many_are_written_and_then_that_the_rest_is_loaded(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model")
    opened: Told = []
    told: Told = []
    options = {"percent": (0, 50, 0, 100, 0, 100), "offload_dir": tmp_path, "device": "cpu", "dummy_weights": True}
    with LLM(str(tmp_path / "model"), on_stage=lambda *one: opened.append(one), **options) as llm:  # type: ignore[arg-type]
        for prompt in ([7, 8], [9]):
            llm.generate([prompt], SamplingParams(max_tokens=2), on_stage=lambda *one: told.append(one))
        llm.generate([[5]], SamplingParams(max_tokens=1))
    stages = [stage for stage, _, _ in told]
    writing = stages.count(Stage.WRITING)
    once = [Stage.LOADING, *[Stage.WRITING] * writing, Stage.LOADING, Stage.GENERATING]
    assert writing > 3 and stages == [*once, Stage.GENERATING]
    assert all((total > 0) == (stage is Stage.WRITING) for stage, _, total in told)
    assert opened == [(Stage.GENERATING, 0, 0)], "a listener of one call hears the others no more"


def test_the_peak_of_a_process_is_its_own_and_not_that_of_its_parent() -> None:
    held = bytearray(b"1") * 900_000_000  # more than a process takes that imports torch
    code = "from h2o_flexgen.memory.host import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50_000_000 < int(done.stdout) < len(held)


def test_what_other_engines_take_is_answered_with_what_to_write_here() -> None:
    with pytest.raises(ValueError, match=r"'gpu_memory_utilization': write gpu_mem=.*, and 'swap_space': percent="):
        LLM("/no/such/model", gpu_memory_utilization=0.9, swap_space=4)
    for asked in ({"tokenizer": object()}, {"model": torch.nn.Linear(1, 1)}):
        with pytest.raises(ValueError, match=r"(tokenizer is a object|model is a Linear); give a name on the hub, or a folder"):
            LLM(**{"model": DEMO, **asked})
    with pytest.raises(ValueError, match=r"gpu_mem '4GB' is for a GPU, and this model computes on the CPU; leave it out"):
        LLM(DEMO, device="cpu", gpu_mem="4GB")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
@pytest.mark.parametrize("dummy_weights", [False, True])
def test_what_goes_without_being_closed_leaves_no_descriptor_and_no_thread(dummy_weights: bool, tmp_path: Path) -> None:
    def open_files() -> list[str]:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sorted(os.readlink(link) for link in links if os.path.islink(link))  # one was that of the listing

    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    llm = LLM("demo", dummy_weights=dummy_weights, device="cpu", percent=(0, 0, 0, 0, 0, 0), offload_dir=tmp_path)
    llm.generate(["Once"], SamplingParams(max_tokens=2))
    assert len(open_files()) >= len(files) + 2, "weights and KV are on the disk"
    del llm
    gc.collect()
    assert open_files() == files
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_closed_model_holds_no_weights_though_no_garbage_is_collected(graphs: str) -> None:
    """What waits in circles of references is freed when memory is searched, which may be long after."""
    gc.collect()
    gc.disable()
    try:
        with LLM(DEMO, gpu_batch_size=2, graphs=graphs) as llm:
            llm.generate(["The ", "A "], SamplingParams(max_tokens=3))
            held = weakref.ref(llm.loaded.ready(lambda *told: None))
        assert held() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(model=DEMO, dtype=torch.float32, device="cpu", gpu_batch_size=2) as llm:
        yield llm


def test_prompts_of_every_form_have_the_same_completions(demo: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    text = "The old man"
    ids = demo.tokenizer.encode(text)
    (as_text,) = demo.generate(text, sampling_params=params)
    assert (as_text.prompt, list(as_text.prompt_token_ids), as_text.finish_reason) == (text, ids, "length")
    encoded = demo.get_tokenizer()([text, "She"], padding=False)  # type: ignore[operator]
    for given in (ids, {"prompt_token_ids": ids}, torch.tensor(ids), [ids], iter([text]), {"prompt": text}, encoded):
        assert demo.generate(given, params)[0].token_ids == as_text.token_ids
    assert demo.generate([]) == demo.generate(iter(())) == []
    for wrong, advice in (
        ({"max_new_tokens": 5}, "'max_new_tokens': in SamplingParams: it is called max_tokens"),
        ({"params": params}, "'params': write sampling_params="),
        ({"sampling_params": {"max_tokens": 3}}, r"sampling_params is {'max_tokens': 3}; write SamplingParams\("),
        ({"sampling_params": {}}, r"sampling_params is {}; write SamplingParams\("),
        ({"sampling_params": 3}, r"sampling_params is 3; write SamplingParams\("),
        ({"sampling_params": [0]}, r"sampling_params is 0; write SamplingParams\("),
        ({"sampling_params": []}, "1 prompts came with 0 sampling params; give one for all or one for each"),
    ):
        with pytest.raises(ValueError, match=advice):
            demo.generate(text, **wrong)  # type: ignore[arg-type]


def test_texts_are_scored_as_their_tokens_are(demo: LLM) -> None:
    whole, start = demo.tokenizer.encode("The old man sat"), len(demo.tokenizer.encode("The old man"))
    by_text, by_ids = demo.score([("The old man", " sat"), (whole[:start], whole[start:])])
    assert by_text.logprobs == by_ids.logprobs


def test_a_chat_is_answered_as_the_text_that_it_is_written_as(demo: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who sat there?"}]
    written = "Be brief.\n\nUser: Who sat there?\nAssistant:"
    (expected,) = demo.generate(written, replace(params, stop="\nUser:"))
    (alone,), (first, second) = demo.chat(chat, params), demo.chat([chat, chat[1:]], params)
    assert alone == expected and first == expected and second.index == 1 and second.prompt == written.partition("\n\n")[2]
    with pytest.raises(ValueError, match="has no chat template"):
        demo.chat(chat, style="template")


def test_progress_is_shown_on_stderr_or_on_the_bar_that_is_given(demo: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    texts, params = ["One", "Two", "Three"], SamplingParams(max_tokens=2)
    counts, heard, done = list[int](), list[int](), list[int]()

    def bar(total: int, desc: str, unit: str) -> SimpleNamespace:
        return SimpleNamespace(update=counts.append, close=lambda: counts.append(-total))

    demo.generate(texts, params, use_tqdm=bar, on_token=lambda place, *_: heard.append(place))
    assert counts == [1, 1, 1, -3] and sorted(heard) == [0, 0, 1, 1, 2, 2]
    capfd.readouterr()
    demo.generate(texts, params, on_completion=lambda one: done.append(one.index))
    assert sorted(done) == [0, 1, 2] and capfd.readouterr().err == ""
    demo.generate(texts, params, use_tqdm=True)
    assert "3/3" in capfd.readouterr().err.splitlines()[-1]


# -- a model without a tokenizer -----------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_takes_token_ids_and_gives_token_ids(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path)
    with LLM(tmp_path, device="cpu") as llm:
        heard: list[str | None] = []
        (found,) = llm.generate([7, 8], SamplingParams(max_tokens=3), on_token=lambda place, token, text: heard.append(text))
        assert found.text == "" and len(found.token_ids) == 3 and heard == [None] * 3
        assert llm.score([([7], [8, 9])])[0].logprob < 0
        chat = [{"role": "user", "content": "hello"}]
        for ask in (partial(llm.generate, "a"), partial(llm.score, [("a", "b")]), partial(llm.chat, chat)):
            with pytest.raises(ValueError, match=r"has no tokenizer .it has none of tokenizer\.json"):
                ask()
        with pytest.raises(ValueError, match="stop is a text, but this model has no tokenizer"):
            llm.generate([7, 8], SamplingParams(stop="x"))
        with llm.converse() as talk:
            assert len(talk.reply([7, 8], SamplingParams(max_tokens=2)).completion.token_ids) == 2
            with pytest.raises(ValueError, match="has no tokenizer"):
                talk.reply("The ferry")
            with pytest.raises(ValueError, match=r"sampling_params is {}; write SamplingParams"):
                talk.reply([7, 8], {})  # type: ignore[arg-type]
    with LLM(tmp_path, device="cpu", tokenizer="bytes") as llm:
        (as_bytes,) = llm.generate("ab", SamplingParams(max_tokens=3))
        assert as_bytes.prompt_token_ids == tuple(ByteTokenizer(VOCAB).encode("ab")) and as_bytes.text


def test_a_tokenizer_that_is_not_there_is_named_as_one(tmp_path: Path) -> None:
    said = one_line(lambda: LLM("demo", device="cpu", tokenizer=tmp_path / "none"))
    assert said.startswith(f"no tokenizer '{tmp_path}/none': ") and "dummy" not in said
    assert said.endswith("; give a folder or a GGUF file with a tokenizer, a hub name, or bytes")


def test_a_config_without_an_architecture_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert one_line(lambda: LLM(tmp_path)) == (
        "the config names no architecture (model_type); give the folder of a Hugging Face checkpoint"
    )


def test_the_tokenizer_of_another_folder_is_taken(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "model", vocab_size=320)
    save_byte_level(tmp_path / "tokenizer")
    with LLM(tmp_path / "model", device="cpu", tokenizer=tmp_path / "tokenizer") as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1))[0].prompt_token_ids[0] == 0


# -- a plan that is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "finds"),
    [
        ((60, 4), (20, 30), 2),
        ((100, 4), (20, 100), 2),  # more positions than the model has, together
        ((20, 4), (20, None), 2),  # no tokens to generate: the prompt is scored, which takes memory beside the plan
        ((20, None), (20, 2), 1),
    ],
)
def test_calls_of_two_kinds_in_turn_are_planned_for_once_each(
    first: tuple[int, int | None], second: tuple[int, int | None], finds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_cache, "profiled", lambda *asked, **how: find_machine("cpu-2core"))
    monkeypatch.setattr(PlanFinder, "_plan_with_room", lambda *_: None)
    held_back, searched = list[int](), PlanFinder._searched
    monkeypatch.setattr(
        PlanFinder, "_searched", lambda self, need, shown: held_back.append(need.held_back) or searched(self, need, shown)
    )
    save_tiny("opt", tmp_path)
    with LLM(tmp_path, dtype="float32", device="cpu", percent="auto", gpu_batch_size=1, num_gpu_batches=1) as llm:
        for length, gen_len in (first, second, first, second):
            if gen_len is None:
                llm.score([([7] * length, [8, 9])])
            else:
                llm.generate([[7] * length], SamplingParams(max_tokens=gen_len))
    assert len(held_back) == finds and (max(held_back) > 0) == (None in (first[1], second[1]))


def test_percent_auto_finds_a_plan_for_the_first_prompts_and_another_when_they_are_outgrown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str | None]()

    def known(device: object, folder: object, dtype: str | None, **how: object) -> Machine:
        measured.append(dtype)
        return find_machine("cpu-2core")

    monkeypatch.setattr(profile_cache, "profiled", known)
    save_tiny("opt", tmp_path)
    prompts = [[7 + place, 8] for place in range(9)]
    params = SamplingParams(max_tokens=4)
    with LLM(tmp_path, dtype="float32", device="cpu") as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params)]
    with LLM(tmp_path, dtype="float32", device="cpu", percent="auto") as llm:
        assert llm.generate(prompts, params)[0].token_ids == expected[0]
        assert llm.plan.block_size == 9 and not measured, "what fits with room to spare needs no profile"
    monkeypatch.setattr(PlanFinder, "_plan_with_room", lambda *_: None)
    with LLM(tmp_path, dtype="float32", device="cpu", percent="auto", num_gpu_batches=1) as llm:
        with pytest.raises(ValueError, match="for a conversation give six numbers"):
            llm.converse()
        plans = []
        for count in (1, 9, 4):
            assert [one.token_ids for one in llm.generate(prompts[:count], params)] == expected[:count]
            plans.append(llm.plan)
        assert plans[0].block_size == 1 and plans[1].block_size > 1, "a block of one row would serve nine prompts badly"
        assert plans[2] is plans[1], "fewer prompts go with the plan that there is"
        assert {plan.num_gpu_batches for plan in plans} == {1} and measured == ["float32"]
        limits = llm.limits
        llm.loaded.limits = replace(limits, host=1)
        with pytest.raises(DoesNotFit, match="no plan fits"):
            llm.generate([[7] * 50], params)
        llm.loaded.limits = limits
        (scored,) = llm.score([(prompts[0], expected[0])])
        assert scored.greedy == expected[0]
        with llm.converse() as talk, pytest.raises(ValueError, match=r"a conversation of .* is open"):
            talk.reply(prompts[0])
            llm.generate([[7] * 100], params)
    with pytest.raises(ValueError, match=r"percent is 'best'; give six numbers, or 'auto' to have a plan found$"):
        LLM(tmp_path, percent="best")


def test_a_process_keeps_little_of_what_was_freed_where_a_plan_fits_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[bool]()
    monkeypatch.setattr(loaded_model, "keep_little_freed", lambda: kept.append(True))
    with LLM(DEMO, device="cpu", percent=(100, 0, 100, 0, 100, 0)) as llm:
        workload = Workload.uniform(1, 4, 2)
        planned = llm.check(workload)
        assert kept == []
        llm.loaded.limits = replace(llm.limits, host=llm.limits.needs(planned.footprint, "host") + 1)
        llm.check(workload)
    assert kept == [True]
