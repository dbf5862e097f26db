"""The project as a newcomer meets it: the README is true, the licence is there, and every file keeps the rules of the house."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAIN_COMMAND = "pip install -e . && python -m h2o_flexgen.run"
TEST_COMMAND = "pip install -e '.[test,test-gpu]' && pytest -n auto"
LARGEST_BYTES = 12_000_000
LONGEST_FUNCTION = 60
PRIVATE = re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users)/\w")
MADE_BY_TOOLS = re.compile(r"(^|/)(__pycache__|build|dist|\.[a-z_]+(?<!\.ci)|[^/]*\.egg-info)(/|$)")


def project_files() -> list[Path]:
    """What is tracked or waits to be; without git, all that no tool made."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        every = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*"))
        listed = [name for name in every if not MADE_BY_TOOLS.search(name)]
    return sorted(ROOT / name for name in listed if name and (ROOT / name).is_file())


def is_python(path: Path) -> bool:
    """Also a script without a suffix, by its first line."""
    if path.suffix:
        return path.suffix == ".py"
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


FILES = project_files()
SOURCES = [path for path in FILES if is_python(path)]


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(markdown: str) -> Iterator[str]:
    yield from re.findall(r"^```[a-z]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def tree_paths(block: str) -> list[str]:
    """The paths that a file tree names: an indented line stands in the folder above it."""
    folders: list[tuple[int, str]] = []
    paths = []
    for line in filter(str.strip, block.splitlines()):
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = (folders[-1][1] if folders else "") + name
        paths.append(path)
        if name.endswith("/"):
            folders.append((indent, path))
    return paths


def readme_tree() -> list[str]:
    trees = [block for block in code_blocks(readme()) if block.startswith("h2o_flexgen/")]
    assert len(trees) == 1, "the README has one file tree, and it starts with h2o_flexgen/"
    return tree_paths(trees[0])


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readme_has_exactly_the_two_commands_that_do_everything() -> None:
    lines = [line for block in code_blocks(readme()) for line in block.splitlines()]
    assert [line for line in lines if line.startswith("pip ")] == [MAIN_COMMAND, TEST_COMMAND]


def test_ci_runs_the_readmes_test_command_what_is_slow_and_the_checks() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run can be executed"
    pattern = re.search(r'grep -m1 "(.*)" README\.md', script.read_text(encoding="utf-8"))
    assert pattern is not None
    assert [line for line in readme().splitlines() if re.search(pattern[1], line)] == [TEST_COMMAND]
    for check in ("pytest -n auto -m 'slow and not fuzz'", "ruff check .", "ruff format --check .", "mypy"):
        assert f'"{check}"' in script.read_text(encoding="utf-8")


def test_whatever_the_readmes_file_tree_names_is_there() -> None:
    assert [path for path in readme_tree() if not (ROOT / path).exists()] == []


def test_every_top_level_folder_stands_in_the_readmes_file_tree() -> None:
    folders = {place(path).split("/")[0] + "/" for path in FILES if "/" in place(path)}
    assert folders - set(readme_tree()) == set()


def test_every_line_of_the_readmes_file_tree_says_what_it_is_for() -> None:
    tree = next(block for block in code_blocks(readme()) if block.startswith("h2o_flexgen/"))
    assert [line for line in tree.splitlines() if line.strip() and len(line.split()) < 3] == []


def test_every_script_that_measures_stands_in_the_table_of_questions() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    questions, _, shared = page.partition("## What scripts share")
    found = {
        path.name: path.read_text("utf-8") for path in FILES if place(path.parent) == "benchmarks" and path.suffix == ".py"
    }
    scripts = {name for name, text in found.items() if '__name__ == "__main__"' in text}
    assert sorted(re.findall(r"^\| .+\? \| `(\w+\.py)` \|", questions, re.MULTILINE)) == sorted(scripts)
    files = [cell for line in shared.splitlines() if line.startswith("| `") for cell in line.split(" | ")[:1]]
    assert found.keys() - scripts == set(re.findall(r"`(\w+\.py)`", " ".join(files)))


def lines_of_diffs(markdown: str) -> Iterator[tuple[str, list[str]]]:
    """The lines that diffs of a page add to each file, in their order. A shortened line is left out."""
    for block in re.findall(r"^```diff\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^(?:--- a/|\+\+\+ b/)", block, flags=re.MULTILINE)[1:]:
            file, *lines = part.splitlines()
            yield file, [line[1:] for line in lines if line.startswith("+") and "..." not in line]


def not_there(wanted: Sequence[str], file: str) -> list[str]:
    """The lines that a file does not have behind those before them."""
    rest = iter(file.splitlines())
    return [line for line in wanted if line not in rest]


def test_diffs_that_show_how_to_add_things_are_those_of_the_tree() -> None:
    found = [*lines_of_diffs((ROOT / "docs" / "extending.md").read_text("utf-8"))]
    assert len({file for file, _ in found}) > 10 and sum(len(lines) for _, lines in found) > 60
    missed = {file: not_there(lines, (ROOT / file).read_text("utf-8")) for file, lines in found}
    assert {file: lines for file, lines in missed.items() if lines} == {}


def test_the_reader_of_diffs_sees_lines_in_another_order() -> None:
    page = "```diff\n--- /dev/null\n+++ b/one\n+a\n+  b\n+left out...\n--- a/other\n+c\n```\n"
    assert [*lines_of_diffs(page)] == [("one", ["a", "  b"]), ("other", ["c"])]
    assert not_there(["a", "c"], "a\nb\nc") == [] and not_there(["c", "a"], "a\nb\nc") == ["a"]
    assert not_there(["  b"], "a\nb") == ["  b"]


def test_every_local_link_in_the_documents_leads_somewhere() -> None:
    documents = [path for path in FILES if path.suffix == ".md"]
    links = [(path, link) for path in documents for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", path.read_text("utf-8"))]
    assert [f"{place(path)}: {link}" for path, link in links if not (path.parent / link).exists()] == []


def section_names(markdown: str) -> set[str]:
    """The names by which links lead to the headings of a document."""
    outside = re.sub(r"^[ ]*```.*?^[ ]*```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_section_leads_to_one() -> None:
    found = []
    for path in (path for path in FILES if path.suffix == ".md"):
        for link, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text("utf-8")):
            document = path.parent / link if link else path
            if document.exists() and section not in section_names(document.read_text("utf-8")):
                found.append(f"{place(path)}: {link}#{section}")
    assert found == []


def test_the_reader_of_sections_names_them_as_links_do() -> None:
    page = "# Texts that go on, and scores\n```\n# no heading\n```\n## `kv_budget` and C++\n"
    assert section_names(page) == {"texts-that-go-on-and-scores", "kv_budget-and-c"}


def test_the_reader_of_file_trees_puts_names_into_their_folders() -> None:
    tree = "a/   one\n  b.py   two\n  c/   three\n    d.py   four\ne/   five\nf   six\n"
    assert tree_paths(tree) == ["a/", "a/b.py", "a/c/", "a/c/d.py", "e/", "f"]


def test_the_licence_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert [number for number in range(1, 10) if f"\n   {number}. " not in text] == []
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize(("page", "most"), [("README.md", 9_216), ("docs/architecture.md", 12_288)])
def test_the_pages_that_are_read_first_are_short(page: str, most: int) -> None:
    assert (ROOT / page).stat().st_size <= most


# -- every file --------------------------------------------------------------------------------------------------------


def test_no_file_is_large() -> None:
    assert [place(path) for path in FILES if path.stat().st_size > LARGEST_BYTES] == []


def test_no_file_names_a_folder_of_one_persons_machine() -> None:
    found = []
    for path in FILES:
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{place(path)}: {text[match.start() :][:80]!r}" for match in PRIVATE.finditer(text)]
    assert found == []


@dataclass(frozen=True)
class Source:
    """What a source file says of itself, and how long its functions are."""

    is_empty: bool
    has_docstring: bool
    defines: bool  # a function or a class
    defers: bool  # annotations
    functions: Mapping[str, int]  # by name: lines

    @classmethod
    def of(cls, text: str) -> Source:
        tree = ast.parse(text)
        definitions = [
            node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        functions = [node for node in definitions if not isinstance(node, ast.ClassDef)]
        lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
        deferred = "\nfrom __future__ import annotations\n" in text
        return cls(not tree.body, bool(ast.get_docstring(tree)), bool(definitions), deferred, lengths)


@pytest.fixture(scope="module")
def sources() -> Mapping[str, Source]:
    return {place(path): Source.of(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_a_source_file_says_what_it_is_for_and_defers_annotations(sources: Mapping[str, Source]) -> None:
    """An empty __init__.py makes a folder a package and says nothing else."""
    assert [name for name, source in sources.items() if not source.is_empty and not source.has_docstring] == []
    assert [name for name, source in sources.items() if source.defines and not source.defers] == []


def test_no_function_is_long(sources: Mapping[str, Source]) -> None:
    lengths = {f"{name}: {function}": lines for name, one in sources.items() for function, lines in one.functions.items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_this_reader_sees_what_breaks_the_rules() -> None:
    assert Source.of("") == Source(True, False, False, False, {})
    bare = Source.of("class A:\n    def one(self):\n        async def two():\n            pass\n        return two\n")
    assert bare == Source(False, False, True, False, {"one, line 2": 4, "two, line 3": 2})
    kept = Source.of('"""It is kept."""\n\nfrom __future__ import annotations\n')
    assert kept == Source(False, True, False, True, {})


PUBLIC_NAMES = {"Engine", "Tokenizer"}  # of Ray's and of HELM's users, beside those of the engine itself


def test_a_class_name_has_one_home() -> None:
    homes = Counter(
        node.name
        for path in FILES
        if path.suffix == ".py" and place(path).startswith("h2o_flexgen/")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in homes.items() if number > 1} == PUBLIC_NAMES


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert [
        place(path)
        for path in FILES
        if path.suffix not in (".json", ".png") and marks.search(path.read_text("utf-8", "replace"))
    ] == []
