"""Problems: why a request has no answer, in the form in which OpenAI's clients know errors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from h2o_flexgen.core.hints import as_in_json, shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.jobs.openai_answers import Said, error_body

RETRY = "Retry-After"
VERSION = "/v1"  # the beginning of paths that are OpenAI's
WRONG, BROKEN, CROWDED = "invalid_request_error", "server_error", "rate_limit_error"
TOO_LONG, COMPUTATION_FAILED, ENDING = "context_length_exceeded", "computation_failed", "ending"


@dataclass(frozen=True)
class ApiProblem:
    status: int
    message: str
    kind: str = WRONG
    code: str | None = None
    param: str | None = None  # the field that is to blame
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Said:
        return error_body(as_in_json(self.message), self.kind, self.code, self.param)


class Refused(Exception):
    """A request is answered with a problem."""

    def __init__(self, problem: ApiProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def bad_request(message: str, code: str | None = None, param: str | None = None) -> ApiProblem:
    return ApiProblem(400, message, code=code, param=param)


def unclear_end() -> ApiProblem:
    why = "Transfer-Encoding stands beside Content-Length, or in a request of HTTP/1.0"
    message = f"it is not clear where the body ends: {why}; send Content-Length alone, or Transfer-Encoding with HTTP/1.1"
    return ApiProblem(400, message, code="unclear_body_length", headers={"Connection": "close"})


def unknown_key() -> ApiProblem:
    how = "send a key of this server's key file as Authorization: Bearer KEY"
    return ApiProblem(401, f"no such API key; {how}", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_host(asked: str) -> ApiProblem:
    what = f"this server listens to its machine alone, which is not called {shown(asked)}"
    return ApiProblem(421, f"{what}; ask localhost, or have a proxy send that as Host", code="unknown_host")


def unknown_model(message: str) -> ApiProblem:
    return ApiProblem(404, message, code="model_not_found", param="model")


def unknown_path(method: str, path: str, known: Container[str]) -> ApiProblem:
    """The problem names the path that is meant, if its beginning is missing or doubled: clients are given that as a base."""
    meant = next((one for one in (VERSION + path, path.removeprefix(VERSION)) if one != path and one in known), None)
    hint = "" if meant is None else f"; did you mean {meant}?"
    return ApiProblem(404, f"{method} {shown(path)} is nothing that this server knows{hint}", code="unknown_url")


def other_method(method: str, path: str, allowed: str) -> ApiProblem:
    message = f"{path} does not take {method}; it takes {allowed}"
    return ApiProblem(405, message, code="method_not_supported", headers={"Allow": allowed})


def too_slow(seconds: float) -> ApiProblem:
    message = f"the body did not come to its end in {seconds:g} s"
    return ApiProblem(408, message, code="request_timeout", headers={"Connection": "close"})


def too_large(limit: int) -> ApiProblem:
    message = f"the body has more than {format_bytes(limit)}, which is the limit here; ask in parts"
    return ApiProblem(413, message, code="request_too_large", headers={"Connection": "close"})


def no_json(given: str) -> ApiProblem:
    return ApiProblem(415, f"the content type is {shown(given)}; send application/json", code="unsupported_content_type")


def too_many(rows: int, seats: int, most_waiting: int) -> ApiProblem:
    room = f"there are {seats} seats, and {most_waiting} may wait"
    return bad_request(f"{rows} completions are asked for at once, and {room}; ask in parts", "too_many_completions")


def queue_full(waiting: int, rows: int, most_waiting: int, seconds: int) -> ApiProblem:
    beside = f"{waiting} completions wait for a seat, and {most_waiting} may"
    message = f"{beside}: there is no room for {rows} more; ask again in {seconds} s"
    return ApiProblem(429, message, CROWDED, "queue_full", headers={RETRY: str(seconds)})


def broken(reason: str) -> ApiProblem:
    return ApiProblem(500, reason, BROKEN, COMPUTATION_FAILED)


def broken_by_itself(reason: str) -> ApiProblem:
    """The request alone is the cause: a retry is of no use."""
    return ApiProblem(500, reason, BROKEN, "request_failed")


def ending() -> ApiProblem:
    return ApiProblem(503, "this server is ending; ask another, or this one when it is back", BROKEN, ENDING)


# -- of files and batches --------------------------------------------------------------------------------------------------


def no_data_folder() -> ApiProblem:
    message = "this server keeps no files, and so runs no batches: they need a folder; start it with --data-dir FOLDER"
    return ApiProblem(404, message, code="no_data_dir")


def unknown_file(file_id: str) -> ApiProblem:
    return ApiProblem(404, f"there is no file {shown(file_id)}", code="file_not_found", param="id")


def unknown_batch(batch_id: str) -> ApiProblem:
    return ApiProblem(404, f"there is no batch {shown(batch_id)}", code="batch_not_found", param="id")


def other_purpose(file_id: str, purpose: str, wanted: str) -> ApiProblem:
    message = f"the purpose of {file_id} is {shown(purpose)}; a batch reads one of {shown(wanted)}"
    return bad_request(message, param="input_file_id")


def file_in_use(file_id: str, batch_id: str) -> ApiProblem:
    message = f"{file_id} is read by {batch_id}, which has not ended; wait for that, or cancel it"
    return ApiProblem(409, message, code="file_in_use")


def no_longer(batch_id: str, status: str) -> ApiProblem:
    return ApiProblem(409, f"{batch_id} is {status}, and can no longer be cancelled", code="batch_ended")


def no_form(given: str) -> ApiProblem:
    message = f"the content type is {shown(given)}; send a form, as multipart/form-data with its boundary"
    return ApiProblem(415, message, code="unsupported_content_type")


def other_site(origin: str) -> ApiProblem:
    return ApiProblem(403, f"pages of {shown(origin)} may ask this server for nothing", code="other_origin")


def file_too_large(limit: int) -> ApiProblem:
    message = f"the file has more than {format_bytes(limit)}, which is the limit here; send it in parts"
    return ApiProblem(413, message, code="file_too_large", headers={"Connection": "close"})


def cannot_write(why: str) -> ApiProblem:
    return ApiProblem(507, f"the server's folder cannot be written ({why}); tell its operator", BROKEN, "insufficient_storage")
