"""The package: its public names, and what is there once it is installed from a source distribution, without the repository."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

import h2o_flexgen
from h2o_flexgen.formats.kernel_table import BASELINE, LIBRARIES
from h2o_flexgen.kernels.native import variants
from h2o_flexgen.lm_eval import CLASS, NAME
from tests.test_project import FILES, ROOT

IN_HOST = "0", "100", "0", "100", "0", "100"  # given, so that no machine is measured to find it
SHORT_RUN = "--gen-len", "3", "--prompt-len", "8", "--num-prompts", "1", "--percent", *IN_HOST
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"  # as pip would


@pytest.mark.parametrize("name", h2o_flexgen.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(h2o_flexgen, name).__name__ == name
    assert name in dir(h2o_flexgen)


def test_an_unknown_name_is_an_error_of_the_usual_kind() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Lama'"):
        _ = h2o_flexgen.Lama  # type: ignore[attr-defined]


def test_plans_can_be_made_without_torch() -> None:
    code = "import sys\nfrom h2o_flexgen import Plan, Workload, Completion, Machine\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- installed -------------------------------------------------------------------------------------------------------------


def python(*words: str, folder: Path, **environment: str) -> str:
    command, everything = [sys.executable, *words], os.environ | environment
    run = subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of a source distribution, in a folder of its own, where there is no compiler."""
    return installed_from_source(tmp_path_factory, CC="false")


def installed_from_source(tmp_path_factory: pytest.TempPathFactory, **environment: str) -> Path:
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for file in FILES:
        copy = source / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    archive = made / python("-c", BUILD, str(made), folder=source).splitlines()[-1]
    shutil.rmtree(source)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-compile")
    words = ("-m", "pip", "install", "-q", *offline, "--target", str(made / "target"), str(archive))
    python(*words, folder=made, H2O_FLEXGEN_BUILD="baseline", **environment)
    return made / "target"


@pytest.fixture(scope="module")
def metadata(installed: Path) -> Distribution:
    (found,) = distributions(path=[str(installed)])
    return found


def test_the_installation_says_what_it_is(metadata: Distribution) -> None:
    said = metadata.metadata
    assert (said["Name"], said["Version"]) == ("h2o_flexgen", h2o_flexgen.__version__)
    assert (said["License-Expression"], said["License-File"], said["Requires-Python"]) == ("Apache-2.0", "LICENSE", ">=3.10")
    assert said.get_all("Project-URL") is None
    assert said["Description"].lstrip().startswith("# h2o_flexgen")
    extras = {"test", "test-gpu", "test-web", "eval", "grammar", "plot", "bench", "ray", "helm", "serve"}
    assert set(said.get_all("Provides-Extra") or ()) == extras


def test_the_installation_registers_a_command_and_the_harnesss_model(metadata: Distribution, installed: Path) -> None:
    found = {(point.group, point.name): point.value for point in metadata.entry_points}
    assert found == {("console_scripts", "h2o-flexgen"): "h2o_flexgen.cli.main:main", ("lm_eval.models", NAME): CLASS}
    assert (installed / "bin" / "h2o-flexgen").is_file()


def test_all_that_the_package_reads_travels_with_it(installed: Path) -> None:
    package = installed / "h2o_flexgen"
    assert (package / "py.typed").is_file()
    for source, there in ((ROOT / "configs", package / "configs"), (ROOT / "h2o_flexgen", package)):
        wanted = {file.relative_to(source) for file in FILES if file.is_relative_to(source)}
        assert wanted - {file.relative_to(there) for file in there.rglob("*")} == set()


