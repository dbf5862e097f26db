"""Tokenizers made from the metadata of GGUF files, as a tokenizer of the library that reads those of model folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from h2o_flexgen.core.hints import one_line, shown
from h2o_flexgen.text.gguf_vocabulary import BYTES, END, PADDING, PIECES, START, UNKNOWN, GgufVocabulary, TokenType

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "▁"
TEXTS = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)  # types of tokens that pieces of text become
LONGEST_PIECE = 512  # characters; every place where a piece could be parted is looked at
ROLES = {"bos_token": START, "eos_token": END, "unk_token": UNKNOWN, "pad_token": PADDING}  # as the library names them


def library_tokenizer(vocabulary: GgufVocabulary, adds_start: bool | None = None) -> PreTrainedTokenizerBase:
    """The vocabulary as a tokenizer of transformers. `adds_start` overrides what the file says about a start token."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    fast = tokenizer_of(vocabulary, adds_start)
    roles = {role: vocabulary.token_of(name) for role, name in ROLES.items() if _has_role(vocabulary, name)}
    template = {} if vocabulary.template is None else {"chat_template": vocabulary.template}
    made = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **roles, **template)
    made.name_or_path = str(vocabulary.path)  # not earlier: the library would ask the hub about it
    return made


def tokenizer_of(vocabulary: GgufVocabulary, adds_start: bool | None = None) -> Tokenizer:
    if vocabulary.kind not in (BYTES, PIECES):
        raise vocabulary.unreadable(f"its kind {shown(vocabulary.kind)} is not known; known are {BYTES}, {PIECES}")
    made = _of_bytes(vocabulary) if vocabulary.kind == BYTES else _of_pieces(vocabulary)
    made.add_special_tokens(list(_added(vocabulary, TokenType.CONTROL, TokenType.UNKNOWN)))
    made.add_tokens(list(_added(vocabulary, TokenType.USER_DEFINED)))
    made.post_processor = _around_text(vocabulary, vocabulary.adds_start if adds_start is None else adds_start)
    return made


def _of_bytes(vocabulary: GgufVocabulary) -> Tokenizer:
    """BPE over bytes, each of which is written as a character."""
    rule = vocabulary.word_rule
    made = Tokenizer(_bpe(vocabulary, vocabulary.merges, ignore_merges=rule.keeps_whole))
    if rule.composes:
        made.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _of_pieces(vocabulary: GgufVocabulary) -> Tokenizer:
    """SentencePiece's BPE over characters: spaces are marked, and bytes represent characters that are no pieces."""
    merges, unknown = vocabulary.merges or scored_merges(vocabulary), vocabulary.token_of(UNKNOWN)
    made = Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    marked = normalizers.Replace(" ", SPACE_MARK)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marked]) if vocabulary.adds_space else marked
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if vocabulary.adds_space else [])])
    return made


def _bpe(vocabulary: GgufVocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    """The first of equal merges counts, as in llama.cpp."""
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(ids, list(dict.fromkeys(merges)), **options)
    except Exception as error:  # the library has no class of its own for merges that contradict the tokens
        raise vocabulary.unreadable(one_line(error)) from error


def scored_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, the one with the highest score first. Pieces of one score follow each other as in
    the vocabulary, which some files have in the order of merges beside scores that are all the same."""
    pieces = {text: token for token, text in vocabulary.of_types(*TEXTS)}
    if len(longest := max(pieces, key=len, default="")) > LONGEST_PIECE:
        raise vocabulary.unreadable(f"the piece {shown(longest)} is longer than {LONGEST_PIECE} characters")
    ordered = sorted(pieces, key=lambda text: (-vocabulary.scores[pieces[text]], pieces[text]))
    return [pair for text in ordered for pair in _halves(text) if pair[0] in pieces and pair[1] in pieces]


def _halves(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:place], text[place:]) for place in range(len(text) - 1, 0, -1))


def _added(vocabulary: GgufVocabulary, *types: TokenType) -> Iterator[AddedToken]:
    """Tokens that are found in a text before anything else is done with it."""
    special = TokenType.USER_DEFINED not in types
    return (AddedToken(text, special=special, normalized=False) for _, text in vocabulary.of_types(*types))


def _has_role(vocabulary: GgufVocabulary, name: str) -> bool:
    """False also for a plain piece of text that stands in for an unknown or a padding token: it would vanish from texts."""
    if name not in vocabulary.ids:
        return False
    return name in (START, END) or vocabulary.types[vocabulary.ids[name]] not in (TokenType.NORMAL, TokenType.BYTE)


def _around_text(vocabulary: GgufVocabulary, adds_start: bool) -> processors.TemplateProcessing:
    """The tokens before and after a text. They have names of their own, since the template could not hold every token."""
    names = [name for name, adds in ((START, adds_start), (END, vocabulary.adds_end)) if adds and name in vocabulary.ids]
    known = [{"id": name, "ids": [vocabulary.ids[name]], "tokens": [vocabulary.token_of(name)]} for name in names]
    pieces = [name if name in names else "" for name in (START, END)]
    return processors.TemplateProcessing(single=f"{pieces[0]} $A {pieces[1]}".split(), special_tokens=known)
