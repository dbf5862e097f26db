"""The tiers that data may live on, the fastest first. Without an accelerator what is meant for the device lies on the host."""

from __future__ import annotations

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
