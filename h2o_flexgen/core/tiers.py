"""The tiers that data may live on, the fastest first. Without an accelerator, the device's share lies on the host."""

from __future__ import annotations

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
