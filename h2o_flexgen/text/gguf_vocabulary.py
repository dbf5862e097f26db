"""The tokens of a GGUF file: what its metadata say of them, checked before a tokenizer is built from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import Metadata
from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.text.tokenizer import BYTES as TOKENS_ARE_BYTES

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
HIGH, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NAME, CAPITALS = f"{BEFORE_WORD}{HIGH}*{LOW}+", f"{BEFORE_WORD}{HIGH}+{LOW}*"
ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
CHINESE, CHINESE_OR_KANA = r"[一-龥ࠀ-一가-퟿]+", r"[一-龥぀-ゟ゠-ヿ]+"

GPT2 = _any(SHORTENED, r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", LAST_SPACES)
LLAMA3 = _any(ANY_CASE, WORD, THREE_DIGITS, SIGNS, SPACES)
QWEN2 = _any(ANY_CASE, WORD, DIGIT, SIGNS, SPACES)
QWEN35 = _any(ANY_CASE, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)
TEKKEN = _any(NAME, CAPITALS, DIGIT, SIGNS_WITH_SLASHES, SPACES)
GPT4O = _any(f"{NAME}{ANY_CASE}?", f"{CAPITALS}{ANY_CASE}?", THREE_DIGITS, SIGNS_WITH_SLASHES, SPACES)
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
