"""Problems: why a request has no answer, in the form in which OpenAI's clients know errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.jobs.answers import Said, error_body

RETRY = "Retry-After"
WRONG, BROKEN, CROWDED = "invalid_request_error", "server_error", "rate_limit_error"


@dataclass(frozen=True)
class Problem:
    status: int
    message: str
    kind: str = WRONG
    code: str | None = None
    param: str | None = None  # the field that is to blame
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Said:
        return error_body(self.message, self.kind, self.code, self.param)


class Refused(Exception):
    """A request is answered with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def bad_request(message: str, code: str | None = None, param: str | None = None) -> Problem:
    return Problem(400, message, code=code, param=param)


def unknown_key() -> Problem:
    how = "send a key of this server's key file as Authorization: Bearer KEY"
    return Problem(401, f"no such API key; {how}", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_model(asked: object, known: str) -> Problem:
    hint = did_you_mean(asked, [known]) if isinstance(asked, str) else ""
    message = f"the model {shown(asked)} is not here; this server has {shown(known)}{hint}"
    return Problem(404, message, code="model_not_found", param="model")


def unknown_path(method: str, path: str) -> Problem:
    return Problem(404, f"{method} {shown(path)} is nothing that this server knows", code="unknown_url")


def other_method(method: str, path: str, allowed: str) -> Problem:
    message = f"{path} does not take {method}; it takes {allowed}"
    return Problem(405, message, code="method_not_supported", headers={"Allow": allowed})


def too_slow(seconds: float) -> Problem:
    message = f"the body did not come to its end in {seconds:g} s"
    return Problem(408, message, code="request_timeout", headers={"Connection": "close"})


def too_large(limit: int) -> Problem:
    message = f"the body has more than {format_bytes(limit)}, which is the limit here; ask in parts"
    return Problem(413, message, code="request_too_large", headers={"Connection": "close"})


def no_json(given: str) -> Problem:
    return Problem(415, f"the content type is {shown(given)}; send application/json", code="unsupported_content_type")


def queue_full(waiting: int, seconds: int) -> Problem:
    message = f"{waiting} completions wait for a seat, and no more are taken; ask again in {seconds} s"
    return Problem(429, message, CROWDED, "queue_full", headers={RETRY: str(seconds)})


def broken(reason: str) -> Problem:
    return Problem(500, reason, BROKEN, "computation_failed")


def broken_by_itself(reason: str) -> Problem:
    """Nobody else had a part in it: to ask again is of no use."""
    return Problem(500, reason, BROKEN, "request_failed")


def ending() -> Problem:
    return Problem(503, "this server is ending; ask another, or this one when it is back", BROKEN, "ending")
