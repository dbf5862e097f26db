"""The page that a browser shows at /: one file, which asks this server alone for what it shows. The browser is told so: it runs
the style and the script that stand in the file, and loads nothing from anywhere else."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response

FILE = Path(__file__).with_name("page.html")


def page() -> Response:
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
