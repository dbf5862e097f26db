"""The fields of a request, as OpenAI and vLLM name them, read into sampling parameters, or into what is asked of embeddings,
labels and ranks. What would change the answer and is not known is refused; what has no bearing on it is let pass. ModelNames:
the names that requests have for a model, and for the model with one of its adapters: NAME, NAME:ADAPTER, or ADAPTER.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

from h2o_flexgen.core.allowed_values import TRUTH, Allowed, Choice, Rule, mapping, whole_number
from h2o_flexgen.core.hints import Mistakes, did_you_mean, refuse_unknown, shown
from h2o_flexgen.sampling.params import INSTEAD, SAMPLING, SamplingParams
from h2o_flexgen.sampling.pooling import (
    CLASSIFYING,
    MOST_RETURNED,
    RANKING,
    ClassifyParams,
    PoolingParams,
    Truncate,
    read_truncate,
)
from h2o_flexgen.sampling.pooling import INSTEAD as INSTEAD_OF_POOLING
from h2o_flexgen.sampling.structured_outputs import FORMAT, NAME
from h2o_flexgen.text.prompts import TextPair, read_documents
from h2o_flexgen.text.tokenizer import EFFORT, NO_SETTINGS, SETTINGS, VERBOSITY, TemplateSettings, read_settings
from h2o_flexgen.text.tools import CHOICE, PARALLEL, TOOLS, ToolUse, read_tool_use

# -- the names of a model --------------------------------------------------------------------------------------------------

MODEL, LORA = "model", "lora_name"


class UnknownModel(ValueError):
    """An error: a request is for a model that is not here."""


@dataclass(frozen=True)
class ModelNames:
    model: str
    adapters: Sequence[str] = ()

    @property
    def every(self) -> list[str]:
        """The names as they are listed."""
        return [self.model, *(f"{self.model}:{adapter}" for adapter in self.adapters)]

    def of(self, adapter: str | None) -> str:
        """The name of the model with an adapter, or without one."""
        return self.model if adapter is None else f"{self.model}:{adapter}"

    def adapter(self, asked: object) -> str | None:
        """The adapter that a name stands for. A name that stands for nothing is refused."""
        if asked in (None, self.model):
            return None
        found = asked.removeprefix(f"{self.model}:") if isinstance(asked, str) else None
        if found not in self.adapters:
            hint = did_you_mean(asked, [*self.every, *self.adapters]) if isinstance(asked, str) else ""
            known = " or ".join(map(shown, self.every))
            raise UnknownModel(f"the model {shown(asked)} is not here; ask for {known}{hint}")
        return found

    def read(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """The body with its adapter as a field, and not as a part of the model's name."""
        adapter = self.adapter(body.get(MODEL))
        if adapter is None:
            return body
        if body.get(LORA) not in (None, adapter):
            raise ValueError(f"{LORA} is {shown(body[LORA])}, and {MODEL} names {shown(adapter)}; give one of them")
        return {**body, LORA: adapter}


# -- prompts and chats -----------------------------------------------------------------------------------------------------

ECHO, LOGPROBS, TOP_LOGPROBS, TOKEN_IDS = "echo", "logprobs", "top_logprobs", "return_token_ids"
PROMPT_LOGPROBS = "prompt_logprobs"
MAX_TOKENS, OTHER_MAX_TOKENS, BIAS, BEST_OF = "max_tokens", "max_completion_tokens", "logit_bias", "best_of"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


_TEXT = Rule(_text, "a text")
_TEXTS = ("user", "safety_identifier", "prompt_cache_key")
RETENTIONS = Choice(("in_memory", "in-memory", "24h"))
# fields that ask for what is done in any case, or that no answer depends on with OpenAI either, with the types there
UNUSED: Mapping[str, Allowed] = {
    **dict.fromkeys(("model", *_TEXTS, EFFORT), _TEXT),
    "prompt_cache_retention": RETENTIONS,
}
METADATA, SAID_BACK = "metadata", Rule(mapping(_text, _text), "an object with texts as values")
NEUTRAL: Mapping[str, tuple[Callable[[object], bool], str]] = {  # fields that are let pass with the value that changes nothing
    "stream": (lambda value: value is False, "records come whole; leave it out"),
    "modalities": (lambda value: value == ["text"], "only text is made"),
    "suffix": (lambda value: value == "", "texts are only continued at their end"),
    "store": (lambda value: value is False, "nothing is kept; leave it out"),
    "service_tier": (lambda value: value in ("auto", "default"), "all requests are alike; leave it out"),
}
ELSEWHERE: Mapping[str, str] = {
    **{name: advice for name, advice in INSTEAD.items() if name not in (*NEUTRAL, BEST_OF)},
    "id": "it is called custom_id",
    "prompt_token_ids": "prompt takes token ids, too",
    "text": "it is called prompt",
    PROMPT_LOGPROBS: "add echo and logprobs",
    "input": "it is called prompt, or messages for a chat",
    "stream_options": "records come whole, with their usage",
    "functions": f"it is called {TOOLS}",
    "function_call": f"it is called {CHOICE}",
}

