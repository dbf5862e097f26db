"""Option: all that is known of one option: its name, its default, what is allowed, what it means, its flag, its other names.

A table of options is a frozen dataclass: each field is an option. The dataclass checks its fields by the table, the command
line makes flags of it, readers of JSON take fields by it, and a printed command is written from it.

    @dataclass(frozen=True)
    class SamplingParams:
        temperature: float = option(0.0, Bounds(0, 100, is_whole=False), "T", "0: greedy, the likeliest token")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from h2o_flexgen.core.allowed_values import Allowed

T = TypeVar("T")
KEY = "option"  # of the metadata of a field


@dataclass(frozen=True)
class Option:
    allowed: Allowed
    metavar: str  # stands for the value in the help; empty: the flag alone says it all, or help lists the names to choose from
    text: str  # the help of the flag; empty: there is no flag
    note: str  # says more of what is allowed in Python and JSON
    flags: tuple[str, ...]  # the first is the usual one; empty: made of the names
    bare: object  # the meaning of the flag without a value, as it is typed; None: it needs one
    also_called: tuple[str, ...]  # other names that are taken
    elsewhere: tuple[str, ...]  # names in other libraries, for advice
    name: str = ""
    default: Any = None
    may_be_none: bool = False

    def value(self, given: object) -> Any:
        """Reads a value of Python or JSON."""
        if given is None and self.may_be_none:
            return () if self.default == () else None  # no list is an empty one
        return self.allowed.value(self.name, given, self.note)

    @property
    def flag(self) -> str:
        return self.all_flags[0]

    @property
    def all_flags(self) -> tuple[str, ...]:
        return self.flags or tuple(flag_of(name) for name in (self.name, *self.also_called))

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be given several times."""
        return bool(self.default == ())

    def written(self, value: Any) -> tuple[str, ...]:
        """The option as it is typed."""
        takes_a_value = self.metavar or self.bare is None
        return (self.flag, self.allowed.written(value)) if takes_a_value else (self.flag,)


def option(
    default: T,
    allowed: Allowed,
    metavar: str = "",
    text: str = "",
    *,
    note: str = "",
    flags: tuple[str, ...] = (),
    bare: object = None,
    also_called: tuple[str, ...] = (),
    elsewhere: tuple[str, ...] = (),
    hashed: bool | None = None,
) -> T:
    """A field of a table of options. `hashed`: False if its values cannot be hashed."""
    told = Option(allowed, metavar, text, note, flags, bare, also_called, elsewhere)
    made: T = field(default=default, hash=hashed, metadata={KEY: told})
    return made


@cache
def options_of(table: type) -> Mapping[str, Option]:
    """The options of a table by their names, with the defaults and types of its fields."""
    return MappingProxyType(
        {
            one.name: replace(
                one.metadata[KEY], name=one.name, default=one.default, may_be_none=str(one.type).endswith("| None")
            )
            for one in fields(table)
            if KEY in one.metadata
        }
    )


def by_own_names(given: Mapping[str, object], table: type) -> dict[str, object]:
    """Given options by their own names, where other names are taken as well."""
    own = {other: name for name, one in options_of(table).items() for other in one.also_called}
    if twice := next((name for name in given if own.get(name) in given), None):
        raise ValueError(f"{own[twice]} is also called {twice}, and both are given; give one of them")
    return {own.get(name, name): value for name, value in given.items()}


def check_options(given: object, table: type) -> None:
    """Checks the fields of a new object by its table, and keeps them as they are read."""
    for name, one in options_of(table).items():
        value = getattr(given, name)
        if value is not one.default:  # there are many thousand objects that differ from the defaults in little
            object.__setattr__(given, name, one.value(value))


def flags_written(given: object, table: type, always: tuple[str, ...] = ()) -> Iterator[str]:
    """The options as they are typed, without those that have the default, but for those in `always`."""
    for name, one in options_of(table).items():
        value = getattr(given, name)
        if name in always or value != one.default:
            yield from one.written(value)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
