"""The English of the project: docstrings are plain sentences or noun phrases, and documents have short, plain sentences.

A document's paragraphs, list items, table cells and headings are read by `tests/helpers/prose.py`. Code and generated parts are
left out, and so is what is not rewritten: the entries of the log but for the width of their lines, and the list of changes but
for words of people.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.prose import Prose, read_prose, sentences, shown, words
from tests.test_project import FILES, place

PACKAGE = Path(__file__).resolve().parents[1] / "h2o_flexgen"
FRAGMENT = re.compile(
    "(That|Which|Whose|Whom|Of|To|For|In|On|By|From|With|Without|Where|Per|Behind|Beside|Before|After|Between|Under|Into|Through|"
    r"Not|Nor|And|Or|But|Is|Are|Does|Do|Did|Has|Have|Can|May|Will)\b"
)
REFUSED = re.compile(r"\b(?:who|whom|whose|whoever|whomever|nobody|somebody|anybody|he|him|his|himself)\b", re.IGNORECASE)
IS_NAME = re.compile(r"[a-z-]+")  # the name of a picture, say
LONGEST_SENTENCE, LONGEST_LINE = 30, 140  # words; characters
OF_LOG = re.compile(r"docs/log/.*\.md")
NOT_REWRITTEN = re.compile(r"CHANGELOG\.md|docs/log/(?!README\.md).*")


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Every docstring of a file, and its place."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield f"{file.relative_to(PACKAGE)}, line {node.body[0].lineno}", text


def test_no_docstring_begins_as_a_fragment() -> None:
    found = [one for file in sorted(PACKAGE.rglob("*.py")) for one in docstrings(file)]
    assert found
    assert [f"{place}: {text}" for place, text in found if FRAGMENT.match(text)] == []


PROSE_OF_PEOPLE = ("text/given_texts.py", "apps/data_wrangling/data_sets.py")  # made-up prompts, and questions of a benchmark


def comments(file: Path) -> Iterator[tuple[str, str]]:
    """Every comment of a file that may have a refused word, and its place. To find those of all files takes a second."""
    text = file.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if REFUSED.search(text) else ():
        if token.type == tokenize.COMMENT:
            yield f"{file.relative_to(PACKAGE)}, line {token.start[0]}", token.string


def strings(file: Path) -> Iterator[tuple[str, str]]:
    """Every string of a file, docstrings included, and its place."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{file.relative_to(PACKAGE)}, line {node.lineno}", node.value


def test_the_package_does_not_speak_of_things_as_of_people() -> None:
    """Rows, requests, threads and processes are things, in comments, docstrings and messages."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).as_posix() not in PROSE_OF_PEOPLE]
    found = [one for file in files for one in (*comments(file), *strings(file))]
    assert len(found) > 10_000
    assert [f"{place}: {text}" for place, text in found if REFUSED.search(text) and not IS_NAME.fullmatch(text)] == []


# -- documents ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents() -> Mapping[str, Prose]:
    chosen = [path for path in FILES if path.suffix == ".md" and not NOT_REWRITTEN.fullmatch(place(path))]
    return {place(path): read_prose(path.read_text(encoding="utf-8")) for path in chosen}


def found_sentences(documents: Mapping[str, Prose]) -> Iterator[tuple[str, str]]:
    for name, prose in documents.items():
        for passage in prose.passages:
            for sentence in sentences(passage.text):
                yield f"{name}, line {passage.line}: {sentence}", sentence


def test_documents_do_not_speak_of_things_as_of_people(documents: Mapping[str, Prose]) -> None:
    assert {"README.md", "docs/guide.md", "benchmarks/results/README.md"} <= documents.keys()
    changes = read_prose((PACKAGE.parent / "CHANGELOG.md").read_text(encoding="utf-8"))
    read = {**documents, "CHANGELOG.md": changes}
    assert [told for told, sentence in found_sentences(read) if REFUSED.search(sentence)] == []


def test_documents_have_short_sentences(documents: Mapping[str, Prose]) -> None:
    assert [told for told, sentence in found_sentences(documents) if words(sentence) > LONGEST_SENTENCE] == []


def test_documents_have_short_lines(documents: Mapping[str, Prose]) -> None:
    log = {place(path): read_prose(path.read_text(encoding="utf-8")) for path in FILES if OF_LOG.fullmatch(place(path))}
    assert "docs/log/serving.md" in log
    read = {**documents, **log}
    wide = [(name, line) for name, prose in read.items() for line in prose.lines if len(shown(line.text)) > LONGEST_LINE]
    assert [f"{name}, line {line.line}: {line.text}" for name, line in wide] == []


# -- the reader --------------------------------------------------------------------------------------------------------

PAGE = """# A heading. With a point

A first sentence (in brackets.) A second
one, e.g. with `code. Of several` words and [a link. too](page.md).

* an item. Its second sentence
  goes on
2. another item

| a cell | A second. A third |
|---|---|

```
Code is. Left out whoever reads it
```

<!-- part: written by a script -->
generated
<!-- part: end -->
**Bold.** The end
"""


def test_the_reader_of_documents_finds_passages_and_leaves_out_code_and_generated_parts() -> None:
    assert [(one.line, " ".join(one.text.split())) for one in read_prose(PAGE).passages] == [
        (1, "# A heading. With a point"),
        (3, "A first sentence (in brackets.) A second one, e.g. with `code. Of several` words and [a link. too](page.md)."),
        (6, "an item. Its second sentence goes on"),
        (8, "another item"),
        (10, "a cell"),
        (10, "A second. A third"),
        (20, "**Bold.** The end"),
    ]


def test_the_reader_of_documents_finds_sentences_and_counts_words() -> None:
    heading, paragraph, item, _, _, cell, bold = (sentences(one.text) for one in read_prose(PAGE).passages)
    assert paragraph == ["A first sentence (in brackets.)", "A second one, e.g. with CODE words and LINK."]
    assert [words(one) for one in paragraph] == [5, 9]
    assert item == ["an item.", "Its second sentence goes on"] and cell == ["A second.", "A third"]
    assert heading == ["# A heading.", "With a point"] and words(heading[0]) == 2
    assert bold == ["**Bold.**", "The end"]
    assert sentences("llama.cpp has 0.5 of it; 1,5 ... and more?! Yes") == [
        "llama.cpp has 0.5 of it; 1,5 ...",
        "and more?!",
        "Yes",
    ]
    assert words("a - b, c = 3 %") == 4


def test_the_reader_of_documents_shows_lines_outside_of_tables_and_links_by_their_text() -> None:
    lines = {one.line: one.text for one in read_prose(PAGE).lines}
    assert lines[4].startswith("one, e.g.") and 10 not in lines and lines[14] == "" and lines[18] == ""
    assert shown("see [this](https://example.org/" + "a" * 200 + ")") == "see this"


def test_words_that_are_refused_are_found_as_whole_words() -> None:
    assert REFUSED.search("Nobody waits") and REFUSED.search("rows, whose cache")
    assert REFUSED.search("the whole history of these") is None
