"""A batch: what was asked, how far it is, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from h2o_flexgen.jobs.input_check import InputPart
from h2o_flexgen.jobs.manifest import Manifest, Settings
from h2o_flexgen.jobs.openai_answers import Said

KIND = "batch_"
WINDOW = "24h"  # the only one that OpenAI has; nothing expires here
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
UNDER_WAY = (IN_PROGRESS, FINALIZING, CANCELLING)
ENDED = (COMPLETED, FAILED, CANCELLED)
STATES = (VALIDATING, *UNDER_WAY, *ENDED)


@dataclass(frozen=True)
class BatchOutcome:
    """What came of a batch: how many requests have an answer, or an error, and the files of these, if there are any."""

    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None


@dataclass(frozen=True)
class StoredBatch:
    id: str
    input_file_id: str
    endpoint: str
    created_at: int  # seconds since 1970
    seed: int  # of requests that bring none
    metadata: Mapping[str, str] | None = None
    status: str = VALIDATING
    since: Mapping[str, int] = field(default_factory=dict)  # when it came to be in each state
    total: int = 0  # requests
    completed: int = 0
    failed: int = 0
    checked: InputPart | None = None  # its input, as it was found to be sound
    begun: Manifest | None = None  # what the answers depend on, once there may be some
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[Mapping[str, object], ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def now(self, status: str) -> StoredBatch:
        return replace(self, status=status, since={**self.since, status: int(time.time())})

    def checked_as(self, whole: InputPart | None, requests: int, errors: Sequence[Said]) -> StoredBatch:
        """The batch behind its check."""
        return replace(self, checked=whole, total=requests, errors=tuple(errors)).now(FAILED if errors else IN_PROGRESS)

    def ended_as(self, status: str, outcome: BatchOutcome, errors: Sequence[Said]) -> StoredBatch:
        return replace(self, **asdict(outcome), errors=tuple(errors)).now(status)

    def begins(self, settings: Settings, noted: Settings) -> StoredBatch:
        assert self.checked is not None, "it was validated"
        return replace(self, begun=Manifest(self.created_at, self.seed, self.checked, settings, noted))

    @property
    def said(self) -> Said:
        """The batch in OpenAI's form."""
        times = {f"{state}_at": self.since.get(state) for state in (*UNDER_WAY, *ENDED)}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **times,
            "expires_at": None,
            "expired_at": None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }

    # -- its document --------------------------------------------------------------------------------------------------

    @property
    def document(self) -> Said:
        return asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> StoredBatch:
        checked, begun, errors = said.pop("checked"), said.pop("begun"), tuple(said.pop("errors"))
        batch = cls(
            **said,
            errors=errors,
            checked=None if checked is None else InputPart(**checked),
            begun=None if begun is None else Manifest(**{**begun, "checked": InputPart(**begun["checked"])}),
        )
        if batch.status not in STATES:
            raise ValueError("another state")
        return batch


def failing(message: str, line: int | None = None, code: str = "invalid_request") -> Said:
    """Why a batch has failed; `line`: the one of its input that is to blame."""
    return {"code": code, "line": line, "message": message, "param": None}
