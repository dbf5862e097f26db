"""What the machine gives at this moment: printed before and after, because such machines slow down for minutes at a time.

python -m benchmarks.comparison.calibration cpu bfloat16 CHECKPOINT
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

import torch

from benchmarks.instructions import instructions
from benchmarks.peaks import Peaks
from h2o_flexgen.formats.kernel_table import CPU, INT8
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.profiling.measure import Needs, describe_machine, measure, memory_read_rate

RATES = (
    *("flops_per_s", "memory_read_per_s", "disk_read_per_s", "link_per_s", "device_read_per_s"),
    *("fp32_peak_per_s", "integer_peak_per_s"),
)
SHAPE = (11008, 4096)  # of the weights
ROWS, ROWS_OF_ACCELERATOR = 256, 2048  # of a product that is large for it
COPIED_BYTES, COPIES = 1 << 29, 5  # within an accelerator's memory


@dataclass(frozen=True)
class Calibration:
    flops_per_s: float
    memory_read_per_s: float
    disk_read_per_s: float | None  # None: no file is read
    link_per_s: float | None  # to the accelerator
    machine: dict[str, object]
    device_read_per_s: float | None = None  # of an accelerator's own memory
    fp32_peak_per_s: float = 0.0  # operations in registers alone; 0 where that cannot be measured
    integer_peak_per_s: float = 0.0  # of 8 bits

    def products_per_s(self, arithmetic: str) -> float:
        """The most operations per second: as measured of a large product, or the peak where that is higher."""
        peaks = self.fp32_peak_per_s, self.integer_peak_per_s if arithmetic == INT8 else 0.0
        return max(self.flops_per_s, *peaks)

    def __str__(self) -> str:
        rates = [f"{self.flops_per_s / 1e9:,.0f} GFLOP/s"]
        if self.fp32_peak_per_s:
            rates.append(f"peaks {self.fp32_peak_per_s / 1e9:,.0f} in fp32, {self.integer_peak_per_s / 1e9:,.0f} in int8")
        rates.append(f"memory {self.memory_read_per_s / 1e9:.1f} GB/s")
        beside = {"disk": self.disk_read_per_s, "link": self.link_per_s, "memory of the GPU": self.device_read_per_s}
        rates += [f"{name} {rate / 1e9:.2f} GB/s" for name, rate in beside.items() if rate is not None]
        return ", ".join(rates)

    @classmethod
    def taken(cls, device: str, dtype: str, checkpoint: Path, seconds: float = 2.0) -> Calibration:
        opened = open_device(device)
        files = (checkpoint,) if checkpoint.is_file() else tuple(sorted(checkpoint.glob("*.safetensors")))
        rows = ROWS_OF_ACCELERATOR if opened.accelerator else ROWS
        needs = Needs(dtype, SHAPE, (rows,), read_files=files, links=True)
        peaks = Peaks.measured() if device == CPU else None
        machine = measure(opened, needs, repetitions=3, seconds=seconds / 3)
        return cls(
            flops_per_s=machine.flop_rate(dtype, rows),
            memory_read_per_s=memory_read_rate(),
            disk_read_per_s=machine.disk_read_per_s if files else None,
            link_per_s=machine.host_to_device_per_s if opened.accelerator else None,
            device_read_per_s=memory_rate_of(opened) if opened.accelerator else None,
            machine={**describe_machine(opened), "instructions": instructions()},
            fp32_peak_per_s=peaks.fp32 if peaks else 0.0,
            integer_peak_per_s=peaks.integer if peaks else 0.0,
        )

    def at_best(self, other: Calibration) -> Calibration:
        rates = [name for name in RATES if getattr(self, name) is not None]
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in rates})


def memory_rate_of(device: Device) -> float:
    """Bytes per second that a copy within an accelerator's memory reads and writes."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device.torch_device)
    target, best = torch.empty_like(source), inf
    for _ in range(COPIES):
        device.settle()
        begun = time.perf_counter()
        target.copy_(source)
        device.settle()
        best = min(best, time.perf_counter() - begun)
    return 2 * COPIED_BYTES / best


if __name__ == "__main__":
    print(json.dumps(asdict(Calibration.taken(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
