"""INT4: whole numbers of 4 bits, as safetensors have them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from h2o_flexgen.formats.byte_layout import SCALE_BYTES, ByteLayout, Sectioned

MIDDLE = 8  # the zero of codes that have no other


@dataclass(frozen=True)
class Int4(Sectioned):
    """Codes two to a byte, the lower half first; a group of inputs of an output shares a scale and a zero:
    w = (code - zero) * scale. Codes may lie in another order than the inputs, which is then the last section."""

    group: int
    scale: str  # type of the scales
    zeros: bool  # a byte for each group; otherwise every zero is MIDDLE
    ordered: bool  # column j is input order[j] of the matrix
    name_in_c: ClassVar[str] = "INT4"

    @property
    def name(self) -> str:
        return "-".join(["int4", str(self.group), self.scale, *["zeros"] * self.zeros, *["ordered"] * self.ordered])

    @property
    def layout(self) -> ByteLayout:
        return ByteLayout(
            zero=0 if self.zeros else MIDDLE, shared_inputs=self.group, has_zeros=self.zeros, is_ordered=self.ordered
        )

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = shape
        assert columns % self.group == 0, (self, shape)
        groups = rows * columns // self.group
        zeros, order = (groups,) if self.zeros else (), (4 * columns,) if self.ordered else ()
        return rows * columns // 2, groups * SCALE_BYTES[self.scale], *zeros, *order

    def outputs_together(self) -> tuple[int, ...]:
        return 1, 1, *[1] * self.zeros, *[0] * self.ordered


INT4 = tuple(
    Int4(group, scale, zeros, ordered)
    for group, scale, zeros, ordered in product((32, 64, 128), ("float16", "bfloat16"), (False, True), (False, True))
)
