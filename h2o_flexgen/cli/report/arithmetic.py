"""Arithmetic: what a checkpoint's weights are stored in, what a plan keeps its values in, and what it multiplies them in.

The last two differ: a processor without instructions for a type of 16 bits multiplies in float32 what is kept in 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from h2o_flexgen.cli.report import Entry, entry
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.formats.kernel_table import CPU, EXACT, FLOAT32, INT8, PRODUCT, PRODUCTS, Processor, choose, rounds
from h2o_flexgen.formats.table import BY_BITS, FORMATS, PLAIN, Stored, chosen_format
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.session.opened_model import OpenedModel

SHOWN_DIGITS = 3


@dataclass(frozen=True)
class FormatShare:
    """The values of a model that are written in one format."""

    name: str  # a format's, or the type of plain values
    group: str  # what shares a scale; nothing where values are plain
    bits: float  # of a value, with its share of scales and all else
    share: float  # of the model's values

    def __str__(self) -> str:
        bits = f"{self.bits:.{SHOWN_DIGITS}g} bits"
        return f"{self.name} ({', '.join(filter(None, (bits, self.group)))})"

    def as_json(self) -> dict[str, object]:
        return {"form": self.name, "bits": round(self.bits, 3), "group": self.group or None, "share": round(self.share, 4)}


@dataclass(frozen=True)
class StoredWeights:
    kind: str  # of the files
    method: str  # of quantisation, as its config names it; nothing where there is none
    formats: tuple[FormatShare, ...]  # of matrices and tables, those of most values first

    @classmethod
    def of(cls, opened: OpenedModel) -> StoredWeights | None:
        """None: weights are random, and none are stored."""
        checkpoint = opened.checkpoint
        if checkpoint is None:
            return None
        kind = checkpoint.origins[0].suffix.removeprefix(".")
        return cls(kind, opened.quantisation, format_shares(opened.spec(Plan()), checkpoint.dtype))

    def _line(self) -> str:
        found = f"{self.kind}, {self.method}" if self.method else self.kind
        if len(self.formats) == 1:
            return f"{found}: {self.formats[0]}"
        shares = [f"{100 * format.share:.0f} % in {format}" for format in self.formats]
        return f"{found}: of the values {', '.join(shares)}"

    def entry(self) -> Entry:
        forms = [format.as_json() for format in self.formats]
        return entry("found", self._line(), stored={"files": self.kind, "method": self.method or None, "forms": forms})


def format_shares(spec: ModelSpec, plain: str) -> tuple[FormatShare, ...]:
    """The formats of a model's matrices; `plain` is the type of those that are not packed."""
    tensors = [tensor for tensor in spec.tensors.values() if len(tensor.shape) > 1]
    values = Counter[str]()
    for tensor in tensors:
        values[tensor.format] += tensor.numel
    return tuple(_share(format, tensors, count / values.total(), plain) for format, count in values.most_common())


def _share(format: str, tensors: Iterable[TensorSpec], share: float, plain: str) -> FormatShare:
    own = [tensor for tensor in tensors if tensor.format == format]
    stored, bits = FORMATS[format], 8 * sum(tensor.stored_nbytes for tensor in own) / sum(tensor.numel for tensor in own)
    return FormatShare(plain if format == PLAIN else format, stored.sharing if isinstance(stored, Stored) else "", bits, share)


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
        kept += "" if self.plan.state_dtype == FLOAT32 else f", states in {self.plan.state_dtype}"
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
            "states": self.plan.state_dtype,
            "activations": self.dtype,
            "compute": self.plan.compute,
            "products": list(self.products),
        }
