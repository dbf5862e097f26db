"""Whether a picture can be drawn: said before the work and not behind it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from h2o_flexgen.cli.report import check_writable

KINDS = (".png", ".svg", ".pdf")


def check_picture(file: str | None, flag: str) -> None:
    if file is None:
        return
    try:
        import_module("matplotlib.figure")  # now, so that what it takes in memory is counted before a plan is held against it
    except ImportError as error:
        advice = "install it, or the extra [plot] from a checkout: pip install -e '.[plot]'"
        raise ValueError(f"{flag} needs matplotlib; {advice}") from error
    check_writable(file, flag)
    if Path(file).suffix.lower() not in KINDS:
        raise ValueError(f"{flag} {file} is no kind of picture that is known; end it in {', '.join(KINDS)}")
