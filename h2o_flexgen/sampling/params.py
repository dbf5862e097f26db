"""SamplingParams: how a prompt is to be continued, checked on creation. LoRARequest: the adapter of a request, under
vLLM's name. The command line takes its defaults from here, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from h2o_flexgen.core.allowed_values import (
    LARGEST_ID,
    TRUTH,
    Bounds,
    Rule,
    Several,
    any_of,
    check_tokens,
    mapping,
    several,
    text,
)
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.option import check_options, option, options_of
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.sampling.structured_outputs import (
    FORMAT,
    NAME,
    AsResponseFormat,
    AsStructuredOutputs,
    StructuredOutputsParams,
)

LARGEST_SHIFT, LARGEST_BIAS = 2.0, 100.0
SEED = Bounds(0, 2**64 - 1)
SHIFT = Bounds(-LARGEST_SHIFT, LARGEST_SHIFT, is_whole=False)
SHARE = Bounds(0, 1, is_whole=False)
TOKEN_ID = Bounds(0, LARGEST_ID)
BIAS = Bounds(-LARGEST_BIAS, LARGEST_BIAS, is_whole=False)
_OFF = "; 0 is off"
FORBIDDING = ("allowed_token_ids", "min_tokens", "no_repeat_ngram_size", "repetition_penalty", "structured_outputs")

_NO_BEAMS = "there is no beam search; make n completions and choose by cumulative_logprob"
# options of other libraries that have no other name here, and what to do
_ADVICE: Mapping[str, str] = {
    "bad_words": "lower the chances of tokens with logit_bias",
    "best_of": "make n completions and choose by cumulative_logprob",
    "detokenize": "text and token_ids are always both there",
    "do_sample": "a temperature above 0 samples, and 0 is greedy",
    "early_stopping": _NO_BEAMS,
    "extra_args": "nothing would read them",
    **{
        f"guided_{kind}": f'write structured_outputs={{"{kind}": ...}}'
        for kind in ("json", "regex", "choice", "grammar", "json_object")
    },
    "guided_whitespace_pattern": 'write structured_outputs={"json": ..., "whitespace_pattern": ...}',
    "json_schema": 'write structured_outputs={"json": ...}',
    "length_penalty": _NO_BEAMS,
    "logits_processors": "what there is are logit_bias, allowed_token_ids and the penalties",
    "num_beams": _NO_BEAMS,
    "output_kind": "completions come whole; on_token gets every token",
    "spaces_between_special_tokens": "a text has no spaces that are in none of its tokens; leave it out",
    "truncate_prompt_tokens": "give the prompt as token ids, without those to leave out",
    "use_beam_search": _NO_BEAMS,
}


def _stops(value: object) -> tuple[str, ...]:
    return (text(value),) if isinstance(value, str) else several(text)(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. The defaults are greedy decoding of 32 tokens."""

    max_tokens: int | None = option(  # None: as many as there are positions for; 0: prompt_logprobs alone
        32,
        Bounds(0, MOST_TOKENS),
        note=", or None (as many as the model has positions for)",
        flags=("--gen-len",),
        elsewhere=("max_new_tokens", "max_length"),
    )
    # of tokens that are equally likely greedy decoding takes the one with the lowest id; above 100 little is left of the model
    temperature: float = option(
        0.0, Bounds(0, 100, is_whole=False), "T", "0: greedy, the likeliest token", note="; 0 is greedy"
    )
    top_k: int = option(  # and what ties with the k-th
        0, Bounds(-1, LARGEST_ID), "K", "only the K likeliest tokens; 0 or -1: all", note="; 0 and -1 are off"
    )
    top_p: float = option(
        1.0,
        Bounds(0, 1, is_whole=False, without_least=True),
        "P",
        "only the fewest that hold this share; 1: all",
        note="; 1 is off",
    )
    min_p: float = option(0.0, SHARE, "P", "only tokens at least P times as likely as the likeliest; 0: all", note=_OFF)
    repetition_penalty: float = option(  # beyond its bounds it allows nothing, or nothing else
        1.0,
        Bounds(0.01, 100, is_whole=False),
        "R",
        "above 1 discourages tokens that were there before; 1: off",
        note="; 1 is off",
    )
    seed: int | None = option(  # None: the seed of the whole call
        None, SEED, "N", "repeats a run with a temperature (default: another one each time)", note=", or None"
    )
    stop: str | Sequence[str] | None = option(
        (),
        Rule(_stops, "a text that is not empty, or a list of such; [] is none"),
        "TEXT",
        "a text ends before this",
        elsewhere=("stop_strings",),
    )
    stop_token_ids: Sequence[int] | None = option(
        (),
        Several(TOKEN_ID, f"a list of token ids, 0 to {LARGEST_ID}"),
        "ID",
        "ends a text",
        flags=("--stop-token-id",),
        elsewhere=("eos_token_id",),
    )
    ignore_eos: bool = option(False, TRUTH, "", "go on to --gen-len behind the end of the text", bare=True)
    logprobs: int | None = option(  # as the model has them
        None, TOKEN_ID, "N", "show those of each token, and of the N likeliest", note=", or None (off)", bare=0
    )
    n: int = option(1, Bounds(1, 16_384), elsewhere=("num_return_sequences",))  # completions, each with its random numbers
    min_tokens: int = option(
        0,
        Bounds(0, MOST_TOKENS),
        "N",
        "nothing ends a text before it has so many tokens",
        note=_OFF,
        elsewhere=("min_new_tokens",),
    )
    presence_penalty: float = option(
        0.0,
        SHIFT,
        "P",
        f"taken off the logits of tokens that were generated, {-LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}; below 0 encourages them",
        note=_OFF,
    )
    frequency_penalty: float = option(0.0, SHIFT, "P", "the same, once for each time that a token was generated", note=_OFF)
    no_repeat_ngram_size: int = option(  # as transformers means it: tokens of the prompt count, and so do those that end a text
        0, Bounds(0, MOST_TOKENS), "N", "no N tokens come in the same order a second time; 0: off", note=_OFF
    )
    logit_bias: Mapping[int, float] | None = option(  # added to the logits of these tokens
        None,
        Rule(mapping(TOKEN_ID.read, BIAS.read), f"a dict of token ids and numbers, {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"),
        note=", or None",
        hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = option(  # only these can be picked
        None, Rule(any_of(several(TOKEN_ID.read)), "a list of one token id or more"), note=", or None (all)"
    )
    prompt_logprobs: int | None = option(None, TOKEN_ID, note=", or None (off)")  # as logprobs, of the tokens of the prompt
    # the text ends after a stop string or the text of a stop token
    include_stop_str_in_output: bool = option(False, TRUTH)
    skip_special_tokens: bool = option(True, TRUTH)  # otherwise they are in the text, but for the one that ends it
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = option(  # what the text is held to
        None,
        AsStructuredOutputs(),
        "FILE",
        "hold each text to the JSON schema in this file",
        flags=("--json-schema",),
        elsewhere=("guided_decoding",),
    )
    # the name of the adapter that the row has
    lora_name: str | None = option(None, Rule(text, "the name of an adapter"), note=", or None")
    # the same as OpenAI has it: what it asks for is kept as structured_outputs
    response_format: StructuredOutputsParams | Mapping[str, object] | None = option(None, AsResponseFormat())

    def __new__(cls, *given: object, **named: object) -> SamplingParams:
        """Explains an unknown name better than Python does."""
        if not SAMPLING.keys() >= named.keys():
            for name in named:
                if name in INSTEAD:
                    raise ValueError(f"sampling option {name!r} is not supported; {INSTEAD[name]}")
                if name not in SAMPLING:
                    hint = did_you_mean(name, SAMPLING) or f"; known are {', '.join(SAMPLING)}"
                    raise ValueError(f"sampling option {name!r} is unknown{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self, SamplingParams)
        if self.response_format is not None:
            if self.structured_outputs is not None:
                raise ValueError(f"{FORMAT} stands beside {NAME}; give one of them")
            object.__setattr__(self, NAME, self.response_format)
            object.__setattr__(self, FORMAT, None)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens == 0 and not self.asks_of_prompt:
            raise ValueError("max_tokens is 0; allowed is 1 or more, or 0 with prompt_logprobs, where a prompt is only scored")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; allowed is 0 to max_tokens, which is {self.max_tokens}")

    @property
    def asks_of_prompt(self) -> bool:
        """True if something is made of all positions of the prompt, in the pass that reads it."""
        return self.prompt_logprobs is not None

    def up_to(self, max_tokens: int) -> SamplingParams:
        """The same parameters for this many tokens."""
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def check_vocabulary(self, vocab: int, model: str) -> None:
        """Refuses tokens that the model cannot generate."""
        check_tokens("stop_token_ids has", self.stop_ids, vocab, model)
        check_tokens("logit_bias has", self.logit_bias or (), vocab, model)
        check_tokens("allowed_token_ids has", self.allowed_token_ids or (), vocab, model)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple), "read when it was made"
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple), "read when it was made"
        return self.stop_token_ids

    @property
    def held_to(self) -> StructuredOutputsParams | None:
        """What the text is held to."""
        assert not isinstance(self.structured_outputs, Mapping), "read when it was made"
        return self.structured_outputs

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def is_penalised(self) -> bool:
        """True if a token's score depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def may_forbid_any(self) -> bool:
        """True if any token may be forbidden, not only one that ends a text."""
        return self.allowed_token_ids is not None or self.no_repeat_ngram_size > 0

    @property
    def forbidding(self) -> Sequence[str]:
        """The names of the options that are set here and may leave no token; of all such options if none is set."""
        return [name for name in FORBIDDING if getattr(self, name) != SAMPLING[name].default] or FORBIDDING

    @cached_property
    def changes_scores(self) -> bool:
        """True if scores differ from the model's logits at every step."""
        return self.is_penalised or bool(self.logit_bias) or self.may_forbid_any


