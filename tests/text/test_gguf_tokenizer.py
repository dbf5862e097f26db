"""Tokenizers from GGUF files: the same tokens as from a model's own files, as by the rules that files name, and as by
SentencePiece; and files that contradict themselves."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.checkpoints.gguf_format import Metadata, read_metadata
from h2o_flexgen.checkpoints.model_places import SMOLLM2, demo_folder
from h2o_flexgen.text.gguf_tokenizer import WORD_RULES, GgufTokenizer, GgufVocabulary, TokenType, tokenizer_of
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from h2o_flexgen.text.tokenizer import BYTES, ChatInput, NoTokenizer, Tokenizer
from tests.helpers.gguf_vocabularies import BYTE_PIECES, PREFIX, metadata_of_folder, metadata_of_pieces, save_metadata
from tests.helpers.real_tokenizers import TEXTS, save_byte_level
from tests.helpers.refusals import one_line

ODD = [
    "don't",
    "I'LL",
    "'ſ",
    "Ünïcode",
    "fooBar",
    "12345",
    "٣½Ⅷ",
    "日本。",
    "e\u0301",
    "한국",
    "\u00a0",
    "\u3000",
    "😀",
    "<s>",
    "</s>",
]
ODD += [" ", "   ", "\n", "\r\n\r\n", "\t", "...", "?!", "//", "$x+=1", " hello", "_", "^~|`", "ok\n", "क्ष"]
CHAT = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def odd_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(ODD, k=draw.randint(1, 12))) for _ in range(count)]


def opened(file: Path, values: dict[str, Any]) -> GgufTokenizer:
    made = load_tokenizer(save_metadata(file, values), None, 0)
    assert isinstance(made, GgufTokenizer)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metadata of a small byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("byte_level")
    save_byte_level(folder)
    return metadata_of_folder(folder, "gpt-2")


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """The metadata of a small tokenizer of SentencePiece's."""
    texts = [*"abcdehlorw▁", "he", "ll", "hell", "hello", "▁w", "▁hello", "or", "▁wor", "ld", "▁world", "▁▁"]
    return metadata_of_pieces({text: -float(place) for place, text in enumerate(texts)})


def with_tokens(values: dict[str, Any], added: dict[str, TokenType], **changes: Any) -> dict[str, Any]:
    """The metadata with more tokens, and with changes."""
    more = {
        "tokens": [*values[PREFIX + "tokens"], *added],
        "token_type": [*values[PREFIX + "token_type"], *map(int, added.values())],
    }
    if PREFIX + "scores" in values:
        more["scores"] = [*values[PREFIX + "scores"], *[0.0] * len(added)]
    return {**values, **{PREFIX + key: value for key, value in {**more, **changes}.items()}}


def test_a_models_own_tokenizer_makes_the_same_tokens_from_a_gguf_file_as_from_its_folder(file: Path) -> None:
    folder = demo_folder("demo-llama")
    assert folder is not None
    own, ours = load_tokenizer(folder, None, 0), opened(file, metadata_of_folder(folder, "gpt-2"))
    texts = [text for text in [*TEXTS, *odd_texts(200)] if not any(map(str.isnumeric, text))]  # its own rule for digits
    for text in texts:
        assert ours.encode(text) == own.encode(text), text
        assert ours.encode_more(text) == own.encode_more(text), text
        assert ours.decode(ours.encode(text)) == own.decode(own.encode(text)), text
    assert (ours.eos_ids, ours.note, ours.of_transformers.name_or_path) == (own.eos_ids, "", str(file))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("starts", [True, False])
def test_two_texts_have_the_tokens_around_each_that_transformers_puts_there(
    starts: bool, ends: bool, pieces: dict[str, Any], file: Path
) -> None:
    """sentence-transformers gives a query and a document to the same function."""
    says = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": starts, "add_eos_token": ends}
    ours = opened(file, with_tokens(pieces, {}, **says))
    rules = LibraryTokenizer.from_str(ours.rules.to_str())
    rules.post_processor = None
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": starts, "add_eos_token": ends}
    theirs = PreTrainedTokenizerFast(tokenizer_object=rules, **named)
    theirs.update_post_processor()
    assert ours.encode_pair("hello", "world hell") == theirs("hello", "world hell").input_ids
    assert ours.encode_pair("hello", "world") == [*ours.encode("hello"), *ours.encode("world")]
    assert ours.of_transformers("hello", "world").input_ids == ours.encode_pair("hello", "world")


