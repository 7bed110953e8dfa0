"""The page of a simulation: graphs that show what the rows say, and a file that needs nothing beside it."""

from collections.abc import Iterable
from typing import Any

import pytest
from html_page import HtmlPage

from cpumond.cli.render.fair_share import BUCKETS, render_html
from cpumond.cli.render.html import format_amount
from cpumond.fairshare.simulate import SimulationRow

DAY = 86400.0


def make_row(time_s: float = 0.0, usage: float = 0.0, **changes: Any) -> SimulationRow:
    """A row of a burst pool that is granted ``usage`` for volume."""
    values: dict[str, Any] = {
        **dict.fromkeys(SimulationRow.__slots__, 0.0),
        "time_s": time_s, "pool": "reports", "guarantee_type": "burst", "resource_flow": 100.0,
        "burst_guarantee": 500.0, "integral_pool_capacity": 8.64e6,
        **dict.fromkeys(("demand", "usage", "fair_share", "fair_share_integral_guarantee"), usage),
    }  # fmt: skip
    return SimulationRow(**{**values, **changes})


def render(rows: Iterable[SimulationRow], until_s: float = DAY, **changes: Any) -> str:
    values: dict[str, Any] = {"title": "tree.toml", "main_resource": "cpu", **changes}
    return render_html(rows, until_s=until_s, **values)


def test_names_are_escaped():
    name = "<script>alert(\"1\")</script> & 'x' \udcff"
    text = render([make_row(pool=name), make_row(1.0, pool=name)], title=name)
    text.encode()
    page = HtmlPage(text)
    shown = name.replace("\udcff", r"\udcff")
    assert page.texts("title") == page.texts("h1") == page.texts("h2") == [shown]


def test_there_are_two_graphs_per_pool_with_an_integral_guarantee():
    kinds = {"a": "burst", "b": "none", "c": "relaxed"}
    rows = [make_row(time_s, pool=pool, guarantee_type=kind) for time_s in (0.0, 1.0) for pool, kind in kinds.items()]
    page = HtmlPage(render(rows))
    assert page.texts("h2") == ["a", "c"]
    assert [chart["sync"] for chart in page.charts] == ["pool 0", "pool 0", "pool 1", "pool 1"]
    assert page.texts("table") == []


def test_without_an_integral_guarantee_there_is_a_sentence():
    page = HtmlPage(render([make_row(pool="a", guarantee_type="none")]))
    assert "No pool of this tree has an integral guarantee, so there is no volume to draw." in page.texts("p")
    assert page.texts("script") == ["[]", ""]


def test_lines_are_thinned_and_spikes_stay():
    spikes = {43_000: 500.0, 60_000: 0.0}
    rows = [make_row(float(second), spikes.get(second, 100.0 + second % 7)) for second in range(0, 86401, 4)]
    page = HtmlPage(render(rows))
    times = page.charts[0]["times"]
    assert times == sorted(set(times))
    assert len(times) <= 3 * BUCKETS
    assert times[-1] == DAY
    for label in ("demand", "allocated", "integral guarantee"):
        values = page.line(label)["values"]
        assert (times[values.index(500)], times[values.index(0)]) == (43_000, 60_000)


def test_areas_are_the_parts_of_the_fair_share_one_on_the_other():
    row = make_row(
        strong_guarantee=100.0, usage=400.0, fair_share=400.0, fair_share_strong_guarantee=100.0,
        fair_share_integral_guarantee=200.0, fair_share_weight_proportional=100.0, burst_guarantee=300.0,
    )  # fmt: skip
    parts = [each for each in HtmlPage(render([row])).charts[0]["series"] if each.get("stack")]
    told = [(each["label"], each["values"][0]) for each in parts]
    assert told == [("strong guarantee", 100), ("integral guarantee", 200), ("weight-proportional share", 100)]


def test_levels_are_what_is_guaranteed_with_and_without_volume():
    def levels_of(row: SimulationRow) -> list[tuple[str, float]]:
        charts = HtmlPage(render([row])).charts
        return [(each["label"], each["level"]) for chart in charts for each in chart["series"] if "level" in each]

    assert levels_of(make_row()) == [("flow", 100), ("burst guarantee", 500), ("capacity", 8.64e6)]
    told = levels_of(make_row(strong_guarantee=200.0))[:3]
    assert told == [("strong + flow", 300), ("strong", 200), ("strong + burst", 700)]
    relaxed = make_row(guarantee_type="relaxed", burst_guarantee=0.0)
    assert levels_of(relaxed) == [("flow", 100), ("capacity", 8.64e6)]


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (-1e-300, "-1e-300"), (62.5, "62.5"), (2000, "2000"), (9999, "9999"), (12500, "12.5 k"),
    (8.64e6, "8.64 M"), (256e9, "256 G"), (1.5e12, "1.5 T"), (2e15, "2 P"), (103.99999, "104"),
])  # fmt: skip
def test_amounts_in_four_digits(value, text):
    assert format_amount(value) == text
