"""What ``cpumond report`` writes, with --savings, too: text and CSV of an answer of the scheduler."""

import csv
import io
import re
import time
from typing import Any

import msgspec
import pytest

from cpumond.cli.scheduler.report import choose_output, render_csv, render_text
from cpumond.cli.scheduler.report_rows import keep_pool, list_pools
from cpumond.cli.scheduler.savings import render_savings, render_savings_csv
from cpumond.core.errors import NoSuchError, UsageError
from cpumond.scheduler.elements.account import BudgetView
from cpumond.scheduler.history.model import ReportRow, ReportTree, ReportView
from cpumond.scheduler.history.savings import SavingsRow, SavingsTree, SavingsView, SavingsWeek, list_weeks
from cpumond.scheduler.model.budget import Budget

DAY_S = 86_400.0
UNTIL = 1_800_000_000.0
MARKUP = "<img src=x onerror=alert(1)>"
HOSTILE = [
    MARKUP, "=cmd()", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a\nb", "a\rb", "a\x1b[2Jb", "\u202egnp", 'say "hi", you',
    "x" * 5000, "😀" * 40, "</script><script>alert(1)</script>", "]]>", "&amp;", "' onload='x", "{0}", "[bold]b[/bold]",
]  # fmt: skip


def make_row(name: str, ordered: float = 10.0, **changes: Any) -> ReportRow:
    """Half of it used, 40 % reclaimed, a fifth of what was throttled late."""
    values = {
        "ordered": ordered, "limit": 0.6 * ordered, "used": 0.5 * ordered, "reclaimed": 0.4 * ordered,
        "throttled": 0.1 * ordered, "late": 0.02 * ordered, "peak_limit_cores": ordered / 4, "points": 100,
    }  # fmt: skip
    return ReportRow(name=name, **{**values, **changes})


def make_report(
    pools: list[ReportRow], operations: list[ReportRow] | None = None, left_out: int = 0, **changes: Any
) -> ReportView:
    total = make_row("<Root>", sum(row.ordered for row in pools if row.parent == "<Root>"))
    tree = ReportTree("default", total, pools, operations or [], left_out)
    values = {"since": UNTIL - DAY_S, "until": UNTIL, "covered_s": DAY_S, "period_s": 10.0, "trees": [tree]}
    return ReportView(**{**values, **changes})


@pytest.fixture
def report() -> ReportView:
    """Pools research > nightly > deep and other, two operations of them."""
    pools = [
        make_row("research", 400.0, parent="<Root>"),
        make_row("nightly", 100.25, parent="research"),
        make_row("deep", 50.0, parent="nightly"),
        make_row("other", 8.0, parent="<Root>"),
    ]
    operations = [
        make_row("op-1", 90.0, title="a title", user="ann", pool="deep", state="running"),
        make_row("op-2", 8.0, user="bob", pool="other", state="completed"),
    ]
    return make_report(pools, operations, left_out=3)


def test_text_has_a_table_of_the_tree_and_one_of_its_operations(report):
    lines = render_text(report, DAY_S, 20, None, False).splitlines()
    start = lines.index("tree default")
    names = [line.split()[0] for line in lines[start + 1 : start + 7]]
    assert names == ["pool", "other", "research", "nightly", "deep", "total"]
    assert [len(line) - len(line.lstrip()) for line in lines[start + 2 : start + 7]] == [0, 0, 2, 4, 0]
    cells = lines[start + 4].split()
    assert cells == ["nightly", "100.25", "50.12", "50.0", "40.1", "40.0", "10.03", "2", "20.0", "0", "25.06"]
    assert lines[start + 6].split()[1] == "408"
    assert lines[start + 9].split()[:6] == ["op-1", "a", "title", "ann", "deep", "running"]
    assert lines[start + 11].split() == ["total", "98", "49", "50.0", "39.2", "40.0", "9.8", "1.96", "20.0", "0", "-"]
    assert lines[start + 12] == "3 more operations with smaller requests: --top shows more of them"
    assert lines[-10:][0].startswith("requested ")


def test_text_says_that_the_history_is_shorter_than_asked():
    pools = [make_row("a", parent="<Root>")]
    short = make_report(pools, covered_s=3600.0)
    assert "less than the 1 d requested" in render_text(short, DAY_S, 20, None, False)
    almost = make_report(pools, covered_s=DAY_S - 15.0)
    assert "less than" not in render_text(almost, DAY_S, 20, None, False)


def test_all_formats_say_how_many_operations_had_no_series():
    pools = [make_row("a", parent="<Root>")]
    report = make_report(pools, operations_without_series=12)
    sentence = "Up to 12 operations at a time had no series of their own"
    assert sentence in render_text(report, DAY_S, 20, None, False)
    assert {row["operations_without_series"] for row in read_csv(report)} == {"12"}
    assert msgspec.json.decode(msgspec.json.encode(report))["operations_without_series"] == 12
    assert "no series" not in render_text(make_report(pools), DAY_S, 20, None, False)


def test_a_report_of_days_lists_users_in_place_of_operations():
    users = [make_row(f"user-{number}", 50.0 - number) for number in range(4)]
    tree = ReportTree("default", make_row("<Root>"), [make_row("a", parent="<Root>")], [], 0, users)
    report = make_report([], since=UNTIL - 7 * DAY_S, covered_s=7 * DAY_S, trees=[tree])
    lines = render_text(report, 7 * DAY_S, 2, None, False).splitlines()
    assert lines[0].endswith("7 d of it are recorded, in whole days, UTC")
    start = next(number for number, line in enumerate(lines) if line.startswith("user "))
    assert [line.split()[:2] for line in lines[start + 1 : start + 3]] == [["user-0", "50"], ["user-1", "49"]]
    assert lines[start + 3] == "2 more users with smaller requests: --top shows more of them"
    assert [row["name"] for row in read_csv(report) if row["kind"] == "user"] == [row.name for row in users]
    assert "user-0" in render_text(report, 7 * DAY_S, 2, 60, False), "the names are there on a narrow terminal"
    kept = render_text(keep_pool(report, "a", top=20), 7 * DAY_S, 20, None, False)
    assert "For longer times users of whole trees are listed (without --pool)" in kept


def test_what_was_not_ordered_has_no_percent():
    text = render_text(make_report([make_row("idle", 0.0, parent="<Root>")]), DAY_S, 20, None, False)
    line = next(line for line in text.splitlines() if line.startswith("idle"))
    assert line.split() == ["idle", "0", "0", "-", "0", "-", "0", "0", "-", "0", "0"]
    assert "no operations in this time" in text


def test_no_name_moves_the_cursor_or_makes_a_line():
    pools = [make_row(name, parent="<Root>") for name in HOSTILE]
    operations = [make_row(f"op-{n}", title=name, user=name, pool=name) for n, name in enumerate(HOSTILE)]
    text = render_text(make_report(pools, operations), DAY_S, 20, None, False)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\n") == len(HOSTILE) * 2 + 18
    assert "[bold]b[/bold]" in text


def read_csv(report: ReportView) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render_csv(report), newline="")))


