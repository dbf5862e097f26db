"""Whether a picture can be drawn: said before the work and not behind it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.commands.report import check_writable

KINDS = (".png", ".svg", ".pdf")


def check_picture(file: str | None, flag: str) -> None:
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError(f"{flag} needs matplotlib; install it, or the extra [plot] from a checkout: pip install -e '.[plot]'")
    check_writable(file, flag)
    if Path(file).suffix.lower() not in KINDS:
        raise ValueError(f"{flag} {file} is no kind of picture that is known; end it in {', '.join(KINDS)}")
