"""Schedules, and their table. A new schedule is a file here and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.schedule.barrier import FlexGenBarrier
from h2o_flexgen.schedule.row_by_row import RowByRow
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.zigzag import Zigzag

SCHEDULES: Mapping[str, type[Schedule]] = {schedule.name: schedule for schedule in (Zigzag, FlexGenBarrier, RowByRow)}