def test_csv_has_a_row_for_each_tree_pool_and_operation(report):
    rows = read_csv(report)
    assert [(row["kind"], row["name"], row["parent"], row["depth"]) for row in rows] == [
        ("total", "<Root>", "", "0"),
        ("pool", "other", "<Root>", "0"),
        ("pool", "research", "<Root>", "0"),
        ("pool", "nightly", "research", "1"),
        ("pool", "deep", "nightly", "2"),
        ("operation", "op-1", "", "0"),
        ("operation", "op-2", "", "0"),
    ]
    assert {key: value for key, value in rows[5].items() if key not in ("since", "until")} == {
        "kind": "operation", "tree": "default", "name": "op-1", "parent": "", "depth": "0", "title": "a title",
        "user": "ann", "pool": "deep", "state": "running", "ordered_core_hours": "90", "used_core_hours": "45",
        "used_of_ordered_percent": "50", "reclaimed_core_hours": "36", "reclaimed_of_ordered_percent": "40",
        "throttled_core_hours": "9", "late_core_hours": "1.8", "late_of_throttled_percent": "20",
        "peak_limit_cores": "22.5", "lost_core_hours": "0", "limit_core_hours": "54",
            "points": "100", "covered_s": "86400",
        "operations_without_series": "0",
    }  # fmt: skip
    assert (rows[0]["since"], rows[0]["until"]) == ("2027-01-14T08:00:00Z", "2027-01-15T08:00:00Z")


def test_csv_keeps_every_name_in_its_cell():
    operations = [make_row(f"op-{n}", title=name, user=name, pool=name) for n, name in enumerate(HOSTILE)]
    rows = [row for row in read_csv(make_report([], operations)) if row["kind"] == "operation"]
    for row, name in zip(rows, HOSTILE, strict=True):
        for key in ("title", "user", "pool"):
            assert row[key].replace("'", "") == name.replace("'", "")
            assert not any(line[:1] in ("=", "+", "-", "@", "\t") for line in row[key].splitlines())
        assert row["points"] == "100"


def test_only_a_pool_and_what_is_below_it_is_kept(report):
    kept = keep_pool(report, "nightly", top=20).trees[0]
    assert [(line.row.name, line.depth) for line in list_pools(kept)] == [("nightly", 0), ("deep", 1)]
    assert kept.total.ordered == 100.25
    assert [row.name for row in kept.operations] == ["op-1"]
    none = keep_pool(report, "nightly", top=0).trees[0]
    assert (none.operations, none.left_out_operations) == ([], 1)


