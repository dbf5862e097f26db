"""Machines by name, by file, and from the cache; and what is said where one cannot be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from h2o_flexgen.planning.machine import Machine, find_machine, known_machines, machine_file, save_machine, saved_machine
from tests.planning.test_machine import SMALL


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", known_machines())
def test_machines_of_the_package_are_found_by_name(name: str) -> None:
    assert find_machine(name).name == name


def test_the_two_core_machine_is_known() -> None:
    assert "cpu-2core" in known_machines()


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "cpu-2core"])
def test_a_file_is_a_machine_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    SMALL.save(tmp_path / name)
    assert find_machine(tmp_path / name) == find_machine(str(tmp_path / name)) == SMALL


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        find_machine("cpu-2cores")
    assert str(caught.value).startswith("machine 'cpu-2cores' is unknown; give a YAML file or one of ")
    assert "cpu-2core" in str(caught.value) and str(caught.value).endswith("did you mean cpu-2core?")


def test_a_file_that_is_not_there_is_no_name() -> None:
    with pytest.raises(ValueError, match=r"machine file nowhere\.yaml cannot be read: No such file"):
        find_machine("nowhere.yaml")


def test_a_profile_is_kept_by_its_fingerprint(cache: Path) -> None:
    assert saved_machine("here-1") is None
    assert save_machine("here-1", SMALL, "today") == machine_file("here-1") == cache / "h2o_flexgen/machines/here-1.yaml"
    assert saved_machine("here-1") == SMALL and saved_machine("here-2") is None
    assert machine_file("here-1").read_text().startswith("# today\n")
    save_machine("here-1", faster := replace(SMALL, disk_read_per_s=9e9))
    assert saved_machine("here-1") == faster
    assert [file.name for file in machine_file("here-1").parent.iterdir()] == ["here-1.yaml"]


def test_a_damaged_profile_is_named_with_key_and_line(cache: Path) -> None:
    file = save_machine("here", SMALL, "one line of comment")
    file.write_text(file.read_text().replace("disk_read_per_s: 2000000000.0", "disk_read_per_s: much"))
    with pytest.raises(ValueError) as caught:
        saved_machine("here")
    line = 1 + file.read_text().splitlines().index("disk_read_per_s: much")
    assert str(caught.value) == f"machine file {file}: disk_read_per_s is 'much'; give a number (line {line})"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"the profile cannot be kept in .* \(Not a directory\); set XDG_CACHE_HOME"):
        save_machine("here", SMALL)


def test_without_xdg_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine_file("here") == Path.home() / ".cache/h2o_flexgen/machines/here.yaml"
    assert isinstance(find_machine("cpu-2core"), Machine)