_TAKEN_AS_THEY_ARE = frozenset(SAMPLING) - {MAX_TOKENS, LOGPROBS, PROMPT_LOGPROBS, BIAS}
_OF_TOOLS = (TOOLS, CHOICE, PARALLEL)
_OWN = frozenset((MAX_TOKENS, OTHER_MAX_TOKENS, LOGPROBS, BIAS, BEST_OF, TOKEN_IDS, METADATA, *_OF_TOOLS))
_BOTH = _TAKEN_AS_THEY_ARE | UNUSED.keys() | NEUTRAL.keys() | _OWN
OF_PROMPTS = _BOTH | {ECHO}
OF_CHATS = _BOTH | {TOP_LOGPROBS, SETTINGS, VERBOSITY}

_WITH_OTHERS = frozenset((BEST_OF, TOP_LOGPROBS, CHOICE, PARALLEL, VERBOSITY))  # fields that are read only beside others
_COUNT = SAMPLING[LOGPROBS].allowed


@dataclass(frozen=True)
class EmbeddingForm:
    """How long a prompt may be that is embedded, and how its vector is written."""

    truncate: Truncate
    is_base64: bool


@dataclass(frozen=True)
class LabelForm:
    """How long a prompt may be that is scored by labels, and in which answer its scores are said."""

    truncate: Truncate
    url: str  # that was asked
    top_n: int | None = None  # the best alone, of those that are ranked


@dataclass(frozen=True)
class Options:
    """What is asked for beside the prompt."""

    params: SamplingParams
    echo: bool = False  # the prompt comes first in the text
    token_ids: bool = False  # token ids come beside the text
    form: EmbeddingForm | LabelForm | None = None  # None: the prompt is continued
    tools: ToolUse | None = None  # of a chat
    settings: TemplateSettings = NO_SETTINGS  # of a chat
    metadata: Mapping[str, str] | None = field(default=None, hash=False)  # which the answer says back

    @property
    def only_scores(self) -> bool:
        return self.params.max_tokens == 0

    def params_with(self, changed: Mapping[str, object]) -> SamplingParams:
        return SamplingParams(**{**self._given, **changed}) if changed else self.params  # type: ignore[arg-type]

    @cached_property
    def _given(self) -> Mapping[str, object]:
        """What differs from the defaults of SamplingParams: `replace` would read everything again, for each of many lines."""
        return {name: value for name, one in SAMPLING.items() if (value := getattr(self.params, name)) != one.default}


_ANYTHING_GOES = Options(SamplingParams(max_tokens=None, logprobs=0, prompt_logprobs=0), echo=True)  # beside any one field


def read_options(given: Mapping[str, object], is_chat: bool, defaults: Options, beside: Iterable[str] = ()) -> Options:
    """The options of a line; `defaults` are taken for what it leaves open. A field that is null is left open. `beside` are the
    other fields of a line, which an unknown one may be meant for. Where something is wrong, so is said what is wrong with each
    field that can be read without the others."""
    known = OF_CHATS if is_chat else OF_PROMPTS
    found = {name: value for name, value in given.items() if value is not None}
    mistakes, worded = Mistakes(), partial(as_given, names=found)
    with mistakes.noted(worded):
        return _options(found, known, is_chat, defaults, beside)
    for name in (name for name in found if name in known and name not in _WITH_OTHERS):
        with mistakes.noted(worded):
            _options({name: found[name]}, known, is_chat, _ANYTHING_GOES, ())
    mistakes.refuse()
    raise AssertionError("what was wrong was noted")


def as_given(message: str, names: Collection[str]) -> str:
    """The message about a request with fields of these names: its tokens go by the name that it has given them."""
    begins_otherwise = MAX_TOKENS not in names and OTHER_MAX_TOKENS in names and message.startswith(f"{MAX_TOKENS} ")
    if begins_otherwise:
        return f"{OTHER_MAX_TOKENS}{message.removeprefix(MAX_TOKENS)}"
    if FORMAT in names and NAME not in names and message.startswith(f"{NAME} "):
        return f"{FORMAT}{message.removeprefix(NAME)}"
    return message


