"""Sizes: how much is moved and computed for a profile, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from h2o_flexgen.core.units import format_bytes

MIB = 1 << 20
SHRINKS = 6  # at most, each halving the sizes, if memory is short


@dataclass(frozen=True)
class ProfileSizes:
    budget_seconds: float = 110.0  # for everything, with what has to be made ready
    rounds: int = 9  # everything is measured once in each, since a machine changes from minute to minute
    seconds: float = 0.05  # per measurement, or longer if a single call takes longer
    disk_seconds: float = 0.3
    disk_bytes: int = 1024 * MIB
    pool_bytes: int = 256 * MIB  # of weights and KV that are used in turn, more than a cache holds
    copied_bytes: int = 128 * MIB  # over a link
    side: int = 4096  # of a weight
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    heads: int = 32
    head_dim: int = 128
    kv_rows: int = 32
    slots: int = 512
    queries_per_key: int = 4  # for decode attention bound by computing
    prompt_len: int = 512
    prompt_tokens: int = 1024  # of prompts at once
    width: int = 2048  # of the layers for which values are counted
    steps: int = 12  # of the tiny model

    def time_on(self, accelerator: bool) -> str:
        """How long a profile takes, for people."""
        return f"{self.budget_seconds:.0f} s at most" + ", and the time to compile kernels for the GPU" * accelerator

    @property
    def memory_bytes(self) -> int:
        """The most memory held at once, roughly: the pool, the rows of a product and what comes of them, prompts, layers of
        values, KV on its way to the disk, page-locked memory, and what is read from disk."""
        rows = 3 * 4 * max(self.rows) * self.side
        prompts = 4 * 4 * self.prompt_tokens * self.heads * self.head_dim
        values = 24 * 4 * self.prompt_tokens * self.width
        kv = 4 * 2 * 4 * self.kv_rows * self.slots // 2 * self.width
        return self.pool_bytes + max(rows, prompts, values, kv) + self.copied_bytes + min(self.disk_bytes, 64 * MIB)

    def within(self, nbytes: int) -> ProfileSizes:
        """Smaller sizes, if there is little memory."""
        sizes = self
        for _ in range(SHRINKS):
            if sizes.memory_bytes <= nbytes:
                return sizes
            sizes = replace(
                sizes,
                pool_bytes=sizes.pool_bytes // 2,
                copied_bytes=sizes.copied_bytes // 2,
                kv_rows=max(1, sizes.kv_rows // 2),
                side=max(64, sizes.side // 2),
                width=max(64, sizes.width // 2),
            )
        raise ValueError(
            f"a profile needs {format_bytes(sizes.memory_bytes)} of memory, but {format_bytes(nbytes)} may be taken; free some"
        )

    def in_pool(self, nbytes: int, itemsize: int) -> ProfileSizes:
        """Sizes of matrices and of KV for which a pool of so many bytes is large enough."""
        side, rows = self.side, self.kv_rows
        while side > 64 and 2 * itemsize * side**2 > nbytes:
            side //= 2
        while rows > 1 and 2 * itemsize * self.heads * self.head_dim * self.slots * rows > nbytes:
            rows //= 2
        return replace(self, side=side, kv_rows=rows)


FULL = ProfileSizes()
QUICK = ProfileSizes(25.0, rounds=2, seconds=0.03, disk_seconds=0.2, disk_bytes=256 * MIB, rows=(1, 4, 16, 64, 256, 1024))
