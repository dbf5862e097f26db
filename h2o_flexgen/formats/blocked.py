"""Rows of blocks, as GGUF files have them: a block has some values of a row, with the numbers that they share among them.

Such bytes come from a checkpoint and are kept as they are: nothing here encodes. Each row has bytes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from h2o_flexgen.formats.byte_layout import (
    FIFTH_BITS,
    PLANES_OF_ONE,
    PLANES_OF_TWO,
    SCALE,
    SCALE_AND_MINIMUM,
    SIGNED_SIX_BITS,
    SIX_BITS,
    SIXTEENS,
    ByteLayout,
)


@dataclass(frozen=True)
class Blocked:
    name: str
    gguf_type: int  # ggml's number of it
    layout: ByteLayout
    rows_together: int = 1

    @property
    def values(self) -> int:
        """The number of values in a block."""
        return self.layout.block_values

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def name_in_c(self) -> str:
        return self.name.upper()

    @property
    def sharing(self) -> str:
        return f"blocks of {self.values}"

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        assert shape[-1] % self.values == 0, (self, shape)
        return prod(shape) // self.values * self.block_bytes


# values of codes, which lie closer together near zero, and 128
IQ4_TABLE = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
SMALL, LARGE = 32, 256  # values of a block; large ones share two numbers, and their groups of 16 or 32 have others
IN_GGUF = (
    Blocked("q4_0", 2, ByteLayout(SMALL, 18, span=16, codes_at=2, zero=8, shared=SCALE)),
    Blocked("q4_1", 3, ByteLayout(SMALL, 20, span=16, codes_at=4, shared=SCALE_AND_MINIMUM)),
    Blocked("q5_0", 6, ByteLayout(SMALL, 22, span=16, codes_at=6, zero=16, upper=FIFTH_BITS, upper_at=2, shared=SCALE)),
    Blocked("q5_1", 7, ByteLayout(SMALL, 24, span=16, codes_at=8, upper=FIFTH_BITS, upper_at=4, shared=SCALE_AND_MINIMUM)),
    Blocked("q8_0", 8, ByteLayout(SMALL, 34, bits=8, codes_at=2, zero=128, is_signed=True, shared=SCALE)),
    Blocked("iq4_nl", 20, ByteLayout(SMALL, 18, span=16, codes_at=2, table=IQ4_TABLE, zero=128, shared=SCALE)),
    Blocked("iq4_xs", 23, ByteLayout(LARGE, 136, span=16, codes_at=8, table=IQ4_TABLE, zero=128, shared=SIGNED_SIX_BITS)),
    Blocked("q4_K", 12, ByteLayout(LARGE, 144, span=32, codes_at=16, shared=SIX_BITS)),
    Blocked("q5_K", 13, ByteLayout(LARGE, 176, span=32, codes_at=48, upper=PLANES_OF_ONE, upper_at=16, shared=SIX_BITS)),
    Blocked(
        "q6_K", 14, ByteLayout(LARGE, 210, span=64, zero=32, upper=PLANES_OF_TWO, upper_at=128, shared=SIXTEENS, shared_at=192)
    ),
)
