"""Processes beside one that computes: a fork says what it cannot have, computes with one thread and leaves its
parent's things alone; one that was spawned is like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.tiny import save_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")

CODE = """
import multiprocessing, os, sys, warnings
import torch
from h2o_flexgen import LLM, SamplingParams

warnings.simplefilter("always")
FOLDER, OFFLOAD = sys.argv[1:]
PROMPTS, PARAMS = [[1 + row] * 60 for row in range(8)], SamplingParams(max_tokens=3)

def made():
    return LLM(FOLDER, percent=(0, 50, 0, 50, 0, 50), gpu_batch_size=8, device="cpu", offload_dir=OFFLOAD, dtype="float32")

def tokens(llm):
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]

def new(_):
    with warnings.catch_warnings(record=True) as told, made() as llm:
        return tokens(llm), torch.get_num_threads(), [str(one.message) for one in told]

def refused(action):
    try:
        action()
    except ValueError as error:
        return str(error)

def old(_):
    found = [refused(lambda: tokens(LIVING)), refused(lambda: TALK.reply([1], PARAMS)), refused(LIVING.converse)]
    TALK.close()
    LIVING.close()
    return found

def in_pool(method, work):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map_async(work, [0]).get()[0]

if __name__ == "__main__":
    torch.set_num_threads(2)
    assert in_pool("fork", new)[1:] == (2, []), "nothing was computed yet, and nothing is lost"
    with made() as LIVING, made() as other:
        expected = tokens(LIVING)
        with other.converse() as TALK:
            TALK.reply([1, 2], PARAMS)
            found, threads, told = in_pool("fork", new)
            assert (found, threads) == (expected, 1), threads
            assert len(told) == 1 and 'one thread; start processes with multiprocessing.get_context("spawn")' in told[0], told
            for line in in_pool("fork", old):
                assert "from which this one was forked" in line, line
            TALK.reply([3], PARAMS)
        assert tokens(LIVING) == expected
    print("over")
"""


def test_a_fork_neither_hangs_nor_harms(tmp_path: Path) -> None:
    save_tiny("opt", tmp_path / "opt", hidden_size=256, num_attention_heads=4, ffn_dim=1024, word_embed_proj_dim=256)
    command = [sys.executable, "-c", CODE, str(tmp_path / "opt"), str(tmp_path / "off")]
    sleeping = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that wait take no time from those that compute
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=sleeping)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "over", done.stderr
