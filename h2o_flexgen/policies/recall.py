"""Recall: all tokens are kept, and a decode step attends a share of them, which its own query chooses by an index of keys.

How many these are is said here alone, and how the index is stored. Which they are says kernels/chosen_slots.py.
"""

from __future__ import annotations

from math import ceil

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.formats.table import BY_BITS, FORMATS

FIRST, RECENT = 4, 16  # tokens that every step attends: the first of a row, and the newest, its own among them
ALL = 1.0  # the share with which nothing is chosen
INDEX = BY_BITS[4]  # the format in which keys are compared with queries
FINENESS = 1e-9  # a tenth of 30 tokens is 3 of them, whatever a product of floating point says


def attended(share: float, held: int) -> int:
    """The tokens that a step attends of those that a row holds, the step's own included."""
    return held if share == ALL else min(held, max(FIRST + RECENT, ceil(share * held - FINENESS)))


def index_bytes(share: float, spec: ModelSpec) -> int:
    """Bytes of the index for one slot of a KV head. Keys that are stored in its format are their own index."""
    if share == ALL or spec.kv_codec == INDEX:
        return 0
    return FORMATS[INDEX].nbytes((spec.head_dim,), spec.itemsize)
