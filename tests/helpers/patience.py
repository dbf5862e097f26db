"""How long a test waits for what would otherwise hang. No outcome is compared with it: a busy machine only takes longer."""

from __future__ import annotations

PATIENCE_SECONDS = 600.0
