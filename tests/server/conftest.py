"""Fixtures of the server's tests: a tiny model with few seats, opened once, and what must not be left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_flexgen.llm import LLM
from tests.helpers.tiny import save_tiny

OWN_THREADS = ("answering", "computing", "reading", "lane", "disk")
SEATS = {"gpu_batch_size": 4, "num_gpu_batches": 1}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert [one for one in threading.enumerate() if one.name.startswith(OWN_THREADS)] == []


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    offload = tmp_path_factory.mktemp("offload") / "deep"
    with LLM(tiny_folder, dtype="float32", tokenizer="bytes", device="cpu", offload_dir=offload, **SEATS) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The model of the package, which answers in words."""
    folder = tmp_path_factory.mktemp("offload")
    with LLM("demo", dtype="float32", device="cpu", offload_dir=folder, **SEATS) as opened:
        yield opened