def _options(
    found: Mapping[str, object], known: frozenset[str], is_chat: bool, defaults: Options, beside: Iterable[str]
) -> Options:
    if not known.issuperset(found):
        refuse_unknown("field", found, sorted({*known, *beside}), ELSEWHERE)
    for name in found.keys() & UNUSED.keys():
        UNUSED[name].value(name, found[name])
    for name in found.keys() & NEUTRAL.keys():
        is_neutral, otherwise = NEUTRAL[name]
        if not is_neutral(found[name]):
            raise ValueError(f"{name} is {shown(found[name])}; {otherwise}")
    changed = {name: value for name, value in found.items() if name in _TAKEN_AS_THEY_ARE}
    if FORMAT in found:
        changed = {NAME: None, **changed}  # whatever the defaults are held to
    changed |= _max_tokens(found) | _bias(found) | (_chat_logprobs(found) if is_chat else _logprobs(found))
    echo = not is_chat and (TRUTH.value(ECHO, found[ECHO]) if ECHO in found else defaults.echo)
    token_ids = TRUTH.value(TOKEN_IDS, found[TOKEN_IDS]) if TOKEN_IDS in found else defaults.token_ids
    logprobs = changed.get(LOGPROBS, defaults.params.logprobs)
    if echo and logprobs is not None:
        changed[PROMPT_LOGPROBS] = logprobs
    elif changed.get(MAX_TOKENS) == 0:
        raise ValueError("max_tokens is 0, which is for prompts that are only scored; add echo and logprobs, or give 1 or more")
    params = defaults.params_with(changed)
    _refuse_to_choose(found.get(BEST_OF), params)
    tools = read_tool_use(*(found.get(name) for name in _OF_TOOLS))
    if tools is not None and not is_chat:
        raise ValueError(f"{TOOLS} is {shown(found[TOOLS])}; tools are for chats, which have messages")
    settings = read_settings(*(found.get(name) for name in (SETTINGS, EFFORT, VERBOSITY)))
    metadata = SAID_BACK.value(METADATA, found[METADATA]) if METADATA in found else None
    return Options(params, echo, token_ids, tools=tools, settings=settings, metadata=metadata)


def _refuse_to_choose(best_of: object, params: SamplingParams) -> None:
    """Refuses to make more completions than are returned, unless they are all the same."""
    if best_of is None:
        return
    is_number = type(best_of) is int and best_of >= params.n
    if not is_number or not (params.is_greedy or best_of == params.n):
        raise ValueError(f"{BEST_OF} is {shown(best_of)}; {INSTEAD[BEST_OF]}")


def _max_tokens(found: Mapping[str, object]) -> dict[str, object]:
    """Both names of one number."""
    asked = [found[name] for name in (MAX_TOKENS, OTHER_MAX_TOKENS) if name in found]
    if len(asked) == 2 and asked[0] != asked[1]:
        raise ValueError(f"{MAX_TOKENS} is {shown(asked[0])} and {OTHER_MAX_TOKENS} is {shown(asked[1])}; give one of them")
    return {MAX_TOKENS: asked[0]} if asked else {}


def _bias(found: Mapping[str, object]) -> dict[str, object]:
    """The biases of tokens. In JSON the ids of tokens are texts."""
    given = found.get(BIAS)
    if not isinstance(given, Mapping):
        return {BIAS: given} if BIAS in found else {}
    try:
        return {BIAS: {whole_number(name): value for name, value in given.items()}}
    except ValueError:
        raise ValueError(f'{BIAS} is {shown(given)}; its names are token ids, like {{"50256": -100}}') from None


def _logprobs(found: Mapping[str, object]) -> dict[str, object]:
    """How many of the likeliest are shown, which is what a completion is asked."""
    return {LOGPROBS: _COUNT.value(LOGPROBS, found[LOGPROBS])} if LOGPROBS in found else {}


def _chat_logprobs(found: Mapping[str, object]) -> dict[str, object]:
    """Whether there are any, and how many of the likeliest are shown, as a chat is asked."""
    shown_beside = _COUNT.value(TOP_LOGPROBS, found[TOP_LOGPROBS]) if TOP_LOGPROBS in found else None
    are_asked = TRUTH.value(LOGPROBS, found[LOGPROBS]) if LOGPROBS in found else None
    if shown_beside is not None and not are_asked:
        raise ValueError(f"{TOP_LOGPROBS} is {shown_beside}, and {LOGPROBS} is not true; add it")
    return {} if are_asked is None else {LOGPROBS: (shown_beside or 0) if are_asked else None}


