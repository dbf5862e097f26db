"""Uses, one by one, every kind of library of kernels that was built and that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from h2o_flexgen.formats.kernel_table import OF_PAIRS, PAIRS
from h2o_flexgen.kernels import native as kernels
from h2o_flexgen.kernels.functions import FUNCTIONS

NONE = pytest.param("none", marks=pytest.mark.skip("no library of kernels was built here"))
VARIANTS = kernels.variants() or [NONE]
OTHERS = VARIANTS[1:]  # than the best one
NO_PAIRS = pytest.param(PAIRS, marks=pytest.mark.skip("this processor has no instructions for pairs of bfloat16"))
WITH_PAIRS = [variant for variant in VARIANTS if variant in OF_PAIRS] or [NO_PAIRS]


@contextmanager
def used(variant: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.SWITCH, variant)
        kernels._loaded.cache_clear()
        try:
            yield
        finally:
            kernels._loaded.cache_clear()


@contextmanager
def without(function: str) -> Iterator[None]:
    """What asks for this function of kernels/functions.py fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FUNCTIONS, function, never)
        yield


def never(*_: object) -> NoReturn:
    """Replaces a twin that must not be used: the work is to be done in C."""
    raise AssertionError("torch was asked")
