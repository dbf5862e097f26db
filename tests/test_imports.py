"""Imports run one way, from room to room; what plans knows no torch; and `cuda` is spelled in few places."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "h2o_flexgen"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = "h2o_flexgen"
SPELL_CUDA = (
    "formats/kernel_table.py",
    "memory/device.py",
    "engine/executor.py",
    "planning/machine.py",
    "planning/plan.py",
)
RAW = ("kernels/raw_memory.py", "memory/host.py")  # the door to memory past torch, and where that is page-locked
SPELL_CUDA_FOLDERS = ("kernels/",)

# Each room may import from those in its line, and they stand above it: so there is no way back up.
ROOMS = {
    "formats": (),
    "core": ("formats",),
    "schedule": ("core",),
    "policies": ("core", "formats"),
    "planning": ("core", "formats", "policies", "schedule"),
    "kernels": ("formats",),
    "memory": ("core", "formats", "kernels"),
    "checkpoints": ("core", "formats", "kernels"),
    "models": ("checkpoints", "core", "formats", "kernels"),
    "kv": ("core", "formats", "kernels", "models", "policies"),
    "sampling": ("core", "kernels"),
    "text": ("checkpoints", "core", "sampling"),
    "engine": (
        "checkpoints",
        "core",
        "formats",
        "kernels",
        "kv",
        "memory",
        "models",
        "planning",
        "policies",
        "sampling",
        "schedule",
        "text",
    ),
}
ROOMS["jobs"] = ("core", "engine", "sampling", "text")
ROOMS["profiling"] = (*ROOMS["engine"], "engine")
ROOMS["calibration"] = (*ROOMS["engine"], "engine")
ROOMS["session"] = (
    "calibration",
    "checkpoints",
    "core",
    "engine",
    "formats",
    "memory",
    "models",
    "planning",
    "policies",
    "profiling",
    "sampling",
    "text",
)
DOORS = ("__main__.py", "run.py", "plan.py", "profile.py", "chat.py", "calibrate.py", "evaluate.py", "batch.py", "lm_eval.py")
DOORS += ("serve.py",)
HTTP = ("starlette", "uvicorn", "h11")
# Files of an application that speak to people: its doors, its flags, its work and its report. All others know no command line.
OF_APPS = (
    "apps/data_wrangling/__main__.py",
    "apps/data_wrangling/request.py",
    "apps/data_wrangling/wrangling_work.py",
    "apps/made_up_tables.py",
)
APPS = ("apps.data_wrangling.__main__", "apps.made_up_tables")  # their doors
WITHOUT_TORCH = ("formats", "core", "schedule", "policies", "planning", "jobs")
PREDICTING = [
    f"{ROOT}.{name}"
    for name in ("planning.cost", "planning.pricing", "planning.predict", "planning.linear_program", "planning.search")
] + [f"{ROOT}.schedule.simulate"]


# Imports of the package's own that wait until a function is called, and why.
LAZY = {
    f"{ROOT} -> import_module",  # public names cost nothing before they are used
    f"{ROOT}.cli.main -> import_module",  # a command's flags are answered without torch; what works imports it
    f"{ROOT}.kernels.functions -> import_module",  # those for GPUs import an optional package
    f"{ROOT}.models -> import_module",  # flags name architectures without torch; functions of one are imported with its model
    f"{ROOT}.cli.batch_work -> {ROOT}.cli.ray_job",  # imports an optional package
    f"{ROOT}.session.open_request -> {ROOT}.checkpoints.probe_file",  # flags are answered without numpy
    f"{ROOT}.session.open_request -> {ROOT}.checkpoints.derived",  # flags are answered without torch
    f"{ROOT}.evaluation.tasks.agreement -> {ROOT}.evaluation.tasks.full_cache",  # flags name tasks without torch
}


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


def lazy_imports(tree: ast.AST) -> Iterator[str]:
    """What functions import of the package, by statement, or by a name that they look up."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
                yield "import_module"
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if below(alias.name, ROOT))
            elif isinstance(node, ast.ImportFrom) and below(str(node.module), ROOT):
                yield str(node.module)


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


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files_in(*folders: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(PACKAGE).parts[0] in folders]


def test_every_room_is_below_those_that_import_it() -> None:
    below_it: set[str] = set()
    for room, imported in ROOMS.items():
        assert below_it.issuperset(imported), room
        below_it.add(room)


