"""Sizes: how much is moved and computed for a profile, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from h2o_flexgen.core.units import format_bytes

MIB = 1 << 20
SHRINKS = 6  # at most, each halving the sizes, if memory is short


@dataclass(frozen=True)
class Sizes:
    rounds: int = 9  # everything is measured once in each, since a machine changes from minute to minute
    seconds: float = 0.05  # per measurement, or longer if a single call takes longer
    disk_seconds: float = 0.3
    disk_bytes: int = 1024 * MIB
    cold_bytes: int = 128 * MIB  # of weights that products take in turn, more than a cache holds
    copied_bytes: int = 192 * MIB
    side: int = 4096  # of a weight
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    slow_rows: tuple[int, ...] = (1, 4, 16, 64)  # for a dtype in which the device is slow and which no plan uses
    heads: int = 32
    head_dim: int = 128
    kv_rows: int = 32
    slots: int = 512
    queries_per_key: int = 4  # for decode attention bound by computing
    prompt_len: int = 512
    prompt_tokens: int = 1024  # of prompts at once
    width: int = 2048  # of the layers whose values are counted
    steps: int = 12  # of the tiny model

    @property
    def memory_bytes(self) -> int:
        """The most memory held at once, roughly: weights of three dtypes and two codecs, copies, keys and values of many kinds,
        and what is read from disk."""
        kv = 2 * self.kv_rows * self.heads * self.head_dim * self.slots
        read = min(self.disk_bytes, 64 * MIB)
        return 6 * max(self.cold_bytes, 4 * self.side**2) + 3 * self.copied_bytes + 14 * kv + read

    def within(self, nbytes: int) -> Sizes:
        """Smaller sizes, if there is little memory."""
        sizes = self
        for _ in range(SHRINKS):
            if sizes.memory_bytes <= nbytes:
                return sizes
            sizes = replace(
                sizes,
                cold_bytes=sizes.cold_bytes // 2,
                copied_bytes=sizes.copied_bytes // 2,
                kv_rows=max(1, sizes.kv_rows // 2),
                side=max(64, sizes.side // 2),
            )
        raise ValueError(
            f"a profile needs {format_bytes(sizes.memory_bytes)} of memory, but {format_bytes(nbytes)} may be taken; free some"
        )


FULL = Sizes()
QUICK = Sizes(rounds=2, seconds=0.03, disk_seconds=0.2, disk_bytes=256 * MIB)
