"""A limit of host memory holds for the whole process to its end: what is sampled from outside never exceeds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from h2o_flexgen.engine.resources import COMPILED_PRODUCTS
from h2o_flexgen.memory.host import KEPT_PRODUCTS, give_back_freed
from h2o_flexgen.planning.plan import Plan
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.samples import first_of
from tests.helpers.tiny import save_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what another process holds is read in /proc")

SIZES = ("--gpu-batch-size", "4", "--num-gpu-batches", "2", "--num-prompts", "8", "--prompt-len", "64", "--gen-len", "12")
PLANS = (
    ("--percent", "0", "30", "0", "40", "0", "50"),
    ("--percent", "auto", "--machine", "cpu-2core"),  # the search must find one that leaves room for what it has left itself
)


TRIES = 5


class Ran(NamedTuple):
    status: int
    document: dict
    seen: int  # the most that was seen from outside
    errors: str


class Told(NamedTuple):
    limit: int
    seen: int  # the most that was seen from outside
    peak: int  # the most that the run told of
    process: int  # alike, with what was held behind it to measure the machine
    over: int


def _under_a_tight_budget(flags: Sequence[str], needs: Ran, again: Callable[[], Ran]) -> Told:
    """A process begins with some MB more or less each time, and is right to refuse where that is what lacks."""
    for _ in range(TRIES):
        limit = int(1.01 * needs.document["needed_bytes"]["host"])
        ran = _ran([*flags, "--cpu-mem", str(limit)])
        if ran.status == 0:
            over = ran.document["over_budget_bytes"]["host"]
            return Told(limit, ran.seen, ran.document["peak_bytes"]["host"], ran.document["process_peak_bytes"], over)
        assert ran.status == 2 and "the limit is" in ran.errors, ran.errors
        needs = again()
    raise AssertionError(f"refused {TRIES} times: {ran.errors}")


def _ran(argv: Sequence[str]) -> Ran:
    command = [sys.executable, "-m", "h2o_flexgen.run", *argv]
    seen, page = 0, os.sysconf("SC_PAGE_SIZE")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if words := Path(f"/proc/{process.pid}/statm").read_text().split():
                seen = max(seen, int(words[1]) * page)
            time.sleep(0.001)
        out, errors = process.communicate()
    return Ran(process.returncode, json.loads(out.splitlines()[-1]) if process.returncode == 0 else {}, seen, errors)


@pytest.mark.parametrize("plan", first_of(PLANS, 1))
def test_no_sample_exceeds_a_tight_budget_and_the_peak_that_is_told_is_the_processes(
    plan: tuple[str, ...], tmp_path: Path
) -> None:
    """Under a limit 1 % above what the first plan says that it needs."""
    save_tiny("opt", tmp_path, hidden_size=512, num_attention_heads=8, ffn_dim=2048, word_embed_proj_dim=512)
    flags = ["--model", str(tmp_path), "--device", "cpu", "--offload-dir", str(tmp_path / "off"), *SIZES]
    dry = partial(_ran, [*flags, *PLANS[0], "--dry-run"])
    one = _under_a_tight_budget([*flags, *plan], dry(), dry)
    assert one.seen <= one.limit and one.peak <= one.process <= one.limit and not one.over, one
    assert one.process >= one.seen - (1 << 20), one  # what is seen in /proc is counted page by page, and late


def test_a_plan_that_is_found_leaves_room_for_what_the_search_holds(checkpoints: Checkpoints, offload: Path) -> None:
    give_back_freed()
    with Case("opt").open(checkpoints, offload) as llm:
        before = llm.limits.host_base
        held = torch.ones(16 << 20)
        llm.adopt(Plan())
        assert llm.limits.host_base - before > held.nbytes // 2


def test_an_open_model_keeps_few_compiled_products(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COMPILED_PRODUCTS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with Case("opt").open(checkpoints, offload):
        assert [os.environ[name] for name in COMPILED_PRODUCTS] == [str(KEPT_PRODUCTS)] * len(COMPILED_PRODUCTS)


@pytest.mark.slow
def test_prompts_of_a_mixture_in_16_bits_stay_within_a_tight_budget(tmp_path: Path) -> None:
    """Each expert gets another number of tokens, and products are compiled for every number."""
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    save_tiny("qwen3-moe", tmp_path, torch.bfloat16, hidden_size=128, max_position_embeddings=256, **experts)
    flags = ["--model", str(tmp_path), "--device", "cpu", "--offload-dir", str(tmp_path / "off"), "--dtype", "bfloat16"]
    flags += ["--gpu-batch-size", "16", "--num-gpu-batches", "4", "--prompt-len", "200", "--gen-len", "2"]
    flags += ["--percent", "0", "0", "0", "0", "0", "0"]
    dry = partial(_ran, [*flags, "--dry-run"])
    one = _under_a_tight_budget(flags, dry(), dry)
    assert one.seen <= one.limit and not one.over, one
