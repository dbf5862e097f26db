"""Grammars: what a text may be held to, compiled for the tokens of one tokenizer by llguidance (the extra [grammar]), which is
imported when the first is asked for. Whatever a client sends is bounded: its length, the time to compile it, and the memory
that it takes while texts are made. The library knows tokens by their bytes, and which of them are in no text. It gets one
token more, behind all others, which stands for the end of a text: which tokens end a row is the engine's matter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, lru_cache
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from h2o_flexgen.core.hints import not_installed, one_line, shortened, shown
from h2o_flexgen.sampling.structured_outputs import (
    CHOICE,
    GRAMMAR,
    JSON,
    JSON_OBJECT,
    NAME,
    REGEX,
    ConstraintBroken,
    StructuredOutputsParams,
)
from h2o_flexgen.text import grammar_trial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer


END = "<|nothing follows|>"
NO_TEXT = b"\xff"  # begins a token that is in no text


def of_bytes(tokens: Sequence[bytes]) -> LLTokenizer:
    """Tokens of which each is the same bytes everywhere; none of them: it is in no text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(tokens)))


class _Bytes:
    """As much of a tokenizer as the library asks for."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        named = ((token, b"<%d>" % number) for number, token in enumerate(tokens))
        self.tokens = [*(token or NO_TEXT + name for token, name in named), NO_TEXT + END.encode()]
        self.eos_token_id = len(tokens)
        self._ids = {token: number for number, token in enumerate(tokens) if token}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[bytes((one,))] for one in text if bytes((one,)) in self._ids]


def of_rules(rules: Tokenizer | None) -> LLTokenizer:
    """The tokens of a tokenizer of the library `tokenizers`: its decoder says what bytes they are."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    if rules is None:
        raise ValueError("no text can be held to a grammar: this tokenizer is none of the library tokenizers; choose another")
    own = Tokenizer.from_str(rules.to_str())
    own.no_padding()
    own.no_truncation()
    end = END
    while own.token_to_id(end) is not None:
        end += END
    own.add_special_tokens([end])
    try:
        return LLTokenizer(own.to_str(), eos_token=own.token_to_id(end))
    except ValueError as error:
        raise ValueError(
            f"no text can be held to a grammar: the tokenizer cannot be read for it ({one_line(error)})"
        ) from error


MOST_CHARACTERS = 1 << 20  # of a grammar
KNOWN_GRAMMARS = 64  # that stay compiled
KNOWN_PARTS = 512  # schemas that were found good: those of the tools of several requests
WORTH_SAYING_SECONDS = 1.0
WORD_BITS = 32  # of a word of a mask
MOST_STEPS = 10_000  # a number counts its multiples in so many states, which takes 20 ms
TRIAL_SECONDS = 5  # of a processor, for a grammar of a kind that may take for ever
LEXER_STATES = 20_000  # some kilobytes each; rows of one grammar share them
ESCAPES = 'bfnrt"\\'  # of characters that cannot stand in JSON as they are, but for the rarest
BLANKS = r" |\n[ \t]{0,40}"  # between the parts of JSON: bounded, as small models never leave off making more
# what a schema says of itself does not count; a name that is not listed must not be written like one that is, with escapes
JSON_OPTIONS: Mapping[str, object] = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": ESCAPES,
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
}
_LEAP = "(0[48]|[2468][048]|[13579][26])"  # hundreds, or years of one that is none of these
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DAY = f"(([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29|{_YEAR}-({_MONTHS}))"
DAYS = {"date": f"^{DAY}$", "date-time": f"^{DAY}[Tt]"}  # formats -> what their texts match
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
NO_DETAILS = "<non-verbose/>"  # behind errors of the library
NO_TOKEN = "NoExtension"  # in the error of the library where nothing may come
TOO_DEEP, NESTED = "recursion limit exceeded", "is nested too deeply; make it flatter"  # as the library says it, and as here
TRIED_TOKENS = 3  # at the beginning of a text
LONGEST_REASON = 200  # characters
TITLES = {
    JSON: "the JSON schema",
    JSON_OBJECT: "any JSON object",
    REGEX: "the regular expression",
    CHOICE: "the choice",
    GRAMMAR: "the grammar",
}
UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
REASON = re.compile(r"^error: (.*)", re.MULTILINE)  # of a regular expression, below a picture of where it is
ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
SLOW_TO_COMPILE = re.compile("[&~]")
MULTIPLES = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')


