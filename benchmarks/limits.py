"""The machine's limit: memory gives so many bytes in a second, and arithmetic in registers so many operations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.comparison.ceiling import weight_bytes
from benchmarks.comparison.checkpoint import spec_in
from benchmarks.comparison.suites import Contender, Load
from benchmarks.peaks import Peaks
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.formats.kernel_table import INT8
from h2o_flexgen.profiling.measure import memory_read_rate

LIMIT = "the bytes of weights and KV at the rate of memory, or the operations of all rows at the peak of the arithmetic"


@dataclass(frozen=True)
class Limits:
    read_per_s: float
    peaks: Peaks

    @classmethod
    def measured(cls) -> Limits:
        peaks = Peaks.measured()
        if peaks is None:
            raise ValueError("benchmarks/peaks.c cannot be compiled here; install a C compiler for x86-64, such as gcc")
        return cls(memory_read_rate(), peaks)

    def at_best(self, other: Limits) -> Limits:
        kinds = {kind: max(rate, getattr(other.peaks, kind)) for kind, rate in asdict(self.peaks).items() if rate}
        return Limits(max(self.read_per_s, other.read_per_s), replace(self.peaks, **kinds))

    def seconds(self, nbytes: float, operations: float, arithmetic: str) -> float:
        """The longer of two times. `arithmetic`: the property of the peaks that counts."""
        return max(nbytes / self.read_per_s, operations / getattr(self.peaks, arithmetic))

    def __str__(self) -> str:
        kinds = {
            "fp32": "fp32",
            "bf16": "bf16",
            "integer": "integers of 8 bits",
            "integer_of_4_bits": "integers of 8 bits times codes of 4, eight of them in sums of 16 bits",
        }
        rates = {words: getattr(self.peaks, kind) for kind, words in kinds.items()}
        peaks = [f"{words} {rate / 1e9:,.0f} Gop/s" for words, rate in rates.items() if rate]
        return ", ".join([f"reading {self.read_per_s / 1e9:.1f} GB/s", *peaks])


@dataclass(frozen=True)
class PassLimit:
    """What bounds a pass over a model in memory: the longer of reading weights and KV once, and of all operations."""

    spec: ModelSpec
    arithmetic: str  # the property of the peaks that counts
    limits: Limits

    @classmethod
    def of(cls, file: Path, contender: Contender, limits: Limits) -> PassLimit:
        dtype = contender.dtype or "bfloat16"
        exact = "fp32" if dtype == "float32" else "exact"
        return cls(spec_in(file, dtype), "integer" if contender.arithmetic == INT8 else exact, limits)

    def prompt_tokens_per_s(self, rows: int, load: Load) -> float:
        return rows * load.prompt_len / self._seconds(rows, load.prompt_len, 0.0)

    def step_tokens_per_s(self, rows: int, load: Load) -> float:
        return rows / self._seconds(rows, 1, load.prompt_len + (load.gen_len - 1) / 2)

    def _seconds(self, rows: int, tokens: int, held: float) -> float:
        """Of so many new tokens in each row, beside those that it holds."""
        kv = rows * held * self.spec.kv_bytes_per_slot * len(self.spec.kv_layers)
        operations = sum(self.spec.flops(layer, rows, tokens, held + tokens / 2) for layer in range(len(self.spec.layers)))
        return self.limits.seconds(weight_bytes(self.spec, rows * tokens) + kv, operations, self.arithmetic)
