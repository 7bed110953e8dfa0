"""The page of a simulation: graphs that show what the rows say, and a file that needs nothing beside it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

import pytest

from cpumond.cli.fair_share_html import BUCKETS, render_html
from cpumond.cli.html import (
    LABEL_GAP,
    LEFT,
    PLOT_WIDTH,
    choose_prefix,
    choose_step,
    choose_time_step,
    format_amount,
    format_clock,
    format_span,
)
from cpumond.fairshare.simulate import SimulationRow

DAY = 86400.0
VOID = {"meta", "path"}


def make_row(time_s: float = 0.0, usage: float = 0.0, **changes: Any) -> SimulationRow:
    """A row of a burst pool that is granted ``usage`` for volume."""
    values: dict[str, Any] = {
        "time_s": time_s,
        "pool": "reports",
        "guarantee_type": "burst",
        "demand": usage,
        "usage": usage,
        "strong_guarantee": 0.0,
        "resource_flow": 100.0,
        "burst_guarantee": 500.0,
        "fair_share": usage,
        "fair_share_strong_guarantee": 0.0,
        "fair_share_integral_guarantee": usage,
        "fair_share_weight_proportional": 0.0,
        "accumulated_volume": 0.0,
        "integral_pool_capacity": 8.64e6,
    }
    return SimulationRow(**{**values, **changes})


def render(rows: Iterable[SimulationRow], until_s: float = DAY, **changes: Any) -> str:
    values: dict[str, Any] = {"title": "tree.toml", "step_s": 1.0, "main_resource": "cpu", **changes}
    return render_html(rows, until_s=until_s, **values)


class Page(HTMLParser):
    """The elements of a page, each with its attributes and the text in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), list[str]())
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def list_texts(self, tag: str, kind: str = "") -> list[str]:
        return ["".join(texts) for name, attributes, texts in self.find(tag, kind) if name == tag]

    def find(self, tag: str, kind: str = "") -> list[tuple[str, dict[str, str | None], list[str]]]:
        return [
            element for element in self.elements if element[0] == tag and (not kind or element[1].get("class") == kind)
        ]

    def path_of(self, kind: str) -> str:
        """The path of the first graph's element of this kind; those before it are keys of a legend."""
        return next(d for _, attributes, _ in self.find("path", kind) if len(d := attributes["d"] or "") > 14)

    def summary_of(self, pool: str) -> dict[str, str]:
        cells = self.list_texts("td")
        pools = [text for _, attributes, (text, *_) in self.find("th") if attributes.get("scope") == "row"]
        heads = [text for _, attributes, (text, *_) in self.find("th") if attributes.get("scope") == "col"][1:]
        start = pools.index(pool) * len(heads)
        return dict(zip(heads, cells[start : start + len(heads)], strict=True))


def points_of(path: str) -> list[tuple[float, float]]:
    """The corners of a path of M, L, H and V with absolute coordinates."""
    points: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MLHV])([-0-9. ]+)", path):
        values = [float(number) for number in numbers.split()]
        x, y = points[-1] if points else (0.0, 0.0)
        points.append(
            (values[0], y) if command == "H" else (x, values[0]) if command == "V" else (values[0], values[1])
        )
    return points


# the file


def test_the_page_is_well_formed_and_needs_nothing_beside_it():
    text = render(make_row(float(second), 500.0 * (second % 2)) for second in range(100))
    Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<link", text)


def test_names_are_escaped():
    name = "<script>alert(\"1\")</script> & 'x'"
    text = render([make_row(pool=name), make_row(1.0, pool=name)], title=name)
    page = Page(text)
    assert text.count("<script") == 1
    assert "alert" not in page.list_texts("script")[0]
    assert page.list_texts("title") == [name]
    assert page.list_texts("h1") == [name]
    assert page.list_texts("h2") == [name]
    assert page.summary_of(name)["Integral guarantee"] == "burst"
    assert f"Usage and demand of {name} over time" in [
        attributes.get("aria-label") for _, attributes, _ in page.find("svg")
    ]