@pytest.mark.smollm2
def test_texts_become_the_tokens_that_llama_cpp_makes_of_them() -> None:
    """Written down were those that llama.cpp 0c1e570 makes with the same file, where special tokens are read in texts."""
    tokenizer = load_tokenizer(SMOLLM2.path, None, 0)
    recorded = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text(encoding="utf-8"))
    assert {text: tokenizer.encode(text) for text in recorded} == recorded
    assert all(tokenizer.decode(ids) == text for text, ids in recorded.items() if "<|" not in text)


def words(rule: str, text: str) -> list[str]:
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in WORD_RULES[rule].patterns])
    return [word for word, _ in cuts.pre_tokenize_str(text)]


def of_transformers() -> dict[str, str]:
    """The patterns that transformers has under the names of rules; it does not know all of them."""
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping", reason="only in newer releases")
    return {name: pattern for name, pattern in known.GGUF_PRE_TOKENIZER_SPLITS.items() if name in WORD_RULES}


def test_texts_are_cut_into_words_as_by_the_patterns_of_transformers() -> None:
    patterns = of_transformers()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"}.issubset(patterns)
    for name, pattern in patterns.items():
        theirs = pre_tokenizers.Split(Regex(pattern), "isolated")
        for text in odd_texts(40):
            assert words(name, text) == [word for word, _ in theirs.pre_tokenize_str(text)], (name, text)


def test_texts_are_cut_into_words_as_by_what_the_library_has_for_gpt2_and_for_digits() -> None:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for text in odd_texts(200, seed=1):
        for name, theirs in (("gpt-2", gpt2), ("smollm", digits)):
            spans = [text[start:end] for _, (start, end) in theirs.pre_tokenize_str(text)]
            assert words(name, text) == spans, (name, text)


OF_KIMI = (
    ["Hello", "World", " it's", " ", "123", "45", "!\n\n", " ", " x"],
    ["今日", "はWord", "漢字", " ok", ",", "漢字", "abc", "的", "LLMs"],
    [" ", "〇一", " a\u0301", "漢", " ア", "一", " ", "々"],
)


@pytest.mark.parametrize("expected", OF_KIMI)
def test_the_rule_of_kimi_parts_chinese_characters_from_other_letters(expected: list[str]) -> None:
    assert words("kimi-k2", "".join(expected)) == expected


def test_every_rule_loses_no_letter(byte_level: dict[str, Any], file: Path) -> None:
    for name, rule in WORD_RULES.items():
        values = {**byte_level, PREFIX + "pre": name}
        tokenizer = tokenizer_of(GgufVocabulary.of(read_metadata(save_metadata(file, values))))
        for text in odd_texts(8, seed=2):
            composed = tokenizer.normalizer.normalize_str(text) if rule.composes else text
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == composed, (name, text)


@pytest.mark.parametrize(("rule", "keeps"), [("llama-bpe", True), ("kimi-k2", True), ("smaug-bpe", False)])
def test_some_rules_keep_a_word_whole_that_is_a_token(byte_level: dict[str, Any], file: Path, rule: str, keeps: bool) -> None:
    tokenizer = opened(file, with_tokens(byte_level, {"zzzz": TokenType.NORMAL}, pre=rule))
    assert (len(tokenizer.encode_more("zzzz")) == 1) == keeps, "no merges lead to it"


def test_accents_are_composed_where_the_models_own_tokenizers_do_so(byte_level: dict[str, Any], file: Path) -> None:
    encoded = {rule: opened(file, {**byte_level, PREFIX + "pre": rule}).encode_more("e\u0301") for rule in ("qwen2", "gpt-2")}
    tokenizer = opened(file, byte_level)
    assert encoded == {"qwen2": tokenizer.encode_more("\u00e9"), "gpt-2": tokenizer.encode_more("e\u0301")}


# -- SentencePiece -----------------------------------------------------------------------------------------------------------


