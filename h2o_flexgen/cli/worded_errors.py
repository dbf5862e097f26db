"""Errors that call options by their names, as Python and JSON have them, with the flags of a command in their place."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection

from h2o_flexgen.core.option import Option, flag_of, options_of
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.sampling.params import SAMPLING
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest

TABLES = Plan, KVOptions, ModelRequest, SiteRequest, PlanRequirements
OPTIONS = {name: option for table in reversed(TABLES) for name, option in options_of(table).items()}
QUOTED = r"(?<![\w=])'[^']*'(?!\w)|\"[^\"]*\""  # what a user has written
VALUE = r"(?:=(?P<given>'[^']*'|[\w.]*\w)| (?P<beside>'[^']*'))"  # as in `schedule='zigzag'`, and in `kv_policy 'h2o'`
OF_A_FILE = re.compile(r"\bline \d+: ")  # files have the names
LISTED = r"\b(?:takes?|leave|give) (?:(?:{names})(?:, | and | or ))*$"
PERCENT, SHARES = "percent", re.compile(r" (?:-?\d|for \w+ is )")  # six numbers stand behind it, or what two of them are for


def as_typed(line: str, flags: Collection[str]) -> str:
    """An error with the flags of a command in the place of names. `flags`: the names of those that it has. A name that is also
    a plain word is meant where a value is given to it, or where the line says to take or to leave it. What is quoted, and
    what stands behind a flag, is what was given. What is asked of each text keeps its names: files of requests have them."""
    meant = sorted((name for name in flags if name not in SAMPLING), key=len, reverse=True)
    if not meant:
        return line
    names = "|".join(meant)
    listed = re.compile(LISTED.format(names=names))

    def typed(found: re.Match[str]) -> str:
        name, value, before = found["name"], found["given"] or found["beside"], line[: found.start()]
        if name is None or OF_A_FILE.search(before) or is_what_was_given(name, before):
            return found[0]
        is_percent = name == PERCENT and SHARES.match(line, found.end())
        is_meant = found["given"] or "_" in name or is_percent or listed.search(before)
        return _written(name, value, found[0]) if is_meant else found[0]

    return re.sub(rf"{QUOTED}|(?<!in Python )(?<![\w'\"/.=-])(?P<name>{names}){VALUE}?(?![\w'\"/-]|\.\w)", typed, line)


def is_what_was_given(name: str, before: str) -> bool:
    """Whether a word that is written like a name is a value: of a flag, or of what the name itself calls."""
    return re.search(rf"(?:--[a-z-]+|\b{name.replace('_', ' ')}) $", before) is not None


def _written(name: str, given: str | None, as_it_is: str) -> str:
    """The flag of an option, with what is given for it in Python. A flag that takes no value says one thing alone."""
    option: Option | None = OPTIONS.get(name)
    flag = flag_of(name) if option is None else option.flag
    if option is None or given is None:
        return " ".join(filter(None, (flag, given)))
    try:
        value = option.allowed.read(literal_eval(given))
    except (TypeError, ValueError, SyntaxError, StopIteration):  # it is not allowed, or cannot be typed
        return f"{flag} {given}"
    typed = option.written(value)
    return as_it_is if len(typed) == 1 and value not in (True, option.bare) else " ".join(typed)
