"""Kernels for GPUs, in Triton: interpreted on a CPU, compiled for GPUs that are not here, and run on a GPU where there is one.

Without Triton all of them are skipped, and say so. Whether a process interprets is fixed when Triton is imported
(tests/conftest.py); the fixture `gpu` is the device of tensors.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels for GPUs are not tested without Triton; install h2o_flexgen[test-gpu]")