def put_together(text: str, scores: dict[str, float]) -> list[str]:
    """What SentencePiece's BPE makes of a text: the neighbours whose piece has the highest score, the first of them, become
    one, again and again."""
    parts = list(text)
    while True:
        pairs = [(-scores[one + other], at) for at, (one, other) in enumerate(pairwise(parts)) if one + other in scores]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_put_together_by_their_scores(file: Path, seed: int) -> None:
    draw = random.Random(seed)
    texts = list("abc▁")
    while len(texts) < 40:
        text = draw.choice(texts) + draw.choice(texts)
        texts += [text] if text not in texts else []
    order = draw.sample(range(40), 40) if seed % 2 else range(40)
    scores = {text: -float(place) for text, place in zip(texts, order)}
    tokenizer = opened(file, metadata_of_pieces(scores))
    for _ in range(60):
        text = "".join(draw.choices("abc ", k=draw.randint(1, 40)))
        expected = put_together("▁" + text.replace(" ", "▁"), scores)
        assert tokenizer.of_transformers.convert_ids_to_tokens(tokenizer.encode_more(text)) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_of_one_score_are_put_together_in_the_order_of_the_vocabulary(file: Path) -> None:
    tokenizer = opened(
        file, metadata_of_pieces(dict.fromkeys(["▁", "a", "b", "c", "bc", "ab"], -1000.0), add_space_prefix=False)
    )
    assert tokenizer.of_transformers.tokenize("abc") == ["a", "bc"]


def test_what_no_piece_has_becomes_bytes_and_comes_back(pieces: dict[str, Any], file: Path) -> None:
    tokenizer = opened(file, pieces)
    eyes = "é".encode()
    assert tokenizer.of_transformers.tokenize("hellé") == ["▁", "hell", *(BYTE_PIECES[byte] for byte in eyes)]
    for text in [*TEXTS, *odd_texts(60)]:
        plain = text.replace("<s>", "").replace("</s>", "")
        assert tokenizer.decode(tokenizer.encode(plain)) == plain


def test_a_space_stands_before_each_text_unless_the_file_says_otherwise(pieces: dict[str, Any], file: Path) -> None:
    tokenize = opened(file, pieces).of_transformers.tokenize
    assert tokenize("hello world") == ["▁hello", "▁world"]
    assert tokenize("</s>hello") == ["</s>", "▁hello"], "as in llama.cpp, also behind a special token"
    without = opened(file, {**pieces, PREFIX + "add_space_prefix": False})
    assert without.of_transformers.tokenize("hello world") == ["hello", "▁world"]
    assert without.decode(without.encode(" hello")) == " hello"


def test_merges_of_the_file_go_before_scores(pieces: dict[str, Any], file: Path) -> None:
    tokenizer = opened(file, {**pieces, PREFIX + "merges": ["l l", "he ll"]})
    assert tokenizer.of_transformers.tokenize("hell") == ["▁", "h", "e", "ll"]


