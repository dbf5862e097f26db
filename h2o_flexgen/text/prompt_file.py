"""The prompts given to a command, as texts or in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from h2o_flexgen.core.files import parse_json, read_text


def given_prompts(texts: Sequence[str] | None, file: str | None, num: int | None = None) -> list[str]:
    """The prompts of --prompt, then those of the file, only the first `num` of them. The list is empty if none are given."""
    if texts is None and file is None:
        return []
    prompts = [*(texts or ()), *(read_prompts(Path(file).expanduser()) if file is not None else ())]
    for place, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {place} is empty; every prompt needs at least one token")
    if num is not None and not 1 <= num <= len(prompts):
        raise ValueError(f"--num-prompts is {num}, but {len(prompts)} prompts are given; give 1 to {len(prompts)}")
    return prompts[:num]


def read_prompts(file: Path) -> list[str]:
    take = _from_json if file.suffix == ".jsonl" else str
    lines = enumerate(read_lines(file, "prompt file"), start=1)
    return [_of_line(line, take, f"prompt file {file}, line {number}") for number, line in lines]


def read_lines(file: Path, what: str, of: str = "a prompt") -> list[str]:
    """The lines of a file, without empty ones at its end."""
    lines = read_text(file, f"{what} {file}").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(f"{what} {file} is empty; write {of} per line")
    return lines


def _of_line(line: str, take: Callable[[str], str], where: str) -> str:
    try:
        prompt = take(line)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{where} is no {{"prompt": "..."}}; mend or remove it') from error
    if not prompt.strip():
        raise ValueError(f"{where} is empty; remove it")
    return prompt


def _from_json(line: str) -> str:
    prompt = parse_json(line)["prompt"] if line.strip() else ""
    if not isinstance(prompt, str):
        raise TypeError(prompt)
    return prompt
