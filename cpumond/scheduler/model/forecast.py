"""Forecasts as values. Times are seconds since 1970; None if they are beyond the horizon."""

from __future__ import annotations

import msgspec


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted first start and end of an operation. They are before ``..._p10`` in one of ten simulations, before
    ``..._p50`` in half of the simulations, and before ``..._p90`` in nine of ten.

    An operation that has started has ``started_at``, and no ``start_...``. ``end_...`` are also None if nothing is
    known of the run times of similar operations. ``as_of``: time of the simulated state. ``lines``: the forecast as
    sentences, including what is not known."""

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
    """Number of simulations; 0 if the operation can never start in the present state."""
    lines: list[str] = []


class PredictedStart(msgspec.Struct, frozen=True):
    """First start and end, without and with the change; None: beyond the horizon, or no such operation."""

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
    """Fair share and allocated cores (``used``) of a pool, means over the simulation. ``after``: with the change."""

    tree: str
    pool: str
    fair_share_before: float
    fair_share_after: float
    used_before: float
    used_after: float


class Simulation(msgspec.Struct, frozen=True):
    """Effects of a change: when operations start, which jobs are stopped, and how shares change. Only the operation in
    question, and what differs, are listed. ``lines``: the main effects as sentences."""

    as_of: float
    horizon: float
    operation_id: str
    starts: list[PredictedStart]
    stops: list[PredictedStop]
    shares: list[PredictedShare]
    lines: list[str]
    left_out: int = 0
    """Number of operations that differ but are not listed, since they are too many or hidden from the caller."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a response that takes a while. Each line has the progress (0 to 1). The first line has the latest
    forecast (``first``) and its age; the last line has the result, or why there is none."""

    done: float
    first: list[str] = []
    answer: Simulation | None = None
    error: str = ""