def test_texts_become_the_tokens_that_gemma_4_makes_of_them(file: Path) -> None:
    """Its files have a kind of their own for pieces that are put together by merges."""
    from transformers import GemmaTokenizer

    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    made = LibraryTokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*specials, *BYTE_PIECES], show_progress=False)
    made.train_from_iterator([*TEXTS, "hello world\n\nhello  there\n"] * 3, trainer)
    model = json.loads(made.to_str())["model"]
    merges = [(first, second) for first, second in model["merges"]]
    theirs = GemmaTokenizer(vocab=model["vocab"], merges=merges)
    types = [TokenType.CONTROL] * len(specials) + [TokenType.BYTE] * len(BYTE_PIECES)
    tokens = sorted(model["vocab"], key=lambda text: int(model["vocab"][text]))
    values = {
        "model": "gemma4",
        "tokens": tokens,
        "scores": [-1000.0] * len(tokens),
        "token_type": [*map(int, types), *[int(TokenType.NORMAL)] * (len(tokens) - len(types))],
        "merges": [" ".join(pair) for pair in merges],
        "padding_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }
    ours = opened(file, {PREFIX + key: value for key, value in values.items()})
    for text in [*TEXTS, "hello world", "\n\n hello\n", "  two  spaces ", *odd_texts(60)]:
        assert ours.encode_more(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text) == [2, *ours.encode_more(text)]
    assert ours.eos_ids == {1, 4}
    assert ours.decode(ours.encode(" hello\n")) == " hello\n"


# -- tokens with a meaning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_special_and_added_tokens_are_whole_in_texts_and_only_special_ones_vanish(
    kind: str, request: pytest.FixtureRequest, file: Path
) -> None:
    values = request.getfixturevalue(kind)
    added = {"<|go|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED, "<pad:1 >": TokenType.UNUSED}
    tokenizer, first = opened(file, with_tokens(values, added)), len(values[PREFIX + "tokens"])
    ids = tokenizer.encode_more("he<|go|>he<think>he")
    assert [token for token in ids if token >= first] == [first, first + 1]
    assert tokenizer.decode(ids).replace(" ", "") == "hehe<think>he"
    assert first + 2 not in tokenizer.encode_more("<pad:1 >")


@pytest.mark.parametrize(
    ("kind", "changes", "before", "behind"),
    [
        ("byte_level", {}, True, False),
        ("byte_level", {"add_bos_token": False}, False, False),
        ("byte_level", {"add_bos_token": None}, False, False),
        ("byte_level", {"add_bos_token": None, "pre": "llama-bpe"}, True, False),
        ("byte_level", {"add_eos_token": True}, True, True),
        ("pieces", {}, True, False),
        ("pieces", {"add_bos_token": False, "add_eos_token": True}, False, True),
    ],
)
def test_start_and_end_tokens_stand_where_the_file_says(
    kind: str, changes: dict[str, Any], before: bool, behind: bool, request: pytest.FixtureRequest, file: Path
) -> None:
    changed = {**request.getfixturevalue(kind), **{PREFIX + key: value for key, value in changes.items()}}
    tokenizer = opened(file, {key: value for key, value in changed.items() if value is not None})
    start, end = tokenizer.of_transformers.bos_token_id, tokenizer.of_transformers.eos_token_id
    plain = tokenizer.encode_more("hello")
    assert tokenizer.encode("hello") == [*[start] * before, *plain, *[end] * behind]
    assert tokenizer.made_again(adds_start=not before)("hello").input_ids == [*[start] * (not before), *plain, *[end] * behind]


def test_a_start_token_of_any_text_can_stand_before_texts(byte_level: dict[str, Any], file: Path) -> None:
    first = len(byte_level[PREFIX + "tokens"])
    tokenizer = opened(file, with_tokens(byte_level, {"$A :1": TokenType.CONTROL}, bos_token_id=first))
    assert tokenizer.encode("hello")[0] == first


def test_all_tokens_that_end_a_text_are_known(byte_level: dict[str, Any], file: Path) -> None:
    first = len(byte_level[PREFIX + "tokens"])
    added = dict.fromkeys(["<|im_end|>", "<|made_up|>", "<|other|>"], TokenType.CONTROL) | {"<EOT>": TokenType.NORMAL}
    tokenizer = opened(file, with_tokens(byte_level, added, eot_token_id=first + 1, eom_token_id=first + 2))
    assert tokenizer.eos_ids == {byte_level[PREFIX + "eos_token_id"], first, first + 1, first + 2}, "<EOT> is plain text here"


def test_the_chat_template_of_the_file_is_rendered_in_the_sandbox(byte_level: dict[str, Any], file: Path) -> None:
    talk = [{"role": "user", "content": "hello"}]
    tokenizer = opened(file, {**byte_level, "tokenizer.chat_template": CHAT})
    assert tokenizer.has_chat_template and tokenizer.render_chat(ChatInput(talk)) == "<s>user: hello</s>"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="refuses this turn"):
        opened(file, {**byte_level, "tokenizer.chat_template": endless}).render_chat(ChatInput(talk))
    assert not opened(file, byte_level).has_chat_template


def test_a_plain_piece_that_stands_for_paddings_stays_in_texts(byte_level: dict[str, Any], file: Path) -> None:
    tokens = byte_level[PREFIX + "tokens"]
    changes = {PREFIX + "padding_token_id": tokens.index("!"), PREFIX + "unknown_token_id": len(tokens) + 7}
    tokenizer = opened(file, {**byte_level, **changes})
    assert tokenizer.decode(tokenizer.encode("he!")) == "he!"


# -- what there is to say ----------------------------------------------------------------------------------------------------


