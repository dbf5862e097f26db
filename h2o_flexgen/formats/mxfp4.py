"""MXFP4: floats of 4 bits (e2m1), of which 32 share a scale of one byte, a power of two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import E8M0, EXPONENT, FLOAT4, ByteLayout, Sectioned

ZERO = 12  # is added to twice the value of a code: codes are whole numbers without a sign
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
FP4_IN_BYTES = ByteLayout(codes=FLOAT4, table=tuple(value + ZERO for value in TWICE), zero=ZERO)
MXFP4_BLOCKS = Blocked(
    "mxfp4", 39, replace(FP4_IN_BYTES, block_values=32, block_bytes=17, span=16, codes_at=1, shared=EXPONENT)
)


@dataclass(frozen=True)
class Fp4(Sectioned):
    """MXFP4 in sections, as safetensors have them: two codes to a byte, the lower half first."""

    group: int = 32
    scale: str = E8M0
    name_in_c: ClassVar[str] = "FP4"

    @property
    def name(self) -> str:
        return f"fp4-{self.group}"

    @property
    def layout(self) -> ByteLayout:
        return replace(FP4_IN_BYTES, shared_inputs=self.group)

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = shape
        assert columns % self.group == 0, (self, shape)
        return rows * columns // 2, rows * columns // self.group

    def outputs_together(self) -> tuple[int, ...]:
        return 1, 1


MXFP4_SECTIONS = Fp4()
