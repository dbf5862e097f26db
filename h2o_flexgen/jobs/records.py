"""Records: what is written for a request, in the output form of OpenAI's batches. Nothing in them is drawn or depends on when
they were made, so a job that was interrupted writes the same ones; `created` is when the job began."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b

from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.openai_answers import Answers, Said, error_body
from h2o_flexgen.sampling.completion import Completion

FINE, BAD_REQUEST, BROKEN = 200, 400, 500
KINDS = {BAD_REQUEST: "invalid_request", BROKEN: "server_error"}
OF_RECORD = "batch_req_"
BEGINNING = f'{{"id": "{OF_RECORD}'.encode()  # of every record's line
Record = Said


def as_line(record: Record) -> bytes:
    """The record's line. Characters that UTF-8 lacks are escaped as in JSON."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n"


def refusal(custom_id: str, reason: str, status: int = BAD_REQUEST, code: str | None = None) -> Record:
    """The record of a request that cannot be run, or that has failed."""
    kind = f"{KINDS[status].removesuffix('_error')}_error"
    response = _response(custom_id, status, error_body(reason, kind, code))
    return _record(custom_id, response, {"code": code or KINDS[status], "message": reason})


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
