"""The plans that are tried where lanes are late: those in which any two choices of the contract meet, as far as they go."""

from __future__ import annotations

from itertools import islice

from tests.helpers.pairwise import covering
from tests.test_contract import CHOICES

PLANS = list(islice(covering(CHOICES, seed=7), 60))
