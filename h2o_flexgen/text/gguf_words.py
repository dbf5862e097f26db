"""The rules by which byte-level tokenizers cut texts into words before merges apply, under the names that GGUF files give them
(tokenizer.ggml.pre). A name without a rule here is refused: text cut by another rule becomes other tokens than those
the model was trained on, and only worse answers would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "default"  # llama.cpp's own, which it takes where a file names none
USUAL = ("llama-bpe", "qwen2", "tekken", "smollm", "gpt-2")  # rules of the models that are run most


@dataclass(frozen=True)
class WordRule:
    """A text is cut by each pattern in turn: what the pattern matches is a piece, and so is what lies between two matches."""

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
    **_same("qwen2", WordRule((QWEN2,), composes=True)),
    **_same("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", WordRule((QWEN2,))),
    **_same("qwen35", WordRule((QWEN35,), composes=True)),
    **_same("tekken", WordRule((TEKKEN,), True, adds_start=True)),
    **_same("gpt-4o llama4 kanana2 talkie minimax-m2", WordRule((GPT4O,))),
    **_same("seed-coder", WordRule((SEED_CODER,))),
    **_same("deepseek-coder", WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT))),
    **_same("deepseek-v3 hunyuan-dense joyai-llm", WordRule((THREE_DIGITS, CHINESE_OR_KANA, DEEPSEEK3))),
}
