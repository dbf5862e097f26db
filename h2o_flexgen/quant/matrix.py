"""PackedMatrix: a matrix of a layer in the bytes of its codec. Few rows are multiplied with the bytes, where the codec can; for
more it is decoded first, once for all that follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from h2o_flexgen.quant.codec import Codec


@dataclass(eq=False)
class DecodeBuffer:
    """Memory for the values of one matrix at a time."""

    values: Tensor  # (outputs, inputs) of the largest
    holder: PackedMatrix | None = None  # whose values are there


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    data: Tensor  # (outputs, bytes of a row)
    codec: Codec
    room: DecodeBuffer

    def values(self) -> Tensor:
        """(outputs, inputs). Good until somebody else takes the room."""
        values = self.room.values[: len(self.data)]
        if self.room.holder is not self:
            self.codec.decode(self.data.view(-1), values)
            self.room.holder = self
        return values

    def renew(self) -> None:
        """The bytes are others now, or the room was used for something else."""
        self.room.holder = None

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As torch's, of the values."""
        out = self.codec.product(x, self.data, bias)
        return functional.linear(x, self.values(), bias) if out is None else out
