"""Tokenizers made from the metadata of GGUF files, by the library `tokenizers` alone. What the metadata say of the tokens is
checked before a tokenizer is built of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from h2o_flexgen.checkpoints.gguf_format import Metadata, read_metadata
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.core.hints import did_you_mean, one_line, shown
from h2o_flexgen.text.tokenizer import BYTES as TOKENS_ARE_BYTES
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFAULT = "default"  # llama.cpp's own, which it takes where a file names none
USUAL = ("llama-bpe", "qwen2", "tekken", "smollm", "gpt-2")  # rules of the models that are run most


@dataclass(frozen=True)
class WordRule:
    """A rule by which byte-level tokenizers cut texts into words before merges apply. GGUF files give its name
    (tokenizer.ggml.pre). A name without a rule here is refused: text cut by another rule becomes other tokens than those the
    model was trained on, and only worse answers would show it.

    A text is cut by each pattern in turn: what the pattern matches is a piece, and so is what lies between two matches."""

    patterns: tuple[str, ...]
    keeps_whole: bool = False  # a word that is a token itself is never built from merges
    adds_start: bool = False  # the start token stands before a text, unless the file says otherwise
    composes: bool = False  # letters and their accents become one character first (NFC), as these models' own tokenizers do


def _any(*patterns: str) -> str:
    return "|".join(patterns)


SHORTENED = r"'s|'t|'re|'ve|'m|'ll|'d"
ANY_CASE = rf"(?i:{SHORTENED})"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
LAST_SPACES = r"\s+(?!\S)|\s+"
SPACES = _any(r"\s*[\r\n]+", LAST_SPACES)
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
HIGH_ONES, LOW_ONES, NO_HAN = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"&&[^\p{Han}]"
HIGH, LOW = f"[{HIGH_ONES}]", f"[{LOW_ONES}]"
NAME, CAPITALS = f"{BEFORE_WORD}{HIGH}*{LOW}+", f"{BEFORE_WORD}{HIGH}+{LOW}*"
ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
CHINESE, CHINESE_OR_KANA = r"[一-龥ࠀ-一가-퟿]+", r"[一-龥぀-ゟ゠-ヿ]+"

GPT2 = _any(SHORTENED, r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", LAST_SPACES)
LLAMA3 = _any(ANY_CASE, WORD, THREE_DIGITS, SIGNS, SPACES)
QWEN2 = _any(ANY_CASE, WORD, DIGIT, SIGNS, SPACES)
QWEN35 = _any(ANY_CASE, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)
TEKKEN = _any(NAME, CAPITALS, DIGIT, SIGNS_WITH_SLASHES, SPACES)
GPT4O = _any(f"{NAME}{ANY_CASE}?", f"{CAPITALS}{ANY_CASE}?", THREE_DIGITS, SIGNS_WITH_SLASHES, SPACES)
KIMI_NAME = f"{BEFORE_WORD}[{HIGH_ONES}{NO_HAN}]*[{LOW_ONES}{NO_HAN}]+{ANY_CASE}?"
KIMI_CAPITALS = f"{BEFORE_WORD}[{HIGH_ONES}{NO_HAN}]+[{LOW_ONES}{NO_HAN}]*{ANY_CASE}?"
KIMI = _any(r"\p{Han}+", KIMI_NAME, KIMI_CAPITALS, THREE_DIGITS, SIGNS, SPACES)  # the model's own; llama.cpp parts no capitals
SEED_CODER = _any(ANY_CASE, WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", SPACES)
DEEPSEEK3 = _any(f"{ASCII_SIGN}[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", SPACES)


def _same(names: str, rule: WordRule) -> dict[str, WordRule]:
    return dict.fromkeys(names.split(), rule)


WORD_RULES: Mapping[str, WordRule] = {
    **_same(DEFAULT, WordRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    **_same("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion", WordRule((GPT2,))),
    **_same("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", WordRule((DIGIT, GPT2))),
    **_same("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", WordRule((LLAMA3,), True, adds_start=True)),
    **_same("smaug-bpe dbrx chatglm-bpe", WordRule((LLAMA3,))),
    **_same("glm4", WordRule((LLAMA3,), keeps_whole=True)),
    **_same("bloom gpt3-finnish", WordRule((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
    **_same("qwen2", WordRule((QWEN2,), composes=True)),
    **_same("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", WordRule((QWEN2,))),
    **_same("qwen35", WordRule((QWEN35,), composes=True)),
    **_same("tekken", WordRule((TEKKEN,), True, adds_start=True)),
    **_same("gpt-4o llama4 kanana2 talkie minimax-m2", WordRule((GPT4O,))),
    **_same("kimi-k2", WordRule((KIMI,), keeps_whole=True)),
    **_same("seed-coder", WordRule((SEED_CODER,))),
    **_same("deepseek-coder", WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT))),
    **_same("deepseek-v3 hunyuan-dense joyai-llm", WordRule((THREE_DIGITS, CHINESE_OR_KANA, DEEPSEEK3))),
}


OURS = "tokenizer.ggml."
KIND, RULE, TOKENS, TYPES, SCORES, MERGES = (
    OURS + name for name in ("model", "pre", "tokens", "token_type", "scores", "merges")
)
ADDS_START, ADDS_END, ADDS_SPACE = (OURS + name for name in ("add_bos_token", "add_eos_token", "add_space_prefix"))
TEMPLATE = "tokenizer.chat_template"
START, END, END_OF_TURN, END_OF_MESSAGE, UNKNOWN, PADDING = "bos", "eos", "eot", "eom", "unknown", "padding"
HAVE_TO_BE = (START, END, END_OF_TURN, END_OF_MESSAGE)  # tokens; files name padding that does not exist: it is not used
USUAL_IDS: Mapping[str, int] = {START: 1, END: 2, UNKNOWN: 0}  # of the kind PIECES, where the file does not say
BYTES, PIECES = "gpt2", "llama"  # kinds: BPE over bytes, and SentencePiece's BPE over characters
PIECES_OF_GEMMA4 = "gemma4"  # the second by merges, with a start token and without a space before a text
NO_KINDS = ("none", "no_vocab")  # names that say that there are no tokens
# Most files name one token that ends a text, though their models were taught several.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<EOT>")
ADVICE = f"choose another tokenizer (--tokenizer, in Python tokenizer=): {TOKENS_ARE_BYTES}, or the folder or GGUF file of one"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufVocabulary:
    path: Path
    kind: str  # BYTES, PIECES, or one that no tokenizer is made from
    rule_name: str | None  # of the rule that cuts texts into words; None: the file does not say
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]  # of the kind PIECES: pieces with higher ones are put together first
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int]  # START, END, ... -> the token
    says_start: bool | None  # whether the start token stands before each text; None: the file does not say
    adds_end: bool
    adds_space: bool  # a space stands before each text, and goes again where tokens become text
    template: str | None

    @classmethod
    def of(cls, metadata: Metadata) -> GgufVocabulary:
        """Unknown kinds and rules are refused later, where a tokenizer is made: what ends a text is known without one."""
        kind, tokens = metadata.text(KIND), _tokens(metadata)
        of_gemma4 = kind == PIECES_OF_GEMMA4
        merges = tuple(_merges(metadata)) if MERGES in metadata or kind == BYTES or of_gemma4 else ()
        kind = PIECES if of_gemma4 else kind
        made = cls(
            metadata.path,
            kind,
            rule_name=metadata.text(RULE) if RULE in metadata else None,
            tokens=tokens,
            types=_types(tokens, metadata),
            scores=_scores(tokens, metadata) if kind == PIECES and not merges else (),
            merges=merges,
            ids={name: token for name in (*HAVE_TO_BE, UNKNOWN, PADDING) for token in _id(name, tokens, metadata)},
            says_start=metadata.flag(ADDS_START) if ADDS_START in metadata and not of_gemma4 else None,
            adds_end=metadata.flag(ADDS_END, False),
            adds_space=kind == PIECES and not of_gemma4 and metadata.flag(ADDS_SPACE, True),
            template=metadata.text(TEMPLATE) if TEMPLATE in metadata else None,
        )
        for adds, key, name in ((made.says_start, ADDS_START, START), (made.adds_end, ADDS_END, END)):
            if adds and name not in made.ids:
                raise _corrupt(metadata, f"it says {key}, but not {_id_key(name)}")
        return made

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end a text: those that the file names, and control tokens that are known by their text."""
        named = {self.ids[name] for name in (END, END_OF_TURN, END_OF_MESSAGE) if name in self.ids}
        return frozenset(named.union(token for token, text in self.of_types(TokenType.CONTROL) if text in ENDS))

    @property
    def word_rule(self) -> WordRule:
        """How texts are cut into words, if tokens are bytes."""
        name = self.rule_name or DEFAULT
        if name not in WORD_RULES:
            some = f"{len(WORD_RULES)} are, such as {', '.join(USUAL)}{did_you_mean(name, WORD_RULES)}"
            raise self.unreadable(f"it cuts texts into words by the rule {shown(name)}, which is not known ({some})")
        return WORD_RULES[name]

    @property
    def adds_start(self) -> bool:
        if self.says_start is not None:
            return self.says_start
        return START in self.ids and (self.kind == PIECES or self.word_rule.adds_start)

    def of_types(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        return ((token, text) for token, (text, kind) in enumerate(zip(self.tokens, self.types)) if kind in types)

    def token_of(self, name: str) -> str | None:
        return self.tokens[self.ids[name]] if name in self.ids else None

    def unreadable(self, what: str) -> ValueError:
        return ValueError(f"the tokenizer in {self.path} cannot be read: {what}; {ADVICE}")


def has_tokens(metadata: Metadata) -> bool:
    return KIND in metadata and metadata.text(KIND) not in NO_KINDS


def _corrupt(metadata: Metadata, what: str) -> ValueError:
    return ValueError(f"the tokenizer in {metadata.path} is corrupt: {what}; {AGAIN}")


def _tokens(metadata: Metadata) -> tuple[str, ...]:
    """Every token's text. Those without one get a name, as each text belongs to one token."""
    tokens = tuple(text or f"[EMPTY_{token}]" for token, text in enumerate(metadata.texts(TOKENS)))
    if not tokens:
        raise _corrupt(metadata, f"{TOKENS} is empty")
    if len(set(tokens)) < len(tokens):
        text, times = Counter(tokens).most_common(1)[0]
        raise _corrupt(metadata, f"{shown(text)} stands {times} times in {TOKENS}, where each token stands once")
    return tokens


def _types(tokens: Sequence[str], metadata: Metadata) -> Sequence[int]:
    types = metadata.wholes(TYPES) if TYPES in metadata else [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _corrupt(metadata, f"{TYPES} has {len(types)} entries for {len(tokens)} tokens")
    return types


def _scores(tokens: Sequence[str], metadata: Metadata) -> Sequence[float]:
    scores = metadata.numbers(SCORES)
    if len(scores) != len(tokens):
        raise _corrupt(metadata, f"{SCORES} has {len(scores)} entries for {len(tokens)} tokens")
    if any(map(math.isnan, scores)):
        raise _corrupt(metadata, f"{SCORES} has entries that are no numbers")
    return scores


def _merges(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """The pairs of pieces, the first to be put together first. A piece may begin with a space, but has none further on."""
    for merge in metadata.texts(MERGES):
        space = merge.find(" ", 1)
        if space < 0 or space == len(merge) - 1:
            raise _corrupt(metadata, f"{MERGES} has the entry {shown(merge)}, which is no pair of pieces")
        yield merge[:space], merge[space + 1 :]


def _id(name: str, tokens: Sequence[str], metadata: Metadata) -> Iterator[int]:
    """The token with this name, if there is one."""
    key, usual = _id_key(name), USUAL_IDS.get(name) if metadata.text(KIND) == PIECES else None
    if key not in metadata and (usual is None or usual >= len(tokens)):
        return
    token = metadata.whole(key, usual)
    if 0 <= token < len(tokens):
        yield token
    elif name in HAVE_TO_BE:
        raise _corrupt(metadata, f"{key} is {token}, and there are {len(tokens)} tokens")


def _id_key(name: str) -> str:
    return f"{OURS}{name}_token_id"


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

    def encode_pair(self, first: str, second: str) -> list[int]:
        return list(self._tokenizer.encode(first, second).ids)

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
    """The tokens before and after a text, and around each of two. They have names of their own, since the template could not
    hold every token."""
    names = [name for name, adds in ((START, adds_start), (END, vocabulary.adds_end)) if adds and name in vocabulary.ids]
    known = [{"id": name, "ids": [vocabulary.ids[name]], "tokens": [vocabulary.token_of(name)]} for name in names]
    start, end = (name if name in names else "" for name in (START, END))
    single, second = f"{start} $A {end}".split(), f"{start} $B {end}".split()
    pair = [*single, *(f"{piece}:1" for piece in second)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
