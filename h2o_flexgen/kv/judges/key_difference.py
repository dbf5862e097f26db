"""A token is worth more the less its key resembles the others: minus the cosine between it and the mean of their directions."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from h2o_flexgen.kv.judges.together import JudgeOfRows


class KeyDifference(JudgeOfRows):
    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        directions = normalize(keys.float(), dim=-1)
        mean = normalize(directions.mean(dim=1), dim=-1)
        return -(directions @ mean.unsqueeze(-1)).squeeze(-1)
