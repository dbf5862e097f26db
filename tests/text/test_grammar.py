"""Grammars, compiled for tokenizers of all kinds: what comes of them is what was asked for, and what cannot be is refused."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from h2o_flexgen.sampling.structured_outputs import ConstraintBroken, StructuredOutputsParams
from h2o_flexgen.text import grammar
from h2o_flexgen.text.gguf_tokenizer import GgufTokenizer
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.tokenizer import ByteTokenizer, NoTokenizer, Tokenizer
from h2o_flexgen.text.word_tokenizer import WordTokenizer
from tests.helpers.gguf_vocabularies import metadata_of_folder, metadata_of_pieces, save_metadata
from tests.helpers.held_texts import allowed, random_text, room_for_mask
from tests.helpers.random_schemas import random_schema, validated
from tests.helpers.real_tokenizers import KINDS, VOCABS, saved_tokenizer
from tests.helpers.refusals import one_line

pytest.importorskip("llguidance", reason="needs the extra [grammar]")
PIECES = {text: -float(rank) for rank, text in enumerate(("▁", "▁a", "▁is", "is", *map(chr, range(33, 127))))}
GGUF_KINDS = ("gguf of bytes", "gguf of pieces")


@pytest.fixture(scope="module", params=[*KINDS, *GGUF_KINDS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param not in GGUF_KINDS:
        return saved_tokenizer(request.param, folder)
    if request.param == GGUF_KINDS[1]:
        values = metadata_of_pieces(PIECES, ("<tool>",), **{"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1})
    else:
        saved_tokenizer("byte_level", folder)
        values = metadata_of_folder(folder, "gpt-2")
    made = load_tokenizer(save_metadata(folder / "tokens.gguf", values), {}, 500)
    assert isinstance(made, GgufTokenizer)
    return made


def asked(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["é", 1, None]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", ' a"b\\c\n\t', "naïve café", "日本", "👩‍🚀", "</s>", "a|b", "{1}")


def is_json(text: str) -> bool:
    Draft202012Validator(PERSON).validate(json.loads(text))
    return True


HELD = {
    "json": (asked(json=PERSON), is_json),
    "compact json": (
        asked(json=PERSON, disable_any_whitespace=True),
        lambda text: is_json(text) and not re.search(r"[:,] ", text),
    ),
    "blanks": (asked(json=PERSON, whitespace_pattern="  "), lambda text: is_json(text) and "\n" not in text),
    "regex": (asked(regex="[a-z]{1,3}-(é|[0-9]{2})"), re.compile("[a-z]{1,3}-(é|[0-9]{2})").fullmatch),
    "choice": (asked(choice=CHOICES), lambda text: text in CHOICES),
    "lark": (asked(grammar='start: "is" (" " NUMBER)+ "."\nNUMBER: /[0-9]{1,2}/'), re.compile(r"is( [0-9]{1,2})+\.").fullmatch),
    "gbnf": (asked(grammar='root ::= "(" root ")" | "a"'), re.compile(r"\(*a\)*").fullmatch),
}


@pytest.mark.parametrize("kind", HELD)
def test_every_text_that_ends_is_what_was_asked_for(kind: str, tokenizer: Tokenizer) -> None:
    what, holds = HELD[kind]
    vocab = 50_000 if isinstance(tokenizer, ByteTokenizer) else 500
    made = [random_text(tokenizer, vocab, what, Random(seed)) for seed in range(12)]
    ended = {text for text, has_ended in made if has_ended}
    assert len(ended) > 2, made
    assert all(holds(text) for text in ended), ended


def test_the_library_has_the_bytes_of_tokens_that_texts_are_made_of(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.grammars.tokens
    pieces = {token: tokenizer.piece(token) for token in range(tokens.vocab_size - 1)}
    texts = {token: piece for token, piece in pieces.items() if piece and not tokens.is_special_token(token)}
    assert len(texts) > 90
    assert {token: tokens.decode_bytes([token]) for token in texts} == {token: text.encode() for token, text in texts.items()}
    shown_as_nothing = {token for token in pieces if tokenizer.decode([*tokenizer.encode_more("a"), token]) == "a"}
    assert shown_as_nothing <= {token for token in pieces if tokens.is_special_token(token) or not tokens.decode_bytes([token])}


@pytest.mark.parametrize("vocab", [10, 320, 321, 1000])
def test_masks_are_as_wide_as_the_vocabulary_of_the_model(vocab: int, tmp_path: Path) -> None:
    tokenizer = saved_tokenizer("byte_level", tmp_path)
    held = tokenizer.grammars.constraint(asked(regex="[a-z ]*"), [1, 9, 2000])
    words = room_for_mask(vocab)
    held.write_mask(words)
    may_come = allowed(words)
    assert {1, 9} <= {*may_come}, "tokens that end a text, as it is whole"
    texts = [tokenizer.decode([token]) for token in may_come if token not in (1, 9)]
    assert all(re.fullmatch("[a-z ]+", text) for text in texts) and (vocab == 10 or len(texts) > 26)


def test_a_row_is_whole_over_and_forgotten(tokenizer: Tokenizer) -> None:
    held = tokenizer.grammars.constraint(asked(regex="is|isis"), [])
    states = []
    for token in tokenizer.grammars.tokens.greedy_tokenize("isis"):
        held.take(token)
        states.append((held.is_whole, held.is_over))
    assert states[-1] == (True, True) and (False, True) not in states and (True, False) in states
    held.restart()
    assert not held.is_whole and not held.is_over
    assert [held.holds(text) for text in ("is", "isis", "i", "isi", "")] == [True, True, False, False, False]


def test_the_only_token_that_may_come_is_known_without_a_mask(tokenizer: Tokenizer) -> None:
    """It is the one of the mask, and wherever a mask has one token, and the text may not end, it is known."""
    vocab, singles = 500, 0
    for place, what in enumerate((*(own for own, _ in HELD.values()), asked(regex="FIXED TEXT[0-9]{2}, and more of it"))):
        random, held, words = Random(place), tokenizer.grammars.constraint(what, [1]), room_for_mask(vocab)
        for _ in range(40):
            only = held.only_token
            held.write_mask(words)
            may_come = [token for token in allowed(words) if token != 1]
            is_single = len(may_come) == 1 and not held.is_whole
            assert only == (may_come[0] if is_single else None)
            singles += is_single
            if not may_come:
                break
            held.take(random.choice(may_come))
            if held.is_over:
                assert held.only_token is None
                break
    assert singles > 20


def test_a_token_is_allowed_where_it_is_in_the_mask(tokenizer: Tokenizer) -> None:
    """Each token of the vocabulary and two behind it, step by step."""
    vocab, found = tokenizer.grammars.tokens.vocab_size + 2, [0, 0]
    for place, what in enumerate((*(own for own, _ in HELD.values()), asked(regex="FIXED TEXT[0-9]{2}, and more of it"))):
        random, held, words = Random(place), tokenizer.grammars.constraint(what, [1]), room_for_mask(vocab)
        for _ in range(12):
            held.write_mask(words)
            may_come = {*allowed(words)}
            assert {token for token in range(vocab) if held.allows(token)} == may_come
            found[len(may_come) > 1] += 1
            if not may_come - {1}:
                break
            held.take(random.choice(sorted(may_come - {1})))
    assert min(found) > 20


def test_a_token_that_is_open_is_not_looked_for_in_a_mask(of_words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask takes a look at the whole vocabulary."""
    held = of_words.grammars.constraint(asked(regex="h[a-z]*"), [])
    assert isinstance(held, grammar.HeldText)
    words = room_for_mask(320)
    held.write_mask(words)
    assert len(allowed(words)) > 1, "tokens that all begin with the byte that must come"
    monkeypatch.setattr(grammar.HeldText, "_make_mask", None)
    assert held.only_token is None


