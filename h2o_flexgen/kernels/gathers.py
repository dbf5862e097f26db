"""The ways in which the attention that a key gets from several queries becomes one number."""

from __future__ import annotations

SUM = "sum"
MAX = "max"  # the highest share; the weights of queries say which of them count