class Grammars:
    """What texts of one tokenizer are held to. Several threads may ask it."""

    def __init__(self, tokens: Callable[[], LLTokenizer]) -> None:
        """`tokens` makes the library's own form of the tokenizer, which has one token more: the end of a text."""
        self._tokens_of, self._making = tokens, Lock()
        self._compiled = lru_cache(maxsize=KNOWN_GRAMMARS)(self._compile)
        self._parts_known = lru_cache(maxsize=KNOWN_PARTS)(self._try_part)

    def check(self, asked: StructuredOutputsParams) -> None:
        """Refuses what no text can be held to."""
        self._compiled(asked)

    def check_part(self, asked: StructuredOutputsParams) -> None:
        """The same of what no text is held to by itself: it does not stay compiled, so that what texts are held to does."""
        self._parts_known(asked)

    def constraint(self, asked: StructuredOutputsParams, ends: Collection[int]) -> HeldText:
        """What a row is held to; `ends` are the tokens that may end it."""
        return HeldText(self._compiled(asked).deep_copy(), self.tokens, ends)

    @cached_property
    def tokens(self) -> LLTokenizer:
        """The tokens as the library has them."""
        try:
            return self._tokens_of()
        except ImportError as error:
            raise ValueError(not_installed("llguidance, which holds texts to a grammar,", "grammar")) from error

    def _try_part(self, asked: StructuredOutputsParams) -> None:
        self._compile(asked)

    def _compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        with self._making:
            tokens = self.tokens
        began = perf_counter()
        try:
            found = _matcher(asked, tokens)
        except RecursionError:
            raise NotHeld(asked, NESTED) from None
        seconds = perf_counter() - began
        if seconds > WORTH_SAYING_SECONDS:
            what = f"{TITLES[asked.kind]} {shown(_written(asked))}"
            warnings.warn(f"slow: {what} took {seconds:.1f} s to compile", RuntimeWarning, stacklevel=2)
        return found


# -- compiling ---------------------------------------------------------------------------------------------------------------


