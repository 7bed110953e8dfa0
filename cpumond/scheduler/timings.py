"""What a running scheduler counts of itself, for its status, alerts and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """How long things took, in real seconds: the last value, and counts and sums for averages."""

    update_s: float = 0.0
    updates: int = 0
    updates_s: float = 0.0
    good_updates: int = 0
    """Updates in which not every tree failed; a refusal of the store is no failure here."""
    late_updates: int = 0
    late_at: float | None = None
    failed_updates: int = 0
    failed_at: float | None = None
    heartbeats: int = 0
    heartbeats_s: float = 0.0
    dropped_heartbeats: int = 0
    commands: int = 0
    refused_commands: int = 0
    store_writes: int = 0
    store_writes_s: float = 0.0
    store_errors: int = 0
    store_error_at: float | None = None
    store_losses: int = 0
    """How often the store was removed, and written anew."""
    store_lost_at: float | None = None
    """``..._at``: scheduler time of the last one."""