def test_a_file_without_tokens_reads_no_text_and_says_what_it_lacks(file: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(save_metadata(file, {"general.name": "x"}), None, 9)
    assert isinstance(tokenizer, NoTokenizer) and tokenizer.eos_ids == frozenset()
    said = one_line(lambda: tokenizer.encode("x"))
    assert all(part in said for part in (str(file), PREFIX + "model", "--tokenizer", BYTES))
    assert PREFIX + "model" in one_line(lambda: load_tokenizer(None, None, 9, file))


def test_a_file_that_names_no_rule_is_read_by_llama_cpps_and_this_is_said(byte_level: dict[str, Any], file: Path) -> None:
    without = {key: value for key, value in byte_level.items() if key != PREFIX + "pre"}
    tokenizer = opened(file, without)
    assert PREFIX + "pre" in tokenizer.note and str(file) in tokenizer.note
    assert tokenizer.encode(TEXTS[1]) == opened(file, {**byte_level, PREFIX + "pre": "default"}).encode(TEXTS[1])


def test_the_tokenizer_of_another_gguf_file_serves_a_model_whose_files_say_what_ends_texts(
    byte_level: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = load_tokenizer(model, {"eos_token_id": 9}, 320, save_metadata(file, byte_level))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello" and tokenizer.eos_ids == {9} and str(file) in tokenizer.note


@pytest.mark.parametrize("changes", [{"model": "bert"}, {"pre": "lama-bpe"}])
def test_what_no_tokenizer_is_made_from_is_named_and_bytes_serve_instead(
    byte_level: dict[str, Any], file: Path, changes: dict[str, str]
) -> None:
    save_metadata(file, {**byte_level, **{PREFIX + key: value for key, value in changes.items()}})
    said = one_line(lambda: load_tokenizer(file, None, 320))
    expected = (
        str(file),
        *map(repr, changes.values()),
        "--tokenizer",
        BYTES,
        "gpt2" if "model" in changes else "did you mean llama-bpe",
    )
    assert [part for part in expected if part not in said] == []
    assert load_tokenizer(file, None, 320, BYTES).eos_ids == {byte_level[PREFIX + "eos_token_id"]}


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("byte_level", "tokens", ["a", "b", "a"], "'a' stands 2 times"),
        ("byte_level", "tokens", [1, 2], "list of texts"),
        ("byte_level", "token_type", [1, 2], "2 entries"),
        ("byte_level", "merges", ["ab"], "'ab'"),
        ("byte_level", "merges", ["a "], "'a '"),
        ("byte_level", "merges", ["h zzzz"], "zzzz"),
        ("byte_level", "merges", None, "merges"),
        ("byte_level", "eos_token_id", 70_000, "70000"),
        ("byte_level", "eos_token_id", -1, "-1"),
        ("byte_level", "bos_token_id", None, "bos_token_id"),
        ("byte_level", "add_eos_token", 1, "yes or no"),
        ("byte_level", "model", 3, "text"),
        ("pieces", "scores", None, "scores"),
        ("pieces", "scores", [1.0], "1 entries"),
        ("pieces", "scores", [1, 2], "scores"),
        ("pieces", "merges", ["h q"], "`q`"),
    ],
)
def test_what_contradicts_itself_is_named_in_one_line(
    kind: str, key: str, value: Any, said: str, request: pytest.FixtureRequest, file: Path
) -> None:
    values = {**request.getfixturevalue(kind), PREFIX + key: value}
    save_metadata(file, {name: one for name, one in values.items() if one is not None})
    message = one_line(lambda: load_tokenizer(file, None, 320))
    assert str(file) in message and said in message


def test_a_list_without_tokens_is_refused(byte_level: dict[str, Any], file: Path) -> None:
    values = {**byte_level, PREFIX + "tokens": ()}
    assert "empty" in one_line(lambda: GgufVocabulary.of(Metadata(file, values)))


def test_scores_that_are_no_numbers_are_refused(pieces: dict[str, Any], file: Path) -> None:
    scores = [*pieces[PREFIX + "scores"][1:], float("nan")]
    assert "no numbers" in one_line(lambda: opened(file, {**pieces, PREFIX + "scores": scores}))


def test_a_piece_of_endless_length_is_refused(pieces: dict[str, Any], file: Path) -> None:
    assert "longer than" in one_line(lambda: opened(file, with_tokens(pieces, {"a" * 1_000_000: TokenType.NORMAL})))


def test_tokens_without_text_get_a_name_each(byte_level: dict[str, Any], file: Path) -> None:
    tokens = [*byte_level[PREFIX + "tokens"], "", ""]
    values = with_tokens(byte_level, {"x0": TokenType.UNUSED, "x1": TokenType.UNUSED}, tokens=tokens)
    tokenizer = opened(file, values)
    assert len(tokenizer.of_transformers) == len(tokens) and tokenizer.decode(tokenizer.encode("hello")) == "hello"
