"""What tests of jobs are made of: input files, their indexes, and a tokenizer and sizes without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from h2o_flexgen.engine.job import Request, RequestSize
from h2o_flexgen.jobs.index import CheckedFile, Index, check_file
from h2o_flexgen.jobs.line import InputFile
from h2o_flexgen.jobs.line_fields import Options
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt
from h2o_flexgen.text.tokenizer import ByteTokenizer

DEFAULTS = Options(SamplingParams())
BYTES = ByteTokenizer(300)
POSITIONS = 60


def input_file(folder: Path, *lines: Any, name: str = "in.jsonl") -> InputFile:
    """A file of these lines, each as it is or as JSON."""
    path = folder / name
    path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
    return InputFile.of(str(path))


def _line(line: Any) -> bytes:
    return line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()


def checked(folder: Path, *lines: Any, name: str = "in.jsonl") -> CheckedFile:
    return check_file(input_file(folder, *lines, name=name), DEFAULTS)


def index_of(folder: Path, count: int) -> Index:
    """An index of sound requests that are called r0, r1, ..."""
    return checked(folder, *({"custom_id": f"r{number}", "prompt": f"text {number}"} for number in range(count))).index


def size_of(number: int, request: Request) -> RequestSize:
    """What a model with few positions says of a request."""
    assert isinstance(request.prompt, Prompt) and request.params is not None
    length, wanted = len(request.prompt.ids), request.params.max_tokens
    if length + (wanted or 1) > POSITIONS:
        raise ValueError(f"prompt {number} has {length} tokens, which is too long")
    return RequestSize(length, POSITIONS - length if wanted is None else wanted, request.params.n)
