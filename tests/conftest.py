"""Fixtures of all tests: the options of the test run, tiny checkpoints made once, the devices that tests run on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import hypothesis
import pytest
import torch

from h2o_flexgen.checkpoints.model_places import SMOLLM2

if TYPE_CHECKING:  # tests without an engine do not import torch
    from h2o_flexgen.text.tokenizer import Tokenizer
    from tests.helpers.contract import Checkpoints

# new objects, and passes over younger ones, before a pass of garbage collection: syntax trees, plans and tasks are many, and a
# pass at every 700 takes up to a quarter of the time of a test; an engine that gives memory back collects everything anyway
SELDOM = 50_000, 20, 100
INTERPRET = "TRITON_INTERPRET"  # kernels of a process are interpreted, or compiled for a GPU
if not torch.cuda.is_available():
    os.environ.setdefault(INTERPRET, "1")  # here, as it is read when Triton is imported, which what stands below may do


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plans", type=int, default=200, help="random plans that `pytest -m fuzz` draws")


def pytest_configure() -> None:
    gc.disable()  # nothing of what is imported and collected is garbage; it begins again with the first test
    sys.dont_write_bytecode = False  # each worker, and each process that a test starts, would compile all modules again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    torch.set_num_threads(1)  # tensors here are tiny: on a busy machine a second thread is mostly waited for
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too
    slow, is_ci = hypothesis.HealthCheck.too_slow, "CI" in os.environ  # which has the same examples in each run
    patient = hypothesis.settings(deadline=None, suppress_health_check=[slow], derandomize=is_ci)  # none depends on a clock
    hypothesis.settings.register_profile("patient", patient)
    hypothesis.settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `pytest -n auto`: each takes a gigabyte or two."""
    from h2o_flexgen.core.environment import cores

    return min(4, cores())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process begins with neighbours, and takes from the others when it has none left: what a module, a folder or a family
    of models shares is made once, not in each process. Another way of `--dist` stays."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test with a `fuzz_seed` as many times as --plans says, with seeds that follow those of the default run."""
    if "fuzz_seed" in metafunc.fixturenames:
        metafunc.parametrize("fuzz_seed", range(30, 30 + metafunc.config.getoption("--plans")))


@pytest.fixture(scope="session", autouse=True)
def what_was_imported_is_not_searched() -> Iterator[None]:
    """Keeps the many imported modules out of garbage collection, which an engine triggers when it gives memory back."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()
    yield
    gc.unfreeze()  # or Triton's library complains at the end of what it calls leaks


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for the tests, instead of the user's own. What was fetched into that is found in it, too."""
    fetched = SMOLLM2.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if fetched.is_file():
            SMOLLM2.path.parent.mkdir(parents=True)
            SMOLLM2.path.symlink_to(fetched)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """What several tests share is the same, whichever of them has it made."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(crc32(fixturedef.argname.encode()))
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(crc32(item.nodeid.encode()))  # it draws the same numbers whatever ran before it in its process
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("web"):
        from tests.server.browsers import why_there_is_none

        if (why := why_there_is_none()) is not None:
            pytest.skip(why)
    if item.get_closest_marker(SMOLLM2.name) and not SMOLLM2.path.is_file():
        pytest.skip(f"needs the model that {SMOLLM2.script} fetches")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.cuda)])
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the tensors of kernels for GPUs lie: on a CPU that interprets them, or on the GPU that there is."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    if os.environ.get(INTERPRET) != "1":
        pytest.skip(f"kernels are compiled where there is a GPU, unless {INTERPRET}=1")
    from tests.kernels.gpu.interpreter import mended

    with mended():
        yield torch.device("cpu")


@pytest.fixture(params=["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.cuda)])
def any_device(request: pytest.FixtureRequest, pretended: None) -> str:
    """The devices, with the CPU that pretends to have memory of its own and so takes the accelerator's way."""
    return str(request.param)


@pytest.fixture
def pretended() -> Iterator[None]:
    from tests.helpers.pretended import pretend

    with pretend():
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    from tests.helpers.contract import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    from tests.helpers.real_tokenizers import KINDS, saved_tokenizer

    return {kind: saved_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(params=["byte_level", "byte_fallback", "bytes"])
def tokenizer_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(tokenizer_kind: str, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[tokenizer_kind]


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Path]:
    """A folder for offloading that does not exist yet; what made it, or another beside it, must have taken it away again."""
    folder = tmp_path / "offload" / "deep"
    folder.parent.mkdir()
    yield folder
    assert not (left := sorted(folder.parent.rglob("*"))), f"{left} is left behind"
