"""ModelSpec: which products its weights allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h2o_flexgen.core.model_spec import share_of
from h2o_flexgen.formats.table import PLAIN
from tests.planning.worlds import tiny_spec


def test_products_of_8_bits_are_for_packed_matrices() -> None:
    spec = tiny_spec()
    assert spec.written_as("group4", PLAIN, "int8").product == "int8 product"
    assert spec.packed("group8").written_as(PLAIN, PLAIN, "int8").product == "int8 product"
    with pytest.raises(ValueError, match=r"^compute='int8' is for weights .* of tiny are not; pack them: --compress-weight "):
        spec.written_as(PLAIN, "group4", "int8")


def test_a_share_of_values_is_so_many_of_them_again() -> None:
    wrong = {(part, whole) for whole in range(1, 200) for part in range(whole + 1) if int(part / whole * whole) != part}
    assert (30, 44) in wrong
    assert [(part, whole) for part, whole in wrong if int(share_of(part, whole) * whole) != part] == []
    assert (share_of(32, 80), share_of(44, 44), share_of(0, 4)) == (0.4, 1.0, 0.0)


def test_a_packed_table_alone_allows_none() -> None:
    """Its rows are looked up, and multiply nothing."""
    table, *blocks = tiny_spec(tied=False).packed("group4").layers
    plain = tiny_spec(tied=False)
    assert not replace(plain, layers=(table, *plain.layers[1:])).can_compute("int8")
    assert replace(plain, layers=(plain.layers[0], *blocks)).can_compute("int8")