def test_nothing_else_is_installed(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"h2o_flexgen", "bin"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
@pytest.mark.slow
def test_the_kernels_that_are_asked_for_are_built_from_the_source_distribution(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Not optimised, and for one kind of processor: those for others have the same sources, and all of them take minutes."""
    there = installed_from_source(tmp_path_factory, CFLAGS="-O0 -g0")
    assert {file.name.split(".")[0] for file in (there / "h2o_flexgen" / "kernels").glob("*.so")} == {"_baseline"}
    run = python("-m", "h2o_flexgen.run", *SHORT_RUN, folder=tmp_path, PYTHONPATH=str(there))
    assert json.loads(run.splitlines()[-1])["kernels"].startswith("C (")


def test_kernels_for_an_unknown_processor_are_refused() -> None:
    command, asked = [sys.executable, "setup.py", "--name"], os.environ | {"H2O_FLEXGEN_BUILD": "avx2 z80"}
    run = subprocess.run(command, cwd=ROOT, env=asked, capture_output=True, text=True, check=False)
    assert run.returncode and run.stderr.startswith("H2O_FLEXGEN_BUILD names z80; allowed are baseline")


IN_PLACE = """
import json
from setuptools import distutils

found = {}
for where in ("checkout", "wheel"):
    build = distutils.core.run_setup("setup.py", ["--quiet"], stop_after="commandline").get_command_obj("build_ext")
    build.inplace = where == "checkout"
    build.ensure_finalized()
    found[where] = [extension.name.rpartition("._")[2] for extension in build.extensions]
print(json.dumps(found))
"""


@pytest.mark.parametrize("requested", ["", "all"])
def test_a_checkout_gets_kernels_for_this_processor_and_a_wheel_for_all(requested: str) -> None:
    found = json.loads(python("-c", IN_PLACE, folder=ROOT, H2O_FLEXGEN_BUILD=requested))
    assert found["wheel"] == sorted(LIBRARIES, key=found["wheel"].index) and len(found["wheel"]) > 1
    if requested:
        assert found["checkout"] == found["wheel"]
    else:
        assert found["checkout"][0] == BASELINE and len(found["checkout"]) <= 2
        assert next(iter(variants()), BASELINE) in found["checkout"]


AGAIN = """
import sys
from setuptools import distutils

build = distutils.core.run_setup("setup.py", ["--quiet"], stop_after="commandline").get_command_obj("build_ext")
build.editable_mode, build.build_lib, build.build_temp = True, *sys.argv[1:]
build.ensure_finalized()
build.run()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_a_checkout_that_is_installed_again_compiles_what_has_changed_alone(tmp_path: Path) -> None:
    kernels = tmp_path / "h2o_flexgen" / "kernels"
    kernels.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    source = kernels / "one.c"
    source.write_text("int one(void) { return 1; }\n")

    def installed(number: int) -> bytes:
        python("-c", AGAIN, f"made{number}", f"parts{number}", folder=tmp_path, H2O_FLEXGEN_BUILD=BASELINE)
        (library,) = kernels.glob("*.so")
        return library.read_bytes()

    assert installed(1).startswith(b"\x7fELF")
    (library,) = kernels.glob("*.so")
    library.write_bytes(b"as it was")
    for file, second in ((source, 1), (tmp_path / "setup.py", 1), (library, 2)):
        os.utime(file, (second, second))
    assert installed(2) == b"as it was"
    for file, second in ((source, 3), (library, 2)):
        os.utime(file, (second, second))
    assert installed(3).startswith(b"\x7fELF")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_a_source_that_does_not_compile_ends_a_build_in_place_and_takes_the_old_library_away(tmp_path: Path) -> None:
    kernels = tmp_path / "h2o_flexgen" / "kernels"
    kernels.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)

    def built(source: str, *words: str, **environment: str) -> tuple[bool, int]:
        """Whether a build is content, and how many libraries there are behind it."""
        (kernels / "one.c").write_text(source)
        command = [sys.executable, *(words or ("setup.py", "build_ext", "--inplace", "--force"))]
        known = os.environ | {"H2O_FLEXGEN_BUILD": BASELINE, **environment}
        run = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, check=False)
        return run.returncode == 0, len([*kernels.glob("*.so")])

    right, wrong, again = "int one(void) { return 1; }\n", "int one = ;\n", ("-c", AGAIN, "made", "parts")
    assert built(right) == (True, 1)
    assert built(wrong) == (False, 0), "it was made in place"
    assert built(right, *again) == (True, 1)
    assert built(wrong, *again) == (False, 0), "it was asked for"
    assert built(right) == (True, 1)
    assert built(wrong, *again, H2O_FLEXGEN_BUILD="") == (True, 0), "torch does its work"
    assert built(right, *again, CC="false") == (True, 0), "there is no compiler"
    assert built(right, CC="false") == (False, 0), "there is none, and it was to be made in place"


def test_sources_that_are_compiled_first_are_there() -> None:
    named = re.findall(r'"(\w+\.c)"', (ROOT / "setup.py").read_text())
    assert named and all((ROOT / "h2o_flexgen" / "kernels" / name).is_file() for name in named)


NO_HEADERS = '#!/bin/sh\ncase "$*" in *c-header*) exit 1;; esac\nexec cc "$@"\n'


@pytest.mark.skipif(shutil.which("cc") is None or platform.machine() != "x86_64", reason="there is no C compiler for AVX2 here")
@pytest.mark.parametrize("keeps_headers", [True, False])
def test_a_compiler_that_keeps_no_headers_reads_them_for_each_file(keeps_headers: bool, tmp_path: Path) -> None:
    kernels, compiler = tmp_path / "h2o_flexgen" / "kernels", tmp_path / "cc"
    kernels.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (kernels / "one.c").write_text("#include <immintrin.h>\nint one(void) { return _mm_popcnt_u32(1); }\n")
    compiler.write_text(NO_HEADERS)
    compiler.chmod(0o755)
    environment = {"H2O_FLEXGEN_BUILD": "avx2", "CC": shutil.which("cc") or "" if keeps_headers else str(compiler)}
    python("-c", AGAIN, "made", "parts", folder=tmp_path, **environment)
    assert len([*kernels.glob("*.so")]) == 1 and bool([*tmp_path.rglob("*.gch")]) == keeps_headers


def test_the_help_a_plan_and_a_run_work_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = {"folder": tmp_path, "PYTHONPATH": str(installed)}
    place = python("-c", "import h2o_flexgen; print(h2o_flexgen.__file__)", **where)
    assert Path(place.strip()).is_relative_to(installed)
    assert "python -m h2o_flexgen.run" in python("-m", "h2o_flexgen.run", "--help", **where)
    shapes = "--model facebook/opt-6.7b --machine t4-gcp --evaluate --percent 0 100 100 0 100 0"
    plan = json.loads(python("-m", "h2o_flexgen.plan", *shapes.split(), **where).splitlines()[-1])
    assert plan["machine"] == "t4-gcp" and plan["predicted"]["tokens_per_second"] > 0
    run = json.loads(python("-m", "h2o_flexgen.run", *SHORT_RUN, **where).splitlines()[-1])
    assert run["model"] == "demo" and run["generated_tokens"] > 0 and not run["kernels"].startswith("C (")
