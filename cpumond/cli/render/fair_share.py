"""The page of ``cpumond fair-share simulate --html``: turns rows into the text of one self-contained file.

Pure. Each pool with an integral guarantee gets two graphs over one time axis: allocation and demand against the
guarantee, and accumulated volume against the capacity. Rows are thinned as they arrive: memory grows with the number of
drawn pools, not with the length of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from cpumond.cli.render.html import Page, as_text, format_amount
from cpumond.fairshare.simulate import SimulationRow

BUCKETS: Final = 1000
"""Number of time buckets; only the rows of a bucket in which a line has its minimum or maximum are drawn."""

UNITS: Final = {"user_slots": "slot", "cpu": "core", "gpu": "GPU", "memory": "byte", "network": "network unit"}


LINES: Final[dict[str, Callable[[SimulationRow], float]]] = {
    "strong": lambda row: row.fair_share_strong_guarantee,
    "integral": lambda row: row.fair_share_integral_guarantee,
    "weight": lambda row: row.fair_share_weight_proportional,
    "demand": lambda row: row.demand,
    "usage": lambda row: row.usage,
    "volume": lambda row: row.accumulated_volume,
}
"""Line of a graph -> its value in a row."""


class _Pool:
    """The rows of a pool that are drawn; rows that arrive are added to them."""

    def __init__(self) -> None:
        self.rows: list[SimulationRow] = []
        self._waiting: list[SimulationRow] = []
        self._bucket = -1

    def add(self, row: SimulationRow, bucket: int) -> None:
        if bucket != self._bucket:
            self.thin()
            self._bucket = bucket
        self._waiting.append(row)

    def thin(self) -> None:
        """Of the bucket's rows, keep only those in which some line has its minimum or maximum in the bucket."""
        kept = {pick(self._waiting, key=line) for line in LINES.values() for pick in (min, max) if self._waiting}
        self.rows += sorted(kept, key=lambda row: row.time_s)
        self._waiting = []


def render_html(rows: Iterable[SimulationRow], title: str, until_s: float, main_resource: str) -> str:
    """Return the page for the rows of a simulation up to ``until_s`` seconds.

    ``title`` is the heading; ``main_resource``: one of RESOURCES, that of the rows' amounts. Names are escaped."""
    end_s = until_s or 1.0  # a simulation of one moment is drawn as one second
    pools: dict[str, _Pool] = {}
    last: dict[str, SimulationRow] = {}
    for row in rows:
        if row.guarantee_type != "none":
            pools.setdefault(row.pool, _Pool()).add(row, min(int(row.time_s / end_s * BUCKETS), BUCKETS - 1))
            last[row.pool] = row
    page = Page(title)
    if not pools:
        page.add("<p>No pool of this tree has an integral guarantee, so there is no volume to draw.</p>")
    for number, (name, pool) in enumerate(pools.items()):
        pool.thin()
        # The values of a row hold until the next row.
        to_end = [replace(last[name], time_s=end_s)] if pool.rows[-1].time_s < end_s else []
        _add_pool(page, [*pool.rows, *to_end], number, UNITS[main_resource])
    return page.render()


def _add_pool(page: Page, rows: Sequence[SimulationRow], number: int, unit: str) -> None:
    row, last = rows[0], rows[-1]
    page.add(f"<h2>{as_text(row.pool)}</h2>")
    times = [each.time_s for each in rows]
    more: dict[str, Any] = {"elapsed": True, "sync": f"pool {number}", "until": last.time_s}
    most_demand, most_used = max(each.demand for each in rows), max(each.usage for each in rows)
    volumes = [each.accumulated_volume for each in rows]

    def line(name: str, label: str, color: str, **look: Any) -> dict[str, Any]:
        # More than six digits are not visible.
        values = [float(f"{LINES[name](each):.6g}") for each in rows]
        return {"label": label, "values": values, "color": color, **look}

    levels = _list_levels(row)
    fitting = max(most_used, *(level["level"] for level in levels), 0.0)
    # A demand far above everything else would flatten the other lines.
    is_cut = most_demand > fitting * 2.5 > 0
    area: dict[str, Any] = {"step": "after", "stack": True, "fill": True, "width": 0}
    strong = [line("strong", "strong guarantee", "--c5", **area)] if row.strong_guarantee else []
    page.add_chart(
        f"Allotted and demand against the guarantee, {unit}s",
        f"Demand of at most {format_amount(most_demand)} {unit}s, allocated at most "
        f"{format_amount(most_used)}, at the end {format_amount(last.usage)}.",
        times,
        [
            *strong,
            line("integral", "integral guarantee", "--c3", **area),
            line("weight", "weight-proportional share", "--c7", **area),
            line("demand", "demand (beyond the graph)" if is_cut else "demand", "--c2", step="after", width=3),
            line("usage", "allocated", "--c1", step="after"),
            *levels,
        ],
        height=260, **({"cut": fitting * 1.15} if is_cut else {}), **more,
    )  # fmt: skip
    capacity = row.integral_pool_capacity
    page.add_chart(
        f"Accumulated volume against the capacity, {unit}·s",
        f"From {format_amount(min(volumes))} to {format_amount(max(volumes))} {unit}·s, at the end "
        f"{format_amount(last.accumulated_volume)}, of a capacity of {format_amount(capacity)}.",
        times,
        [line("volume", "volume", "--c3"), {"label": "capacity", "level": capacity, "color": "--c7", "dash": True}],
        height=180, **more,
    )  # fmt: skip


def _list_levels(row: SimulationRow) -> list[dict[str, Any]]:
    """The guaranteed levels: the strong guarantee alone, with the flow, and with the burst while the volume lasts."""
    strong = row.strong_guarantee
    plus = "strong + " if strong > 0 else ""
    levels = [(f"{plus}flow", strong + row.resource_flow, "--c6")]
    if strong > 0:
        levels.append(("strong", strong, "--c5"))
    if row.burst_guarantee > 0:
        levels.append((f"{plus}burst" if plus else "burst guarantee", strong + row.burst_guarantee, "--c4"))
    return [{"label": label, "level": level, "color": color, "dash": True} for label, level, color in levels]
