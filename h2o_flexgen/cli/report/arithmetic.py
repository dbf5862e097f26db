"""Arithmetic: what a plan keeps its values in, and what it multiplies them in.

These are two things: a processor without instructions for a type of 16 bits multiplies in float32 what is kept in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.formats.kernel_table import CPU, EXACT, INT8, PRODUCT, PRODUCTS, Processor, choose, rounds
from h2o_flexgen.formats.table import BY_BITS, PLAIN, chosen_format
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan

BITS = {format: f"{bits} bits" for bits, format in BY_BITS.items()}


@dataclass(frozen=True)
class Arithmetic:
    plan: Plan
    dtype: str  # type of hidden states, and of everything that is not packed
    processor: Processor | None  # None: that of another machine, with unknown instructions
    decode_rows: int = 1  # rows of products in decode
    prompt_rows: int = 1  # rows of products while prompts are computed
    formats: tuple[str, ...] = (PLAIN,)  # formats of the matrices, that of most values first

    @classmethod
    def of(cls, planned: WorkloadPlan, processor: Processor | None) -> Arithmetic:
        """The arithmetic of the largest block."""
        batch, at_once = planned.blocks.first.block.batches[0], planned.plan.prefill_tokens
        most = max(min(at_once, one.readings * one.size * one.prompt_len) for one in batch.parts(at_once))
        return cls(planned.plan, planned.spec.dtype, processor, batch.size, most, planned.spec.formats)

    # -- what products are made in ---------------------------------------------------------------------------------------

    @property
    def products(self) -> tuple[str, ...]:
        """The types in which decode and prompts are multiplied; one if they are the same, none if the processor is unknown."""
        if self.processor is None:
            return ()
        first = self.rounded[0] if self.rounded else self.formats[0]
        return tuple(
            dict.fromkeys(self._multiplied_in(first, rows, self.processor) for rows in (self.decode_rows, self.prompt_rows))
        )

    @property
    def rounded(self) -> tuple[str, ...]:
        """The formats that have their factors rounded to 8 bits."""
        return tuple(format for format in self.formats if self.plan.compute == INT8 and rounds(format))

    def _multiplied_in(self, format: str, rows: int, processor: Processor) -> str:
        """The type that so many rows are multiplied in, with packed weights as they are or as decoded."""
        op = PRODUCTS[self.plan.compute]
        kernel = choose(op, format, self.dtype, processor.runs, rows) or choose(
            PRODUCT, PLAIN, self.dtype, processor.runs, rows
        )
        return self.dtype if kernel is None else kernel.within or self.dtype

    @property
    def shares_work(self) -> bool:
        """Whether kernels in C do the products: their threads wait for none that another process keeps from its core."""
        own = self.processor
        if own is None or own.device != CPU:
            return False
        op = {format: PRODUCTS[self.plan.compute] if format in self.rounded else PRODUCT for format in self.formats}
        found = [choose(op[format], format, self.dtype, own.runs, self.decode_rows) for format in self.formats]
        return all(kernel is not None and kernel.libraries for kernel in found)

    # -- in words ----------------------------------------------------------------------------------------------------------

    def line(self) -> str:
        weights, kv = " and ".join(self.kept_in), BITS.get(self.plan.kv_codec, self.dtype)
        kept = f"activations and KV in {kv}" if kv == self.dtype else f"activations in {self.dtype}, KV in {kv}"
        return f"weights in {weights}, products {self._products()}; {kept}"

    @property
    def kept_in(self) -> tuple[str, ...]:
        """What matrices are kept in, in words."""
        return tuple(self._named(format) for format in self.formats)

    def _named(self, format: str) -> str:
        return self.dtype if format == PLAIN else BITS.get(chosen_format(format), format)

    def _products(self) -> str:
        if self.rounded:
            others = [self._named(format) for format in self.formats if format not in self.rounded]
            beside = f" ({EXACT} with {' and '.join(others)})" if others else ""
            return f"in {INT8}, of activations rounded to 8 bits{beside}"
        decode, *prompts = self.products or ("",)
        exact = f"{self.plan.compute} in {decode}" if decode else self.plan.compute
        return f"{exact} (of prompts in {prompts[0]})" if prompts else exact

    def as_json(self) -> dict[str, object]:
        return {
            "weights": self.plan.weight_codec,
            "matrices": [chosen_format(format) for format in self.formats],
            "kv": self.plan.kv_codec,
            "activations": self.dtype,
            "compute": self.plan.compute,
            "products": list(self.products),
        }
