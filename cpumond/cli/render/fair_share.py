"""The page of ``cpumond fair-share simulate --html``: rows to the text of one file that needs no other.

Pure. Each pool with an integral guarantee has the two graphs of the documents over one time axis: allotted and demand
against the guarantee, accumulated volume against the capacity. Rows are thinned as they arrive: memory grows with the
number of pools that are drawn, not with the length of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cpumond.cli.render.html import Page, as_text, format_amount
from cpumond.fairshare.simulate import SimulationRow

BUCKETS: Final = 1000
"""Time buckets; of each, only the rows are drawn in which a line has its least or greatest value."""

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


@dataclass(slots=True)
class _Pool:
    """What is collected of one pool while its rows arrive."""

    first: SimulationRow
    last: SimulationRow
    greatest_demand: float = 0.0
    greatest_usage: float = 0.0
    least_volume: float = math.inf
    greatest_volume: float = 0.0
    bucket: int = -1
    waiting: list[SimulationRow] = field(default_factory=list)
    """The rows of ``bucket``."""
    drawn: list[SimulationRow] = field(default_factory=list)
    """The rows that are drawn of the buckets before."""

    def add(self, row: SimulationRow, until_s: float) -> None:
        """Take the next row of the pool. The values of a row hold until the next one."""
        self.last = row
        self.greatest_demand = max(self.greatest_demand, row.demand)
        self.greatest_usage = max(self.greatest_usage, row.usage, row.fair_share)
        self.least_volume = min(self.least_volume, row.accumulated_volume)
        self.greatest_volume = max(self.greatest_volume, row.accumulated_volume)
        bucket = min(int(row.time_s / until_s * BUCKETS), BUCKETS - 1) if until_s > 0 else 0
        if bucket != self.bucket:
            self._thin()
            self.bucket = bucket
        self.waiting.append(row)

    def finish(self, until_s: float) -> list[SimulationRow]:
        """The rows that are drawn, to ``until_s``."""
        self._thin()
        is_whole = self.drawn[-1].time_s >= until_s
        return self.drawn if is_whole else [*self.drawn, replace(self.last, time_s=until_s)]

    def _thin(self) -> None:
        if self.waiting:
            kept = {
                id(row): row
                for line in LINES.values()
                for row in (min(self.waiting, key=line), max(self.waiting, key=line))
            }
            self.drawn += sorted(kept.values(), key=lambda row: row.time_s)
            self.waiting = []


def render_html(rows: Iterable[SimulationRow], title: str, until_s: float, main_resource: str) -> str:
    """The page for the rows of a simulation up to ``until_s`` seconds.

    ``title`` is the heading; ``main_resource``, one of RESOURCES, is what the rows have amounts of. Names are escaped.
    """
    pools: dict[str, _Pool] = {}
    for row in rows:
        if row.guarantee_type != "none":
            if row.pool not in pools:
                pools[row.pool] = _Pool(row, row)
            pools[row.pool].add(row, until_s)
    page = Page(title)
    if not pools:
        page.add("<p>No pool of this tree has an integral guarantee, so there is no volume to draw.</p>")
    for number, pool in enumerate(pools.values()):
        _add_pool(page, pool, number, until_s, UNITS[main_resource])
    return page.render()


def _add_pool(page: Page, pool: _Pool, number: int, until_s: float, unit: str) -> None:
    row, last = pool.first, pool.last
    page.add(f"<h2>{as_text(row.pool)}</h2>")
    # A simulation of one moment is drawn as one second.
    end_s = until_s or 1.0
    rows = pool.finish(end_s)
    times = [each.time_s for each in rows]

    def line(name: str, label: str, color: str, **look: Any) -> dict[str, Any]:
        # More than six digits are not visible.
        values = [float(f"{LINES[name](each):.6g}") for each in rows]
        return {"label": label, "values": values, "color": color, **look}

    levels = _list_levels(row)
    fitting = max(pool.greatest_usage, *(level["level"] for level in levels), 0.0)
    # A demand far above all else would press the other lines flat.
    is_cut = pool.greatest_demand > fitting * 2.5 > 0
    area: dict[str, Any] = {"step": "after", "stack": True, "fill": True, "width": 0}
    strong = [line("strong", "strong guarantee", "--c5", **area)] if row.strong_guarantee else []
    page.add_chart(
        f"Allotted and demand against the guarantee, {unit}s",
        f"Demand of at most {format_amount(pool.greatest_demand)} {unit}s, allotted at most "
        f"{format_amount(pool.greatest_usage)}, at the end {format_amount(last.usage)}.",
        times,
        [
            *strong,
            line("integral", "integral guarantee", "--c3", **area),
            line("weight", "weight-proportional share", "--c7", **area),
            line("demand", "demand (beyond the graph)" if is_cut else "demand", "--c2", step="after", width=3),
            line("usage", "allotted", "--c1", step="after"),
            *levels,
        ],
        height=260, elapsed=True, sync=f"pool {number}", until=end_s, **({"cut": fitting * 1.15} if is_cut else {}),
    )  # fmt: skip
    capacity = row.integral_pool_capacity
    page.add_chart(
        f"Accumulated volume against the capacity, {unit}·s",
        f"From {format_amount(pool.least_volume)} to {format_amount(pool.greatest_volume)} {unit}·s, at the end "
        f"{format_amount(last.accumulated_volume)}, of a capacity of {format_amount(capacity)}.",
        times,
        [line("volume", "volume", "--c3"), {"label": "capacity", "level": capacity, "color": "--c7", "dash": True}],
        height=180, elapsed=True, sync=f"pool {number}", until=end_s,
    )  # fmt: skip


def _list_levels(row: SimulationRow) -> list[dict[str, Any]]:
    """The guaranteed levels: strong alone, with the flow, and with the burst while the volume lasts."""
    strong = row.strong_guarantee
    plus = "strong + " if strong > 0 else ""
    levels = [(f"{plus}flow", strong + row.resource_flow, "--c6")]
    if strong > 0:
        levels.append(("strong", strong, "--c5"))
    if row.burst_guarantee > 0:
        levels.append((f"{plus}burst" if plus else "burst guarantee", strong + row.burst_guarantee, "--c4"))
    return [{"label": label, "level": level, "color": color, "dash": True} for label, level, color in levels]
