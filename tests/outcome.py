"""What came of something in a test: of a command its exit status and the lines it wrote, of a refusal its one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest


@dataclass(frozen=True)
class Result:
    status: int
    out: list[str]
    err: list[str]
    progress: ClassVar[tuple[str, ...]] = ()  # how lines on stderr begin that only tell how far it is

    @property
    def json(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        return json.loads(self.out[-1])

    @property
    def said(self) -> list[str]:
        return [line for line in self.err if not line.startswith(self.progress)]

    @property
    def error(self) -> str:
        assert self.status == 2 and len(self.said) == 1 and self.said[0].startswith("error: "), (self.status, self.err)
        return self.said[0]


def one_line(action: Callable[[], object]) -> str:
    """What a ValueError says, which is short enough to be read at once."""
    with pytest.raises(ValueError) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)
