"""Imports point one way: planning knows no torch, models neither memory nor caches; and `cuda` is spelled in few places."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "h2o_flexgen"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = "h2o_flexgen"
RUNNING = ("memory", "kv", "quant", "models", "kernels", "runtime")
SPELL_CUDA = ("memory/device.py", "memory/host.py", "runtime/executor.py", "planning/machine.py", "run.py")
SPELL_CUDA_FOLDERS = ("kernels/",)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is named, those that only the type checker reads included. `from a import b` names a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def words(tree: ast.AST) -> Iterator[str]:
    """Identifiers, and strings that are not documentation."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value
        for name in ("id", "attr", "name", "asname", "arg", "module"):
            if isinstance(value := getattr(node, name, None), str):
                yield value.lower()


def imported_by(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text(encoding="utf-8"))))


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files_in(*folders: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(PACKAGE).parts[0] in folders]


def policy_modules() -> list[str]:
    """The table of cache policies, and the policies in it."""
    named = (imported_by(PACKAGE / "kv" / f"{file}.py") for file in ("policies", "policy"))
    return [f"{ROOT}.kv.policies", *(name for names in named for name in names if below(name, f"{ROOT}.kv"))]


@pytest.mark.parametrize("path", files_in("planning"), ids=module_name)
def test_planning_imports_the_standard_library_numpy_pulp_yaml_cache_policies_and_codecs(path: Path) -> None:
    codecs = f"{ROOT}.quant.codec"
    allowed = (*sys.stdlib_module_names, "numpy", "pulp", "yaml", f"{ROOT}.planning", codecs, *policy_modules())
    assert [name for name in imported_by(path) if not below(name, *allowed)] == []


@pytest.mark.parametrize("path", files_in(*RUNNING), ids=module_name)
def test_what_runs_imports_nothing_of_what_predicts(path: Path) -> None:
    predicting = [f"{ROOT}.planning.{name}" for name in ("cost", "pricing", "predict", "linear", "search", "simulate")]
    assert [name for name in imported_by(path) if below(name, *predicting)] == []


@pytest.mark.parametrize("path", files_in("models"), ids=module_name)
def test_models_know_neither_memory_nor_caches_nor_the_engine(path: Path) -> None:
    """Codecs are known to those that write weights down, and to no architecture."""
    writes = path.stem in ("dummy", "packed")
    unknown = ("memory", "kv", "runtime", "kernels", "commands", "llm", "run") + (() if writes else ("quant",))
    assert [name for name in imported_by(path) if below(name, *(f"{ROOT}.{name}" for name in unknown))] == []


@pytest.mark.parametrize("path", files_in("kernels"), ids=module_name)
def test_kernels_know_nothing_of_ours(path: Path) -> None:
    assert [name for name in imported_by(path) if below(name, ROOT) and not below(name, f"{ROOT}.kernels")] == []


@pytest.mark.parametrize("path", files_in("kv", "memory", "quant", "kernels"), ids=module_name)
def test_what_is_below_the_engine_does_not_import_it(path: Path) -> None:
    above = [f"{ROOT}.{name}" for name in ("runtime", "commands", "llm", "run")]
    assert [name for name in imported_by(path) if below(name, *above)] == []


@pytest.mark.parametrize("path", files_in("kv"), ids=module_name)
def test_caches_know_of_models_only_the_types_that_both_speak(path: Path) -> None:
    of_models = {name for name in imported_by(path) if below(name, f"{ROOT}.models")}
    if module_name(path) in policy_modules():
        assert of_models == set()
    assert all(below(name, f"{ROOT}.models.base") for name in of_models)


@pytest.mark.parametrize("path", files_in("memory"), ids=module_name)
def test_memory_knows_no_models_caches_or_plans(path: Path) -> None:
    hidden = [f"{ROOT}.{name}" for name in ("models", "kv", "planning")]
    assert [name for name in imported_by(path) if below(name, *hidden)] == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_cuda_is_spelled_only_where_devices_are_handled(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    if place not in SPELL_CUDA and not place.startswith(SPELL_CUDA_FOLDERS):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert [word for word in words(tree) if "cuda" in word] == []


def test_planning_and_the_package_itself_are_imported_without_torch() -> None:
    modules = [ROOT, *map(module_name, files_in("planning"))]
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *modules]
    run = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert (run.stdout.strip(), run.returncode) == ("False", 0), run.stderr


def test_this_reader_sees_every_form_of_import_and_spelling() -> None:
    source = '''
"""A docstring may say cuda."""
import torch.cuda as gpu
from h2o_flexgen import planning
def device(cuda_index: int) -> str:
    """So may this one: cuda."""
    from a.b import c
    return f"cuda:{cuda_index}" + x.cuda() + CudaDevice
'''
    tree = ast.parse(source)
    assert set(imports(tree)) == {"torch.cuda", "h2o_flexgen", "h2o_flexgen.planning", "a.b", "a.b.c"}
    found = sorted(word for word in words(tree) if "cuda" in word)
    assert found == ["cuda", "cuda:", "cuda_index", "cuda_index", "cudadevice", "torch.cuda"]