def test_there_are_two_graphs_per_pool_with_an_integral_guarantee_and_a_line_of_the_table_for_each_pool():
    kinds = {"a": "burst", "b": "none", "c": "relaxed"}
    rows = [make_row(time_s, pool=pool, guarantee_type=kind) for time_s in (0.0, 1.0) for pool, kind in kinds.items()]
    page = Page(render(rows))
    assert page.list_texts("h2") == ["a", "c"]
    drawn = [attributes["data-pool"] for _, attributes, _ in page.find("svg") if "data-pool" in attributes]
    assert drawn == ["0", "0", "1", "1"]
    assert [page.summary_of(pool)["Integral guarantee"] for pool in kinds] == list(kinds.values())


def test_without_an_integral_guarantee_there_is_the_table_and_a_sentence():
    page = Page(render([make_row(pool="a", guarantee_type="none")]))
    assert "No pool of this tree has an integral guarantee, so there is no volume to draw." in page.list_texts("p")
    assert page.list_texts("script") == [""]
    assert not page.find("svg")


def test_a_tree_without_pools_is_a_page_too():
    assert "No pool" in Page(render([])).list_texts("p")[1]


def test_a_simulation_of_one_moment_is_a_page_too():
    page = Page(render([make_row(usage=70.0, accumulated_volume=5.0)], until_s=0.0))
    assert page.summary_of("reports")["Mean usage"] == "70"
    assert page.summary_of("reports")["Volume at the end"] == "5"
    assert page.list_texts("text", "tick middle")[:1] == ["0 s"]


def test_amounts_have_the_unit_of_the_main_resource():
    texts = Page(render([make_row()], main_resource="memory")).list_texts("b")
    assert texts == [
        "Usage and demand against the guarantee, bytes",
        "Accumulated volume against the capacity, million byte·s",
    ]


# lines


def test_a_line_keeps_each_value_until_the_next():
    page = Page(render([make_row(0.0), make_row(1.0, 500.0), make_row(2.0)], until_s=4.0))
    x = [LEFT + PLOT_WIDTH * part for part in (0, 0.25, 0.5, 1)]
    bottom, top = 250.0, 10.0
    assert points_of(page.path_of("line usage")) == [
        (x[0], bottom), (pytest.approx(x[1], abs=0.1), bottom), (pytest.approx(x[1], abs=0.1), top),
        (pytest.approx(x[2], abs=0.1), top), (pytest.approx(x[2], abs=0.1), bottom), (x[3], bottom),
    ]  # fmt: skip


def test_the_volume_goes_straight_from_each_value_to_the_next():
    rows = [make_row(float(second), accumulated_volume=volume) for second, volume in enumerate((0, 8.64e6, 4.32e6))]
    points = points_of(Page(render(rows, until_s=2.0)).path_of("line volume"))
    assert [y for _, y in points] == pytest.approx([170, 170 - 160 * 0.864, 170 - 160 * 0.432], abs=0.1)


def test_lines_are_thinned_and_spikes_stay():
    rows = [
        make_row(float(second), {43_000: 500.0, 60_000: 0.0}.get(second, 100.0 + second % 7))
        for second in range(0, 86401, 4)
    ]
    page = Page(render(rows))
    for kind in ("line demand", "line usage", "area integral"):
        points = points_of(page.path_of(kind))
        assert len({x for x, _ in points}) <= 2 * BUCKETS + 1
        assert min(y for _, y in points) == 10.0
        assert points[-1][0] == LEFT + PLOT_WIDTH
    spike = [x for x, y in points_of(page.path_of("line usage")) if y == 10.0]
    assert spike == [pytest.approx(LEFT + PLOT_WIDTH * 43_000 / DAY, abs=1)] * 2
    low = [x for x, y in points_of(page.path_of("line usage")) if y == 250.0]
    assert low == [pytest.approx(LEFT + PLOT_WIDTH * 60_000 / DAY, abs=1)] * 2


def test_a_line_that_stays_where_it_is_has_two_points():
    page = Page(render(make_row(float(second), 100.0) for second in range(0, 86401, 4)))
    assert len(points_of(page.path_of("line usage"))) == 2