# -- embeddings, labels and ranks -----------------------------------------------------------------------------------------

CLASSIFY, SCORE, RERANK = "/classify", "/v1/score", "/v1/rerank"
FIRST, SECOND, QUERY, DOCUMENTS, TOP_N, TEMPLATE = "text_1", "text_2", "query", "documents", "top_n", "template"
TRUNCATE = "truncate"
_ONLY_CHECKED = ("model", "user")  # the adapter that the first one names is read before; the other one changes nothing
OF_LABELS = frozenset((*_ONLY_CHECKED, TRUNCATE, LORA))  # the fields of all requests for labels and ranks
Given: TypeAlias = "Mapping[str, object]"


def read_label_options(given: Given, beside: Collection[str]) -> Options:
    """The options of a request for labels. A field that is null is left open."""
    return _label_options(CLASSIFY, given, beside, CLASSIFYING)


def read_scored(given: Given) -> tuple[list[TextPair], Options]:
    """The pairs of a request for scores: one text beside each of several, or as many on both sides."""
    options = _label_options(SCORE, given, (FIRST, SECOND, TEMPLATE), RANKING)
    first, second = (_texts(name, given.get(name)) for name in (FIRST, SECOND))
    if len(first) not in (1, len(second)):
        raise ValueError(f"{FIRST} has {len(first)} texts and {SECOND} has {len(second)}; give one, or as many")
    first = first * len(second) if len(first) == 1 else first
    return [_pair(one, other, given.get(TEMPLATE)) for one, other in zip(first, second, strict=True)], options


def read_ranked(given: Given) -> tuple[list[TextPair], Options]:
    """The pairs of a request for ranks: a query with each of its documents."""
    options = _label_options(RERANK, given, (QUERY, DOCUMENTS, TOP_N, TEMPLATE), RANKING)
    if given.get(QUERY) is None or given.get(DOCUMENTS) is None:
        raise ValueError(f"{QUERY if given.get(QUERY) is None else DOCUMENTS} is missing; a request for ranks has both")
    pairs = read_documents(given[QUERY], given[DOCUMENTS], given.get(TEMPLATE))
    if not pairs:
        raise ValueError(f"{DOCUMENTS} is empty; give one text or more")
    return pairs, options


PAIRS: Mapping[str, tuple[str, Callable[[Given], tuple[list[TextPair], Options]]]] = {
    SCORE: (SECOND, read_scored),
    RERANK: (DOCUMENTS, read_ranked),
}  # the field that may be a list, and what reads all of them


def _label_options(url: str, given: Given, beside: Collection[str], instead: Mapping[str, str]) -> Options:
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, sorted({*OF_LABELS, *beside}), instead)
    for name in found.keys() & _ONLY_CHECKED:
        UNUSED[name].value(name, found[name])
    most = MOST_RETURNED.value(TOP_N, found[TOP_N]) if TOP_N in found else None
    form = LabelForm(read_truncate(found.get(TRUNCATE)), url, most)
    return Options(ClassifyParams(ranks=url != CLASSIFY, lora_name=found.get(LORA)), form=form)  # type: ignore[arg-type]


def _texts(name: str, given: object) -> list[object]:
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(one, str) and one for one in several):
        raise ValueError(f"{name} is {shown(given)}; it is a text, or a list of texts")
    return several


def _pair(first: object, second: object, template: object) -> TextPair:
    (pair,) = read_documents(first, [second], template)
    return pair


FLOAT, BASE64 = "float", "base64"
ENCODING, OF_PARAMS = "encoding_format", ("pooling", "normalize", LORA)
OF_EMBEDDINGS = frozenset((*_ONLY_CHECKED, ENCODING, *OF_PARAMS, TRUNCATE))
_ENCODINGS = Choice((FLOAT, BASE64))


def read_embedding_options(given: Mapping[str, object], beside: Collection[str]) -> Options:
    """The options of a request for embeddings. A field that is null is left open."""
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, sorted({*OF_EMBEDDINGS, *beside}), INSTEAD_OF_POOLING)
    for name in found.keys() & _ONLY_CHECKED:
        UNUSED[name].value(name, found[name])
    params = PoolingParams(**{name: found[name] for name in OF_PARAMS if name in found})  # type: ignore[arg-type]
    encoding = _ENCODINGS.value(ENCODING, found.get(ENCODING, FLOAT))
    return Options(params, form=EmbeddingForm(read_truncate(found.get(TRUNCATE)), encoding == BASE64))
