"""Which cases of each library of kernels a default run has: all of the best one, and of every other one a sample.

Libraries have the same sources. Their other cases are slow.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kernels.variants import OTHERS

SAMPLE = 3  # a default run has each so many cases of another library


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = Counter[str]()
    for item in items:
        if isinstance(item, pytest.Function) and (library := library_of(item)) in OTHERS:
            if (places[library] + OTHERS.index(library)) % SAMPLE:  # libraries have other cases, as far as there are three
                item.add_marker(pytest.mark.slow)
            places[library] += 1


def library_of(item: pytest.Function) -> str:
    return str(item.callspec.params.get("variant")) if hasattr(item, "callspec") else ""
