"""Answers: what is said of completions, in OpenAI's objects, and the records of jobs that hold them. A server sends them.

Nothing in a record is drawn or depends on when it was made, so a job that was interrupted writes the same ones; `created` is
when the job began.

Texts that were scored by labels are answered in the objects of vLLM.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import TypeAlias

from h2o_flexgen.core.labels import Labels
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.line_fields import CLASSIFY, RERANK, SCORE, EmbeddingForm, LabelForm, ModelNames
from h2o_flexgen.sampling.completion import AnswerMessage, Completion, Output, StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.pooling import Classification, Ranked, best_first
from h2o_flexgen.text.answer_reader import AnswerReading, identity_of
from h2o_flexgen.text.dialogue import Style
from h2o_flexgen.text.prompts import TextPair
from h2o_flexgen.text.tokenizer import Tokenizer

Answered: TypeAlias = "Sequence[tuple[Line, Classification]]"


def label_body(head: Said, counted: Said, labels: Labels, answered: Sequence[tuple[Line, Completion]]) -> Said:
    """The whole answer. `head`: its id, when it was made, and the model; `counted`: the tokens that were read."""
    told = [(line, _classified(completion, labels)) for line, completion in answered]
    return _BODIES[_form(told).url](head, counted, told)


def _classified(completion: Completion, labels: Labels) -> Classification:
    assert completion.embedding is not None, f"{completion.index} was not classified"
    ids = completion.prompt_token_ids
    return Classification(completion.index, completion.prompt, ids, labels, completion.embedding, completion.truncated_tokens)


def _labelled(head: Said, counted: Said, told: Answered) -> Said:
    data = [
        {"index": place, "label": one.label, "probs": list(one.probs), "num_classes": len(one.labels.names), **_cut(line, one)}
        for place, (line, one) in enumerate(told)
    ]
    return {**_list_of("classify", head), "data": data, "usage": counted}


def _scored(head: Said, counted: Said, told: Answered) -> Said:
    data = [
        {"index": place, "object": "score", "score": one.probs[0], **_cut(line, one)} for place, (line, one) in enumerate(told)
    ]
    return {**_list_of("score", head), "data": data, "usage": counted}


def _ranked(head: Said, counted: Said, told: Answered) -> Said:
    each = []
    for place, (line, one) in enumerate(told):
        assert isinstance(line.prompt, TextPair), "ranks are of pairs"
        each.append(Ranked(place, line.prompt.document, one.probs[0], one.truncated_tokens))
    results = [
        {
            "index": one.index,
            "document": {"text": one.document},
            "relevance_score": one.score,
            **_cut(*told[one.index]),
        }
        for one in best_first(each, _form(told).top_n)
    ]
    return {"id": f"rerank-{head['id']}", "model": head["model"], "usage": counted, "results": results}


def _list_of(kind: str, head: Said) -> Said:
    return {"id": f"{kind}-{head['id']}", "object": "list", "created": head["created"], "model": head["model"]}


def _form(told: Answered) -> LabelForm:
    form = told[0][0].options.form
    assert isinstance(form, LabelForm), "others are not scored by labels"
    return form


def _cut(line: Line, one: Classification) -> Said:
    """How many tokens are missing, if the prompt might be cut."""
    return {} if _form([(line, one)]).truncate is None else {"truncated_tokens": one.truncated_tokens}


_BODIES: Mapping[str, Callable[[Said, Said, Answered], Said]] = {CLASSIFY: _labelled, SCORE: _scored, RERANK: _ranked}


STOP, TOOL_CALLS = "stop", "tool_calls"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; other engines write the same
Said = dict[str, object]  # what JSON is made of


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Said:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(completions: Iterable[Completion]) -> Said:
    """The tokens of prompts, each counted once, and of everything that was generated; where it is known, also how many of the
    former had been computed for others."""
    told = list(completions)
    read = sum(len(one.prompt_token_ids) for one in told)
    generated = sum(len(output.token_ids) for one in told for output in one.outputs)
    cached = [one.cached_tokens for one in told if one.cached_tokens is not None]
    details: Said = {"prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else {}
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated, **details}


@dataclass(frozen=True)
class Answers:
    model: str
    style: Style  # in which chats were written down, and so are answered
    labels: Labels | None = None  # by which the model scores texts
    adapters: Sequence[str] = ()  # names of those that requests may ask for

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.model, self.adapters)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.style.tokenizer

    def body(self, name: str, created: int, answered: Sequence[tuple[Line, Completion]]) -> Said:
        """The whole answer to a body; its prompts have a line each; `created`: in seconds since 1970."""
        if answered[0][0].options.form is not None:
            return self._of_prompts(name, created, answered)
        choices: list[Said] = []
        for line, completion in answered:
            for output in completion.outputs:
                choices.append(self.choice(line, completion, output, len(choices), name))
        first, _ = answered[0]
        kind = "chat.completion" if first.is_chat else "text_completion"
        completions = [completion for _, completion in answered]
        said_back: Said = {} if first.options.metadata is None else {"metadata": {**first.options.metadata}}
        head = self.head(name, created, first, kind)
        return {**head, "choices": choices, "usage": usage(completions), **said_back}

    def _of_prompts(self, name: str, created: int, answered: Sequence[tuple[Line, Completion]]) -> Said:
        """The answer where prompts are only read."""
        counted = usage(completion for _, completion in answered)
        del counted["completion_tokens"]
        if isinstance(answered[0][0].options.form, LabelForm):
            assert self.labels is not None, "otherwise nothing is scored by them"
            head: Said = {"id": name, "created": created, "model": self.model_of(answered[0][0])}
            return label_body(head, counted, self.labels, answered)
        data = [_embedding(place, *one) for place, one in enumerate(answered)]
        return {"object": "list", "data": data, "model": self.model_of(answered[0][0]), "usage": counted}

    def head(self, name: str, created: int, first: Line, kind: str) -> Said:
        """What an answer to these lines begins with; all chunks of a streamed one begin alike."""
        begins = "chatcmpl" if first.is_chat else "cmpl"
        return {"id": f"{begins}-{name}", "object": kind, "created": created, "model": self.model_of(first)}

    def model_of(self, line: Line) -> str:
        """The name of the model that has answered, with the adapter that it had."""
        return self.names.of(line.options.params.lora_name)

    def choice(self, line: Line, completion: Completion, output: Output, index: int, name: str) -> Said:
        """One of the choices of the answer with this name."""
        end = self._end(line, completion, output)
        if not line.is_chat:
            return {"index": index, **self._choice(line, completion, output), **end}
        message = self.message(line, completion, output, self.identity(line, name, completion.prompt_token_ids, index))
        if message.tool_calls and output.finish_reason == STOP:
            end["finish_reason"] = TOOL_CALLS
        logprobs = None if output.logprobs is None else self.chat_logprobs(output.logprobs)
        return {"index": index, "message": message.written, "logprobs": logprobs, **end}

    def message(self, line: Line, completion: Completion, output: Output, identity: str) -> AnswerMessage:
        return self.reading(line, completion.prompt).message(output.text, output.finish_reason != STOP, identity)

    def identity(self, line: Line, name: str, prompt: Sequence[int], index: int) -> str:
        """What the ids of calls are made of. A request with a seed has the same each time, as its answer is the same."""
        seed = line.options.params.seed
        return identity_of(name if seed is None else f"seed {seed}", prompt, index)

    def reading(self, line: Line, prompt: str | None) -> AnswerReading:
        """How answers to this chat are read."""
        return self.style.reading(prompt, line.options.params, line.options.tools)

    def _choice(self, line: Line, completion: Completion, output: Output) -> Said:
        echoed = line.options.echo
        prompt = self.prompt_text(completion.prompt, completion.prompt_token_ids) if echoed else ""
        return {"text": prompt + output.text, "logprobs": self._logprobs(completion, output, echoed)}

    def _end(self, line: Line, completion: Completion, output: Output) -> Said:
        reason = "length" if line.options.only_scores else output.finish_reason
        ids = {"prompt_token_ids": list(completion.prompt_token_ids), "token_ids": list(output.token_ids)}
        return {
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
            **(ids if self.shows_ids(line) else {}),
        }

    def shows_ids(self, line: Line) -> bool:
        """Whether token ids stand beside the text: where they are asked for, or are all there is."""
        return line.options.token_ids or not self.tokenizer.reads_texts

    def prompt_text(self, text: str | None, ids: Sequence[int]) -> str:
        return self.text(ids) if text is None else text

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    # -- log-probabilities -----------------------------------------------------------------------------------------------

    def _logprobs(self, completion: Completion, output: Output, echoed: bool) -> Said | None:
        if output.logprobs is None:
            return None
        steps: list[StepLogprobs | None] = [*((completion.prompt_logprobs or ()) if echoed else ()), *output.logprobs]
        return self.logprobs([*(completion.prompt_token_ids if echoed else ()), *output.token_ids], steps)

    def logprobs(self, ids: Sequence[int], steps: Sequence[StepLogprobs | None], offset: int = 0) -> Said:
        """Lists with an item for each token of a completion, those of the prompt first if it is echoed. `offset`: the
        characters before the first of them."""
        tokens = [self.text([token]) for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [None if step is None else _finite(step.chosen.logprob) for step in steps],
            "top_logprobs": [None if step is None else self._likeliest(step) for step in steps],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
        }

    def _likeliest(self, step: StepLogprobs) -> Mapping[str, float]:
        """The likeliest tokens and the chosen one; of two that read the same, the likelier."""
        found: dict[str, float] = {}
        for one in (*step.top, step.chosen):
            found.setdefault(self.text([one.token_id]), _finite(one.logprob))
        return found

    def chat_logprobs(self, steps: Sequence[StepLogprobs]) -> Said:
        return {"content": [self._chat_step(step) for step in steps], "refusal": None}

    def _chat_step(self, step: StepLogprobs) -> Said:
        return {**self._token(step.chosen), "top_logprobs": [self._token(one) for one in step.top]}

    def _token(self, one: TokenLogprob) -> Said:
        text = self.text([one.token_id])
        return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _embedding(index: int, line: Line, completion: Completion) -> Said:
    """The vector of a prompt: numbers, or its bytes in fp32. If the prompt may be cut, it says how many tokens are missing."""
    form, vector = line.options.form, completion.embedding
    assert isinstance(form, EmbeddingForm) and vector is not None, f"{completion.index} was not embedded"
    written = b64encode(vector.tobytes()).decode() if form.is_base64 else list(vector)
    cut: Said = {} if form.truncate is None else {"truncated_tokens": completion.truncated_tokens}
    return {"object": "embedding", "index": index, "embedding": written, **cut}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


FINE, BAD_REQUEST, BROKEN = 200, 400, 500
ERROR_TYPES = {BAD_REQUEST: "invalid_request", BROKEN: "server_error"}
OF_RECORD = "batch_req_"
BEGINNING = f'{{"id": "{OF_RECORD}'.encode()  # of every record's line
Record = Said


def as_line(record: Record) -> bytes:
    """The record's line. Characters that UTF-8 lacks are escaped as in JSON."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"


def refusal(custom_id: str, reason: str, status: int = BAD_REQUEST, code: str | None = None) -> Record:
    """The record of a request that cannot be run, or that has failed."""
    kind = f"{ERROR_TYPES[status].removesuffix('_error')}_error"
    response = _response(custom_id, status, error_body(reason, kind, code))
    return _record(custom_id, response, {"code": code or ERROR_TYPES[status], "message": reason})


def is_refusal(record: Record) -> bool:
    return record.get("error") is not None


@dataclass(frozen=True)
class RecordMaker:
    answers: Answers
    created: int  # seconds since 1970 when the job began

    def answer(self, custom_id: str, line: Line, completion: Completion) -> Record:
        body = self.answers.body(_short(custom_id), self.created, [(line, completion)])
        return _record(custom_id, _response(custom_id, FINE, body), None)


def _record(custom_id: str, response: Record, error: Record | None) -> Record:
    return {"id": f"{OF_RECORD}{_short(custom_id)}", "custom_id": custom_id, "response": response, "error": error}


def _response(custom_id: str, status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": f"req_{_short(custom_id)}", "body": body}


def _short(custom_id: str) -> str:
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
