"""SamplingParams: how a prompt is to be continued, checked on creation. The command line takes its defaults from here, without
importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from h2o_flexgen.core.allowed_values import Rule, any_of, mapping, number, optional, several, text, truth, whole
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.vocabulary import check_tokens

SEED_LIMIT = 2**64
MOST_COMPLETIONS = 16_384  # per prompt
LEAST_PENALTY, LARGEST_PENALTY = 0.01, 100.0  # beyond these a penalty allows nothing, or nothing else
LARGEST_SHIFT, LARGEST_BIAS = 2.0, 100.0

_NO_GRAMMAR = "no text is held to a grammar; check it when it is there"
_NO_SPECIALS = "special tokens are never in a text; token_ids has them"
_NO_BEAMS = "there is no beam search; make n completions and choose by cumulative_logprob"
# options of other libraries, and what to do here
INSTEAD: Mapping[str, str] = {
    "bad_words": "lower the chances of tokens with logit_bias",
    "best_of": "make n completions and choose by cumulative_logprob",
    "detokenize": "text and token_ids are always both there",
    "do_sample": "a temperature above 0 samples, and 0 is greedy",
    "early_stopping": _NO_BEAMS,
    "extra_args": "nothing would read them",
    "guided_decoding": _NO_GRAMMAR,
    "length_penalty": _NO_BEAMS,
    "logits_processors": "what there is are logit_bias, allowed_token_ids and the penalties",
    "max_new_tokens": "it is called max_tokens",
    "min_new_tokens": "it is called min_tokens",
    "num_beams": _NO_BEAMS,
    "num_return_sequences": "it is called n",
    "output_kind": "completions come whole; on_token hears of every token",
    "skip_special_tokens": _NO_SPECIALS,
    "spaces_between_special_tokens": _NO_SPECIALS,
    "structured_outputs": _NO_GRAMMAR,
    "truncate_prompt_tokens": "give the prompt as token ids, without those that are to go",
    "use_beam_search": _NO_BEAMS,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. The defaults are greedy decoding of 32 tokens."""

    max_tokens: int | None = 32  # None: as many as the model has positions for behind the prompt; 0: prompt_logprobs alone
    temperature: float = 0.0  # 0: greedy, the most likely token, the lowest id of several
    top_k: int = 0  # only the k most likely tokens (and what ties with the k-th); 0 or -1: all
    top_p: float = 1.0  # only the fewest tokens that hold this share of the probability; 1: all
    min_p: float = 0.0  # only tokens at least this many times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # of tokens in the prompt and in what was generated; above 1 discourages
    seed: int | None = None  # None: the seed of the whole call
    stop: str | Sequence[str] | None = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the chosen token and of the n likeliest, as the model has them
    n: int = 1  # completions of the prompt, each with random numbers of its own
    min_tokens: int = 0  # before these are there, no end of text, no stop token and no stop string ends a text
    presence_penalty: float = 0.0  # taken off the logits of tokens that were generated; below 0 encourages them
    frequency_penalty: float = 0.0  # the same, once for each time
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # added to the logits of these tokens
    allowed_token_ids: Sequence[int] | None = None  # only these can be picked
    prompt_logprobs: int | None = None  # as logprobs, of the tokens of the prompt
    include_stop_str_in_output: bool = False  # the text ends behind a stop string or the text of a stop token

    def __new__(cls, *given: object, **named: object) -> SamplingParams:
        """Explains an unknown name better than Python does."""
        if not RULES.keys() >= named.keys():
            known = [each.name for each in fields(cls)]
            for name in named:
                if name in INSTEAD:
                    raise ValueError(f"sampling option {name!r} is not supported; {INSTEAD[name]}")
                if name not in known:
                    hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
                    raise ValueError(f"sampling option {name!r} is unknown{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            given = getattr(self, name)
            if given is not DEFAULTS[name]:  # files have many thousand of these, which differ from the defaults in little
                object.__setattr__(self, name, rule.value(name, given))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0; allowed is 1 or more, or 0 with prompt_logprobs, where a prompt is only scored")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; allowed is 0 to max_tokens, which is {self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n}; allowed is 1 where temperature is 0: greedy completions are all the same; give a temperature"
            )

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
    def changes_scores(self) -> bool:
        """True if scores differ from the model's logits at every step."""
        return self.is_penalised or bool(self.logit_bias) or self.allowed_token_ids is not None


# -- allowed values ------------------------------------------------------------------------------------------------------


def _top_k(value: object) -> int:
    return max(0, whole(-1)(value))


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return several(text)(value)


_COUNT = Rule(optional(whole(0)), "a whole number, 0 or more, or None (off)")
_SHIFT = Rule(number(-LARGEST_SHIFT, LARGEST_SHIFT), f"{-LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}; 0 is off")
_SWITCH = Rule(truth, "True or False")
_IDS = several(whole(0))
_BIASES = mapping(whole(0), number(-LARGEST_BIAS, LARGEST_BIAS))

RULES: Mapping[str, Rule] = {
    "max_tokens": Rule(optional(whole(0)), "a whole number, 0 or more, or None (as many as the model has positions for)"),
    "temperature": Rule(number(0), "0 (greedy) or more"),
    "top_k": Rule(_top_k, "a whole number, 0 or -1 (off) or more"),
    "top_p": Rule(number(0, 1, without_least=True), "above 0 and at most 1 (off)"),
    "min_p": Rule(number(0, 1), "0 (off) to 1"),
    "repetition_penalty": Rule(number(LEAST_PENALTY, LARGEST_PENALTY), f"{LEAST_PENALTY:g} to {LARGEST_PENALTY:g}; 1 is off"),
    "seed": Rule(optional(whole(0, SEED_LIMIT - 1)), "a whole number, 0 to 2**64 - 1, or None"),
    "stop": Rule(optional(_stops, ()), "a text that is not empty, or a list of such"),
    "stop_token_ids": Rule(optional(_IDS, ()), "a list of token ids, 0 or more"),
    "ignore_eos": _SWITCH,
    "logprobs": _COUNT,
    "n": Rule(whole(1, MOST_COMPLETIONS), f"a whole number, 1 to {MOST_COMPLETIONS}"),
    "min_tokens": Rule(whole(0), "a whole number, 0 (off) or more"),
    "presence_penalty": _SHIFT,
    "frequency_penalty": _SHIFT,
    "logit_bias": Rule(optional(_BIASES), f"a dict of token ids and numbers, {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or None"),
    "allowed_token_ids": Rule(optional(any_of(_IDS)), "a list of one token id or more, or None (all)"),
    "prompt_logprobs": _COUNT,
    "include_stop_str_in_output": _SWITCH,
}


DEFAULTS: Mapping[str, object] = {each.name: each.default for each in fields(SamplingParams)}


def one_params(given: object) -> SamplingParams:
    """The given parameters, or the default ones for None. Anything else is refused, even an empty dict."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise ValueError(f"sampling_params is {shown(given)}; write SamplingParams(max_tokens=32, temperature=0.8)")
    return given
