"""SamplingParams: how a prompt is to be continued, checked on creation. The command line takes its defaults from here, without
importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from h2o_flexgen.core.allowed_values import Bounds, Rule, any_of, mapping, optional, several, text, truth
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.vocabulary import LARGEST_ID, check_tokens
from h2o_flexgen.core.workload import MOST_TOKENS

SEED_LIMIT = 2**64
LARGEST_SHIFT, LARGEST_BIAS = 2.0, 100.0
_SHIFTS = Bounds(-LARGEST_SHIFT, LARGEST_SHIFT, is_whole=False)
# of every option that is a number, for Python, files of requests, the server and the command line alike
BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(0, MOST_TOKENS),
    "temperature": Bounds(0, 100, is_whole=False),  # above this hardly anything is left of what the model says
    "top_k": Bounds(-1, LARGEST_ID),
    "top_p": Bounds(0, 1, is_whole=False, without_least=True),
    "min_p": Bounds(0, 1, is_whole=False),
    "repetition_penalty": Bounds(0.01, 100, is_whole=False),  # beyond these it allows nothing, or nothing else
    "seed": Bounds(0, SEED_LIMIT - 1),
    "stop_token_ids": Bounds(0, LARGEST_ID),  # each of them
    "logprobs": Bounds(0, LARGEST_ID),
    "n": Bounds(1, 16_384),
    "min_tokens": Bounds(0, MOST_TOKENS),
    "presence_penalty": _SHIFTS,
    "frequency_penalty": _SHIFTS,
}

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
    "output_kind": "completions come whole; on_token gets every token",
    "skip_special_tokens": _NO_SPECIALS,
    "spaces_between_special_tokens": _NO_SPECIALS,
    "structured_outputs": _NO_GRAMMAR,
    "truncate_prompt_tokens": "give the prompt as token ids, without those to leave out",
    "use_beam_search": _NO_BEAMS,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. The defaults are greedy decoding of 32 tokens."""

    max_tokens: int | None = 32  # None: as many as the model has positions for after the prompt; 0: prompt_logprobs alone
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
    include_stop_str_in_output: bool = False  # the text ends after a stop string or the text of a stop token

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


def _top_k(value: object) -> float:
    return max(0, BOUNDS["top_k"].read(value))


def _stops(value: object) -> tuple[str, ...]:
    return (text(value),) if isinstance(value, str) else several(text)(value)


def _number(name: str, meaning: str = "") -> Rule:
    return Rule(BOUNDS[name].read, f"{BOUNDS[name]}{meaning}")


_COUNT = Rule(optional(BOUNDS["logprobs"].read), f"{BOUNDS['logprobs']}, or None (off)")
_SWITCH = Rule(truth, "True or False")
_ID = BOUNDS["stop_token_ids"].read
_IDS = several(_ID)
_BIASES = mapping(_ID, Bounds(-LARGEST_BIAS, LARGEST_BIAS, is_whole=False).read)

RULES: Mapping[str, Rule] = {
    "max_tokens": Rule(
        optional(BOUNDS["max_tokens"].read), f"{BOUNDS['max_tokens']}, or None (as many as the model has positions for)"
    ),
    "temperature": _number("temperature", "; 0 is greedy"),
    "top_k": Rule(_top_k, f"{BOUNDS['top_k']}; 0 and -1 are off"),
    "top_p": _number("top_p", "; 1 is off"),
    "min_p": _number("min_p", "; 0 is off"),
    "repetition_penalty": _number("repetition_penalty", "; 1 is off"),
    "seed": Rule(optional(BOUNDS["seed"].read), "a whole number, 0 to 2**64 - 1, or None"),
    "stop": Rule(optional(_stops, ()), "a text that is not empty, or a list of such; [] is none"),
    "stop_token_ids": Rule(optional(_IDS, ()), f"a list of token ids, 0 to {LARGEST_ID}"),
    "ignore_eos": _SWITCH,
    "logprobs": _COUNT,
    "n": _number("n"),
    "min_tokens": _number("min_tokens", "; 0 is off"),
    "presence_penalty": _number("presence_penalty", "; 0 is off"),
    "frequency_penalty": _number("frequency_penalty", "; 0 is off"),
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