def test_areas_are_the_parts_of_the_fair_share_one_on_the_other():
    row = make_row(
        strong_guarantee=100.0,
        usage=400.0,
        fair_share=400.0,
        fair_share_strong_guarantee=100.0,
        fair_share_integral_guarantee=200.0,
        fair_share_weight_proportional=100.0,
        burst_guarantee=300.0,
    )
    page = Page(render([row]))
    tops = {
        kind: min(y for _, y in points_of(page.path_of(f"area {kind}"))) for kind in ("weight", "integral", "strong")
    }
    assert tops == {"weight": 10.0, "integral": 70.0, "strong": 190.0}


def test_under_the_pointer_is_a_row_per_bucket():
    rows = [make_row(float(second), float(second), accumulated_volume=second * 10.0) for second in range(0, 86401, 4)]
    script = Page(render(rows)).list_texts("script")[0]
    (data,) = json.loads(script.removeprefix("const DATA=").partition(",UNTIL=")[0])
    assert len(data["time"]) == BUCKETS
    assert data["time"][:3] == [0, 88, 176]
    assert data["usage"] == data["time"]
    assert data["volume"] == [time_s * 10 for time_s in data["time"]]
    assert {len(column) for column in data.values()} == {BUCKETS}


# levels


def test_levels_are_what_is_guaranteed_with_and_without_volume():
    page = Page(render([make_row()]))
    assert page.list_texts("text", "label") == ["flow 100", "burst guarantee 500", "capacity 8.64 M"]
    page = Page(render([make_row(strong_guarantee=200.0)]))
    assert page.list_texts("text", "label")[:3] == ["strong 200", "strong + flow 300", "strong + burst 700"]
    page = Page(render([make_row(guarantee_type="relaxed", burst_guarantee=0.0)]))
    assert page.list_texts("text", "label") == ["flow 100", "capacity 8.64 M"]


@pytest.mark.parametrize("demand", [0.0, 800.0, 900.0, 1e6])
def test_names_of_levels_never_overlap(demand):
    row = make_row(strong_guarantee=1.0, resource_flow=2.0, burst_guarantee=3.0, usage=min(demand, 1000), demand=demand)
    labels = [float(attributes["y"] or "") for _, attributes, _ in Page(render([row])).find("text", "label")][:3]
    assert all(below - above >= LABEL_GAP - 0.1 for below, above in itertools.pairwise(labels))


def test_demand_without_bounds_does_not_press_the_graph_flat():
    page = Page(render([make_row(0.0, 500.0, demand=1e6)]))
    assert "demand (up to 1 M, beyond the graph)" in page.list_texts("span")
    assert min(y for _, y in points_of(page.path_of("line demand"))) == pytest.approx(4.0)
    assert min(y for _, y in points_of(page.path_of("line usage"))) > 10.0


def test_a_pool_without_any_amount_has_an_axis_from_0_to_1():
    row = make_row(resource_flow=0.0, burst_guarantee=0.0, integral_pool_capacity=0.0)
    page = Page(render([row]))
    assert {"0", "1"} <= set(page.list_texts("text", "tick end"))


def test_the_guarantee_is_said_in_words():
    assert Page(render([make_row()])).list_texts("p")[1] == (
        "Integral guarantee: burst, flow 100 cores, burst guarantee 500 cores. "
        "The volume holds up to 8.64 M core·s, which lasts 6h of full burst."
    )
    relaxed = make_row(guarantee_type="relaxed", burst_guarantee=0.0, strong_guarantee=50.0)
    assert Page(render([relaxed])).list_texts("p")[1] == (
        "Integral guarantee: relaxed, flow 100 cores, on top of a strong guarantee of 50 cores. "
        "The volume holds up to 8.64 M core·s."
    )


# summary


def test_the_summary_counts_what_holds_until_the_next_row():
    rows = [
        make_row(0.0, 0.0, accumulated_volume=1000.0),
        make_row(100.0, 500.0, demand=600.0, accumulated_volume=9000.0),
        make_row(400.0, 499.0, demand=499.0, accumulated_volume=30.0),
        make_row(500.0, 100.0, demand=500.0, accumulated_volume=40.0),
        make_row(600.0, 500.0, demand=501.0, accumulated_volume=50.0),
    ]
    assert Page(render(rows, until_s=600.0)).summary_of("reports") == {
        "Integral guarantee": "burst",
        "At full burst": "5m",
        "Above the flow": "6m 40s",
        "Least volume": "30",
        "Greatest volume": "9000",
        "Volume at the end": "50",
        "Mean usage": "349.8",
        "Demand not met": "6m 40s",
    }