def test_a_token_that_may_not_come_is_refused(tokenizer: Tokenizer) -> None:
    held = tokenizer.grammars.constraint(asked(regex="[0-9]+"), [])
    wrong = tokenizer.encode_more("a")[-1]
    with pytest.raises(ConstraintBroken, match="satisfy the grammar"):
        held.take(wrong)
    with pytest.raises(ConstraintBroken):
        held.write_mask(room_for_mask(128))


def test_a_name_of_a_schema_has_one_way_to_be_written(tokenizer: Tokenizer) -> None:
    """Otherwise it could have a value that the schema does not allow, as a name that is not listed."""
    schema = {"properties": {"a": {"const": 1}, "b/c": {"const": 1}}, "required": ["b/c"]}
    held = tokenizer.grammars.constraint(asked(json=schema), [])
    assert held.holds('{"b/c":1}') and held.holds('{"a":1,"b/c":1}') and held.holds('{"b/c":1,"d":"\\n"}')
    assert not any(map(held.holds, ('{"b/c":1,"\\u0061":2}', '{"b/c":1,"b\\/c":2}', '{"b/c":1,"a":2}')))


DAYS = ("0001-01-01", "0004-02-29", "1900-02-28", "2000-02-29", "2024-02-29", "2023-12-31", "9999-04-30")
NO_DAYS = ("0000-10-20", "0000-02-29", "1900-02-29", "2023-02-29", "2024-02-30", "2023-04-31", "2023-13-01", "2023-00-10")


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        ({"type": "string", "format": "date"}, '"{}"'),
        ({"type": "string", "format": "date", "pattern": "-"}, '"{}"'),
        ({"format": "date", "pattern": "-", "allOf": [{"maxLength": 10}]}, '"{}"'),
        ({"type": "string", "format": "date-time"}, '"{}t12:00:00Z"'),
        ({"items": {"$ref": "#/$defs/format"}, "$defs": {"format": {"format": "date"}}}, '[true,"{}"]'),
        ({"properties": {"const": {"anyOf": [{"format": "date", "type": "string"}]}}}, '{{"const":"{}"}}'),
    ],
)
def test_days_are_those_that_there_are(schema: dict[str, Any], around: str, of_words: Tokenizer) -> None:
    held = of_words.grammars.constraint(asked(json=schema), [])
    assert [day for day in (*DAYS, *NO_DAYS) if held.holds(around.format(day))] == [*DAYS]