@pytest.fixture(scope="module")
def trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


@pytest.fixture(scope="module")
def imported(trees: Mapping[Path, ast.Module]) -> Mapping[Path, set[str]]:
    """What every file imports."""
    return {path: set(imports(tree)) for path, tree in trees.items()}


def test_imports_run_down(imported: Mapping[Path, set[str]]) -> None:
    found = []
    for path in files_in(*ROOMS):
        room = path.relative_to(PACKAGE).parts[0]
        allowed = [f"{ROOT}.{name}" for name in (room, *ROOMS[room])]
        named = [name for name in imported[path] if below(name, ROOT) and name != ROOT]
        found += [f"{module_name(path)} -> {name}" for name in named if not below(name, *allowed)]
    assert found == []


def importing(imported: Mapping[Path, set[str]], files: Iterable[Path], *packages: str) -> list[str]:
    """Every import of these packages, and of what is in them, by these files."""
    return [f"{module_name(path)} -> {name}" for path in files for name in imported[path] if below(name, *packages)]


def test_only_doors_know_the_command_line(imported: Mapping[Path, set[str]]) -> None:
    places = {path: path.relative_to(PACKAGE) for path in FILES}
    others = [path for path, place in places.items() if "cli" not in place.parts and place.as_posix() not in (*DOORS, *OF_APPS)]
    assert importing(imported, others, f"{ROOT}.cli") == []


def test_what_plans_imports_the_standard_library_numpy_pulp_and_yaml(imported: Mapping[Path, set[str]]) -> None:
    allowed = (*sys.stdlib_module_names, "numpy", "pulp", "yaml", ROOT)
    named = [(path, name) for path in files_in(*WITHOUT_TORCH) for name in imported[path]]
    assert [f"{module_name(path)} -> {name}" for path, name in named if not below(name, *allowed)] == []


def test_what_runs_imports_nothing_of_what_predicts(imported: Mapping[Path, set[str]]) -> None:
    runs = files_in("memory", "kv", "checkpoints", "models", "engine", "profiling")
    assert importing(imported, runs, *PREDICTING) == []


def test_architectures_know_no_codecs(imported: Mapping[Path, set[str]]) -> None:
    named = importing(imported, files_in("models"), f"{ROOT}.formats")
    assert [name for name in named if not below(name.split(" -> ")[1], f"{ROOT}.formats.kernel_sizes")] == []


def test_caches_know_of_models_only_the_types_that_both_speak(imported: Mapping[Path, set[str]]) -> None:
    of_models = {name for path in files_in("kv") for name in imported[path] if below(name, f"{ROOT}.models")}
    assert all(below(name, f"{ROOT}.models.new_tokens") for name in of_models - {f"{ROOT}.models"}), of_models


def test_jobs_know_of_the_engine_only_what_a_job_is(imported: Mapping[Path, set[str]]) -> None:
    of_engine = {name for path in files_in("jobs") for name in imported[path] if below(name, f"{ROOT}.engine")}
    assert all(below(name, f"{ROOT}.engine.job") for name in of_engine), of_engine


def test_only_the_server_knows_what_it_listens_with(imported: Mapping[Path, set[str]]) -> None:
    places = {path: path.relative_to(PACKAGE).as_posix() for path in FILES}
    others = [path for path, place in places.items() if not place.startswith("server/") and place != "cli/serve_work.py"]
    named = {name for path in others for name in imported[path] if below(name, *HTTP, f"{ROOT}.server")}
    assert [name for name in named if not below(name, f"{ROOT}.server.desks")] == []
    assert importing(imported, files_in("server"), *HTTP) != []


def test_desks_need_nothing_that_the_server_listens_with(imported: Mapping[Path, set[str]]) -> None:
    known, found = {module_name(path): path for path in FILES}, [f"{ROOT}.server.desks"]
    for name in found:  # which grows
        found += sorted(imported[known[name]].intersection(known).difference(found))
    assert f"{ROOT}.server.desk" in found
    assert importing(imported, [known[name] for name in found], *HTTP) == []


def test_nothing_is_built_on_applications(imported: Mapping[Path, set[str]]) -> None:
    others = [path for path in FILES if path not in files_in("apps")]
    assert importing(imported, others, f"{ROOT}.apps") == []


