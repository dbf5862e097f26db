"""FP8: floats of 8 bits (e4m3), as safetensors have them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from h2o_flexgen.formats.byte_layout import FLOAT8, SCALE_BYTES, ByteLayout, Sectioned


@dataclass(frozen=True)
class Fp8(Sectioned):
    """Codes with a scale for each block of outputs and inputs: w = code * scale."""

    block_rows: int  # 0: all
    block_columns: int  # 0: all
    scale: str  # type of the scales
    name_in_c: ClassVar[str] = "FP8"

    @property
    def name(self) -> str:
        return f"fp8-{self.block_rows}x{self.block_columns}-{self.scale}"

    @property
    def layout(self) -> ByteLayout:
        return ByteLayout(codes=FLOAT8, bits=8, shared_rows=self.block_rows, shared_inputs=self.block_columns)

    @property
    def sharing(self) -> str:
        if not self.block_columns:
            return "a scale for an output" if self.block_rows else "a scale for a matrix"
        return f"blocks of {self.block_rows} x {self.block_columns}"

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = shape
        return -(-rows // (self.block_rows or rows)), -(-columns // (self.block_columns or columns))

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = self.scales_shape(shape)
        return shape[0] * shape[1], rows * columns * SCALE_BYTES[self.scale]

    def outputs_together(self) -> tuple[int, ...]:
        return 1, self.block_rows


FP8_BLOCKS = ((128, 128), (1, 32), (1, 0), (0, 0))  # a scale for each square, each group, each output, or the whole matrix
FP8 = tuple(Fp8(*block, scale) for block, scale in product(FP8_BLOCKS, SCALE_BYTES))
