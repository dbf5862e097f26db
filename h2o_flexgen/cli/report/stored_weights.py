"""What was found in a checkpoint: the kind of its files, its quantisation, and the formats of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from h2o_flexgen.cli.report.entry import Entry, entry
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.formats.table import FORMATS, PLAIN, Stored
from h2o_flexgen.planning.plan import Plan
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
