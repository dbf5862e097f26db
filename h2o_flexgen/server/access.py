"""Access to a server: requests are let in by the name of the host that they ask, and by a key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

from h2o_flexgen.core.files import read_text

LOCAL = "localhost"
HEADER = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]*)?", re.ASCII | re.IGNORECASE
)  # an address or a name, and a port


@dataclass(frozen=True)
class Hosts:
    """The names in a Host header that mean this server. One that listens to its machine alone answers to the names of loopback
    alone. Otherwise a site could make its name lead here (DNS rebinding) and read everything, as browsers go by names."""

    own: str | None = None  # the one that was chosen beside those of loopback; None: a client may use any name

    def admit(self, header: str | None) -> bool:
        """Whether a request with this Host header is for this server."""
        if self.own is None:
            return True
        name = _name(header or "")
        return name == self.own.lower() or name == LOCAL or name.endswith(f".{LOCAL}") or _is_loopback(name)


def _name(header: str) -> str:
    """The name in a header, without its port; empty where it cannot be read."""
    found = HEADER.fullmatch(header)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_loopback(name: str) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


SCHEME = b"bearer"
LEAST = 8  # characters: a shorter one is soon guessed


@dataclass(frozen=True)
class Keys:
    """The keys of a server, of which a request needs one; without any, requests need none. They are in a file, one a line. The
    time of a comparison says nothing about them."""

    known: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, file: Path, flag: str) -> Keys:
        lines = [line.strip() for line in read_text(file, f"{flag} {file}").splitlines()]
        keys = tuple(line for line in lines if line)
        if not keys:
            raise ValueError(f"{flag} {file} has no key; write one a line")
        short = next((place for place, line in enumerate(lines, start=1) if 0 < len(line) < LEAST), None)
        if short is not None:
            raise ValueError(f"{flag} {file} has a key of fewer than {LEAST} characters in line {short}; write a longer one")
        return cls(tuple(key.encode() for key in keys))

    def admit(self, authorization: str | None) -> bool:
        """Whether this header has a known key; its bytes were read as latin-1. All keys are compared, whichever fits."""
        if not self.known:
            return True
        scheme, _, given = (authorization or "").encode("latin-1").partition(b" ")
        is_known = sum(compare_digest(key, given.strip()) for key in self.known)
        return is_known > 0 and scheme.lower() == SCHEME
