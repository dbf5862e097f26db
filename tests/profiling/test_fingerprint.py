"""A fingerprint is the same for the same machine, and another where a profile would be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen.memory.device import Device
from h2o_flexgen.profiling import profile_cache
from h2o_flexgen.profiling.profile_cache import Fingerprint, file_system


def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from h2o_flexgen.memory.device import Device; from h2o_flexgen.profiling.profile_cache import Fingerprint\n"
        "for folder in sys.argv[1:]: print(Fingerprint.of(Device(), Path(folder), 'bfloat16').name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "not" / "there")]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert names == [Fingerprint.of(Device(), tmp_path, "bfloat16").name] * 2


def test_each_of_its_parts_makes_another_name(tmp_path: Path) -> None:
    one = Fingerprint.of(Device(), tmp_path, "bfloat16")
    others = [replace(one, parts={**one.parts, part: "other"}).name for part in one.parts]
    assert len({one.name, *others}) == 1 + len(one.parts)


def test_the_name_says_what_it_is_and_can_be_a_file_s() -> None:
    parts = {"cpu": "AMD EPYC/9B45 (R)", "cores": "2", "memory": "25 GB", "device": "NVIDIA H200"}
    name = Fingerprint(parts).name
    assert name.startswith("amd-epyc-9b45-r-2-cores-25-gb-nvidia-h200-") and "/" not in name


def test_the_disk_is_that_of_the_nearest_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def mounted(where: Path | str, device: str) -> SimpleNamespace:
        return SimpleNamespace(mountpoint=str(where), device=device, fstype="ext4")

    mounts = [mounted("/", "root"), mounted(tmp_path / "data", "first"), mounted(tmp_path / "data", "second")]
    monkeypatch.setattr(profile_cache.psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "data").mkdir()
    assert file_system(tmp_path / "data" / "not" / "there") == f"second (ext4) at {tmp_path / 'data'}"
    assert file_system(tmp_path / "database") == "root (ext4) at /"
    monkeypatch.setattr(profile_cache.psutil, "disk_partitions", lambda all: [])
    assert file_system(tmp_path) == "unknown"
