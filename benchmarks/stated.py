"""A machine file as this engine's kernels for GPUs should make it: an ESTIMATE, in which nothing is measured.

The rates of the file's own products and links stay. Packed products, decoding and attention get the shares of memory bandwidth
that `benchmarks/gpu_kernels.py` states as aims; a visit gets what its launches take, counted in a run of a tiny model by
`benchmarks/host.py`. All assumptions are fields here, so that they can be printed beside every figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import log
from typing import Any

from benchmarks.gpu_kernels import ATTENTION_SHARES, DECODING_SHARE, HEAD_DIM, PRODUCT_SHARES
from benchmarks.host import GpuHost, launches_of
from h2o_flexgen.core.model_spec import ATTENTION_VISIT, MLP_VISIT
from h2o_flexgen.core.site import DEVICE
from h2o_flexgen.formats.kernel_table import ROWS_OF_TILES
from h2o_flexgen.formats.table import FORMATS, PLAIN, TILED
from h2o_flexgen.planning.machine import EVICTION, Curve, Machine
from h2o_flexgen.planning.plan import Plan

HALF, ITEMSIZE = "float16", 2
LONG = 1 << 12  # values of a row over which what a codec keeps beside them is averaged
ALL_OFFLOADED = (0, 100, 0, 100, 0, 100)
KEEPS_ALL, BUDGET = Plan.kv_policy, 0.2
COUNTED_ROWS, COUNTED_BATCHES = 4, 2  # of the run in which launches are counted: they do not depend on rows


@dataclass(frozen=True)
class LaunchCost:
    """ASSUMPTIONS about the host beside a GPU."""

    host: str
    torch_us: float  # of an operation of torch
    kernel_us: float  # of a kernel compiled by Triton, launched from Python


@dataclass(frozen=True)
class Launches:
    """Launches of a decode step's visits: those of torch, and those of kernels."""

    attention: tuple[float, float]
    mlp: tuple[float, float]
    eviction: tuple[float, float] = (0.0, 0.0)  # beside those of an attention without eviction

    @property
    def of_a_block(self) -> tuple[float, float]:
        """Launches of an attention and a mlp."""
        torch, kernels = zip(self.attention, self.mlp, self.eviction)
        return sum(torch), sum(kernels)

    def seconds(self, cost: LaunchCost) -> dict[str, float]:
        """Seconds for each kind of visit, by the names that a machine has for them."""
        visits = {ATTENTION_VISIT: self.attention, MLP_VISIT: self.mlp, EVICTION: self.eviction}
        return {kind: (torch * cost.torch_us + kernels * cost.kernel_us) * 1e-6 for kind, (torch, kernels) in visits.items()}


@cache
def counted_launches(weight_codec: str, kv_codec: str, kv_policy: str) -> Launches:
    """The launches with these codecs and a policy, counted in runs of a tiny model."""
    codecs = {"weight_codec": weight_codec, "kv_codec": kv_codec}
    full = launches_of(_counted_plan(**codecs))
    found = Launches(full["attention"], full["mlp"])
    if kv_policy == KEEPS_ALL:
        return found
    torch, kernels = launches_of(_counted_plan(**codecs, kv_policy=kv_policy, kv_budget=BUDGET))["attention"]
    return replace(found, eviction=(torch - found.attention[0], kernels - found.attention[1]))


def _counted_plan(**options: Any) -> Plan:
    made = Plan.create(gpu_batch_size=COUNTED_ROWS, num_gpu_batches=COUNTED_BATCHES, pin_weight=False, **options)
    return made.with_percent(ALL_OFFLOADED)


def slow_host() -> LaunchCost:
    """The host that `benchmarks/host.py` assumes beside a T4."""
    assumed = GpuHost()
    return LaunchCost(assumed.name, assumed.launch_us, assumed.kernel_us)


def quick_host() -> LaunchCost:
    """A host that is as many times quicker as the processor with which `benchmarks/host.py` compares that one."""
    assumed = GpuHost()
    name = f"a processor {assumed.slower:g} times as quick as 2 GHz Xeon cores"
    return LaunchCost(name, assumed.launch_us / assumed.slower, assumed.kernel_us / assumed.slower)


def with_kernels(machine: Machine, launches: Launches, cost: LaunchCost) -> Machine:
    """The machine with this engine's kernels at their stated shares, and a visit's launches in front of its work."""
    reached = bytes_per_s(machine)
    attention = {codec: share * reached / _bytes_of_value(codec) for codec, share in ATTENTION_SHARES.items()}
    return replace(
        machine,
        packed_flops_per_s={codec.name: packed_curve(codec.bits, reached) for codec in TILED},
        decoded_values_per_s={
            codec.name: DECODING_SHARE * reached / (_bytes_of_value(codec.name) + ITEMSIZE) for codec in TILED
        },
        attention_bytes_per_s={**machine.attention_bytes_per_s, DEVICE: ATTENTION_SHARES[PLAIN] * reached},
        attention_flops_per_s={},  # what is packed is bound by its bytes, not by flops
        unpacked_values_per_s={codec: rate for codec, rate in attention.items() if codec != PLAIN},
        visit_seconds=launches.seconds(cost),
    )


def bytes_per_s(machine: Machine) -> float:
    """Bytes per second that the device's memory gives: with one row a product of 16 bits has a flop for each byte."""
    return machine.flop_rate(HALF, 1) / (2 / ITEMSIZE)


def packed_curve(bits: int, reached: float) -> Curve:
    """Rates of fused products, for powers of two up to the rows that are multiplied so."""
    of_value = 2 * reached / _bytes_of_value(next(codec.name for codec in TILED if codec.bits == bits))
    most = max(ROWS_OF_TILES, *(rows for each, rows in PRODUCT_SHARES if each == bits))
    rows = [1 << power for power in range(most.bit_length())]
    return tuple((each, each * product_share(bits, each) * of_value) for each in rows)


def product_share(bits: int, rows: int) -> float:
    """The stated share of a fused product, on lines over log(rows) between those that are stated, or that of the nearest."""
    stated = sorted((known, share) for (each, known), share in PRODUCT_SHARES.items() if each == bits)
    for (fewer, low), (more, high) in pairwise(stated):
        if rows <= more:
            return low + (high - low) * log(rows / fewer) / log(more / fewer)
    return stated[-1][1]


def _bytes_of_value(codec: str) -> float:
    """Bytes per packed value: of KV over a head, of a matrix over long rows of as many units as lie together."""
    together, width = FORMATS[codec].rows_together, LONG if FORMATS[codec] in TILED else HEAD_DIM
    return FORMATS[codec].nbytes((together, width), ITEMSIZE) / (together * width)


def stated_shares() -> dict[str, float]:
    """The shares by words for people."""
    attention = {f"attention of {codec} KV": share for codec, share in ATTENTION_SHARES.items()}
    products = {f"{bits}-bit product, rows: {rows}": share for (bits, rows), share in PRODUCT_SHARES.items()}
    return {**attention, **products, "decoding of weights": DECODING_SHARE}