def test_what_a_pool_does_not_have_is_a_dash():
    rows = [
        make_row(time_s, 30.0, pool=pool, guarantee_type=pool, burst_guarantee=0.0)
        for time_s in (0.0, 60.0)
        for pool in ("relaxed", "none")
    ]
    page = Page(render(rows))
    assert list(page.summary_of("relaxed").values()) == ["relaxed", "-", "0s", "0", "0", "0", "30", "0s"]
    assert list(page.summary_of("none").values()) == ["none", "-", "-", "-", "-", "-", "30", "0s"]


# axes


def test_a_day_has_hours():
    page = Page(render([make_row()]))
    ticks = page.list_texts("text", "tick middle")
    assert ticks[:14] == [*(f"{hour} h" for hour in range(0, 25, 2)), "time"]
    volumes = ["0", "2", "4", "6", "8", "10"]
    assert page.list_texts("text", "tick end") == ["0", "100", "200", "300", "400", "500", *volumes]


@pytest.mark.parametrize(
    ("until_s", "title", "labels"),
    [
        (0.5, "time", ["0 s", "0.1 s", "0.2 s"]),
        (5, "time", ["0 s", "1 s", "2 s"]),
        (60, "time, min:s", ["00:00", "00:05", "00:10"]),
        (600, "time, h:min", ["0:00", "0:01", "0:02"]),
        (3 * 3600, "time, h:min", ["0:00", "0:15", "0:30"]),
        (12 * 3600, "time", ["0 h", "1 h", "2 h"]),
        (DAY, "time", ["0 h", "2 h", "4 h"]),
        (6 * DAY, "time", ["0 h", "12 h", "24 h"]),
        (7 * DAY, "time", ["0 d", "1 d", "2 d"]),
        (28 * DAY, "time", ["0 d", "2.5 d", "5 d"]),
        (36500 * DAY, "time", ["0 d", "5000 d", "10000 d"]),
    ],
)
def test_numbers_of_the_time_axis(until_s, title, labels):
    step_s, name, label = choose_time_step(until_s)
    assert name == title
    assert [label(number) for number in range(3)] == labels
    assert 3 <= until_s / step_s <= 12


@pytest.mark.parametrize(
    ("greatest", "step"),
    [
        (0, 1),
        (1, 0.2),
        (5, 1),
        (9, 2),
        (10, 2),
        (12, 2.5),
        (500, 100),
        (501, 200),
        (8.64e6, 2e6),
        (0.03, 0.01),
        (1e-9, 2e-10),
    ],
)
def test_steps_of_an_axis_are_round_numbers(greatest, step):
    assert choose_step(greatest, 5) == pytest.approx(step)


@pytest.mark.parametrize(
    ("greatest", "expected"),
    [
        (0, (1, "")),
        (9999, (1, "")),
        (1e4, (1e3, "thousand ")),
        (1e6, (1e6, "million ")),
        (5e15, (1e15, "quadrillion ")),
    ],
)
def test_large_numbers_of_an_axis_are_divided(greatest, expected):
    assert choose_prefix(greatest) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (12.5, "12.5s"), (59.9, "1m"), (60, "1m"), (2465, "41m 5s"), (3599.9, "1h"), (22320, "6h 12m"),
        (7199, "2h"), (DAY, "24h"), (2 * DAY - 1, "2d"), (2 * DAY, "2d"), (3.1 * DAY, "3d 2h"),
    ],
)  # fmt: skip
def test_spans_in_their_two_greatest_units(seconds, text):
    assert format_span(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (-1e-300, "-1e-300"), (62.5, "62.5"), (2000, "2000"), (9999, "9999"), (12500, "12.5 k"),
        (8.64e6, "8.64 M"), (256e9, "256 G"), (1.5e12, "1.5 T"), (2e15, "2 P"), (103.99999, "104"),
    ],
)  # fmt: skip
def test_amounts_in_four_digits(value, text):
    assert format_amount(value) == text


def test_a_clock_has_hours_beyond_a_day():
    assert [format_clock(seconds) for seconds in (0, 59.6, 3661, 100 * 3600)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "100:00:00",
    ]
