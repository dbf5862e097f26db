"""Fewer threads where others are busy, and a line that says so."""

from __future__ import annotations

from h2o_flexgen.cli.report import say
from h2o_flexgen.profiling.others import Others


def say_threads(others: Others, asked: int | None) -> None:
    """`others` were looked at from the command's start on, which has cost nothing. Before this, plans and profiles are of the
    machine as it is when nobody disturbs it."""
    from h2o_flexgen.engine.threads import make_room_for_others  # imports torch, which is there by now

    line = make_room_for_others(others.cores(), asked)
    say([] if line is None else [f"threads   {line}"])