def test_a_value_that_looks_like_a_schema_is_a_value(of_words: Tokenizer) -> None:
    value = {"format": "date", "properties": {"format": "date"}}
    held = of_words.grammars.constraint(asked(json={"anyOf": [{"const": value}, {"enum": [[value]]}]}), [])
    assert held.holds(json.dumps(value)) and held.holds(json.dumps([value]))


def test_what_is_drawn_from_random_schemas_validates(of_words: Tokenizer) -> None:
    ended = 0
    for seed in range(40):
        schema = random_schema(Random(seed))
        text, has_ended = random_text(of_words, VOCABS["byte_level"], asked(json=schema), Random(seed))
        if has_ended:
            validated(schema, text)
            ended += 1
    assert ended > 30


# -- what is refused -----------------------------------------------------------------------------------------------------------

REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"regex": "(a"}, "the regular expression '(a' is refused (unclosed group); mend it"),
    ({"regex": "(?=a)b"}, "is refused (look-around, including look-ahead and look-behind, is not supported); mend it"),
    ({"regex": "[^\\x00-\\U0010FFFF]"}, "accepts no text that this model could write; mend it"),
    ({"regex": "a{0}"}, "accepts no text"),
    (
        {"json": {"type": "array", "uniqueItems": True, "contains": {}}},
        'not supported: "contains", "uniqueItems"',
    ),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, 'keywords that are not supported: "not"; leave them out'),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not supported"),
    ({"json": False}, "the JSON schema 'false'"),
    ({"json": {"enum": []}}, "Unsatisfiable schema"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
    ({"json": {"$ref": "#"}}, "accepts no text"),
    ({"json": {"items": [{"minProperties": 2}]}}, "minProperties 2 for names that are not listed, which is not supported"),
    ({"json": {"$ref": "http://127.0.0.1:1/a.json"}}, "Default retriever does not fetch resources"),
    ({"json": {"type": "strin"}}, "is refused (Invalid type: strin); mend it"),
    ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ({"json": {"type": "string", "format": "wibble"}}, "Unknown format: wibble"),
    ({"json": {"multipleOf": 9_999_991}}, "has multipleOf '9999991', which has too many steps; 10000 is the most"),
    ({"json": {"multipleOf": 1.23456789}}, "too many steps"),
    ({"json": {"multipleOf": 1e9}}, "too many steps"),
    ({"grammar": 'start: %json {"multiple\\u004ff": 99999999}'}, "too many steps"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "start: start"}, "accepts no text"),
    ({"grammar": "wibble"}, "Expected ::= at line 1"),
    ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "exceed the maximum number of nested parentheses"),
    ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deeply nested"),
    *(({"json": '{"items":' * deep + "{}" + "}" * deep}, "is nested too deeply; make it flatter") for deep in (200, 400, 800)),
    ({"regex": "a" * (1 << 20) + "a"}, "has more than 1048576 characters; give a shorter one"),
)


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved_tokenizer("byte_level", tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[str(place) for place in range(len(REFUSED))])
def test_what_no_text_can_be_held_to_is_refused_in_one_line(given: dict[str, Any], said: str, of_words: Tokenizer) -> None:
    message = one_line(lambda: of_words.grammars.check(asked(**given)))
    assert message.startswith("structured_outputs cannot be held to: the ") and said in message


