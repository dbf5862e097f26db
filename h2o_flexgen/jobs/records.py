"""Records: what is written for a request, in the output form of OpenAI's batches. Nothing in them is drawn or depends on when
they were made, so a job that was interrupted writes the same ones; `created` is when the job began."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from h2o_flexgen.jobs.line import Line
from h2o_flexgen.sampling.output import Completion, Output, StepLogprobs, TokenLogprob
from h2o_flexgen.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; other engines write the same
FINE, BAD_REQUEST, BROKEN = 200, 400, 500
KINDS = {BAD_REQUEST: "invalid_request", BROKEN: "server_error"}
OF_RECORD = "batch_req_"
BEGINNING = f'{{"id": "{OF_RECORD}'.encode()  # of every record's line
Record = dict[str, object]


def as_line(record: Record) -> bytes:
    """The record's line. Characters that UTF-8 lacks are escaped as in JSON."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"


def refusal(custom_id: str, reason: str, status: int = BAD_REQUEST) -> Record:
    """The record of a request that cannot be run, or whose run has failed."""
    error = {"message": reason, "type": f"{KINDS[status].removesuffix('_error')}_error", "param": None, "code": None}
    return _record(custom_id, _response(custom_id, status, {"error": error}), {"code": KINDS[status], "message": reason})


def is_refusal(record: Record) -> bool:
    return record.get("error") is not None


@dataclass(frozen=True)
class RecordMaker:
    model: str
    created: int  # seconds since 1970 when the job began
    tokenizer: Tokenizer

    def answer(self, custom_id: str, line: Line, completion: Completion) -> Record:
        choose = self._chat_choice if line.is_chat else self._choice
        prompt_tokens = len(completion.prompt_token_ids)
        generated = sum(len(output.token_ids) for output in completion.outputs)
        body: Record = {
            "id": f"{'chatcmpl' if line.is_chat else 'cmpl'}-{_short(custom_id)}",
            "object": "chat.completion" if line.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choose(line, completion, output) for output in completion.outputs],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }
        return _record(custom_id, _response(custom_id, FINE, body), None)

    def _choice(self, line: Line, completion: Completion, output: Output) -> Record:
        echoed = line.options.echo
        prompt = completion.prompt if completion.prompt is not None else self._text(completion.prompt_token_ids)
        return {
            "index": output.index,
            "text": (prompt if echoed else "") + output.text,
            "logprobs": self._logprobs(completion, output, echoed),
            **self._end(line, completion, output),
        }

    def _chat_choice(self, line: Line, completion: Completion, output: Output) -> Record:
        steps = output.logprobs
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": None if steps is None else {"content": [self._chat_step(step) for step in steps], "refusal": None},
            **self._end(line, completion, output),
        }

    def _end(self, line: Line, completion: Completion, output: Output) -> Record:
        reason = "length" if line.options.only_scores else output.finish_reason
        shows_ids = line.options.token_ids or not self.tokenizer.reads_texts
        ids = {"prompt_token_ids": list(completion.prompt_token_ids), "token_ids": list(output.token_ids)}
        return {"finish_reason": reason, "stop_reason": output.stop_reason, **(ids if shows_ids else {})}

    # -- log-probabilities -----------------------------------------------------------------------------------------------

    def _logprobs(self, completion: Completion, output: Output, echoed: bool) -> Record | None:
        """Lists with an item for each token of a completion, those of the prompt first if it is echoed."""
        if output.logprobs is None:
            return None
        steps: list[StepLogprobs | None] = [*((completion.prompt_logprobs or ()) if echoed else ()), *output.logprobs]
        ids = [*(completion.prompt_token_ids if echoed else ()), *output.token_ids]
        tokens = [self._text([token]) for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [None if step is None else _finite(step.chosen.logprob) for step in steps],
            "top_logprobs": [None if step is None else self._likeliest(step) for step in steps],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        }

    def _likeliest(self, step: StepLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two that read the same, the likelier."""
        found: dict[str, float] = {}
        for one in (*step.top, step.chosen):
            found.setdefault(self._text([one.token_id]), _finite(one.logprob))
        return found

    def _chat_step(self, step: StepLogprobs) -> Record:
        return {**self._token(step.chosen), "top_logprobs": [self._token(one) for one in step.top]}

    def _token(self, one: TokenLogprob) -> Record:
        text = self._text([one.token_id])
        return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


def _record(custom_id: str, response: Record, error: Record | None) -> Record:
    return {"id": f"{OF_RECORD}{_short(custom_id)}", "custom_id": custom_id, "response": response, "error": error}


def _response(custom_id: str, status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": f"req_{_short(custom_id)}", "body": body}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _short(custom_id: str) -> str:
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
