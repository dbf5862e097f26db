"""What a refusal says in a test: one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def one_line(action: Callable[[], object]) -> str:
    """What a ValueError says, which is short enough to be read at once."""
    with pytest.raises(ValueError) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)
