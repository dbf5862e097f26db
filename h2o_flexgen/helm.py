"""Client and Tokenizer: the engine as a model of HELM. `scripts/helm_config` writes the files that name them.

    client_spec: {class_name: h2o_flexgen.helm.Client, args: {model: facebook/opt-1.3b, kv_policy: h2o, kv_budget: 0.2}}

HELM asks one request at a time from each of its threads (`helm-run -n 32`). Desks, as the server's, gather them into blocks.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from threading import Lock
from typing import Any, TypeAlias

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import not_installed
from h2o_flexgen.core.workload import GATHER, PROMPTS, TOKENS
from h2o_flexgen.engine.job import Request, without_number
from h2o_flexgen.evaluation.answer_settings import TOKENIZER, model_settings, plan_settings
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion, Output, StepLogprobs
from h2o_flexgen.sampling.params import SEED, SamplingParams
from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.server.desks import SECONDS, Desks, Lengths, Turns
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.prompts import Prompt, read_chat, read_prompts
from h2o_flexgen.text.row_text import pieces_of
from h2o_flexgen.text.tokenizer import ChatInput
from h2o_flexgen.text.tokenizer import Tokenizer as EngineTokenizer
from h2o_flexgen.text.word_tokenizer import WordTokenizer

try:
    from helm.clients.client import CachingClient
    from helm.common import request as helm_request
    from helm.common.cache import CacheConfig
    from helm.common.response_format import ResponseFormat
    from helm.common.tokenization_request import DecodeRequest, TokenizationRequest
    from helm.proxy.retry import NonRetriableException
    from helm.tokenizers.caching_tokenizer import CachingTokenizer
except ModuleNotFoundError as error:
    missing = error.name is not None and error.name.partition(".")[0] == "helm"
    raise ModuleNotFoundError(not_installed("HELM", "helm") if missing else str(error)) from error

Response: TypeAlias = "dict[str, Any]"  # what HELM's cache keeps
PERMANENT = helm_request.ErrorFlags(is_retriable=False)  # another try would end alike
NOT_READ = ("multimodal_prompt", "image_generation_parameters")
END_OF_TEXT = "endoftext"  # HELM's name of the reason; the others are named alike


# -- models ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HelmModel:
    """An open model and the desks where it is asked."""

    llm: LLM
    desks: Desks
    seed: int
    identity: Mapping[str, object]  # the options on which answers depend, for keys of caches
    reading: Lock = field(default_factory=Lock)  # tokenizers change while they read

    @classmethod
    def open(
        cls,
        turns: Turns,
        model: str,
        gather: float = SECONDS,
        rows: int | None = None,
        prompt_len: int = 1,
        gen_len: int = 1,
        seed: int = 0,
        **options: object,
    ) -> HelmModel:
        """`options` are those of LLM; without a plan or percent among them a plan is found."""
        seconds, at_once = GATHER.value("gather", gather), None if rows is None else PROMPTS.value("rows", rows)
        least = Lengths(TOKENS.value("prompt_len", prompt_len), TOKENS.value("gen_len", gen_len))
        seed = SEED.value("seed", seed)
        given = {} if "percent" in options else {"percent": AUTO}
        llm = LLM(model, **{**given, **options})  # type: ignore[arg-type]
        if not llm.tokenizer.reads_texts:
            llm.close()
            raise ValueError(f"HELM asks with texts, and {llm.tokenizer.note}; name a tokenizer in the args of the client")
        identity = {**model_settings(llm)[0], **plan_settings(llm.plan), "seed": seed}
        return cls(llm, Desks(llm, seconds=seconds, rows=at_once, least=least, turns=turns), seed, identity)

    def read(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request that was read. What this model cannot do is refused."""
        with self.reading:
            (read,) = read_prompts([prompt], self.llm.tokenizer)
        request = Request(read, params, index=0)
        self.desks.size(request)
        return request

    def close(self) -> None:
        self.desks.close()
        self.llm.close()


class Models:
    """The models of this process, each of which is opened once: each of HELM's threads makes a client when the first requests
    come, and no client is ever closed. Models take turns in memory, since runs of several models follow each other."""

    def __init__(self) -> None:
        self._opening = Lock()
        self._opened: dict[str, HelmModel] = {}
        self._turns = Turns()

    def open(self, model: str, options: Mapping[str, Any]) -> HelmModel:
        key = json.dumps({"model": model, **options}, sort_keys=True, default=str)
        with self._opening:
            if not self._opened:
                atexit.register(self.close)
            if key not in self._opened:
                self._opened[key] = HelmModel.open(self._turns, model, **options)
            return self._opened[key]

    def close(self) -> None:
        """Closes all models. They can be opened again."""
        with self._opening:
            for model in self._opened.values():
                model.close()
            self._opened.clear()
            atexit.unregister(self.close)


