"""A machine file says all that planning asks, and what is wrong with it is said in one line."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf, log
from pathlib import Path

import pytest
import yaml

from h2o_flexgen.formats.kernel_table import PRODUCT, PRODUCT_OPS, measured_as, measured_formats
from h2o_flexgen.formats.table import FORMATS, PLAIN, ROW_FORMATS
from h2o_flexgen.planning.machine import BORROWED, Machine
from tests.helpers.inverted import Inverted, registered

CONFIGS = Path(__file__).parents[2] / "configs" / "machines"

CURVES = "flops_per_s:\n  float16: [[1, 2]]\n"
SMALL = Machine(
    name="small",
    device="cuda",
    device_bytes=16_000_000_000,
    host_bytes=64_000_000_000,
    disk_bytes=500_000_000_000,
    disk_read_per_s=2e9,
    disk_write_per_s=1e9,
    host_copy_per_s=20e9,
    host_to_device_per_s=12e9,
    device_to_host_per_s=11e9,
    flops_per_s={"float16": ((1, 1e12), (16, 9e12), (256, 50e12))},
    attention_bytes_per_s={"device": 300e9, "host": 20e9},
    task_seconds=5e-5,
)


def test_a_saved_machine_is_loaded_as_it_was(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "small.yaml", "measured by hand\non a Tuesday")
    assert Machine.load(tmp_path / "small.yaml") == SMALL
    assert (tmp_path / "small.yaml").read_text().startswith("# measured by hand\n# on a Tuesday\nname: small\n")
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_machine_of_the_package_loads_under_its_own_name(path: Path) -> None:
    assert Machine.load(path).name == path.stem


def test_the_two_core_machine_is_among_them() -> None:
    machine = Machine.load(CONFIGS / "cpu-2core.yaml")
    assert (machine.device, machine.device_bytes) == ("cpu", 0)
    assert 1e9 < machine.bandwidth("read") < machine.host_read_per_s
    assert 5 * machine.flop_rate("bfloat16", 1) < machine.flop_rate("bfloat16", 64) < machine.flop_rate("bfloat16", 1024)


@pytest.mark.parametrize(("rows", "rate"), [(1, 1e12), (16, 9e12), (256, 50e12), (4, 5e12), (1000, 50e12), (0.5, 1e12)])
def test_flop_rates_meet_the_points_lie_between_them_and_stop_at_the_ends(rows: float, rate: float) -> None:
    assert SMALL.flop_rate("float16", rows) == pytest.approx(rate)


def test_products_with_packed_matrices_have_the_rate_of_their_kernel_or_that_of_decoded_values() -> None:
    machine = replace(SMALL, packed_flops_per_s={"inverted": ((1, 3e12), (4, 5e12))})
    with registered(Inverted(few_rows=4)):
        rates = [machine.product_rate(PRODUCT, form, "float16", rows) for form in ("inverted", PLAIN) for rows in (1, 4, 16)]
        assert rates == [3e12, 5e12, 9e12, 1e12, pytest.approx(5e12), 9e12]
        assert SMALL.product_rate(PRODUCT, "inverted", "float16", 1) == 1e12, "a machine has only kernels with a rate"


def test_rounded_products_that_were_not_measured_cost_what_exact_ones_do() -> None:
    """Products with decoded values may be faster than both, but rounded ones are never made so."""
    machine = replace(SMALL, device="cpu", packed_flops_per_s={"tiles4": ((1, 2e12),)})
    assert [machine.product_rate(op, "tiles4", "float16", 256) for op in PRODUCT_OPS] == [2e12, 2e12]
    measured = replace(machine, packed_flops_per_s={**machine.packed_flops_per_s, "int8 tiles4": ((1, 3e12),)})
    assert [measured.product_rate(op, "tiles4", "float16", 256) for op in PRODUCT_OPS] == [2e12, 3e12]


def test_forms_of_checkpoints_are_priced_as_the_one_of_their_family_that_was_measured() -> None:
    curves = {"q4_K": ((1, 1e12),), "int8 q4_K": ((1, 2e12),), "q6_K": ((1, 3e12),), "fp8-128x128-float32": ((1, 4e12),)}
    machine = replace(SMALL, device="cpu", packed_flops_per_s=curves, decoded_values_per_s={"q4_K": 5e9, "q6_K": 6e9})
    for form in ("q4_0", "q4_1", "mxfp4", "fp4-32", "int4-128-float16-zeros-ordered"):
        assert [machine.product_rate(op, form, "float32", 9) for op in PRODUCT_OPS] == [1e12, 2e12]
        assert machine.decoding_rate(form, 2.0) == 5e9
    for form in ("q5_0", "q5_K"):
        assert [machine.product_rate(op, form, "float32", 9) for op in PRODUCT_OPS] == [3e12, 3e12]
        assert machine.decoding_rate(form, 2.0) == 6e9
    assert [machine.product_rate(op, "fp8-1x32-e8m0", "float32", 9) for op in PRODUCT_OPS] == [4e12, 4e12]
    assert machine.packed_product(PRODUCT, "q8_0", "float32", 9) is None


def test_a_profile_does_not_grow_with_the_number_of_forms() -> None:
    """Machines are asked for the rates of those that stand for others, and know no others."""
    assert set(measured_formats()) == {measured_as(form) for form in FORMATS} - {PLAIN, *ROW_FORMATS}
    with pytest.raises(ValueError, match="unknown key in packed_flops_per_s 'q4_0'"):
        Machine.create({**SMALL.as_plain(), "packed_flops_per_s": {"q4_0": [[1, 1e12]]}})


def test_of_two_measurements_the_faster_rates_count() -> None:
    again = replace(SMALL, disk_read_per_s=1e9, flops_per_s={"float16": ((1, 2e12), (16, 8e12), (256, 60e12))})
    assert SMALL.at_best(again) == again.at_best(replace(SMALL, name=again.name))
    assert SMALL.at_best(again).flops_per_s == {"float16": ((1, 2e12), (16, 9e12), (256, 60e12))}
    assert SMALL.at_best(again).disk_read_per_s == 2e9 and SMALL.at_best(again).measurements == 2
    times = replace(SMALL, task_seconds=1.0, visit_seconds={"mlp": 3.0}, disk_both=1.2, head_seconds=4.0)
    found = times.at_best(replace(times, task_seconds=0.5, visit_seconds={"mlp": 2.0}, disk_both=1.6, head_seconds=0.1))
    assert (found.task_seconds, found.visit_seconds) == (0.5, {"mlp": 2.0})
    assert (found.disk_both, found.head_seconds) == (1.2, 4.0), "a ratio and a difference of seconds: no better one"
    one, other = (replace(SMALL, packed_flops_per_s={"int8 tiles4": ((1, rate), (9, 6.0))}) for rate in (3.0, 5.0))
    assert one.at_best(other).packed_flops_per_s == other.packed_flops_per_s


def test_a_profile_takes_over_what_was_measured_later_and_moves_the_rest_of_a_curve_along() -> None:
    curve = ((1, 1e12), (16, 8e12), (256, 64e12))
    packed = {"tiles4": curve, "int8 tiles4": curve}
    profile = replace(SMALL, flops_per_s={"float16": curve, "float32": ((1, 1e12),)}, disk_read_per_s=2e9)
    profile = replace(profile, packed_flops_per_s=packed)
    again = {"int8 tiles4": ((16, 16e12),)}
    now = replace(profile, disk_read_per_s=1e9, flops_per_s={"float16": ((16, 4e12),)}, packed_flops_per_s=again)
    moved = profile.as_it_is(now)
    assert moved.packed_flops_per_s == {"tiles4": curve, "int8 tiles4": ((1, 2e12), (16, 16e12), (256, 128e12))}
    moved = replace(moved, packed_flops_per_s=packed)
    assert moved.flops_per_s == {"float16": ((1, 0.5e12), (16, 4e12), (256, 32e12)), "float32": ((1, 1e12),)}
    assert moved.disk_read_per_s == 1e9 and replace(moved, disk_read_per_s=2e9, flops_per_s=profile.flops_per_s) == profile
    assert profile.as_it_is(replace(now, disk_read_per_s=inf)).disk_read_per_s == 2e9, "which was not measured again"


def test_flop_rates_are_linear_in_the_logarithm_of_the_rows() -> None:
    expected = 9e12 + 41e12 * log(100 / 16) / log(256 / 16)
    assert SMALL.flop_rate("float16", 100) == pytest.approx(expected)


def test_attention_of_latents_has_rates_by_query_heads_where_they_were_measured(tmp_path: Path) -> None:
    known = replace(SMALL, attention_flops_per_s={"bfloat16": 5e9, "group4": 7e9})
    curves = {"whole": ((16, 1e9), (64, 3e9)), "choosing": ((16, 2e9),)}
    measured = replace(known, latents_flops_per_s=curves)
    measured.save(tmp_path / "measured.yaml")
    assert Machine.load(tmp_path / "measured.yaml") == measured, "points are in their order"
    rates = {part: measured.attention_rate(part, "bfloat16", 32) for part in ("whole", "choosing", "chosen")}
    assert rates == {"whole": pytest.approx(2e9), "choosing": 2e9, "chosen": 5e9}
    for machine, latents_for in ((known, 32), (measured, None)):
        found = [machine.attention_rate(part, "bfloat16", latents_for) for part in ("whole", "choosing", "chosen")]
        assert found == [5e9, 7e9, 5e9]
    faster = replace(measured, latents_flops_per_s={"whole": ((16, 4e9), (64, 2e9))})
    assert measured.at_best(faster).latents_flops_per_s == {**curves, "whole": ((16, 4e9), (64, 3e9))}


def test_a_type_without_a_measured_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="machine 'small' has no flops_per_s for bfloat16; it has float16"):
        SMALL.flop_rate("bfloat16", 1)


def test_every_lane_that_moves_data_has_a_bandwidth() -> None:
    assert [SMALL.bandwidth(lane) for lane in ("read", "load", "store", "write")] == [2e9, 12e9, 11e9, 1e9]
    with pytest.raises(ValueError, match="lane 'compute' has no bandwidth"):
        SMALL.bandwidth("compute")


def test_without_an_accelerator_load_and_store_lead_to_the_disk() -> None:
    machine = replace(SMALL, device="cpu")
    assert [machine.bandwidth(lane) for lane in ("load", "store")] == [2e9, 1e9]


def test_numbers_may_be_written_without_a_sign_in_the_exponent(tmp_path: Path) -> None:
    SMALL.save(path := tmp_path / "m.yaml")
    path.write_text(path.read_text().replace("disk_read_per_s: 2000000000.0", "disk_read_per_s: 2e9"))
    assert yaml.safe_load(path.read_text())["disk_read_per_s"] == "2e9"
    assert Machine.load(path) == SMALL


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("disk_reads_per_s", 1e9, "unknown key 'disk_reads_per_s'; did you mean 'disk_read_per_s'?"),
        ("zzz", 1, "unknown key 'zzz'; remove it"),
        ("device", "tpu", "device is 'tpu'; give one of cpu, cuda"),
        ("disk_read_per_s", "fast", "disk_read_per_s is 'fast'; give a number"),
        ("disk_read_per_s", True, "disk_read_per_s is True; give a number"),
        ("disk_read_per_s", 0, "disk_read_per_s is 0; give a rate above 0"),
        ("disk_write_per_s", float("nan"), "disk_write_per_s is nan; give a number of at least 0"),
        ("host_bytes", -1, "host_bytes is -1; give a number of at least 0"),
        ("name", "", "name is ''; give a name"),
        ("flops_per_s", {}, "flops_per_s is {}; give one line or more"),
        ("flops_per_s", {"float61": [[1, 1]]}, "unknown key in flops_per_s 'float61'; did you mean 'float16'?"),
        ("flops_per_s", {"float16": [[1, 2, 3]]}, "flops_per_s.float16 has the point [1, 2, 3]; give [rows, flop/s]"),
        ("flops_per_s", {"float16": [[4, 1], [4, 2]]}, "flops_per_s.float16 has 4 rows after 4; sort the points by rows"),
        ("latents_flops_per_s", {"whole": 1}, "latents_flops_per_s.whole is 1; give a list of [query heads, flop/s]"),
        ("latents_flops_per_s", {"whole": [[1]]}, "latents_flops_per_s.whole has the point [1]; give [query heads, flop/s]"),
        (
            "latents_flops_per_s",
            {"whole": [[128, 1e9], [14, 2e9]]},
            "latents_flops_per_s.whole has 14 query heads after 128; sort the points by query heads",
        ),
        ("attention_bytes_per_s", {"hots": 1}, "unknown key in attention_bytes_per_s 'hots'; did you mean 'host'?"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(tmp_path: Path, key: str, value: object, message: str) -> None:
    content = SMALL.as_plain() | {"flops_per_s": {"float16": [[1, 1e12]]}, key: value}
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError) as caught:
        Machine.load(path)
    assert str(caught.value).startswith(f"machine file {path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# one\nname: small\ndevice: tpu\n", "device is 'tpu'; give one of cpu, cuda (line 3)"),
        ("name: small\ndevcie: cpu\n", "unknown key 'devcie'; did you mean 'device'? (line 2)"),
        (f"{CURVES}  bfloat16:\n    - [1]\n", "flops_per_s.bfloat16 has the point [1]; give [rows, flop/s] (line 3)"),
        (f"{CURVES}  float61: [[1, 2]]\n", "unknown key in flops_per_s 'float61'; did you mean 'float16'? (line 3)"),
        ("\nvisit_seconds: {attention: 1,\n  mlp: soon}\n", "visit_seconds.mlp is 'soon'; give a number (line 3)"),
        ("flops_per_s:\n  float16: [[0, 1]]\n", "rows in flops_per_s.float16 is 0; give a number of at least 1 (line 2)"),
    ],
)  # fmt: skip
def test_the_line_of_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    rest = {key: value for key, value in asdict(SMALL).items() if f"{key}:" not in text and key != "device"}
    rest = {key: value for key, value in rest.items() if value not in (inf, {})}
    rest = {**rest, "flops_per_s": {"float16": [[1, 1e12]]}} if "flops_per_s:" not in text else rest
    device = {} if "device:" in text or "devcie" in text else {"device": "cpu"}
    (tmp_path / "m.yaml").write_text(text + yaml.safe_dump({**rest, **device}))
    with pytest.raises(ValueError) as caught:
        Machine.load(tmp_path / "m.yaml")
    assert str(caught.value) == f"machine file {tmp_path / 'm.yaml'}: {message}"


def test_missing_keys_are_named(tmp_path: Path) -> None:
    content = {key: value for key, value in asdict(SMALL).items() if key not in ("host_bytes", "task_seconds")}
    with pytest.raises(ValueError, match="missing key host_bytes, task_seconds"):
        Machine.create(content)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not YAML"), ("- 1", "holds no keys"), ("!!python/name:os.system {}", "is not YAML")]
)
def test_a_file_that_is_no_machine_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Machine.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read: No such file"):
        Machine.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("read", [inf, 30e9])
def test_a_machine_that_several_processes_share_has_a_part_of_its_memory_and_its_disk_for_each(read: float) -> None:
    machine = replace(SMALL, host_read_per_s=read)
    memory = 40e9 if read == inf else 30e9  # a copy reads and writes
    assert machine.shared_by(1) is machine
    two, eight = machine.shared_by(2), machine.shared_by(8)
    assert two.host_to_device_per_s == 12e9, "both links together are slower than the memory"
    assert eight.host_to_device_per_s == eight.device_to_host_per_s == memory / 8
    assert (two.disk_read_per_s, two.disk_write_per_s, eight.disk_read_per_s) == (1e9, 0.5e9, 0.25e9)
    assert two.attention_bytes_per_s == {"device": 300e9, "host": min(20e9, memory / 2)}
    assert two.flops_per_s == SMALL.flops_per_s and two.device_bytes == SMALL.device_bytes


# -- figures of another machine --------------------------------------------------------------------------------------------


def test_a_figure_is_borrowed_where_a_file_lacks_it_and_not_where_it_has_the_same_value(tmp_path: Path) -> None:
    same = {name: getattr(Machine, name) for name in BORROWED}
    others = {name: value for name, value in SMALL.as_plain().items() if name not in BORROWED}
    lacking, measured = Machine.create(others), Machine.create({**others, **same})
    assert lacking == measured, "in their figures"
    for machine, borrowed in ((lacking, BORROWED), (measured, ()), (replace(measured, borrowed=BORROWED[:1]), BORROWED[:1])):
        machine.save(tmp_path / "kept.yaml")
        assert Machine.load(tmp_path / "kept.yaml").borrowed == machine.shared_by(3).borrowed == borrowed


def test_what_is_measured_takes_the_place_of_what_is_borrowed() -> None:
    lacking = replace(SMALL, borrowed=BORROWED)
    slower = replace(SMALL, small_reads_per_s=5e3, small_writes_per_s=2e3)
    for best in (lacking.at_best(slower), slower.at_best(lacking)):
        assert (best.small_reads_per_s, best.small_writes_per_s, best.borrowed) == (5e3, 2e3, ())
    assert lacking.at_best(lacking).borrowed == BORROWED
    assert slower.at_best(replace(slower, small_reads_per_s=6e3)).small_reads_per_s == 6e3
