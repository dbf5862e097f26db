"""Tokens: real tokenizers of three kinds (byte-level BPE, byte fallback, plain bytes), text that grows, why rows end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.runtime import tokens
from h2o_flexgen.runtime.output import StepLogprobs, TokenLogprob
from h2o_flexgen.runtime.sampling import SamplingParams
from h2o_flexgen.runtime.tokens import (
    ByteTokenizer,
    Detokenizer,
    HfTokenizer,
    RowState,
    StopChecker,
    decode_new,
    load_tokenizer,
    synthetic_prompts,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen jugs, then rest.",
    "hello world hello",
]
TEXTS = [
    "hello world",
    "naïve café: über 10 €",
    "👩‍🚀🎉🎉 done",
    "日本語のテキスト",
    "  two  spaces \n\tand lines\n",
    "a\u200db 😀" * 30,
]


def save_byte_level(folder: Path) -> None:
    """As OPT and GPT-NeoX have it: a token may be a part of a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def save_byte_fallback(folder: Path) -> None:
    """As LLaMA has it: a space before every word, bytes for unknown characters, the first space dropped in decoding."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    pieces += [chr(code) for code in range(33, 127)]
    bpe = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    bpe.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("byte_level", "byte_fallback")}
    save_byte_level(made["byte_level"])
    save_byte_fallback(made["byte_fallback"])
    return made


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, tokens.Tokenizer]:
    loaded: dict[str, tokens.Tokenizer] = {name: HfTokenizer(folder) for name, folder in folders.items()}
    return {**loaded, "bytes": ByteTokenizer(50_000)}


@pytest.fixture(params=["byte_level", "byte_fallback", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, tokens.Tokenizer]) -> tokens.Tokenizer:
    return tokenizers[request.param]


def ids_after(tokenizer: tokens.Tokenizer, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of the text that continues it."""
    prompt_ids, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    assert whole[: len(prompt_ids)] == prompt_ids
    return prompt_ids, whole[len(prompt_ids) :]


def run_row(
    tokenizer: tokens.Tokenizer, text: str, params: SamplingParams | None = None, streamed: bool = True
) -> tuple[RowState, list[str | None]]:
    """Feeds the ids of a text to a row until it is finished; the last token is generated at max_tokens."""
    prompt_ids, ids = ids_after(tokenizer, "Say:", text)
    row = RowState(3, prompt_ids, params or SamplingParams(max_tokens=len(ids)), tokenizer, "Say:", streamed)
    pieces = []
    for token in ids:
        if not row.finished:
            pieces.append(row.push(token))
    return row, pieces


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_encoding_and_decoding_gives_the_text_back(tokenizer: tokens.Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_put_before_a_prompt_and_not_shown(tokenizers: dict[str, tokens.Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id == 0
    assert tokenizer.decode([0, *tokenizer.encode("hello"), 1]) == "hello"
    assert tokenizer.vocab_size == 320


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, {7, 9}),
        ({"eos_token_id": 0}, None, {0}),
        ({"max_length": 20}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5, 6]}, {5, 6}),
        (None, PreTrainedTokenizerFast, {1}),
        (None, None, {1}),
    ],
)
def test_the_ends_of_sequence_come_from_the_first_place_that_names_them(
    tmp_path: Path, generation: dict[str, object] | None, config: object, expected: set[int]
) -> None:
    save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(tmp_path, config, 320).eos_ids == expected