BOMBS = (
    "(a{1,1000}){1,1000}",
    "((a{0,100}){0,100}){0,100}",
    "(x+x+)+y",
    "(.{1,300}a){1,300}",
    "(.*a.{30})",
    "[a-z]*[a-q]{5000}x",
)


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_expression_that_would_be_large_takes_no_memory_before_it_is_needed(bomb: str, of_words: Tokenizer) -> None:
    """Either a text comes of it, or the row breaks, by itself."""
    try:
        random_text(of_words, VOCABS["byte_level"], asked(regex=bomb), Random(1), most=100)
    except ConstraintBroken as broken:
        assert "too many" in str(broken)


def test_a_grammar_that_would_take_for_ever_is_compiled_apart_first(
    of_words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "TRIAL_SECONDS", 1)
    all_of = " & ".join(f"/(.*{letter}.{{{length}}}.*)/" for letter, length in (("a", 15), ("b", 17), ("c", 19)))
    slow = asked(grammar=f"start: A\nA: {all_of} & ~/(.*d.{{9}}.*)/ & /.*z/")
    said = one_line(lambda: of_words.grammars.check(slow))
    assert said.endswith("takes too long to compile, or too much memory; use fewer & and ~")
    quick = asked(grammar="start: A\nA: /[a-z]{3}/ & ~/abc/")
    held = of_words.grammars.constraint(quick, [])
    assert held.holds("abd") and not held.holds("abc")


def test_what_breaks_with_the_first_tokens_is_refused_at_once(of_words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LEXER_STATES", 8)
    said = one_line(lambda: of_words.grammars.check(asked(regex="[a-z]{1,3} (quick|brown|fox){9}")))
    assert "cannot be followed (lexer error: too many states" in said and said.endswith("make it smaller")


def test_a_long_time_of_compiling_is_told(of_words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_words.grammars.check(asked(regex="quick"))
    monkeypatch.setattr(grammar, "WORTH_SAYING_SECONDS", -1.0)
    with pytest.warns(RuntimeWarning, match=r"^slow: the regular expression 'told' took \d+\.\d s to compile$"):
        of_words.grammars.check(asked(regex="told"))


def test_a_grammar_is_compiled_once_for_many_rows(of_words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    of_words.grammars.check(asked(regex="on(ce)"))
    monkeypatch.setattr(grammar, "_matcher", None)
    rows = [of_words.grammars.constraint(asked(regex="on(ce)"), []) for _ in range(3)]
    rows[0].take(of_words.encode_more("on")[0])
    words = room_for_mask(320)
    rows[1].write_mask(words)
    assert {of_words.decode([token]) for token in allowed(words)} <= {"o", "on", "onc", "once"}, "each has a state of its own"


def test_without_the_extra_one_line_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    for one in (saved_tokenizer("byte_level", tmp_path), ByteTokenizer(300)):
        assert one_line(lambda one=one: one.grammars.check(asked(regex="a"))) == (  # type: ignore[misc]
            "llguidance, which holds texts to a grammar, is not installed; it comes with the extra [grammar]: "
            "pip install -e '.[grammar]'"
        )


def test_a_tokenizer_without_texts_or_without_rules_is_refused(tmp_path: Path, of_words: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no text can be held to a grammar: .* has no tokenizer"):
        NoTokenizer(tmp_path).grammars  # noqa: B018
    assert isinstance(of_words, WordTokenizer)

    class Slow(type(of_words)):  # type: ignore[misc]
        rules = None

    slow = object.__new__(Slow)
    assert "none of the library tokenizers" in one_line(lambda: slow.grammars.check(asked(regex="a")))
