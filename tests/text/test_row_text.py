"""Text that grows: pieces joined are the text however tokens cut it, stop strings end it, and little is decoded twice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import decoders

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.row_text import Detokenizer, StopChecker, decode_new, joins_tokens
from h2o_flexgen.text.tokenizer import ByteTokenizer, Tokenizer
from tests.helpers.real_tokenizers import TEXTS, VOCABS, ids_after


def run_row(
    tokenizer: Tokenizer, text: str, params: SamplingParams | None = None, streamed: bool = True
) -> tuple[RowState, list[str | None]]:
    """Feeds the ids of a text to a row until it is finished; the last token is generated at max_tokens."""
    prompt_ids, ids = ids_after(tokenizer, "Say:", text)
    row = RowState(3, prompt_ids, params or SamplingParams(max_tokens=len(ids)), tokenizer, "Say:", streamed)
    pieces = []
    for token in ids:
        if not row.finished:
            pieces.append(row.push(token))
    return row, pieces


# -- text that grows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_pieces_joined_are_the_text_and_no_piece_is_taken_back(tokenizer: Tokenizer, text: str) -> None:
    row, pieces = run_row(tokenizer, text)
    assert "".join(piece for piece in pieces if piece) == row.completion().text == text
    assert not any(piece is None or "\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_decoded_at_the_end_equals_text_that_was_followed(tokenizer: Tokenizer, text: str) -> None:
    row, pieces = run_row(tokenizer, text, streamed=False)
    assert set(pieces) == {None}
    assert row.completion().text == text


def test_random_tokens_give_the_same_text_piece_by_piece_as_at_once(tokenizers: dict[str, Tokenizer]) -> None:
    draw = random.Random(0)
    for name, vocab in (("byte_level", 320), ("bytes", 400)):
        for _ in range(30):
            ids = draw.choices(range(vocab), k=draw.randrange(1, 120))
            prompt = draw.choices(range(vocab), k=draw.randrange(0, 9))
            detokenizer = Detokenizer(tokenizers[name], prompt)
            pieces = [detokenizer.add(token) for token in ids] + [detokenizer.rest()]
            assert "".join(pieces) == decode_new(tokenizers[name], prompt, ids)


def test_a_prompt_that_ends_in_characters_of_many_tokens_is_continued_cleanly(tokenizer: Tokenizer) -> None:
    for prompt in ("日本", "x🎉", "über", "🎉" * 5, "é"):
        prompt_ids, ids = ids_after(tokenizer, prompt, "語のテ 🎉")
        detokenizer = Detokenizer(tokenizer, prompt_ids)
        pieces = [detokenizer.add(token) for token in ids]
        assert "".join(pieces) == decode_new(tokenizer, prompt_ids, ids) == "語のテ 🎉"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_special_tokens_are_shown_where_that_is_asked_for(
    name: str, is_streamed: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    (start,), (end,) = tokenizer.encode_more("<s>")[-1:], tokenizer.eos_ids
    prompt, first, second = tokenizer.encode("Say:"), *(ids_after(tokenizer, "Say:", text)[1] for text in (" a é", " b"))
    ids = [start, *first, start, *second, end]
    for skips, shown in ((True, " a é b"), (False, "<s> a é<s> b")):
        params = SamplingParams(max_tokens=50, skip_special_tokens=skips, stop=["never"] if is_streamed else [])
        row = RowState(0, prompt, params, tokenizer, "Say:", is_streamed)
        pieces = [row.push(token) or "" for token in ids]
        assert row.completion().text == shown and row.finish_reason == "stop"
        assert not is_streamed or "".join(pieces) == shown


def test_a_character_begun_in_the_prompt_is_completed(tokenizers: dict[str, Tokenizer]) -> None:
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


# -- stop strings --------------------------------------------------------------------------------------------------------


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
    tokenizer: Tokenizer, stops: tuple[str, ...], expected: str | None, streamed: bool
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


def test_what_looked_like_a_stop_string_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
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
        while at < len(text) and checker.found is None:
            width = draw.randrange(0, 4)
            given += checker.add(text[at : at + width])
            at += width
        given += checker.rest()
        assert given == text.partition(stop)[0]
        assert (checker.found is not None) == (stop in text)


def test_a_stop_string_ends_behind_what_may_not_stop_wherever_it_begins() -> None:
    draw = random.Random(2)
    for _ in range(500):
        text, spared = "".join(draw.choices("ab", k=20)), draw.randrange(20)
        stops = ["".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 4))]
        ends = sorted({end for stop in stops for end in range(spared + 1, 21) if text[:end].endswith(stop)})
        wanted = (
            min((text[: ends[0]].rindex(stop) for stop in stops if text[: ends[0]].endswith(stop)), default=20) if ends else 20
        )
        checker, given = StopChecker(stops), ""
        for place, letter in enumerate(text):
            if checker.found is None:
                given += checker.add(letter, may_stop=place >= spared)
        given += checker.rest()
        assert given == text[:wanted], (text, stops, spared)


# -- texts of single tokens ------------------------------------------------------------------------------------------------


def test_text_grows_as_if_all_of_the_window_were_decoded(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    for name, tokenizer in tokenizers.items():
        vocab = VOCABS[name]
        for _ in range(60):
            prompt = draw.choices(range(vocab), k=draw.randrange(0, 9))
            ids = draw.choices(range(min(vocab, 400)), k=draw.randrange(1, 90))
            growing = Detokenizer(tokenizer, prompt)
            pieces = [growing.add(token) for token in ids]
            with monkeypatch.context() as patch:
                patch.setattr(type(tokenizer), "piece", lambda self, token: None)
                decoding = Detokenizer(tokenizer, prompt)
                assert pieces == [decoding.add(token) for token in ids] and growing.rest() == decoding.rest()


def test_little_is_decoded_of_plain_text() -> None:
    tokenizer = CountingTokenizer(300)
    row, _ = run_row(tokenizer, "plain words " * 100)
    assert tokenizer.decoded < row.num_generated


@pytest.mark.parametrize(
    ("decoder", "joins"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Metaspace(), True),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            True,
        ),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), False),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 1)]), False),
        (decoders.WordPiece(), False),
        (decoders.CTC(), False),
        (None, False),
    ],
)
def test_texts_of_tokens_are_joined_only_if_the_decoder_does_so(decoder: object, joins: bool) -> None:
    assert joins_tokens(decoder) == joins
