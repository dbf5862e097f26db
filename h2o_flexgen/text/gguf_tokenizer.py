"""Tokenizers made from the metadata of GGUF files, by the library `tokenizers` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from h2o_flexgen.checkpoints.gguf_format import read_metadata
from h2o_flexgen.core.hints import one_line, shown
from h2o_flexgen.text.gguf_vocabulary import BYTES, END, PADDING, PIECES, RULE, START, UNKNOWN, GgufVocabulary, TokenType
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "▁"
TEXTS = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)  # types of tokens that pieces of text become
LONGEST_PIECE = 512  # characters; every place where a piece could be parted is looked at
ROLES = {"bos_token": START, "eos_token": END, "unk_token": UNKNOWN, "pad_token": PADDING}  # as the library names them


class GgufTokenizer(WordTokenizer):
    """The tokenizer of a GGUF file. transformers is imported only for its users."""

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        self._path = vocabulary.path
        self._tokenizer = tokenizer_of(vocabulary)
        self._roles, self._template = roles_of(vocabulary), vocabulary.template
        self.eos_ids, self.note = vocabulary.end_ids, _note(vocabulary)

    @cached_property
    def of_transformers(self) -> PreTrainedTokenizerBase:
        return self._library_tokenizer(self._tokenizer)

    def made_again(self, adds_start: bool) -> PreTrainedTokenizerBase:
        return self._library_tokenizer(tokenizer_of(GgufVocabulary.of(read_metadata(self._path)), adds_start))

    def _library_tokenizer(self, fast: Tokenizer) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast  # takes seconds to import

        template = {} if self._template is None else {"chat_template": self._template}
        made = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **self._roles, **template)
        made.name_or_path = str(self._path)  # not earlier: the library would ask the hub about it
        return made

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not with_special))

    def name_of(self, token: int) -> object:
        return self._tokenizer.id_to_token(token)

    @property
    def rules(self) -> Tokenizer:
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        return self._template

    @property
    def special_tokens(self) -> Mapping[str, object]:
        return self._roles


def _note(vocabulary: GgufVocabulary) -> str:
    if vocabulary.kind == PIECES or vocabulary.rule_name:
        return ""
    return f"{vocabulary.path} does not say how texts are cut into words ({RULE}), so llama.cpp's default is taken"


def tokenizer_of(vocabulary: GgufVocabulary, adds_start: bool | None = None) -> Tokenizer:
    if vocabulary.kind not in (BYTES, PIECES):
        raise vocabulary.unreadable(f"its kind {shown(vocabulary.kind)} is not known; known are {BYTES}, {PIECES}")
    made = _of_bytes(vocabulary) if vocabulary.kind == BYTES else _of_pieces(vocabulary)
    made.add_special_tokens(list(_added(vocabulary, TokenType.CONTROL, TokenType.UNKNOWN)))
    made.add_tokens(list(_added(vocabulary, TokenType.USER_DEFINED)))
    made.add_special_tokens([text for text in roles_of(vocabulary).values() if not _is_added(made, text)])
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


def _is_added(made: Tokenizer, text: str) -> bool:
    return any(token.content == text for token in made.get_added_tokens_decoder().values())


def roles_of(vocabulary: GgufVocabulary) -> dict[str, str]:
    """The tokens with a meaning, by the names that the library has for them."""
    named = {role: vocabulary.token_of(name) for role, name in ROLES.items() if _has_role(vocabulary, name)}
    return {role: text for role, text in named.items() if text is not None}


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
