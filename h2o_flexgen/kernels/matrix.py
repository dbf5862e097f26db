"""PackedMatrix: a layer's matrix in the bytes of its codec. It is multiplied as it lies where a kernel can do that; otherwise
it is decoded first, once for all products that follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kernels.operations import decode, packed_product, plain_product


@dataclass(eq=False)
class DecodeBuffer:
    """Memory for the decoded values of one matrix at a time."""

    values: Tensor  # (outputs, inputs) of the largest matrix
    holder: PackedMatrix | None = None  # the matrix whose values are there


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    data: Tensor  # (outputs, bytes of a row)
    codec: str
    room: DecodeBuffer

    def values(self) -> Tensor:
        """The decoded values (outputs, inputs). They are valid until another matrix takes the buffer."""
        values = self.room.values[: len(self.data)]
        if self.room.holder is not self:
            decode(self.codec, self.data, values)
            self.room.holder = self
        return values

    def renew(self) -> None:
        """Forgets decoded values, after the bytes have changed or the buffer was used for something else."""
        self.room.holder = None

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The linear layer of torch, with the decoded values as weights."""
        out = packed_product(self.codec, x, self.data, bias)
        return plain_product(x, self.values(), bias) if out is None else out
