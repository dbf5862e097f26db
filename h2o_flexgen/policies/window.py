"""What layers with a sliding window keep: the tokens that the next one sees. It is not chosen; models have it."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.policies.local import Local


class Window(Local):
    """Its `recent` tokens and the newest one are the window."""

    name: ClassVar[str] = "window"
    accepts: ClassVar[tuple[str, ...]] = ("recent", "positions")

    @property
    def sees(self) -> int | None:
        return self.options.total(0, 0) + 1
