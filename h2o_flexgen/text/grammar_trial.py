"""Compiles a grammar from standard input in a process of its own. It ends after so many seconds of a processor as its argument
says, or where it takes too much memory. It is run as a file, and imports nothing of the package. What is wrong with a grammar
is no failure: that is found again.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

MOST_BYTES = 1 << 31


class Bytes:
    """A tokenizer with a token for each byte, and one for the end of a text."""

    bos_token_id = None
    eos_token_id = 256
    tokens: Sequence[bytes] = (*(bytes((byte,)) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    limits = LLParserLimits(precompute_large_lexemes=False)
    LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), sys.stdin.read(), log_level=0, limits=limits)


if __name__ == "__main__":
    main()
