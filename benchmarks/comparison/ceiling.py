"""The least time in which a workload could be done by any engine that has its weights in as many bits, in as much memory. The
KV is not counted: an engine may keep it where it costs nothing. A state is: each pass reads and writes it, so it comes before
weights in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.suites import Load
from h2o_flexgen.core.model_spec import ModelSpec, asked_for
from h2o_flexgen.formats.kernel_table import EXACT


@dataclass(frozen=True)
class Ceiling:
    spec: ModelSpec
    machine: Calibration
    host_bytes: float = inf
    device_bytes: float | None = None
    arithmetic: str = EXACT

    def seconds(self, rows: int, load: Load) -> float:
        return self.pass_seconds(rows, load.prompt_len) + (load.gen_len - 1) * self.pass_seconds(rows, 1)

    def tokens_per_s(self, rows: int, load: Load) -> float:
        return rows * load.gen_len / self.seconds(rows, load)

    def pass_seconds(self, rows: int, tokens: int) -> float:
        """Of all layers on `tokens` new tokens of each row: what does not fit must come from the disk or over the link, all
        weights must be read once, and all products be made."""
        weights, states = weight_bytes(self.spec, rows * tokens), rows * state_bytes(self.spec)
        room = self.host_bytes + (self.device_bytes or 0)
        at_rest = min(states, room)
        flops = sum(self.spec.flops(layer, rows, tokens, 0) for layer in range(len(self.spec.layers)))
        bounds = [
            (max(0.0, weights - (room - at_rest)) + 2 * (states - at_rest)) / (self.machine.disk_read_per_s or inf),
            flops / self.machine.products_per_s(self.arithmetic),
        ]
        if self.device_bytes is None or self.machine.link_per_s is None:
            bounds.append((weights + 2 * states) / self.machine.memory_read_per_s)
        else:
            bounds.append(max(0.0, weights - self.device_bytes) / self.machine.link_per_s)
            bounds.append(weights / (self.machine.device_read_per_s or inf))
        return max(bounds)


def state_bytes(spec: ModelSpec) -> int:
    """Of a row."""
    return sum(state.nbytes for layer in spec.layers for state in layer.states)


def weight_bytes(spec: ModelSpec, tokens: int) -> float:
    """That a pass over so many tokens needs: of a table that is not the head as well, a few rows, and of experts as many as
    these are expected to ask for."""
    used: dict[str, float] = {}
    for layer in spec.layers:
        shares, matrices = dict(layer.products), {tensor.name for tensor in layer.matrices}
        for local, tensor in layer.tensors:
            if tensor.name in matrices or not layer.takes_tokens:
                used[tensor.name] = tensor.nbytes * asked_for(shares.get(local, 1.0), tokens)
    return sum(used.values())
