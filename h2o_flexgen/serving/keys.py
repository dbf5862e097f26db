"""Keys, of which a request needs one. They are in a file, one a line. The time of a comparison says nothing about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from h2o_flexgen.core.files import read_text

SCHEME = b"bearer"
LEAST = 8  # characters: a shorter one is soon guessed


@dataclass(frozen=True)
class Keys:
    """The keys of a server; without any, requests need none."""

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
