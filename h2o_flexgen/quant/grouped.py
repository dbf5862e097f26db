"""Group-wise quantisation: 64 values along a row share a scale and a minimum of 16 bits each; a value is a code of 4 or 8 bits.

A row has bytes of its own (its codes, then its scales, then its minima), so it can be encoded, moved and rewritten alone. Four
bits take 4.5 bits per value, eight take 8.5. The minimum is rounded down and the scale up, so that the codes reach from the
least to the largest value: no value is off by more than half a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 64
SHARED_BYTES = 2  # of a scale, and of a minimum
ENCODED_VALUES = 1 << 20  # at once: what is held in passing stays small and near


@dataclass(frozen=True)
class Grouped:
    bits: int

    @property
    def name(self) -> str:
        return f"group{self.bits}"

    @property
    def _code_bytes(self) -> int:
        return GROUP * self.bits // 8

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        rows, groups = _layout(shape)
        return rows * groups * (self._code_bytes + 2 * SHARED_BYTES)

    def encode(self, values: Tensor, out: Tensor) -> None:
        import torch

        from h2o_flexgen.kernels.group_decode import group_parts

        rows, groups = _layout(tuple(values.shape))
        codes, scales, minima = group_parts(out.view(rows, -1), self.bits)
        flat, step = values.reshape(rows, -1), max(1, ENCODED_VALUES // (groups * GROUP))
        for row in range(0, rows, step):
            part = slice(row, row + step)
            here = _in_groups(flat[part].float(), groups)
            minimum = _rounded(here.amin(-1), -torch.inf)
            here.sub_(minimum.float().unsqueeze(-1))
            scale = _rounded(here.amax(-1) / (2**self.bits - 1), torch.inf)
            here.div_(torch.where(scale > 0, scale, 1).float().unsqueeze(-1))  # a constant group has codes of 0
            code = here.round_().clamp_(0, 2**self.bits - 1).byte()
            codes[part] = code if self.bits == 8 else code[..., : GROUP // 2] | code[..., GROUP // 2 :] << 4
            scales[part], minima[part] = scale, minimum

    def decode(self, data: Tensor, out: Tensor) -> None:
        from h2o_flexgen.kernels.group_decode import group_decode

        rows, _ = _layout(tuple(out.shape))
        group_decode(data.view(rows, -1), out.view(rows, -1), self.bits)


def _layout(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows, and groups of each."""
    return prod(shape[:-1]), -(-shape[-1] // GROUP)


def _in_groups(rows: Tensor, groups: int) -> Tensor:
    """(rows, groups, 64), memory of its own; what the last group lacks is the row's last value, which changes neither end."""
    import torch

    lacking = groups * GROUP - rows.shape[-1]
    padded = torch.cat((rows, rows[:, -1:].expand(-1, lacking)), dim=-1) if lacking else rows.clone()
    return padded.view(len(rows), groups, GROUP)


def _rounded(values: Tensor, towards: float) -> Tensor:
    """bfloat16: the nearest that is not on the other side."""
    import torch

    near = values.bfloat16()
    beyond = near.float() > values if towards < 0 else near.float() < values
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)