def test_what_an_application_asks_and_judges_needs_no_engine(imported: Mapping[Path, set[str]]) -> None:
    inner = [path for path in files_in("apps") if path.relative_to(PACKAGE).as_posix() not in OF_APPS]
    named = [(path, name) for path in inner for name in imported[path]]
    allowed = (*sys.stdlib_module_names, f"{ROOT}.apps", f"{ROOT}.core")
    assert [f"{module_name(path)} -> {name}" for path, name in named if not below(name, *allowed) and name != ROOT] == []


def test_cuda_is_spelled_only_where_devices_are_handled(trees: Mapping[Path, ast.Module]) -> None:
    places = {path: path.relative_to(PACKAGE).as_posix() for path in FILES if "cuda" in path.read_text("utf-8").lower()}
    others = {
        path: place for path, place in places.items() if place not in SPELL_CUDA and not place.startswith(SPELL_CUDA_FOLDERS)
    }
    assert [f"{place}: {word}" for path, place in others.items() for word in words(trees[path]) if "cuda" in word] == []


def test_values_are_read_and_written_past_torch_through_one_door(trees: Mapping[Path, ast.Module]) -> None:
    """Otherwise a device that checks the order of accesses would not hear of some. An address may be asked for as a number."""
    found = []
    for path in files_in("kernels", "memory", "checkpoints", "models", "kv", "engine"):
        if path.relative_to(PACKAGE).as_posix() not in RAW:
            called = [node.func for node in ast.walk(trees[path]) if isinstance(node, ast.Call)]
            allowed = ("data_ptr",) if path.name == "disk.py" else ()  # whether a place in memory is aligned like one in a file
            named = [one.attr for one in called if isinstance(one, ast.Attribute)]
            found += [f"{module_name(path)}: {name}" for name in named if name in ("numpy", "data_ptr") and name not in allowed]
    assert found == []


def test_no_import_of_the_package_waits_but_those_that_have_to(trees: Mapping[Path, ast.Module]) -> None:
    found = {f"{module_name(path)} -> {name}" for path, tree in trees.items() for name in lazy_imports(tree)}
    assert found == LAZY


def test_doors_open_without_torch() -> None:
    doors = "run", "plan", "profile", "chat", "calibrate", "evaluate", "batch", "serve", "lm_eval", "cli.main", *APPS
    assert imported_with_torch([f"{ROOT}.{door}" for door in doors]) == []


def test_flags_are_answered_without_numpy() -> None:
    assert imported_with("numpy", [f"{ROOT}.{door}" for door in ("run", "chat", "serve", "plan")]) == []


def test_what_plans_and_the_package_itself_are_imported_without_torch() -> None:
    assert imported_with_torch([ROOT, *map(module_name, files_in(*WITHOUT_TORCH))]) == []


def imported_with_torch(modules: Sequence[str]) -> list[str]:
    return imported_with("torch", modules)


def imported_with(package: str, modules: Sequence[str]) -> list[str]:
    """The modules behind whose import the package is there, of those that a process imports one after the other."""
    of_each = f"    importlib.import_module(name)\n    if {package!r} in sys.modules: print(name)"
    code = f"import sys, importlib\nfor name in sys.argv[1:]:\n{of_each}"
    command = [sys.executable, "-c", code, *modules]
    run = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_this_reader_sees_every_form_of_import_and_spelling() -> None:
    source = '''
"""A docstring may say cuda."""
import torch.cuda as gpu
from h2o_flexgen import planning
def device(cuda_index: int) -> str:
    """So may this one: cuda."""
    from a.b import c
    from h2o_flexgen.d import e
    import_module(c)
    return f"cuda:{cuda_index}" + x.cuda() + CudaDevice
'''
    tree = ast.parse(source)
    of_functions = {"a.b", "a.b.c", "h2o_flexgen.d", "h2o_flexgen.d.e"}
    assert set(imports(tree)) == {"torch.cuda", "h2o_flexgen", "h2o_flexgen.planning", *of_functions}
    assert list(lazy_imports(tree)) == ["h2o_flexgen.d", "import_module"]
    found = sorted(word for word in words(tree) if "cuda" in word)
    assert found == ["cuda", "cuda:", "cuda_index", "cuda_index", "cudadevice", "torch.cuda"]
