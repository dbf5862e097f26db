"""What a person sees of a server at a glance: the page that a browser shows at /, and the status, as JSON, that it asks for."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response

from h2o_flexgen.server.counts import Now, ServerCounts

FILE = Path(__file__).with_name("page.html")


def page() -> Response:
    """One file, which asks this server alone for what it shows. The browser is told so: it runs the style and the script that
    stand in the file, and loads nothing from anywhere else."""
    content = FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": "; ".join(_policy(content)),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


def _policy(content: str) -> Iterator[str]:
    yield "default-src 'none'"
    yield f"style-src {_sum_of('style', content)}"
    yield f"script-src {_sum_of('script', content)}"
    yield "connect-src 'self'"
    yield "img-src data:"
    yield from (f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors"))


def _sum_of(element: str, content: str) -> str:
    """The checksum by which a browser knows the one element of this kind."""
    (inner,) = re.findall(f"<{element}>(.*?)</{element}>", content, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inner.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class Tier:
    """What lies where: one place for data."""

    name: str
    held_bytes: Mapping[str, int]  # by kind of data
    needed_bytes: int  # at most, with the room that is worked in; a checkpoint's own files on disk are only read
    budget_bytes: int | None


@dataclass(frozen=True)
class Facts:
    """What is settled before the server listens."""

    model: str  # by which clients know it
    longest_prompt: int  # tokens
    most_tokens: int  # of a completion
    words: Mapping[str, str]  # what is said of the plan, by what it is about
    tiers: tuple[Tier, ...]


def status(facts: Facts, is_ending: bool, now: Now, counts: ServerCounts) -> dict[str, object]:
    return {
        **asdict(facts),
        "is_ending": is_ending,
        "seconds": counts.seconds(),
        "now": asdict(now),
        "since_it_began": counts.totals(),
    }
