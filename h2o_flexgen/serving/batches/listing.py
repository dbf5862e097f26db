"""Lists of objects, a page at a time, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.jobs.openai_answers import Said
from h2o_flexgen.serving.problems import Refused, bad_request

LIMIT, AFTER, ORDER = "limit", "after", "order"
NEWEST_FIRST, OLDEST_FIRST = "desc", "asc"


class Listed(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def said(self) -> Said: ...


def refuse_other(asked: Mapping[str, str], known: Sequence[str]) -> None:
    try:
        refuse_unknown("parameter", asked, known, {})
    except ValueError as error:
        raise Refused(bad_request(str(error))) from error


def page(oldest_first: Sequence[Listed], asked: Mapping[str, str], most: int, usual: int) -> Said:
    """As many as are asked for, behind the one that is named."""
    order = asked.get(ORDER, NEWEST_FIRST)
    if order not in (NEWEST_FIRST, OLDEST_FIRST):
        raise Refused(bad_request(f"{ORDER} is {shown(order)}; allowed are {OLDEST_FIRST} and {NEWEST_FIRST}", param=ORDER))
    found = [*oldest_first] if order == OLDEST_FIRST else [*reversed(oldest_first)]
    limit, after = _limit(asked.get(LIMIT, str(usual)), most), asked.get(AFTER)
    begins = 0
    if after is not None:
        begins = next((place for place, one in enumerate(found, start=1) if one.id == after), 0)
        if not begins:
            raise Refused(bad_request(f"{AFTER} is {shown(after)}, which is not among these", param=AFTER))
    shown_ones = found[begins : begins + limit]
    return {
        "object": "list",
        "data": [one.said for one in shown_ones],
        "first_id": shown_ones[0].id if shown_ones else None,
        "last_id": shown_ones[-1].id if shown_ones else None,
        "has_more": begins + limit < len(found),
    }


def _limit(given: str, most: int) -> int:
    allowed = Bounds(1, most)
    try:
        return int(allowed.typed(given))
    except ValueError:
        raise Refused(bad_request(f"{LIMIT} is {shown(given)}; allowed is {allowed}", param=LIMIT)) from None