def test_a_folder_without_tokenizer_files_gets_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, None):
        tokenizer = load_tokenizer(folder, None, 300)
        assert isinstance(tokenizer, ByteTokenizer)
        assert tokenizer.eos_ids == frozenset()


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    save_byte_level(tmp_path)
    (tmp_path / name).write_text('{"cut off')
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        load_tokenizer(tmp_path, None, 320)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("vocab", [1, 3, 5, 64, 259, 260, 261, 50_272])
def test_bytes_are_total_at_any_vocabulary(vocab: int) -> None:
    tokenizer = ByteTokenizer(vocab)
    ids = tokenizer.encode("".join(map(chr, range(0, 3000, 7))) + "\ud800")
    assert all(0 <= token < vocab for token in ids)
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(0, vocab, max(1, vocab // 500)))


def test_ids_beyond_the_bytes_show_as_numbers() -> None:
    tokenizer = ByteTokenizer(50_272)
    assert tokenizer.decode([*tokenizer.encode("a€"), 31_337, 2]) == "a€<31337>"


# -- text that grows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_pieces_joined_are_the_text_and_no_piece_is_taken_back(tokenizer: tokens.Tokenizer, text: str) -> None:
    row, pieces = run_row(tokenizer, text)
    assert "".join(piece for piece in pieces if piece) == row.completion().text == text
    assert not any(piece is None or "\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_decoded_at_the_end_equals_text_that_was_followed(tokenizer: tokens.Tokenizer, text: str) -> None:
    row, pieces = run_row(tokenizer, text, streamed=False)
    assert set(pieces) == {None}
    assert row.completion().text == text


def test_random_tokens_give_the_same_text_piece_by_piece_as_at_once(tokenizers: dict[str, tokens.Tokenizer]) -> None:
    draw = random.Random(0)
    for name, vocab in (("byte_level", 320), ("bytes", 400)):
        for _ in range(30):
            ids = draw.choices(range(vocab), k=draw.randrange(1, 120))
            prompt = draw.choices(range(vocab), k=draw.randrange(0, 9))
            detokenizer = Detokenizer(tokenizers[name], prompt)
            pieces = [detokenizer.add(token) for token in ids] + [detokenizer.rest()]
            assert "".join(pieces) == decode_new(tokenizers[name], prompt, ids)


def test_a_prompt_that_ends_in_characters_of_many_tokens_is_continued_cleanly(tokenizer: tokens.Tokenizer) -> None:
    for prompt in ("日本", "x🎉", "über", "🎉" * 5, "é"):
        prompt_ids, ids = ids_after(tokenizer, prompt, "語のテ 🎉")
        detokenizer = Detokenizer(tokenizer, prompt_ids)
        pieces = [detokenizer.add(token) for token in ids]
        assert "".join(pieces) == decode_new(tokenizer, prompt_ids, ids) == "語のテ 🎉"


def test_a_character_begun_in_the_prompt_is_completed(tokenizers: dict[str, tokens.Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode("so€x")
    detokenizer = Detokenizer(tokenizer, ids[:3])
    assert [detokenizer.add(token) for token in ids[3:]] == ["", "€", "x"]


class CountingTokenizer(ByteTokenizer):
    """Counts how many ids were decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize(
    "text", ["plain words " * 100, "日本語" * 150, b"\xff".decode("latin-1") * 600], ids=["ascii", "kanji", "latin"]
)
def test_only_a_window_is_decoded_for_each_token(text: str) -> None:
    tokenizer = CountingTokenizer(300)
    row, _ = run_row(tokenizer, text)
    assert row.num_generated >= 1200
    assert tokenizer.decoded < 20 * row.num_generated


def test_garbage_without_end_is_decoded_in_a_window_too() -> None:
    tokenizer = CountingTokenizer(300)
    row = RowState(0, [50], SamplingParams(max_tokens=1000), tokenizer, streamed=True)
    pieces = [row.push(token) for token in tokenizer.encode("some words") + [4 + 0xFF] * 990]
    assert "".join(piece or "" for piece in pieces) == "some words" + "\ufffd" * 990
    assert tokenizer.decoded < 80 * 1000


def test_a_character_that_stays_incomplete_is_shown_as_such() -> None:
    tokenizer = ByteTokenizer(300)
    for streamed in (True, False):
        ids = tokenizer.encode("a€")[:-1]
        row = RowState(0, [50], SamplingParams(max_tokens=len(ids)), tokenizer, streamed=streamed)
        pieces = [row.push(token) for token in ids]
        assert row.completion().text == "a\ufffd"
        assert pieces == (["a", "", "\ufffd"] if streamed else [None] * 3)


# -- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("world",), "hello "),
        (("zzz", "lo w"), "hel"),
        (("d!", "world"), "hello "),
        (("o world, and", "llo"), "he"),
        (("ü€",), "hello world, and "),
        (("hello",), ""),
        (("nd so on",), None),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_text_ends_before_the_first_stop_string_however_tokens_cut_it(
    tokenizer: tokens.Tokenizer, stops: tuple[str, ...], expected: str | None, streamed: bool
) -> None:
    text = "hello world, and ü€ and so forth"
    row, pieces = run_row(tokenizer, text, SamplingParams(max_tokens=1000, stop=stops), streamed)
    if expected is None:
        assert row.finish_reason is None
        return
    completion = row.completion()
    assert completion.text == "".join(piece or "" for piece in pieces) == expected
    assert completion.finish_reason == "stop"
    assert any(stop in tokenizer.decode([*row.prompt_ids, *completion.token_ids]) for stop in stops)


def test_what_looked_like_a_stop_string_is_shown_in_the_end(tokenizer: tokens.Tokenizer) -> None:
    prompt, ids = ids_after(tokenizer, "Say:", "one two thr")
    row = RowState(0, prompt, SamplingParams(max_tokens=len(ids), stop="three"), tokenizer)
    for token in ids:
        assert not row.finished
        row.push(token)
    assert row.completion().text == "one two thr"
    assert row.finish_reason == "length"


def test_random_cuts_and_stops_equal_a_search_in_the_whole_text() -> None:
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choices("ab", k=30))
        stop = "".join(draw.choices("ab", k=draw.randrange(1, 8)))
        checker, given, at = StopChecker((stop, "c")), "", 0
        while at < len(text) and not checker.stopped:
            width = draw.randrange(0, 4)
            given += checker.add(text[at : at + width])
            at += width
        given += checker.rest()
        assert given == text.partition(stop)[0]
        assert checker.stopped == (stop in text)


# -- why rows end ----------------------------------------------------------------------------------------------------


class Ending(ByteTokenizer):
    """Bytes with two ends of sequence."""

    def __init__(self) -> None:
        super().__init__(500)
        self.eos_ids = frozenset((2, 300))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("params", "ids", "reason", "text"),
    [
        (SamplingParams(max_tokens=9), [100, 101, 2], "stop", "`a"),
        (SamplingParams(max_tokens=9), [100, 300], "stop", "`"),
        (SamplingParams(max_tokens=9), [2], "stop", ""),
        (SamplingParams(max_tokens=3), [100, 101, 2], "stop", "`a"),
        (SamplingParams(max_tokens=3), [100, 101, 102], "length", "`ab"),
        (SamplingParams(max_tokens=3, ignore_eos=True), [100, 2, 300], "length", "`<300>"),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[101, 102]), [100, 2, 102], "stop", "`"),
        (SamplingParams(max_tokens=9, stop_token_ids=(101,), stop="c"), [100, 101], "stop", "`"),
        (SamplingParams(max_tokens=2, stop="`a"), [100, 101], "stop", ""),
    ],
)
def test_a_row_ends_by_end_of_sequence_stop_token_or_length(
    params: SamplingParams, ids: list[int], reason: str, text: str, streamed: bool
) -> None:
    row = RowState(5, [60, 61], params, Ending(), streamed=streamed)
    pieces = []
    for token in ids:
        assert not row.finished
        pieces.append(row.push(token))
    completion = row.completion()
    assert (completion.finish_reason, completion.text, completion.token_ids) == (reason, text, tuple(ids))
    assert (completion.index, completion.prompt, completion.prompt_token_ids) == (5, None, (60, 61))
    if streamed:
        assert "".join(piece or "" for piece in pieces) == text


def test_a_row_knows_what_it_has_seen_and_keeps_logprobs_only_when_asked() -> None:
    step = StepLogprobs(TokenLogprob(70, -0.5))
    asked = RowState(0, [60, 61], SamplingParams(max_tokens=2, logprobs=0), ByteTokenizer(300))
    silent = RowState(1, [60, 61], SamplingParams(max_tokens=2), ByteTokenizer(300))
    for token in (70, 71):
        asked.push(token, step)
        silent.push(token)
    assert asked.seen == [60, 61, 70, 71]
    assert asked.num_generated == 2
    assert asked.completion().logprobs == (step, step)
    assert silent.completion().logprobs is None


# -- synthetic prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [1, 2, 5, 64, 5000])
def test_synthetic_prompts_have_the_length_and_differ(tokenizer: tokens.Tokenizer, prompt_len: int) -> None:
    num = 8 if prompt_len < 3 else 40
    prompts = synthetic_prompts(num, prompt_len, tokenizer, vocab=tokenizer.vocab_size)
    assert [len(prompt) for prompt in prompts] == [prompt_len] * num
    assert len(set(map(tuple, prompts))) == num
    assert all(0 <= token < tokenizer.vocab_size for prompt in prompts for token in prompt)
    if prompt_len > 1 and tokenizer.bos_id is not None:
        assert {prompt[0] for prompt in prompts} == {tokenizer.bos_id}


def test_synthetic_prompts_are_words_and_a_seed_repeats_them(tokenizer: tokens.Tokenizer) -> None:
    first, again, other = (synthetic_prompts(3, 300, tokenizer, tokenizer.vocab_size, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert " the " in tokenizer.decode(first[0])


def test_synthetic_prompts_stay_within_a_smaller_vocabulary() -> None:
    prompts = synthetic_prompts(10, 20, ByteTokenizer(300), vocab=17)
    assert all(token < 17 for prompt in prompts for token in prompt)


def test_more_prompts_than_there_are_texts_still_come() -> None:
    assert len(synthetic_prompts(50, 1, ByteTokenizer(300), vocab=5)) == 50


def test_no_prompts_or_empty_ones_are_refused() -> None:
    for num, length in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="give 1 or more"):
            synthetic_prompts(num, length, ByteTokenizer(300), 300)
