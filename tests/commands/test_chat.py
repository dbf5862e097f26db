"""The chat command: turns from files and pipes, its commands, Ctrl-C, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from h2o_flexgen import chat
from h2o_flexgen.cli import chat_request, chat_work, run_request
from h2o_flexgen.cli.report.summary import peaks_entry
from h2o_flexgen.cli.terminal import printable
from h2o_flexgen.llm import LLM
from h2o_flexgen.policies.head_budgets import write_head_budgets
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import PlainStyle
from tests.checkpoints.test_adapters import matrices_of, save_adapter, values_in
from tests.helpers.commands import called
from tests.helpers.contract import head_budgets, kv_heads, kv_layers
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.planted import CPU_MEM, OVER, SAID, plant_a_peak
from tests.helpers.signals import as_in_a_terminal
from tests.helpers.threads import new_threads
from tests.helpers.tiny import save_tiny

BYTES = ("--tokenizer", "bytes")  # a tiny model comes without a tokenizer
ROLLING = ("--kv-policy", "h2o", "--heavy", "20", "--recent", "20", "--positions", "rolling")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-mixtral"
    save_tiny("mixtral", folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not new_threads(before)


@pytest.fixture
def talk(llama: Path, offload: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command over turns: status, what it said, the errors."""

    def run(turns: list[str], *flags: str) -> tuple[int, list[str], list[str]]:
        file = tmp_path / "turns.txt"
        file.write_text("\n".join(turns))
        arguments = ["--model", str(llama), "--input", str(file), "--dtype", "float32", "--gen-len", "6", "--ignore-eos"]
        status = chat.main([*arguments, *BYTES, "--offload-dir", str(offload), *flags])
        out, err = capfd.readouterr()
        return status, out.splitlines(), [line for line in err.splitlines() if line.startswith("error")]

    return run


def test_a_stop_token_that_the_model_does_not_have_is_refused_before_the_first_turn(talk: Any) -> None:
    status, _, errors = talk(["ab"], "--style", "plain", "--stop-token-id", "5000")
    assert status == 2 and len(errors) == 1 and errors[0].startswith("error: stop_token_ids has the token id 5000; ")


def test_each_turn_is_shown_with_its_reply_and_json_comes_last(talk: Any, llama: Path, offload: Path) -> None:
    status, out, errors = talk(["ab", "c"], "--style", "plain", "--percent", "0", "30", "0", "40", "0", "50")
    told = json.loads(out[-1])
    assert (status, errors) == (0, [])
    assert [turn["turn"] for turn in told["turns"]] == ["ab", "c"]
    assert "> ab" in out and "> c" in out
    with LLM(str(llama), tokenizer="bytes", dtype="float32", offload_dir=offload) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        first = llm.generate(["ab"], params)[0]
        text = [*llm.tokenizer.encode("ab"), *first.token_ids, *llm.tokenizer.encode("c")]
        second = llm.generate([text], params)[0]
    assert [turn["reply"] for turn in told["turns"]] == [first.text, second.text]
    for text in (first.text, second.text):
        assert "\n".join(printable(text).splitlines()) in "\n".join(out[:-1])
    assert told["seen"] == told["held"] == 2 + 6 + 1 + 5 and told["endless"] is False
    assert [turn["tokens_read"] for turn in told["turns"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "said", "asked"),
    [
        (
            ("--kv-recall", "0.5"),
            "full (--kv-recall 0.5), 128 slots a head, of which a step attends 50 %, up to 128 tokens",
            ["kv_recall"],
        ),
        (ROLLING, "h2o (--heavy 20 --recent 20 --positions rolling), ", ["heavy", "recent", "positions"]),
    ],
)
def test_a_talk_says_what_was_asked_of_its_policy(talk: Any, flags: tuple[str, ...], said: str, asked: list[str]) -> None:
    _, out, _ = talk(["ab"], *flags)
    assert out[0].split(": KV policy ")[1].startswith(said)
    assert [*json.loads(out[-1])["kept"]["asked"]] == asked


def test_a_talk_with_head_budgets_says_what_heads_keep_at_most_and_on_average(talk: Any, llama: Path, tmp_path: Path) -> None:
    heads, layers = kv_heads("llama-gqa"), kv_layers("llama-gqa")
    shares = tuple(tuple(0.5 if head == layer == 0 else 0.1 for head in range(heads)) for layer in range(layers))
    budgets = head_budgets(shares, heads)
    write_head_budgets(budgets, tmp_path / "heads.json")
    asked = ("--kv-policy", "h2o", "--kv-budget", f"{budgets.budgets[0]}", "--head-budgets", str(tmp_path / "heads.json"))
    _, out, errors = talk(["ab"], *asked)
    assert errors == []
    kept = json.loads(out[-1])["kept"]
    average = (64 + 12 * (heads * layers - 1)) / (heads * layers)
    said = f"64 slots at most a head and {average:.0f} on average ({100 * average / 128:.3g} % of 128 tokens), by head budgets "
    assert said in out[0] and kept["slots"] == 64 and kept["share"] == pytest.approx(average / 128, abs=1e-4)


