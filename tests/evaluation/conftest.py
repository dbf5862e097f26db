"""A tiny model with a tokenizer and positions enough for every task, and texts to measure it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.text.given_texts import Text
from tests.helpers.real_tokenizers import SENTENCES, VOCABS, save_byte_level
from tests.helpers.tiny import save_tiny

POSITIONS = 1024


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "tiny-llama"
    save_tiny("llama-gqa", folder, vocab_size=VOCABS["byte_level"], max_position_embeddings=POSITIONS)
    save_byte_level(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(" ".join(f"{number}: {SENTENCES[number % 3]}" for number in range(60)), encoding="utf-8")
    return file


@pytest.fixture
def text(text_file: Path) -> Text:
    return Text.read(str(text_file))
