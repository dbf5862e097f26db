"""Hosts: the names by which a server may be asked. One that listens to its machine alone answers to the names of loopback
alone. Otherwise a site could make its name lead here (DNS rebinding) and read everything, as browsers go by names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

LOCAL = "localhost"
HEADER = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]*)?", re.ASCII | re.IGNORECASE
)  # an address or a name, and a port


@dataclass(frozen=True)
class Hosts:
    """The names in a Host header that mean this server."""

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