def test_all_turns_have_the_adapter_that_is_given(talk: Any, llama: Path, tmp_path: Path) -> None:
    values = values_in(llama)
    shapes = {name: (values[name].shape[0], values[name].shape[1]) for name in matrices_of(values) if "lm_head" not in name}
    adapter = save_adapter(tmp_path / "adapter", shapes)
    replies = []
    for flags in ((), ("--lora", f"one={adapter}"), ("--adapter", str(adapter))):
        _, out, errors = talk(["ab", "c"], "--style", "plain", *flags)
        assert errors == []
        replies.append([turn["reply"] for turn in json.loads(out[-1])["turns"]])
    assert replies[1] == replies[2] != replies[0]
    for second in ("two=b", "one=b"):  # also where both have one name: another would not help
        _, _, errors = talk(["ab"], "--lora", f"one={adapter}", "--lora", second)
        advice = "give one, or merge several: --adapter PATH, once for each"
        assert errors == [f"error: --lora is one={adapter} and {second}, and all texts have one adapter here; {advice}"]


def test_a_talk_that_held_more_than_its_budget_says_so(talk: Any, monkeypatch: Any, capfd: Any) -> None:
    plant_a_peak(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr("h2o_flexgen.cli.chat_work.say_broken", lambda peaks: said.extend(peaks_entry(peaks).lines))
    status, out, _ = talk(["ab"], *CPU_MEM)
    assert status == 0 and json.loads(out[-1])["over_budget_bytes"]["host"] == OVER
    assert [line.startswith(SAID) for line in said] == [True]


def test_a_crowd_that_was_told_of_is_not_said_again_in_a_talk(talk: Any, monkeypatch: Any) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(chat_work.Chat, "run", lambda self, turns: seen.append(self.is_crowded))
    for told in (True, False):
        monkeypatch.setattr(chat_work, "say_threads", lambda *_, told=told: told)
        assert talk(["ab"])[0] == 0
    assert seen == [True, False]


def test_a_talk_goes_on_beyond_the_models_length(talk: Any) -> None:
    status, out, _ = talk(["hello you"] * 20, *ROLLING)
    told = json.loads(out[-1])
    assert status == 0 and told["endless"] and told["seen"] > 3 * 128 and told["held"] == 40
    assert any("no limit" in line for line in out)


def test_a_full_cache_ends_the_talk_with_a_clear_line(talk: Any) -> None:
    status, out, errors = talk(["hello you"] * 20)
    assert status == 2
    [error] = errors
    assert (
        "the conversation is full" in error
        and "the limit is the model's 128 positions; reset it, or keep less with rolling positions" in error
    )
    assert error.endswith("(/reset begins anew)")
    assert any(
        "the limit is the model's 128 positions; /reset begins anew" in line for line in out
    )  # said with the reply that reached it


def test_a_turn_that_cannot_be_written_ends_a_piped_talk_with_one_line(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> str:
        raise ValueError("the chat template may not do that")

    monkeypatch.setattr(PlainStyle, "turn", refused)
    status, _, errors = talk(["ab"], "--style", "plain")
    assert (status, errors) == (2, ["error: the chat template may not do that"])


def test_commands_between_the_turns(talk: Any) -> None:
    status, out, _ = talk(
        ["ab", "/stats", "/reset", "/stats", "ab", "/stats", "/help", "/quit", "never said"], "--style", "plain"
    )
    told = json.loads(out[-1])
    assert status == 0 and len(told["turns"]) == 2
    assert told["turns"][0]["reply"] == told["turns"][1]["reply"] and told["seen"] == 7
    assert [line for line in out if line.startswith("text: ")] == [
        f"text: {tokens} tokens in {turns} (the limit is 128)"
        for tokens, turns in ((7, "1 turn"), (0, "0 turns"), (7, "1 turn"))
    ]
    assert [line.split(" in ")[0] for line in out if line.startswith("generated: ")] == [
        f"generated: {tokens} tokens" for tokens in (5, 0, 5)
    ]
    assert any(line.startswith("KV cache: 7 of 128 slots a head") for line in out)
    assert any(line.startswith("generated: 5 tokens in ") and line.endswith(" tokens/s") for line in out)
    assert "all that was said is forgotten" in out


@pytest.mark.parametrize("kept", [0, 100])
def test_a_talk_says_what_became_of_guesses_and_why_there_are_none(
    kept: int, llama: Path, offload: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "turns.txt").write_text("a\n/stats")
    flags = ("--style", "plain", "--dtype", "float32", "--gen-len", 2, "--draft", "ngram", *BYTES)
    where = ("--percent", 0, 0, 0, kept, 0, 100, "--offload-dir", offload, "--input", tmp_path / "turns.txt")
    result = called(chat.main, capfd, "--model", llama, *flags, *where)
    assert result.status == 0 and "drafts: no token was guessed" in result.out
    assert any("--draft ngram guesses nothing: keys and values move" in line for line in result.err) == (kept == 0)


@pytest.mark.parametrize(("on_host", "context", "lines"), [(0, 60, 1), (0, 1, 1), (100, 60, 0)])
def test_a_talk_whose_experts_are_read_in_every_step_is_told_to_keep_them(
    on_host: int, context: int, lines: int, mixtral: Path, offload: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "turns.txt").write_text("a")
    flags = ("--style", "plain", "--dtype", "float32", "--gen-len", 1, "--context-len", context, *BYTES)
    where = ("--percent", 0, on_host, 0, 100, 0, 100, "--offload-dir", offload, "--input", tmp_path / "turns.txt")
    result = called(chat.main, capfd, "--model", mixtral, *flags, *where)
    found = [line for line in result.err if "of the experts of a layer" in line]
    assert result.status == 0 and len(found) == lines
    assert all(line.endswith("a talk has no other rows, so keep all in memory") for line in found)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--kv-policy", "h2o", "--hh-prompt-only", "--head-budgets", "equal"), "--hh-prompt-only keeps all that is generated"),
        (("--context-len", "500"), "context is 500, but"),
        (("--style", "template"), "this model has no chat template"),
        (("--kv-policy", "h20"), "--kv-policy 'h20' is unknown"),
        (("--percent", "auto"), "takes six numbers; got 'auto'"),
        (("--input", "/nowhere/turns.jsonl"), "input /nowhere/turns.jsonl cannot be read"),
        (("--cpu-mem", "200MB"), "plan needs"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_loaded(talk: Any, flags: tuple[str, ...], error: str) -> None:
    status, out, errors = talk(["hello"], *flags)
    assert status == 2 and len(errors) == 1 and error in errors[0]
    assert out == []


def test_a_context_that_was_asked_for_is_named_as_the_limit(talk: Any) -> None:
    status, _, errors = talk(["hello you"] * 9, "--context-len", "40")
    assert status == 2
    assert "the limit is 40 tokens, the context that was asked for" in errors[0]
    assert errors[0].endswith("(/reset begins anew; --context-len sets the limit)")


def test_without_a_model_it_talks_to_the_one_of_the_package() -> None:
    asked = chat_request.request_of(chat_request.parse(["--gen-len", "3"]))
    of_run = run_request.request_of(run_request.parse([]))
    assert (asked.model.name, asked.sampling.max_tokens) == (of_run.model.name, 3) == ("demo", 3)
    assert (replace(asked.sampling, max_tokens=of_run.gen_len), asked.seed) == (of_run.sampling, of_run.seed)
    assert chat_request.parse(["--temperature", "0"]).temperature == 0
    with pytest.raises(ValueError, match="random weights is missing; give --model"):
        chat_request.parse(["--dummy-weights"])


def test_nothing_that_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Talk:
        def reply(self, turn: str, params: object, show: Any, stop: object) -> Any:
            for piece in ("so\n\tit", " was\x1b", "]52;c;aGk=\x07", "\r\x9b2J"):
                show(piece)
            done = SimpleNamespace(text="", token_ids=(1,), finish_reason="stop")
            return SimpleNamespace(completion=done, tokens_read=1, prompt_seconds=0, decode_seconds=0, fills_context=False)

    style = SimpleNamespace(turn=lambda text, before: text)
    chat_work.Chat(Talk(), style, SamplingParams(), is_typed=False).run(["hello\x1b[31m"])  # type: ignore[arg-type]
    expected = "> hello\\x1b[31m\nso\n\tit was\\x1b]52;c;aGk=\\x07\\r\\x9b2J\n"
    assert capsys.readouterr().out == expected


def test_what_looks_like_a_command_is_no_turn_where_it_is_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    monkeypatch.setattr(chat_work.Chat, "reply", lambda chat, turn: turns.append(turn))
    for is_typed in (True, False):
        talk = chat_work.Chat(None, None, SamplingParams(), is_typed=is_typed)  # type: ignore[arg-type]
        talk.run(["/exit", "/rest", "/etc/hosts", "/exit the hall"])
    assert turns == ["/etc/hosts", "/exit the hall", "/exit", "/rest", "/etc/hosts", "/exit the hall"]
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["/exit is no command; /help names them", "/rest is no command; did you mean /reset?"]


# -- a terminal ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose positions can roll, and for which transformers imports less than for a LLaMA."""
    folder = tmp_path_factory.mktemp("models") / "tiny-neox"
    save_tiny("neox-parallel", folder)
    return folder


class Terminal:
    """The command as it is used: in a process of its own, typed to."""

    def __init__(self, *flags: str, program: Sequence[str] = ("-m", "h2o_flexgen.chat")) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, *program, *flags]
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=as_in_a_terminal)
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, f"{text}\n".encode())

    def stop_at(self, wanted: str) -> None:
        """Waits for text behind what was waited for before."""
        self._read_until(lambda: wanted in self.shown, repr(wanted))
        self.shown = self.shown.partition(wanted)[2]

    def see(self, count: int) -> None:
        """Waits for so many characters behind what was waited for before."""
        self._read_until(lambda: len(self.shown) >= count, f"{count} characters")

    def _read_until(self, is_so: Callable[[], bool], wanted: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{wanted} does not come: {self.shown[-2000:]!r}"
            try:
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                assert is_so(), self.shown[-2000:]

    def wait_for_a_turn(self) -> None:
        """Between showing a prompt and waiting behind it the command may keep a signal until the next key: here it waits."""
        self.stop_at("> ")
        end, process = time.monotonic() + PATIENCE_SECONDS, psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end
            time.sleep(0.005)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        status = self.process.wait(PATIENCE_SECONDS)
        os.close(self._ours)
        return status


def test_in_a_terminal_ctrl_c_stops_the_reply_and_not_the_talk(neox: Path, offload: Path) -> None:
    flags = ("--offload-dir", str(offload), *ROLLING, "--style", "plain", "--gen-len", "100000", "--ignore-eos")
    terminal = Terminal("--model", str(neox), *BYTES, "--temperature", "1", *flags)
    terminal.stop_at("> ")
    terminal.type("hello")
    terminal.stop_at("hello")
    terminal.see(200)  # of a reply that would take minutes: what readline adds to a line is shorter
    terminal.interrupt()
    terminal.type("/stats")
    terminal.stop_at("in 1 turn (no limit)")
    terminal.stop_at("at most")
    terminal.wait_for_a_turn()
    terminal.interrupt()
    terminal.stop_at("/quit (or Ctrl-D) leaves")
    terminal.type("/quit")
    assert terminal.close() == 0


HELD = """
import sys
from itertools import count
from threading import Event
from h2o_flexgen import chat
from h2o_flexgen.engine import conversation
at, reply, asks = conversation._at, conversation.Conversation.reply, []
def replying(self, turn, params, show, stop):
    asks.append(stop)
    return reply(self, turn, params, show, stop)
def held_at(layer):
    is_at = at(layer)
    def waiting(task):
        if next(tasks) == 100:
            print("in a pass", flush=True)
            while not asks[0]():
                Event().wait(0.01)  # a signal that another thread takes up is heard between two waits
            print("asked to stop", flush=True)
            while True:
                Event().wait(0.01)
        return is_at(task)
    return waiting
tasks, conversation._at, conversation.Conversation.reply = count(), held_at, replying
sys.exit(chat.main())
"""


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(neox: Path, offload: Path) -> None:
    """Both come in one pass over a turn that is read token by token: it waits for them."""
    flags = ("--offload-dir", str(offload), *ROLLING, "--gen-len", "100", "--ignore-eos")
    terminal = Terminal("--model", str(neox), *BYTES, "--prefill-tokens", "1", *flags, program=("-c", HELD))
    terminal.stop_at("> ")
    terminal.type("hello " * 60)
    for shown in ("in a pass", "asked to stop"):
        terminal.stop_at(shown)
        terminal.interrupt()
    terminal.stop_at("interrupted")
    assert terminal.close() == 130


def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(
    llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "converse", lambda *asked, **how: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert chat.main(["--model", str(llama)]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert f"{llama} has no tokenizer (it has none of tokenizer.json, " in error and "--tokenizer" in error