MODELS = Models()  # HELM makes clients by the name of their class, so that they can share nothing but this


# -- requests --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HelmRequest:
    """A request of HELM, in the engine's form."""

    request: Request
    first: int  # the first token of the prompt's text, after those that the tokenizer adds
    copies: int  # of the one completion, if all would be the same
    echoes: bool

    @property
    def params(self) -> SamplingParams:
        assert self.request.params is not None
        return self.request.params


class Client(CachingClient):  # type: ignore[misc]  # unknown where HELM is not installed
    """A client of HELM. A wrong request gets an error in its result; an error of the engine is raised."""

    def __init__(self, cache_config: CacheConfig, model_name: str = "", model: str = "", chat: bool = False, **options: Any):
        """`model` is a name on the hub, a folder or a GGUF file (default: `model_name`, HELM's name of it). `chat`: a prompt is
        a user's message, and is rendered by the model's chat template. `options` are those of Model.open and of LLM."""
        super().__init__(cache_config=cache_config)
        self._model = MODELS.open(model or model_name, options)
        self._chat = chat

    def make_request(self, request: helm_request.Request) -> helm_request.RequestResult:
        if request.embedding:
            return _refused("this engine cannot make embeddings; leave out embedding")
        try:
            asked = self._read(request)
        except ValueError as error:
            return _refused(without_number(str(error), 0))  # HELM has given none

        def answer() -> Response:
            return self._answer(asked)

        key = self.make_cache_key({**self._model.identity, **_key_of(asked)}, request)
        response, is_cached = self.cache.get(key, helm_request.wrap_request_time(answer))
        return helm_request.RequestResult(
            success=True,
            cached=is_cached,
            request_time=response["request_time"],
            request_datetime=response["request_datetime"],
            completions=[_generated(one) for one in response["completions"]],
            embedding=[],
        )

    def _read(self, request: helm_request.Request) -> _HelmRequest:
        for name in NOT_READ:
            if getattr(request, name) is not None:
                raise ValueError(f"{name} is given, but this engine reads and writes only texts; leave it out")
        prompt, first, stops = self._prompt(request)
        params = _params(request, (*request.stop_sequences, *stops))
        seed = _seed(self._model.seed, request.random, prompt)
        read = self._model.read(prompt, replace(params, seed=seed))
        return _HelmRequest(read, first, request.num_completions // params.n, request.echo_prompt)

    def _prompt(self, request: helm_request.Request) -> tuple[Prompt, int, Sequence[str]]:
        """The prompt, the first token of its text, and the strings that end an answer of a chat."""
        if not (request.messages or self._chat):
            with self._model.reading:
                return *read_text(self._model.llm.tokenizer, request.prompt), ()
        said = request.messages or [{"role": "user", "content": request.prompt}]
        style = choose_style(AUTO, self._model.llm.tokenizer)
        with self._model.reading:
            return style.whole(ChatInput(read_chat("the chat", said))), 0, style.stops

    def _answer(self, asked: _HelmRequest) -> Response:
        try:
            completion = self._model.desks.ask(asked.request).result()
        except ValueError as error:  # e.g. of the plan, with too little memory: a retry would fail as well
            raise NonRetriableException(str(error)) from error
        return {"completions": _completions(self._model.llm.tokenizer, completion, asked)}


def read_text(tokenizer: EngineTokenizer, text: str) -> tuple[Prompt, int]:
    """The tokens of a prompt, and how many of them the tokenizer has put before its text. If HELM's text already begins with
    the model's start token, it is not added again."""
    own = tokenizer.encode_more(text) if text else []
    whole_prompt = tokenizer.encode(text)
    added = whole_prompt[: len(whole_prompt) - len(own)]
    if whole_prompt[len(added) :] != own:
        return Prompt(text, tuple(whole_prompt)), 0
    if not added or own[: len(added)] == added:
        return Prompt(text, tuple(own)), 0
    return Prompt(text, tuple(whole_prompt)), len(added)


def _params(request: helm_request.Request, stops: Sequence[str]) -> SamplingParams:
    """The sampling parameters that HELM asks for. Its top_k_per_token says how many likely tokens a result lists. Results have
    no place for them any more, so it is not used: all tokens are sampled from."""
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        stop=stops,
        n=1 if request.temperature == 0 else request.num_completions,
        logprobs=0,
        prompt_logprobs=0 if request.echo_prompt else None,
        structured_outputs=_held_to(request.response_format),
    )