def test_operations_that_may_be_of_another_pool_are_not_shown_as_of_this(report):
    forgotten = make_row("op-3", 1.0)
    tree = msgspec.structs.replace(report.trees[0], operations=[*report.trees[0].operations, forgotten])
    report = msgspec.structs.replace(report, trees=[tree])
    lines = render_text(keep_pool(report, "nightly", top=20), DAY_S, 20, None, False).splitlines()
    (line,) = (line for line in lines if "more operations" in line)
    assert line.startswith("at most 4 more operations, of all pools, may belong to this one: ")
    assert "--top" not in line
    none = render_text(keep_pool(report, "nightly", top=0), DAY_S, 20, None, False)
    assert "1 more operation with smaller requests: --top shows more of them; at most 4 more operations, of all" in none
    tree = msgspec.structs.replace(report.trees[0], operations=tree.operations[:2], left_out_operations=0)
    certain = keep_pool(msgspec.structs.replace(report, trees=[tree]), "nightly", top=20)
    assert "more operation" not in render_text(certain, DAY_S, 20, None, False)


def test_an_unknown_pool_gets_a_suggestion(report):
    with pytest.raises(NoSuchError, match=r'no pool "reserch" in this time; did you mean "research"\?'):
        keep_pool(report, "reserch", top=20)
    with pytest.raises(NoSuchError, match=r'no pool "zzz" in this time; `cpumond report` without --pool'):
        keep_pool(report, "zzz", top=20)


def test_budgets_of_pools_stand_below_their_tree_with_the_day_of_their_end(report):
    text = "192 of 620 core-hours ordered this month (31%), will be spent on 2026-11-23 at the present rate"
    view = BudgetView("default", "pool", "deep", Budget(620), "2026-11-01", 620.0, 192.0, "within", "2026-11-23", text)
    tree = msgspec.structs.replace(report.trees[0], budgets=[view, msgspec.structs.replace(view, name="other")])
    whole = msgspec.structs.replace(report, trees=[tree])
    lines = render_text(whole, DAY_S, 20, None, False).splitlines()
    budgets = [line for line in lines if "budget" in line]
    assert budgets == [f"budget of pool {name}: {text}" for name in ("deep", "other")]
    assert [each.name for each in keep_pool(whole, "research", 20).trees[0].budgets] == ["deep"]


def test_pools_that_are_gone_or_hang_on_each_other_are_listed():
    parents = {"gone": "", "orphan": "nobody", "a": "b", "b": "a"}
    pools = [make_row(name, parent=parent) for name, parent in parents.items()]
    (tree,) = make_report(pools).trees
    told = sorted((line.row.name, line.depth) for line in list_pools(tree))
    assert told == [("a", 0), ("b", 1), ("gone", 0), ("orphan", 0)]
    kept = keep_pool(make_report(pools), "b", top=1).trees[0]
    assert {row.name for row in kept.pools} == {"a", "b"}


@pytest.mark.parametrize(("given", "expected"), [
    ((None, None, False), ("text", None)), (("csv", None, False), ("csv", None)),
    ((None, None, True), ("json", None)), (("json", "x.txt", True), ("json", "x.txt")),
    ((None, "x.CSV", False), ("csv", "x.CSV")), ((None, "x", False), ("text", "x")),
    ((None, "x.txt", False), ("text", "x.txt")), (("text", "x.pdf", False), ("text", "x.pdf")),
    (("text", "x.csv", False), ("text", "x.csv")), ((None, "-", False), ("text", None)),
])  # fmt: skip
def test_the_format_is_told_or_taken_from_the_name(given, expected):
    assert choose_output(*given) == expected


@pytest.mark.parametrize(("given", "sentence"), [
    (("csv", None, True), "--json and --format csv contradict each other; use one"),
    ((None, "x.html", False), "--output x.html: its ending is no known format (.txt, .csv, .json)"),
    ((None, "", False), "--output: expected the name of a file"),
])  # fmt: skip
def test_options_that_disagree_are_refused(given, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        choose_output(*given)


MONDAY = 1_772_409_600.0  # 2026-03-02, UTC


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_weeks_are_those_of_utc_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        rows = [SavingsRow(name="<Root>", extra_used=4.0, gain=4.0)]
        weeks = [SavingsWeek(*times, 7 * DAY_S, rows) for times in list_weeks(MONDAY, MONDAY + 14 * DAY_S)]
        tree = SavingsTree("default", rows, weeks)
        view = SavingsView(since=MONDAY, until=MONDAY + 14 * DAY_S, covered_s=14 * DAY_S, trees=[tree])
        lines = render_savings(view, view.covered_s, None, False).splitlines()
        starts = [line.split()[0] for line in lines if line.startswith("2026-03-") and "recorded" not in line]
        assert starts == ["2026-03-02", "2026-03-09"]
        cells = list(csv.DictReader(io.StringIO(render_savings_csv(view))))
        assert [row["week_since"] for row in cells] == ["2026-03-02T00:00:00.000Z", "2026-03-09T00:00:00.000Z"]
    finally:
        monkeypatch.undo()
        time.tzset()
