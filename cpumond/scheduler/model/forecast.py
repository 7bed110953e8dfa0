"""What is foretold, as values. Times are seconds since 1970; None: beyond what was looked at."""

from __future__ import annotations

import msgspec


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """When an operation starts its first job and ends: in one of ten runs ahead before ``..._p10``, in half of them
    before ``..._p50``, in nine of ten before ``..._p90``.

    ``started_at`` of one that has started, and then no ``start_...``. ``end_...`` are None, too, where nothing is known
    of how long operations like it run. ``as_of``: the moment whose state was run ahead. ``lines``: the same in
    sentences, with what is not known.
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
    """Until when was looked."""
    runs: int
    """How often the state was run ahead; 0 for one that can never start as things are."""
    lines: list[str] = []


class ForetoldStart(msgspec.Struct, frozen=True):
    """The first start and the end of an operation, without the change and with it; None: beyond the horizon, or not
    there at all."""

    operation_id: str
    title: str
    tree: str
    pool: str
    start_before: float | None
    start_after: float | None
    end_before: float | None
    end_after: float | None


class ForetoldStop(msgspec.Struct, frozen=True):
    """A job that would be stopped with the change and not without it, and what it loses."""

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


class ForetoldShare(msgspec.Struct, frozen=True):
    """Fair share of a pool and what is allotted to it (``used``), cores, the mean over what was looked at, without the
    change and with it."""

    tree: str
    pool: str
    fair_share_before: float
    fair_share_after: float
    used_before: float
    used_after: float


class Simulation(msgspec.Struct, frozen=True):
    """What a change would do: what starts when, who is stopped, whose share moves. Only what differs is listed, and the
    operation that was asked about. ``lines``: the most of it in sentences."""

    as_of: float
    horizon: float
    operation_id: str
    starts: list[ForetoldStart]
    stops: list[ForetoldStop]
    shares: list[ForetoldShare]
    lines: list[str]
    left_out: int = 0
    """Operations that differ, but are not listed: too many, or the asker may not read them."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer to a question that takes a while: how far it is (0 to 1); at first what the last forecast
    says of the same (``first``), with its age; the answer at the end, or why there is none."""

    done: float
    first: list[str] = []
    answer: Simulation | None = None
    error: str = ""
