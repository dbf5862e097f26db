"""Sizes: read in the units that people write, printed in decimal ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.core.units import SIZE, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(7, 7), ("7", 7), ("16GB", 16 * 10**9), (" 1.5 gb ", 1_500_000_000), ("8GiB", 8 * 2**30), ("2KiB", 2048), ("3 kB", 3000)],
)
def test_sizes_are_read_decimal_and_binary(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "GB", "1 2GB", "16XB", "0GB", "-1GB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"size '{text}'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (999_994, "999.99 kB"),
        (999_995, "1.00 MB"),
        (2.5e6, "2.50 MB"),
        (3.251e9, "3.25 GB"),
        (350e9, "350.00 GB"),
        (2e12, "2.00 TB"),
    ],
)
def test_printed_sizes_carry_the_largest_unit_that_leaves_a_number_of_1_or_more(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (0.012345, "0.0123 s"), (99.96, "100 s"), (999.4, "999 s"), (2939.801, "2940 s")]
)
def test_printed_seconds_have_no_exponent_where_they_are_many(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_seconds(999.5) == "1000 s"


@given(st.integers(1, 10**15))
def test_what_is_printed_reads_as_the_same_size_to_within_a_rounding(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.0051)


@pytest.mark.parametrize("size", ["1_0GB", "\u0661GB", "1e400", "9" * 30, "nan", "infGB", 0, -5, True, 2**70, "x" * 5000])
def test_a_size_is_a_plain_number_that_a_machine_could_have(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"^size ") as caught:
        parse_bytes(size)
    assert len(str(caught.value)) < 250


def test_a_size_of_nothing_is_refused_plainly() -> None:
    with pytest.raises(ValueError, match=r"^size '0' must be above 0; write it like 16GB or 8GiB$"):
        SIZE.typed("0")


@pytest.mark.parametrize("size", ["8", " 4096 ", "7.5", "1.5"])
def test_a_small_number_in_a_text_lacks_its_unit(size: str) -> None:
    for read in (SIZE.typed, lambda text: SIZE.value("cpu_mem", text)):
        would = f"{int(float(size))} byte{'s' * (float(size) >= 2)}"
        with pytest.raises(ValueError, match=rf"^size '{size}' would be {would}; write its unit, like '{size.strip()}GB'$"):
            read(size)
    assert (SIZE.value("cpu_mem", "10000"), SIZE.typed("8B")) == ("10000", "8B")


@pytest.mark.parametrize("size", [1, 8, 9_999])
def test_a_small_number_lacks_its_unit_in_python_too(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^size {size} would be {size} bytes?; write its unit, like '{size}GB'$"):
        SIZE.value("cpu_mem", size)
    assert SIZE.value("cpu_mem", 10_000) == 10_000