SAMPLING = options_of(SamplingParams)
# options of other libraries, and what to do here
INSTEAD: Mapping[str, str] = {
    **_ADVICE,
    **{other: f"it is called {name}" for name, one in SAMPLING.items() for other in one.elsewhere},
}


def one_params(given: object) -> SamplingParams:
    """The given parameters, or the default ones for None. Anything else is refused, even an empty dict."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise ValueError(f"sampling_params is {shown(given)}; write SamplingParams(max_tokens=32, temperature=0.8)")
    return given


# -- adapters ----------------------------------------------------------------------------------------------------------

FORM = "write LoRARequest(NAME, 1, PATH)"


def is_adapter_name(name: object) -> bool:
    """Whether an adapter may have this name: it stands before a = among flags, and behind a : in the names of models."""
    return isinstance(name, str) and bool(name) and not {*name} & {"=", ":"}


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, by which it is known from then on, and its folder or GGUF file. The number is vLLM's, and means
    nothing here."""

    lora_name: str
    lora_int_id: int = field(default=0, compare=False)
    lora_path: str | Path = ""

    def __post_init__(self) -> None:
        if not is_adapter_name(self.lora_name):
            raise ValueError(f"lora_name is {shown(self.lora_name)}; {FORM}, where NAME has no = and no :")
        if not isinstance(self.lora_path, (str, os.PathLike)) or not str(self.lora_path):
            raise ValueError(f"lora_path is {shown(self.lora_path)}; {FORM}")


Adapted: TypeAlias = "LoRARequest | Iterable[LoRARequest | None] | None"  # one for all prompts, or one for each


def adapters_of_prompts(asked: Adapted, count: int) -> Sequence[LoRARequest | None]:
    """The adapter of each of so many prompts."""
    is_several = isinstance(asked, Iterable) and not isinstance(asked, (str, bytes))
    each: list[Any] = [*asked] if is_several else [asked] * count  # type: ignore[misc]
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError(f"lora_request is {shown(one)}; {FORM}, or a list with one for each")
    if len(each) != count:
        raise ValueError(f"{count} prompts came with {len(each)} adapters in lora_request; give one for all or one for each")
    return each


def params_with_adapters(params: Sequence[SamplingParams], each: Sequence[LoRARequest | None]) -> list[SamplingParams]:
    """Sampling parameters of prompts that name the adapters of these."""
    both = zip(params, each, strict=True)
    return [own if one is None else replace(own, lora_name=one.lora_name) for own, one in both]
