"""torch's own stream sanitizer over the clocked device: it cries wolf unless it is told where the engine learns that an event
is over, and torch itself does not tell it of queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.memory.device import EventMarker
from h2o_flexgen.session import loaded_model
from tests.clocked.checker import Checker, current
from tests.clocked.context import checked
from tests.clocked.device import ClockedDevice
from tests.clocked.tensor import NAME, ClockedTensor
from tests.clocked.test_planted_faults import no_stream_waits
from tests.delayed.sanitizer import Place, StreamSanitizer
from tests.delayed.watched import WatchedHandover
from tests.helpers.contract import POLICIES, Case, Checkpoints, hold_contract
from tests.helpers.samples import first_of
from tests.kernels.variants import used

# Nothing is fetched ahead here: a task is over, and forgotten, before the next one that needs it is issued.
# The layers are such that this happens between two layers, not behind a head, where the host waits.
HOST = Case("opt", (0, 100, 0, 100, 0, 100), (5, 9), 8, num_gpu_batches=1, sep_layer=False, overlap=False, device=NAME)
ALARMING = (HOST, replace(HOST, kind="llama-gqa", policy=POLICIES[1]), replace(HOST, schedule="row_by_row", lengths=(5, 9, 2)))


def on_the_clocked_device(whole: bool = False) -> Place:
    return Place(lambda: current().stream, seen, whole, lambda: current().lock)


def seen(tensor: Tensor) -> Tensor | None:
    return tensor.inner if isinstance(tensor, ClockedTensor) else None


@contextmanager
def untold() -> Iterator[None]:
    """Nothing tells the sanitizer what a query has found."""
    with patch.object(EventMarker, "query", lambda marker: marker.event.query()):
        yield


def watched(
    case: Case, door: Callable[[], AbstractContextManager[object]], checkpoints: Checkpoints, offload: Path
) -> StreamSanitizer:
    """What the sanitizer says of a plan that keeps to the contract."""
    current().streams_are_quick = True
    sanitizer, device = StreamSanitizer(on_the_clocked_device()), ClockedDevice()
    device.handover = WatchedHandover(device.handover, sanitizer)
    with patch.object(loaded_model, "open_device", lambda name: device), door(), sanitizer.listening(), sanitizer():
        hold_contract(case, checkpoints, offload)
    return sanitizer


@pytest.mark.parametrize("case", ALARMING, ids=str)
def test_the_sanitizer_alarms_where_it_is_not_told_of_queries(
    case: Case, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    alarms = watched(case, untold, by_twins, offload).alarms
    assert any("stores/weights.py" in pair for pair in alarms), alarms


@pytest.mark.parametrize("case", first_of(ALARMING, 1), ids=str)
def test_it_does_not_alarm_where_the_engine_tells_it(
    case: Case, by_twins: Checkpoints, offload: Path, checker: Checker
) -> None:
    sanitizer = watched(case, nullcontext, by_twins, offload)
    assert not sanitizer.alarms and sanitizer.launches > 500


def test_it_alarms_where_no_stream_waits_whatever_it_is_told(by_twins: Checkpoints, offload: Path) -> None:
    by_twins.folder(HOST.kind)
    with used(TORCH), checked():
        assert watched(HOST, no_stream_waits, by_twins, offload).alarms
