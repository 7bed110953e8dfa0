"""Forecasts as values. Times are seconds since 1970; None: beyond the horizon."""

from __future__ import annotations

import msgspec


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted first start and end of an operation: before ``..._p10`` in one of ten simulations, before ``..._p50``
    in half of them, before ``..._p90`` in nine of ten.

    ``started_at`` is set for an operation that has started, which then has no ``start_...``. ``end_...`` are also None
    if nothing is known of the run times of similar operations. ``as_of``: time of the simulated state. ``lines``: the
    forecast as sentences, with what is not known.
    """

    operation_id: str
    started_at: float | None = None
    start_p10: float | None = None
    start_p50: float | None = None
    start_p90: float | None = None
    end_p10: float | None = None
    end_p50: float | None = None
    end_p90: float | None = None
    as_of: float
    horizon: float
    """End of the simulated time."""
    runs: int
    """Number of simulations; 0 for an operation that can never start as things are."""
    lines: list[str] = []


class PredictedStart(msgspec.Struct, frozen=True):
    """First start and end of an operation, without and with the change; None: beyond the horizon, or no such
    operation."""

    operation_id: str
    title: str
    tree: str
    pool: str
    start_before: float | None
    start_after: float | None
    end_before: float | None
    end_after: float | None


class PredictedStop(msgspec.Struct, frozen=True):
    """A job that the change would stop, and the work that it would lose."""

    job_id: str
    operation_id: str
    tree: str
    pool: str
    node_id: str
    at: float
    kind: str
    lost_core_hours: float
    for_operation_id: str
    why: str


class PredictedShare(msgspec.Struct, frozen=True):
    """Fair share and allocated cores (``used``) of a pool, means over the simulated time; ``after``: with the
    change."""

    tree: str
    pool: str
    fair_share_before: float
    fair_share_after: float
    used_before: float
    used_after: float


class Simulation(msgspec.Struct, frozen=True):
    """Effects of a change: which operations start when, which jobs are stopped, and whose share moves. Only differences
    are listed, and the operation in question. ``lines``: the main effects as sentences."""

    as_of: float
    horizon: float
    operation_id: str
    starts: list[PredictedStart]
    stops: list[PredictedStop]
    shares: list[PredictedShare]
    lines: list[str]
    left_out: int = 0
    """Number of differing operations that are not listed: too many, or hidden from the caller."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer to a question that takes a while: progress (0 to 1). The first line has what the last
    forecast says (``first``), with its age; the last one has the answer, or why there is none."""

    done: float
    first: list[str] = []
    answer: Simulation | None = None
    error: str = ""