def _held_to(asked: ResponseFormat | None) -> StructuredOutputsParams | None:
    return None if asked is None or asked.json_schema is None else StructuredOutputsParams(json=asked.json_schema)


def _seed(seed: int, random: str | None, prompt: Prompt) -> int:
    """The seed of one request, whatever was asked before it: a different one for every prompt and every `random` of HELM."""
    named = json.dumps([seed, random, prompt.ids])
    return int.from_bytes(blake2b(named.encode(), digest_size=8).digest(), "big")


def _key_of(asked: _HelmRequest) -> Mapping[str, object]:
    prompt = asked.request.prompt
    assert isinstance(prompt, Prompt)
    return {"prompt": prompt.ids, "echo": asked.echoes, "copies": asked.copies, **asdict(asked.params)}


def _refused(why: str) -> helm_request.RequestResult:
    return helm_request.RequestResult(
        success=False, cached=False, completions=[], embedding=[], error=why, error_flags=PERMANENT
    )


# -- answers ---------------------------------------------------------------------------------------------------------------


def _completions(tokenizer: EngineTokenizer, completion: Completion, asked: _HelmRequest) -> list[Response]:
    """The completions as plain data: their texts, and the texts and log-probabilities of their tokens."""
    prompt, echoed = completion.prompt_token_ids, list[tuple[str, float]]()
    if asked.echoes:
        assert completion.prompt_logprobs is not None
        texts = pieces_of(tokenizer, prompt[: asked.first], prompt[asked.first :])
        echoed = [*zip(texts, map(_logprob, completion.prompt_logprobs[asked.first :]))]
    before = completion.prompt or "" if asked.echoes else ""
    found = [_completion(tokenizer, prompt, one, before, echoed) for one in completion.outputs]
    return found * asked.copies


def _completion(
    tokenizer: EngineTokenizer, prompt: Sequence[int], output: Output, before: str, echoed: Sequence[tuple[str, float]]
) -> Response:
    assert output.logprobs is not None
    tokens, left = [*echoed], len(output.text)
    for text, step in zip(pieces_of(tokenizer, prompt, output.token_ids), output.logprobs):
        if not left:  # a stop string, and tokens decoded with it, belong to no text
            break
        tokens.append((text[:left], step.chosen.logprob))
        left -= len(text[:left])
    ends = output.finish_reason == "stop" and output.stop_reason is None
    return {"text": before + output.text, "tokens": tokens, "reason": END_OF_TEXT if ends else output.finish_reason}


def _logprob(step: StepLogprobs | None) -> float:
    return 0.0 if step is None else step.chosen.logprob  # no logits predict the first token


def _generated(completion: Response) -> helm_request.GeneratedOutput:
    tokens = [helm_request.Token(text, logprob) for text, logprob in completion["tokens"]]
    return helm_request.GeneratedOutput(
        text=completion["text"],
        logprob=sum(token.logprob for token in tokens),
        tokens=tokens,
        finish_reason={"reason": completion["reason"]},
    )


# -- the tokenizer ---------------------------------------------------------------------------------------------------------


class Tokenizer(CachingTokenizer):  # type: ignore[misc]  # unknown where HELM is not installed
    """The tokenizer of a model for HELM, which fits prompts into contexts with it. It is the engine's own, from any kind of
    file. It takes the arguments of the client, and shares the model with it."""

    def __init__(self, cache_config: CacheConfig, model: str, **options: Any) -> None:
        super().__init__(cache_config=cache_config)
        opened = MODELS.open(model, options)
        self._tokenizer, self._reading = opened.llm.tokenizer, opened.reading
        self._identity = {TOKENIZER: opened.identity}

    def _tokenize_do_it(self, request: Mapping[str, Any]) -> Response:
        with self._reading:
            ids = self._tokenizer.encode_more(request["text"])
            ids = ids[: max(0, request["max_length"])] if request["truncation"] else ids
            return {"tokens": ids if request["encode"] else pieces_of(self._tokenizer, (), ids)}

    def _decode_do_it(self, request: Mapping[str, Any]) -> Response:
        with self._reading:
            return {"text": decode_all(self._tokenizer, request["tokens"])}

    def _tokenization_request_to_cache_key(self, request: TokenizationRequest) -> Response:
        return {**asdict(request), **self._identity}

    def _decode_request_to_cache_key(self, request: DecodeRequest) -> Response:
        return {**asdict(request), **self._identity}


def decode_all(tokenizer: EngineTokenizer, ids: Sequence[int]) -> str:
    """Decodes tokens, special ones included: HELM puts a model's start token before texts in this way."""
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.decode(ids, with_special=True)
    return tokenizer.decode(ids)
