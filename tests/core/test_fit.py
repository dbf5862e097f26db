"""The largest number that fits."""

from __future__ import annotations

import pytest

from h2o_flexgen.planning.workload_plan import largest


@pytest.mark.parametrize("most", [0, 1, 7, 64, 99, 100, 101, 5000])
def test_the_largest_number_that_fits_is_found(most: int) -> None:
    assert largest(lambda count: count <= most, 100) == min(most, 100)
