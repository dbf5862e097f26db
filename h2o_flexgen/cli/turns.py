"""The turns of a talk: typed in a terminal, piped, or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from h2o_flexgen.cli.errors import Ended
from h2o_flexgen.core.documents import parse_json
from h2o_flexgen.text.prompt_file import read_lines

PROMPT = "> "
RESET, STATS, HELP, QUIT = "/reset", "/stats", "/help", "/quit"
COMMANDS = {
    RESET: "forgets all that was said",
    STATS: "tells of tokens and memory",
    HELP: "names these commands",
    QUIT: "(or Ctrl-D) leaves",
}


def turns_of(file: str | None, is_typed: bool) -> Iterable[str]:
    if file is not None:
        return in_file(file)
    return typed() if is_typed else piped()


def typed() -> Iterator[str]:
    import readline  # noqa: F401  # arrow keys and what was typed before

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except Ended:
            raise
        except KeyboardInterrupt:
            print(f"\n{QUIT} {COMMANDS[QUIT]}")


def piped() -> Iterator[str]:
    return (line.rstrip("\n") for line in sys.stdin)


def in_file(name: str) -> list[str]:
    file = Path(name).expanduser()
    lines = read_lines(file, "input", "a turn")
    if file.suffix != ".jsonl":
        return lines
    return [turn for number, line in enumerate(lines, start=1) for turn in _of_json(line, f"input {file}, line {number}")]


def _of_json(line: str, where: str) -> list[str]:
    try:
        found = parse_json(line)
        turns = [found["prompt"]] if "prompt" in found else found["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise TypeError(turns)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{where} is neither {{"prompt": "..."}} nor {{"turns": ["...", ...]}}; mend or remove it') from error
    return turns