def _matcher(asked: StructuredOutputsParams, tokens: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    if len(_written(asked)) > MOST_CHARACTERS:
        raise NotHeld(asked, f"has more than {MOST_CHARACTERS} characters; give a shorter one")
    _refuse_large_steps(asked)
    if asked.kind == JSON:
        _refuse_repeated_names(asked, asked.schema)
    grammar = _in_library(asked)
    if asked.kind == GRAMMAR and SLOW_TO_COMPILE.search(asked.grammar or ""):
        _try_apart(asked, grammar)
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, precompute_large_lexemes=False, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise NotHeld(asked, _advice(matcher.get_error()))
    try:
        is_possible = HeldText(matcher.deep_copy(), tokens, ()).may_begin()
    except ConstraintBroken as error:
        raise NotHeld(asked, f"cannot be followed ({error}); make it smaller") from error
    if not is_possible:
        raise NotHeld(asked, "accepts no text that this model could write; mend it")
    return matcher


def _written(asked: StructuredOutputsParams) -> str:
    return str(getattr(asked, asked.kind))


class NotHeld(ValueError):
    """What no text can be held to."""

    def __init__(self, asked: StructuredOutputsParams, why: str) -> None:
        super().__init__(f"{NAME} cannot be held to: {TITLES[asked.kind]} {shown(_written(asked))} {why}")
        self.why = why


def _advice(error: str) -> str:
    """What is wrong with a grammar, in one line."""
    if unsupported := UNSUPPORTED.search(error):
        return f"has keywords that are not supported: {unsupported[1]}; leave them out"
    if TOO_DEEP in error:
        return NESTED
    reasons = REASON.findall(error)
    return f"is refused ({reasons[-1] if reasons else _in_short(error)}); mend it"


def _in_short(error: str) -> str:
    said = shortened(one_line(ValueError(error.replace(NO_DETAILS, ""))))
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."


def _refuse_large_steps(asked: StructuredOutputsParams) -> None:
    """Refuses numbers that would take long to be counted in; a grammar may have schemas within."""
    if asked.kind not in (JSON, GRAMMAR):
        return
    text = ESCAPED.sub(lambda found: chr(int(found[1], 16)), _written(asked))
    for number in MULTIPLES.findall(text):
        try:
            size = abs(Decimal(number))
        except ArithmeticError:
            continue  # no number: it is refused as such
        if size * 10 ** max(0, -int(size.as_tuple().exponent)) > MOST_STEPS:
            raise NotHeld(asked, f"has multipleOf {shown(number)}, which has too many steps; {MOST_STEPS} is the most")


def _refuse_repeated_names(asked: StructuredOutputsParams, schema: object) -> None:
    """Refuses numbers of properties of which any may come: one that comes twice would count twice."""
    within = schema if isinstance(schema, list) else [*schema.values()] if isinstance(schema, dict) else []
    if isinstance(schema, dict) and isinstance(least := schema.get("minProperties"), int):
        is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
        required = schema.get("required")
        if is_open and least > max(1, len(required) if isinstance(required, list) else 0):
            raise NotHeld(
                asked, f"has minProperties {least} for names that are not listed, which is not supported; leave it out"
            )
    for one in within:
        _refuse_repeated_names(asked, one)


def _try_apart(asked: StructuredOutputsParams, grammar: str) -> None:
    """Refuses a grammar that takes too long to compile: the library does not bound the time for what all of several expressions
    match, or what one does not."""
    command = [sys.executable, grammar_trial.__file__, str(TRIAL_SECONDS)]
    if subprocess.run(command, input=grammar.encode(), capture_output=True, check=False).returncode:
        raise NotHeld(asked, "takes too long to compile, or too much memory; use fewer & and ~")


def _in_library(asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    if asked.kind == REGEX:
        return LLMatcher.grammar_from_regex(asked.regex or "")
    if asked.kind == CHOICE:
        return LLMatcher.grammar_from_regex("|".join(map(_as_expression, asked.texts)))
    if asked.kind == GRAMMAR:
        try:
            return grammar_from("grammar", asked.grammar or "")
        except ValueError as error:
            raise NotHeld(asked, _advice(str(error))) from error
    options: Any = json_options(asked)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(for_library(asked.schema)), overrides=options)
    except ValueError as error:  # nested too deeply
        raise NotHeld(asked, _advice(str(error))) from error


def json_options(asked: StructuredOutputsParams) -> dict[str, object]:
    """The library's options for this JSON."""
    options = {**JSON_OPTIONS}
    if asked.disable_any_whitespace:
        del options["whitespace_pattern"]
        options["whitespace_flexible"] = False
    elif asked.whitespace_pattern:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return options


def _as_expression(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)


def for_library(schema: object) -> Mapping[str, object]:
    """The schema as the library wants it: an object, of which dates are days that there are."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    assert isinstance(schema, Mapping), "read when it was made"
    return _with_real_days(schema)


def _with_real_days(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with a pattern beside each format that has a day in it: to the library 0000-02-29 is a date."""
    found = {name: _within(name, value) for name, value in schema.items()}
    kind = schema.get("format")
    pattern = DAYS.get(kind) if isinstance(kind, str) else None
    if pattern is None:
        return found
    if "pattern" not in found:
        return {**found, "pattern": pattern}
    others = found.get("allOf")
    return {**found, "allOf": [*(others if isinstance(others, list) else ()), {"pattern": pattern}]}


def _within(name: str, value: object) -> object:
    """What stands in a schema under this name, with the same done to all schemas in it."""
    if name in ("const", "enum", "default", "examples"):
        return value
    if isinstance(value, list):
        return [_with_real_days(one) if isinstance(one, Mapping) else one for one in value]
    if not isinstance(value, Mapping):
        return value
    if name in NAMED_SCHEMAS:
        return {key: _with_real_days(one) if isinstance(one, Mapping) else one for key, one in value.items()}
    return _with_real_days(value)


# -- a row -------------------------------------------------------------------------------------------------------------------


class HeldText:
    """A Constraint by a compiled grammar."""

    def __init__(self, matcher: LLMatcher, tokens: LLTokenizer, ends: Collection[int]) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._ends = [divmod(token, WORD_BITS) for token in ends]
        self._own_end = divmod(tokens.eos_token, WORD_BITS)
        self._words = array("I", bytes(-(-tokens.vocab_size // WORD_BITS) * WORD_BITS // 8))

    @property
    def is_whole(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def only_token(self) -> int | None:
        if self.is_whole or not self._matcher.compute_ff_bytes():
            return None  # the next byte is open, and so is the token
        forced = self._matcher.compute_ff_tokens()
        return forced[0] if forced else None  # which masks have alone; where tokens are open, no mask is made to look for one

    def allows(self, token: int) -> bool:
        """What a mask says of a token."""
        if self.is_whole and divmod(token, WORD_BITS) in self._ends:
            return True
        if token >= self._tokens.vocab_size or token == self._tokens.eos_token:
            return False
        only = self.only_token
        return self._matcher.validate_tokens([token]) == 1 if only is None else token == only

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._refuse_broken()

    def restart(self) -> None:
        self._matcher.reset()

    def write_mask(self, words: memoryview) -> None:
        self._make_mask()
        common = min(len(words), len(self._words))
        words[:common] = memoryview(self._words)[:common]
        words[common:] = memoryview(bytes(words.itemsize * (len(words) - common))).cast("I")
        if self.is_whole:
            for word, bit in self._ends:
                if word < len(words):
                    words[word] |= 1 << bit

    def _make_mask(self) -> None:
        address, count = self._words.buffer_info()
        self._matcher.unsafe_compute_mask_ptr(address, count * self._words.itemsize)
        self._refuse_broken()
        word, bit = self._own_end
        self._words[word] &= ~(1 << bit)

    def _refuse_broken(self) -> None:
        if self._matcher.is_error():
            raise ConstraintBroken(_in_short(self._matcher.get_error()))

    def may_begin(self) -> bool:
        """Whether there is a first token. The next few are tried, too: a ConstraintBroken says what is too large for them."""
        for count in range(TRIED_TOKENS):
            try:
                self._make_mask()
            except ConstraintBroken as error:
                if NO_TOKEN in str(error) and not count:
                    return False
                raise
            first = next((place for place, word in enumerate(self._words) if word), None)
            if first is None:
                return count > 0
            word = self._words[first]
            self.take(first * WORD_BITS + (word & -word).bit_length() - 1)
            if self.is_over:
                break
        return True

    def holds(self, text: str) -> bool:
        other = self._matcher.deep_copy()
        other.reset()
        ids = self._tokens.greedy_tokenize(text)
        return other.try_consume_tokens(ids) == len(ids) and other.is_accepting()
