"""The reference: the tokens that a model says with a full cache, and the log-probabilities of the whole vocabulary for each.
These are large, so they lie in a file without a name, in the offload folder."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.model_files import require_free_space
from h2o_flexgen.memory.disk import OffloadFolder

VALUE_BYTES = 4  # a log-probability in fp32


class FullCache:
    def __init__(self, rows: int, gen_len: int, vocab: int, folder: Path) -> None:
        self.tokens: list[tuple[int, ...]] = [()] * rows
        self._gen_len, self._bytes = gen_len, vocab * VALUE_BYTES
        self._folder = OffloadFolder(folder)
        try:
            require_free_space(folder, rows * gen_len * self._bytes, "what the full cache says")
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        except BaseException:
            self._folder.close()
            raise

    def put(self, row: int, number: int, logits: Tensor) -> None:
        os.pwrite(self._file.fileno(), logits.float().log_softmax(0).numpy().tobytes(), self._place(row, number))

    def logprobs(self, row: int, number: int) -> Tensor:
        read = os.pread(self._file.fileno(), self._bytes, self._place(row, number))
        return torch.frombuffer(bytearray(read), dtype=torch.float32)

    def _place(self, row: int, number: int) -> int:
        return (row * self._gen_len + number) * self._bytes

    def close(self) -> None:
        with closing(self._folder):
            self._file.close()


class Comparison:
    """Compares another setting's predictions with the full cache's, token by token."""

    def __init__(self, full: FullCache, rows: int, gen_len: int) -> None:
        self._full = full
        self._equal = torch.zeros(rows, gen_len, dtype=torch.bool)
        self._lost = torch.zeros(rows, gen_len, dtype=torch.float64)

    def put(self, row: int, number: int, logits: Tensor) -> None:
        said, own = self._full.logprobs(row, number).double(), logits.float().log_softmax(0).double()
        self._equal[row, number] = int(logits.argmax()) == self._full.tokens[row][number]
        self._lost[row, number] = torch.where(said.exp() > 0, said.exp() * (said - own), 0.0).sum()

    @property
    def by_row(self) -> dict[str, list[float]]:
        """The share of equal tokens; the KL divergence in nats per token; and the share of tokens before the first different
        one: that far, a run without forced tokens says the same."""
        equal = self._equal.double()
        values = {"equal": equal, "kl": self._lost, "until_first": equal.cumprod(1)}
        return {name: of_tokens.mean(1).tolist() for name, of_tokens in values.items()}
