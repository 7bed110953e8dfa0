"""What ``status``, ``top``, ``explain`` and the other commands print for an answer of the agent."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx2
import msgspec
import pytest

from cpumond.cli import control, explain, options, run, tables
from cpumond.cli.client import (
    AgentClient,
    DecisionAnswer,
    ExplainAnswer,
    JobAnswer,
    RegisteredAnswer,
    StatusAnswer,
    explain_failure,
    find_socket,
    quote_name,
    read_refusal,
)
from cpumond.config import parse_layer
from cpumond.errors import AccessError, ConfigError, UnavailableError, UsageError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LONG_ID = "0123456789abcdef" * 4

JOB: dict[str, object] = {
    "job_id": "steady-low",
    "operation_id": "sort-17",
    "cgroup": "jobs/steady-low",
    "status": "reclaim",
    "mode": "reclaim",
    "refused": "",
    "cpu_limit": 10.0,
    "current_cpu_limit": 3.2,
    "monitor_cpu_limit": 3.2,
    "usage": 1.75,
    "smoothed_cpu_usage": 1.8,
    "votes_sum": -4,
    "throttled_ratio": 0.0,
    "last_result": "applied",
    "last_error": "",
    "override_left_s": None,
    "pinned_cpu_limit": None,
    "fast_restores": 0,
    "write_errors": 0,
}
SECTION: dict[str, object] = {
    "mode": "reclaim",
    "enable_cpu_reclaim": True,
    "check_period": "1s",
    "relative_upper_bound": 0.9,
    "relative_lower_bound": 0.6,
    "increase_coefficient": 1.45,
    "decrease_coefficient": 0.97,
    "vote_mode": "document",
    "min_cpu_limit": 1.0,
    "min_limit_ratio": 0.0,
    "headroom_ratio": 0.0,
    "direction": "both",
    "actuator": "quota",
    "burst_ratio": None,
}
BOUNDS: dict[str, object] = {
    "floor": 1.0,
    "cap": 10.0,
    "lower_bound": 1.92,
    "upper_bound": 2.88,
    "quota_found": None,
    "ancestor_cap": None,
    "ancestor": "",
}
WINDOW: dict[str, object] = {
    "size": 5,
    "values": [2.0, 1.9, 1.85, 1.82, 1.8],
    "votes": [0, -1, -1, -1, -1],
    "votes_sum": -4,
    "threshold": 3,
}
SHRINK: dict[str, object] = {
    "at": 1795223773.1,
    "kind": "shrink",
    "old_cores": 3.3,
    "new_cores": 3.2,
    "applied_cores": 3.2,
    "usage_cores": 1.75,
    "smoothed_cores": 1.8,
    "throttled_ratio": 0.0,
    "votes_sum": -4,
    "result": "applied",
}
RESTORE = {**SHRINK, "kind": "restore", "old_cores": 3.2, "new_cores": 10.0, "applied_cores": 10.0, "votes_sum": None}


PEAK: dict[str, object] = {
    "peak_cores": 3.05, "target_cores": 3.2, "caution": 3.0, "half_life_s": 40.0, "watched_s": 600.0, "held_count": 9,
    "held_s": 1.9, "held_ratio": 0.0031, "throttle_budget": 0.004,
}  # fmt: skip


def make_job(**changes: object) -> JobAnswer:
    """A job of the status as it comes over the socket."""
    return msgspec.json.decode(msgspec.json.encode({**JOB, **changes}), type=JobAnswer)


def make_status(*jobs: dict[str, object], **changes: object) -> StatusAnswer:
    """A status with these jobs (JOB changed by each)."""
    answer = {
        "node_id": "node-7",
        "layout": "v2",
        "tick": 3,
        "tick_duration_s": 0.0012,
        "check_period_s": 1.0,
        "paused": False,
        "totals": {"cpu_limit": 10.0, "current_cpu_limit": 3.2, "reclaimed": 6.8},
        "counters": {"late_ticks": 0, "foreign_writes": {"raise": 0, "lower": 0}, "decisions": {"grow": 0}},
        "problems": [],
        "last_tick_age_s": 0.4,
        "jobs": [{**JOB, **job} for job in jobs],
        **changes,
    }
    return msgspec.json.decode(msgspec.json.encode(answer), type=StatusAnswer)


def make_explain(
    bounds: dict[str, object] | None = None,
    window: dict[str, object] | None = None,
    section: dict[str, object] | None = None,
    **changes: object,
) -> ExplainAnswer:
    """What ``explain`` gets, with changes to its parts."""
    answer = {
        **JOB,
        "job_cpu_monitor": {**SECTION, **(section or {})},
        "bounds": {**BOUNDS, **(bounds or {})},
        "window": {**WINDOW, **(window or {})},
        "in_force": {"quota_us": 320000, "period_us": 100000, "burst_us": 0, "weight": 100, "cores": 3.2},
        "found": {"quota_us": None, "period_us": 100000, "burst_us": 0, "weight": 100, "cores": None},
        "notes": [],
        "contested_losses": 0,
        "pressure": None,
        "aggregated": {"smoothed_cpu_s": 20.0, "preemptible_cpu_s": 60.0, "preempted_cpu_s": 60.0, "max_cpu_s": 100.0},
        "decisions": [SHRINK],
        "directory": "/sys/fs/cgroup/jobs/steady-low",
        "source": "jobs/*",
        "cpu_limit_given": 10.0,
        "xattr_mode": None,
        "paused": False,
        "pinned_until": None,
        "held_s": 0.0,
        "start_left_s": 0.0,
        **changes,
    }
    return msgspec.json.decode(msgspec.json.encode(answer), type=ExplainAnswer)


def when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def words(line: str) -> str:
    """A line of a table with one space between its words."""
    return " ".join(line.split())


# status


def test_status_into_a_pipe_is_one_plain_line_for_each_job_with_its_whole_id():
    jobs = [{"job_id": LONG_ID}, {"job_id": "x", "operation_id": "an operation with a long name " * 5}]
    text = tables.draw_status(make_status(*jobs), None, False)
    lines = text.split("\n")
    assert not ANSI.search(text)
    assert all(line == line.rstrip() for line in lines)
    assert lines[0] == "node-7: 2 jobs, cgroups v2, one check every 1s, the last one took 1.2 ms"
    assert words(lines[1]) == "job operation status ordered limit usage smoothed votes throttled last result"
    assert words(lines[2]) == f"{LONG_ID} sort-17 reclaim 10.00 3.20 1.75 1.80 -4 0% applied"
    assert lines[3].startswith("x ")
    assert lines[4] == "total: 10 cores ordered, limit 3.2, 6.8 reclaimed"
    assert len(lines) == 5


def test_columns_of_a_rule_are_there_where_a_job_is_under_it():
    def heading(*jobs: dict[str, object]) -> str:
        return words(tables.draw_status(make_status(*jobs), None, False).split("\n")[1])

    peak: dict[str, object] = {"limit_rule": "peak", "peak": PEAK, "votes_sum": None}
    assert heading({"operation_id": ""}) == "job status ordered limit usage smoothed votes throttled last result"
    assert (
        heading({**peak, "operation_id": ""}) == "job status ordered limit usage peak half-life throttled last result"
    )
    both = tables.draw_status(make_status(peak, {"job_id": "d"}), None, False).split("\n")
    assert words(both[1]).endswith("usage smoothed peak half-life votes throttled last result")
    assert words(both[2]).endswith("1.75 1.80 3.05 40 s - 0% applied")
    assert words(both[3]) == "d sort-17 reclaim 10.00 3.20 1.75 1.80 -4 0% applied"
    new = tables.draw_status(make_status({**peak, "peak": {**PEAK, "peak_cores": None}}), None, False).split("\n")
    assert words(new[2]).endswith("1.75 - 40 s 0% applied")
    assert "peak" in tables.draw_top(make_status(peak), "job", 100, False, 24)


def test_a_rule_s_columns_are_the_first_to_go_on_a_narrow_terminal():
    peak: dict[str, object] = {"limit_rule": "peak", "peak": PEAK}
    text = tables.draw_status(make_status(peak), 60, False)
    assert all(len(line) <= 60 for line in text.split("\n"))
    assert "half-life" in text.split("no room for: ")[1]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_status_fits_a_terminal_and_shortens_no_id(width):
    jobs = [{"job_id": LONG_ID}, {"job_id": "busy", "operation_id": "sort"}, {"job_id": "c", "mode": "shadow"}]
    text = tables.draw_status(make_status(*jobs), width, False)
    assert all(len(line) <= width for line in text.split("\n")), text
    first_words = "".join(line.split(" ")[0] for line in text.split("\n"))
    assert LONG_ID in first_words
    assert "busy" in text
    assert "limit" in text


def test_status_on_a_narrow_terminal_says_what_it_left_out():
    answer = make_status({"job_id": LONG_ID})
    assert "no room for: operation, throttled" in tables.draw_status(answer, 80, False)
    assert "no room for" not in tables.draw_status(answer, 140, False)


def test_status_folds_a_long_name_before_it_leaves_a_column_out():
    text = tables.draw_status(make_status({"job_id": LONG_ID}), 120, False)
    assert "throttled" in text
    assert LONG_ID not in text


def test_status_on_a_terminal_is_coloured_where_that_is_wanted():
    answer = make_status({"status": "contested"})
    assert ANSI.search(tables.draw_status(answer, 120, True))
    assert not ANSI.search(tables.draw_status(answer, 120, False))


def test_status_without_jobs_says_how_to_get_some():
    assert "no jobs; see `cpumond doctor`, or add one with `cpumond job add`" in tables.draw_status(
        make_status(), 80, False
    )


def test_status_leaves_the_operation_out_where_no_job_has_one():
    assert "operation" not in tables.draw_status(make_status({"operation_id": ""}), None, False)


def test_status_shows_what_a_job_in_shadow_would_have():
    shadow = {
        "status": "shadow",
        "mode": "shadow",
        "current_cpu_limit": 10.0,
        "monitor_cpu_limit": 2.5,
        "last_result": "",
    }
    lines = tables.draw_status(make_status({}, shadow), None, False).split("\n")
    assert "(would be)" in lines[1]
    assert words(lines[3]) == "steady-low sort-17 shadow 10.00 10.00 2.50 1.75 1.80 -4 0% -"
    assert lines[4].endswith("6.8 reclaimed (7.5 more in shadow)")


def test_status_shows_what_is_not_known_yet_as_a_dash():
    job = {"usage": None, "smoothed_cpu_usage": None, "votes_sum": None, "last_result": ""}
    line = tables.draw_status(make_status(job), None, False).split("\n")[2]
    assert words(line) == "steady-low sort-17 reclaim 10.00 3.20 - - - 0% -"


def test_status_says_in_words_what_needs_an_operator():
    answer = make_status(
        {"last_error": "cannot write '1' to cpu.max: Invalid argument"},
        paused=True,
        problems=["a: id_regex 'x' does not match; left out"],
        counters={"foreign_writes": {"raise": 2, "lower": 1}, "write_errors": 4, "shed_checks": 5},
        last_tick_age_s=75.0,
    )
    lines = tables.draw_status(answer, None, False).split("\n")
    assert lines[4:] == [
        "stuck: the last check was 1m15s ago; see the agent's log",
        "paused: no limit is written while the pause file lies in the agent's runtime_dir",
        "foreign writes: somebody else raised a limit 2 x and lowered one 1 x",
        "write errors: 4 limits could not be written",
        "over its CPU budget: 5 checks were left out ([cost])",
        "problem: a: id_regex 'x' does not match; left out",
        "job steady-low: cannot write '1' to cpu.max: Invalid argument",
    ]


def test_a_name_cannot_move_the_cursor_or_be_taken_for_markup():
    text = tables.draw_status(make_status({"job_id": "a\x1b[2Jb\nc", "operation_id": "[bold]x[/bold]"}), None, False)
    assert "\x1b" not in text
    assert "a\\x1b[2Jb\\nc" in text
    assert "[bold]x[/bold]" in text


# top


def test_top_sorts_and_puts_the_one_with_most_first():
    jobs = [
        {"job_id": "a", "cpu_limit": 4.0, "current_cpu_limit": 4.0, "usage": 0.1},
        {"job_id": "b", "cpu_limit": 9.0, "current_cpu_limit": 1.0, "usage": None},
        {"job_id": "c", "cpu_limit": 8.0, "current_cpu_limit": 7.0, "usage": 3.0},
    ]

    def order(sort):
        lines = tables.draw_top(make_status(*jobs), sort, None, False, None).split("\n")
        return [line.split()[0] for line in lines[2:]]

    assert order("reclaimed") == ["b", "c", "a"]
    assert order("usage") == ["c", "a", "b"]
    assert order("limit") == ["c", "a", "b"]
    assert order("job") == ["a", "b", "c"]


@pytest.mark.parametrize("height", [1, 2, 3, 5, 10, 24, 60])
def test_top_fits_the_height_and_says_how_many_lines_are_hidden(height):
    jobs = [{"job_id": f"job-{number:03d}"} for number in range(50)]
    lines = tables.draw_top(make_status(*jobs, paused=True), "job", 80, False, height).split("\n")
    assert len(lines) <= height
    if height >= 60:
        assert lines[-1].startswith("job-049")
    elif height >= 5:
        shown = [line for line in lines if line.startswith("job-")]
        assert lines[-1] == f"... {50 - len(shown)} more lines, 50 jobs by job"


def test_top_without_a_height_shows_all_jobs():
    jobs = [{"job_id": f"job-{number:03d}"} for number in range(50)]
    assert len(tables.draw_top(make_status(*jobs), "job", None, False, None).split("\n")) == 52


def test_top_keeps_notices_from_taking_the_screen():
    text = tables.draw_top(make_status({}, problems=["p"] * 40), "job", 80, False, 20)
    assert "and 38 more notices: cpumond status" in text
    assert "steady-low" in text


def test_top_of_no_jobs():
    assert tables.draw_top(make_status(), "job", 80, False, 24).split("\n")[-1] == "no jobs"


def test_json_of_top_is_the_whole_answer_in_the_order_of_the_table():
    content = msgspec.json.encode({"new_key": 1, "jobs": [{**JOB, "job_id": name} for name in ("b", "a")]})
    answer = control.sort_answer(content, "job")
    assert answer["new_key"] == 1
    assert [job["job_id"] for job in answer["jobs"]] == ["a", "b"]


# explain: the first sentences


def test_why_a_limit_is_lowered():
    assert explain.describe_why(make_explain()) == (
        "The limit of steady-low is 3.2 of 10 ordered cores, because it lately used about 1.8 (smoothed). The last "
        f"change, 3.3 -> 3.2 at {when(1795223773.1)}: use stayed below 0.6 of the limit "
        "(votes -4, more than 3 are needed)."
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"refused": "it is outside managed_roots", "status": "refused"},
            ": nothing is ever written to its cgroup, because it is outside managed_roots.",
        ),
        (
            {"status": "contested", "contested_losses": 5},
            (
                ", as another program left it: that one changed the limit back 5 times, so the agent writes no more. "
                "End the other program's writes, then `cpumond unpin steady-low`."
            ),
        ),
        (
            {"status": "overridden", "override_left_s": 570.2},
            (
                ": somebody else set it, which is respected for 9m30s more. "
                "`cpumond unpin steady-low` gives it back to the monitor now."
            ),
        ),
        ({"status": "pinned", "pinned_cpu_limit": 3.2}, ": an operator pinned it until `cpumond unpin steady-low`."),
        (
            {"status": "pinned", "pinned_cpu_limit": 3.2, "pinned_until": 1795223999.0},
            f": an operator pinned it until {when(1795223999.0)}.",
        ),
        ({"status": "off", "mode": "off"}, ": its mode is off, it is neither measured nor changed."),
        (
            {"status": "shadow", "mode": "shadow", "monitor_cpu_limit": 2.5},
            (
                ": its mode is shadow, so nothing is written. In mode reclaim it would be 2.5 now, "
                "because it lately used about 1.8 (smoothed)."
            ),
        ),
        (
            {"status": "shadow", "mode": "shadow", "smoothed_cpu_usage": None},
            ": its mode is shadow, so nothing is written. In mode reclaim it would be 3.2 now.",
        ),
    ],
)
def test_why_the_monitor_does_not_decide(changes, sentence):
    assert explain.describe_why(make_explain(**changes)) == (
        f"The limit of steady-low is 3.2 of 10 ordered cores{sentence}"
    )


def test_why_a_limit_stands_at_its_floor_and_is_paused():
    why = explain.describe_why(make_explain({"floor": 3.2}, section={"min_cpu_limit": 3.2}, decisions=[], paused=True))
    assert why.endswith("(smoothed). This is its floor (min_cpu_limit = 3.2). Writes are paused, so it stays there.")


def test_why_a_limit_was_never_lowered():
    why = explain.describe_why(make_explain(current_cpu_limit=10.0, decisions=[]))
    assert why == "The limit of steady-low is 10 of 10 ordered cores, all it may have: it was not lowered so far."


def test_why_a_limit_was_given_back_for_pressure():
    waited = {**RESTORE, "throttled_ratio": 0.0, "pressure_ratio": 0.625}
    reason = explain.describe_reason(msgspec.convert(waited, DecisionAnswer))
    assert reason == "some task waited for CPU 62% of the time, so all was given back at once"
    reason = explain.describe_reason(msgspec.convert({**waited, "throttled_ratio": 0.3}, DecisionAnswer))
    assert reason.startswith("30% of the periods throttled, some task waited for CPU 62% of the time, so all")


def test_why_a_limit_was_given_back():
    why = explain.describe_why(
        make_explain(current_cpu_limit=10.0, decisions=[SHRINK, {**RESTORE, "throttled_ratio": 0.8}])
    )
    assert why == (
        "The limit of steady-low is 10 of 10 ordered cores, all it may have. The last change, 3.2 -> 10 at "
        f"{when(1795223773.1)}: 80% of the periods throttled, so all was given back at once."
    )


def test_why_a_limit_can_never_be_lowered():
    why = explain.describe_why(make_explain({"floor": 1.0, "cap": 1.0}, cpu_limit=1.0, current_cpu_limit=1.0))
    assert why == (
        "The limit of steady-low is 1 of 1 ordered cores, all it may have, and never goes below: "
        "its floor is as high (min_cpu_limit = 1)."
    )


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ({"ancestor_cap": 4.0, "ancestor": "jobs"}, "The quota of jobs above it, 4 cores, allows no more."),
        ({"quota_found": 4.0}, "The quota its cgroup was found with, 4 cores, allows no more."),
    ],
)
def test_why_a_job_does_not_get_what_it_ordered(bounds, sentence):
    why = explain.describe_why(make_explain({"cap": 4.0, **bounds}, current_cpu_limit=4.0, decisions=[]))
    assert why.startswith("The limit of steady-low is 4 of 10 ordered cores, all it may have")
    assert why.endswith(sentence)


# explain: the next check


def test_the_next_check_shrinks():
    assert explain.describe_next(make_explain()) == (
        "needs |sum| > 3, has -4: 4 of 5 below 0.6 x 3.2 = 1.92 cores -> shrink to 3.1 (x 0.97)"
    )


def test_the_next_check_grows():
    window = {"votes": [1] * 5, "values": [3.1] * 5}
    assert explain.describe_next(make_explain(window=window)) == (
        "needs |sum| > 3, has +5: 5 of 5 above 0.9 x 3.2 = 2.88 cores -> grow to 4.64 (x 1.45)"
    )


def test_the_next_check_grows_no_further_than_the_cap():
    e = make_explain({"cap": 4.0}, {"votes": [1] * 5})
    assert explain.describe_next(e).endswith("-> grow to 4 (x 1.45)")


@pytest.mark.parametrize(
    ("votes", "text"),
    [
        ([0] * 5, "needs |sum| > 3, has 0: all between the bounds -> hold"),
        (
            [-1, -1, -1, 1, 0],
            (
                "needs |sum| > 3, has -2: 3 of 5 below 0.6 x 3.2 = 1.92 cores and "
                "1 of 5 above 0.9 x 3.2 = 2.88 cores -> hold"
            ),
        ),
        ([-1, -1, -1, 0, 0], "needs |sum| > 3, has -3: 3 of 5 below 0.6 x 3.2 = 1.92 cores -> hold"),
        ([-1, -1], "decides when the window has 5 votes; now 2, sum -2"),
        ([], "decides when the window has 5 votes; now 0, sum 0"),
    ],
)
def test_the_next_check_holds(votes, text):
    assert explain.describe_next(make_explain(window={"votes": votes})) == text


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"bounds": {"floor": 3.2}, "section": {"min_cpu_limit": 3.2}}, "but 3.2 is its floor (min_cpu_limit = 3.2)"),
        ({"section": {"direction": "up-only"}}, "but its direction is up-only"),
        ({"mode": "up-only"}, "but its mode is up-only"),
        ({"held_s": 61.0}, "but restore_hold or startup_boost keep it for 1m1s more"),
        ({"status": "pinned"}, "shrink to 3.1 (x 0.97), not written: it is pinned"),
        ({"mode": "shadow", "status": "shadow"}, "shrink to 3.1 (x 0.97), not written in mode shadow"),
        ({"paused": True}, "shrink to 3.1 (x 0.97), not written while writes are paused"),
        ({"window": {"votes": [1] * 5}, "bounds": {"cap": 3.2}}, "would grow, but 3.2 is its cap already"),
        ({"window": {"votes": [1] * 5}, "section": {"direction": "down-only"}}, "but direction is down-only"),
    ],
)
def test_the_next_check_names_what_keeps_it_from_moving(changes, end):
    assert explain.describe_next(make_explain(**changes)).endswith(end)


def test_the_next_check_in_mode_off_and_before_the_start():
    assert explain.describe_next(make_explain(mode="off")) == "none in mode off"
    assert explain.describe_next(make_explain(start_left_s=5.0)) == "measured after start_delay, in 5s"


def test_votes_of_the_ytsaurus_form_are_shown_as_such():
    e = make_explain(window={"values": [-1.0] * 4, "votes": [-1] * 4}, section={"vote_mode": "ytsaurus"})
    assert explain.list_votes(e)[1] == "   vote of its check  -1"


@pytest.mark.parametrize(
    ("votes", "end"),
    [
        ([-1] * 4, "has -4 and one vote to come: -> shrink to 3.1 (x 0.97), if that is not +1"),
        ([-1, -1, -1, 0], "has -3 and one vote to come: -> shrink to 3.1 (x 0.97), if that is -1"),
        ([1, 1, 1, 0], "has +3 and one vote to come: -> grow to 4.64 (x 1.45), if that is +1"),
        ([1] * 4, "has +4 and one vote to come: -> grow to 4.64 (x 1.45), if that is not -1"),
        ([1, -1, 0, 0], "has 0 and one vote to come -> hold"),
        ([1], "decides when the window has 5 votes; now 1, sum +1"),
    ],
)
def test_the_form_of_ytsaurus_decides_with_the_next_vote(votes, end):
    e = make_explain(window={"values": votes, "votes": votes}, section={"vote_mode": "ytsaurus"})
    assert explain.describe_next(e).endswith(end)


@pytest.mark.parametrize(
    ("section", "floor", "reason"),
    [
        ({}, 1.0, "min_cpu_limit = 1"),
        ({"min_limit_ratio": 0.25}, 2.5, "min_limit_ratio = 0.25 of the cap"),
        ({"headroom_ratio": 0.5}, 2.7, "headroom_ratio = 0.5 above the use of the window"),
    ],
)
def test_the_floor_is_said_with_its_reason(section, floor, reason):
    facts = dict(explain.list_facts(make_explain({"floor": floor}, section=section)))
    assert facts["floor"] == f"{floor:g} cores: {reason}"


# explain: everything


def test_explain_tells_the_whole_story():
    text = explain.draw_explain(make_explain(), 10, None, False)
    assert text.split("\n")[0].startswith("The limit of steady-low is 3.2 of 10 ordered cores, because ")
    for line in (
        "job         steady-low, operation sort-17, from source jobs/*",
        "cgroup      /sys/fs/cgroup/jobs/steady-low",
        "ordered     10 cores",
        "cap         10 cores: least of the order, the quota found (none), the least above (none)",
        "floor       1 cores: min_cpu_limit = 1",
        "mode        reclaim",
        (
            "in force    320000 us of each 100000 us = 3.2 cores, weight 100; "
            "found: no quota (period 100000 us), weight 100"
        ),
        "use         1.75 cores in the last check, smoothed 1.80, 0% of the periods throttled",
        "pressure    not known (no PSI for this cgroup)",
        "last write  applied",
        "so far      core-seconds: 100 ordered, 20 used (smoothed), 60 reclaimed",
        "votes against the limit of 3.2: -1 below 0.6 x 3.2 = 1.92, +1 above 0.9 x 3.2 = 2.88",
        "      2.000   0",
        "      1.900  -1",
        "next check: needs |sum| > 3, has -4: 4 of 5 below 0.6 x 3.2 = 1.92 cores -> shrink to 3.1 (x 0.97)",
        "last 1 of 1 decision, local time:",
    ):
        assert line in text.split("\n"), line
    assert "  relative_upper_bound = 0.9" in text
    stamp = time.strftime("%b %d %H:%M:%S", time.localtime(1795223773.1))
    assert text.endswith(f"{stamp}  shrink  3.30 -> 3.20  applied  votes -4, use 1.75, smoothed 1.80")


def test_explain_tells_what_bounds_and_others_did():
    e = make_explain(
        {"quota_found": 12.0, "ancestor_cap": 11.0, "ancestor": "jobs"},
        section={"actuator": "weight"},
        notes=["held to 11 cores, the quota of jobs"],
        xattr_mode="up-only",
        paused=True,
        status="contested",
        contested_losses=5,
        source="",
        cpu_limit_given=None,
        last_result="failed",
        last_error="cannot write",
        write_errors=2,
        fast_restores=3,
        pressure={"some_10s_ratio": 0.0123, "some_60s_ratio": 0.5, "some_total_s": 1.0},
        in_force={"quota_us": 320000, "period_us": 100000, "burst_us": 1000, "weight": None, "cores": 3.2},
    )
    facts = dict(explain.list_facts(e))
    assert facts["job"].endswith("added by `cpumond job add`")
    assert facts["ordered"] == "10 cores, taken from its cgroup"
    assert facts["cap"] == "10 cores: least of the order, the quota found (12), the least above (11, of jobs)"
    assert facts["mode"] == (
        "reclaim, xattr user.cpumond.mode asks for up-only, all writes paused by the pause file, contested, "
        "limit lowered by somebody else 5 x"
    )
    assert facts["in force"].startswith("320000 us of each 100000 us = 3.2 cores, burst 1000 us; found: ")
    assert facts["pressure"] == "some task waited for CPU 1.2% of the last 10 s, 50.0% of the last 60 s"
    assert facts["last write"] == "failed, 2 errors so far; cannot write"
    assert facts["actuator"].startswith("weight: ")
    assert facts["held by"] == "held to 11 cores, the quota of jobs"
    assert facts["so far"].endswith("; the full limit given back at once 3 x")


def test_explain_says_how_long_threads_were_held_back_and_how_much_of_it_was_our_doing():
    sums = {"smoothed_cpu_s": 20.0, "preemptible_cpu_s": 60.0, "preempted_cpu_s": 60.0, "max_cpu_s": 100.0,
            "throttled_cpu_s": 4.25, "late_cpu_s": 1.5}  # fmt: skip
    facts = dict(explain.list_facts(make_explain(aggregated=sums)))
    assert facts["so far"].endswith(
        "60 reclaimed; its threads were held back for 4.2 s, 1.5 s of it while its limit was lowered"
    )


def test_the_samples_of_a_job_are_understood_and_may_be_left_out():
    told = {
        "period_s": 5.0, "at": [1.0, 6.0], "usage": [0.5, 0.25], "smoothed": [None, 0.5], "limit": [1.0, 1.0],
        "floor": [0.5, 0.5], "lower_bound": [0.6, 0.6], "upper_bound": [0.9, 0.9], "votes_sum": [None, -4],
        "throttled_ratio": [0.0, 1.0], "peak": [None, 0.5],
    }  # fmt: skip
    answer = make_explain(samples=told)
    assert msgspec.to_builtins(answer.samples) == told
    assert make_explain().samples is None


def test_explain_shows_as_many_decisions_as_asked_for():
    e = make_explain(decisions=[{**SHRINK, "votes_sum": -number} for number in range(30)])

    def shown(last):
        return [line for line in explain.draw_explain(e, last, None, False).split("\n") if "  shrink  " in line]

    assert len(shown(10)) == 10
    assert "votes -29" in shown(10)[-1]
    assert len(shown(None)) == 30
    assert shown(0) == []


def test_explain_without_decisions_says_so():
    assert explain.draw_explain(make_explain(decisions=[]), 10, None, False).endswith("\nno decision yet")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_explain_fits_a_terminal(width):
    text = explain.draw_explain(make_explain(decisions=[SHRINK, RESTORE]), 10, width, False)
    assert all(len(line) <= width for line in text.split("\n"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("foreign-raise", "somebody else raised it"),
        ("foreign-lower", "somebody else lowered it"),
        ("reapply", "brought to what is meant: another write, a reload or a restart had left something else"),
        ("adopt", "found as an earlier run of the agent left it"),
        ("pin", "pinned by an operator"),
        ("mode", "its mode changed"),
        ("new-kind", "new-kind"),
    ],
)
def test_each_kind_of_decision_has_its_reason(kind, reason):
    assert reason in explain.draw_explain(make_explain(decisions=[{**SHRINK, "kind": kind}]), 1, None, False)


def test_a_decision_that_a_bound_moved_says_what_was_applied():
    text = explain.draw_explain(make_explain(decisions=[{**SHRINK, "applied_cores": 3.25}]), 1, None, False)
    assert "3.30 -> 3.20  applied as 3.25" in text


def test_a_throttled_check_in_the_window_is_said():
    e = make_explain(window={"values": [None, 1.0], "votes": [1, -1]})
    assert explain.list_votes(e)[1:] == ["  throttled  +1", "      1.000  -1"]


def test_an_empty_window_is_said():
    assert explain.list_votes(make_explain(window={"values": [], "votes": []}))[1:] == ["  none yet"]


# the other commands


def test_registered_jobs_are_listed_with_their_options_as_people_write_them():
    jobs = [
        RegisteredAnswer("a", "jobs/a", "", None, {"check_period": 0.25, "throttle_vote": True}),
        RegisteredAnswer("b", "jobs/b", "op", 2.5, {}),
    ]
    lines = tables.draw_registered(jobs, None, False).split("\n")
    assert lines[1].split("  ")[0] == "a"
    assert lines[1].endswith("from cgroup  check_period = 250ms, throttle_vote = true")
    assert lines[2].split() == ["b", "op", "jobs/b", "2.5", "-"]


def test_what_became_of_a_pin():
    assert tables.describe_pin(make_job(pinned_cpu_limit=3.2), None) == (
        "job steady-low is pinned at 3.2 cores until `cpumond unpin`"
    )
    assert re.fullmatch(
        r"job steady-low is pinned at 3.2 cores until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
        tables.describe_pin(make_job(pinned_cpu_limit=3.2), 60.0),
    )
    assert "writes are paused" in tables.describe_pin(make_job(), None)
    failed = make_job(pinned_cpu_limit=3.2, last_result="failed", last_error="cannot write")
    assert tables.describe_pin(failed, None).endswith("but the limit could not be written: cannot write")


def test_options_of_a_new_job_are_checked_here_and_sent_as_they_were_given():
    layer = control.read_layer(
        ("check-period=250", 'start_delay="2s"', "restore_hold=1m", "throttle_vote=true"), "shadow"
    )
    assert layer == {
        "check-period": 250,
        "start_delay": "2s",
        "restore_hold": "1m",
        "throttle_vote": True,
        "mode": "shadow",
    }
    read_there = parse_layer(json.loads(json.dumps(layer)), "job")
    assert read_there["check_period"] == 0.25
    assert read_there["start_delay"] == 2.0
    with pytest.raises(ConfigError, match=r"--set: check_perod: unknown key; did you mean 'check_period'\?"):
        control.read_layer(("check_perod=1",), None)
    with pytest.raises(UsageError, match="both name the mode"):
        control.read_layer(("mode=off",), "shadow")


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2.0), ("0.5", 0.5), ("1e1", 10.0), ("250ms", 0.25), ("1h30m", 5400.0)]
)
def test_a_bare_duration_on_the_command_line_is_seconds(text, seconds):
    assert options.DurationType(0.1).convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0.05", "-1", "nan", "inf", "1x", "50ms"])
def test_a_duration_that_makes_no_sense_is_refused(text):
    with pytest.raises(click.BadParameter):
        options.DurationType(0.1).convert(text, None, None)


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        (None, "no limit"),
        (10.0, "10"),
        (3.2, "3.2"),
        (2.109923, "2.11"),
        (0.2054, "0.205"),
        (0.00412, "0.0041"),
        (4.7e-7, "<0.001"),
        (0.0, "0"),
    ],
)
def test_cores_are_short(cores, text):
    assert tables.show_cores(cores) == text


@pytest.mark.parametrize(("cores", "text"), [(None, "-"), (0.0481, "0.048"), (0.0, "0.000"), (1.8, "1.80")])
def test_measured_cores_below_one_have_three_digits(cores, text):
    assert tables.show_measured(cores) == text


def test_a_long_title_is_cut():
    assert tables.show_title("x" * 60) == "x" * 60
    assert tables.show_title("x" * 61) == "x" * 59 + "…"
    assert tables.show_title("a\u202eb") == "a\\u202eb"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1s"), (59.6, "1m"), (570, "9m30s"), (3600, "1h"), (90061, "25h1m1s")]
)
def test_a_remaining_time_has_no_fractions(seconds, text):
    assert tables.show_left(seconds) == text


# client


def test_a_name_is_one_part_of_a_path_whatever_is_in_it():
    for name in ("a", "..", ".", "a/b", "a b?c#d%41", "ü", "a\nb"):
        url = httpx2.URL(f"http://agent/v1/jobs/{quote_name(name)}/explain")
        assert url.raw_path.count(b"/") == 4
        assert url.path == f"/v1/jobs/{name}/explain"


def test_the_socket_is_that_of_the_configuration(tmp_path):
    config = tmp_path / "cpumond.toml"
    config.write_text(f'runtime_dir = "{tmp_path}/run"\n')
    assert find_socket(str(config), True, None) == f"{tmp_path}/run/control.sock"
    assert find_socket(str(config), False, None) == f"{tmp_path}/run/control.sock"
    assert find_socket(str(config), True, "/x/y.sock") == "/x/y.sock"


def test_a_missing_configuration_matters_only_when_it_was_named(tmp_path):
    missing = str(tmp_path / "missing.toml")
    assert find_socket(missing, False, None) == "/run/cpumond/control.sock"
    with pytest.raises(ConfigError, match=r"cannot be read: .*; or name the agent's socket with --socket"):
        find_socket(missing, True, None)


def test_a_wrong_configuration_says_how_to_reach_the_agent_all_the_same(tmp_path):
    config = tmp_path / "cpumond.toml"
    config.write_text("nonsense = 1\n")
    with pytest.raises(ConfigError, match=r"nonsense: unknown key; .*; or name the agent's socket with --socket"):
        find_socket(str(config), False, None)


def test_the_system_s_reason_decides_about_the_error():
    denied = explain_failure("/s", PermissionError(errno.EACCES, "no"))
    assert isinstance(denied, AccessError)
    assert "only root and the socket's group" in str(denied)
    refused = explain_failure("/s", ConnectionRefusedError(errno.ECONNREFUSED, "x"))
    assert isinstance(refused, UnavailableError)
    assert str(refused).startswith("no agent answers on /s (Connection refused); start it with `systemctl start ")


def test_an_agent_that_hangs_up_is_said(listener):
    hang_up = threading.Thread(target=lambda: [listener[0].accept()[0].close() for _ in range(2)])
    hang_up.start()
    with pytest.raises(UnavailableError, match=r"control.sock: the agent ended before it answered; see its log"):
        AgentClient(listener[1], timeout_s=10.0).status()
    hang_up.join()


def test_an_error_of_the_agent_keeps_its_sentence_and_exit_code():
    error = read_refusal("/s", 403, b'{"error": "it is refused", "exit_code": 77}')
    assert (str(error), error.exit_code) == ("it is refused", 77)
    error = read_refusal("/s", 500, b"Internal Server Error")
    assert (str(error), error.exit_code) == ("/s: the agent answered with HTTP status 500", 69)


def test_an_answer_of_another_version_is_said():
    with pytest.raises(UnavailableError, match=r"/s: the agent's answer is not understood: .*; restart the agent"):
        AgentClient("/s").decode(b"{}", StatusAnswer)


@pytest.fixture
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[socket.socket, str]]:
    """A unix socket that takes connections and never answers."""
    path = str(tmp_path_factory.mktemp("s") / "control.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        yield sock, path


def test_an_agent_that_does_not_answer_is_given_up(listener):
    with pytest.raises(UnavailableError, match=r"control.sock: the agent did not answer in 0.1 s; see its log"):
        AgentClient(listener[1], timeout_s=0.1).status()


def test_a_socket_that_nobody_listens_on_is_69(tmp_path, capsys):
    path = str(tmp_path / "control.sock")
    assert run(["status", "--socket", path]) == 69
    assert capsys.readouterr().err.startswith(
        f"cpumond: no agent answers on {path} (No such file or directory); start it"
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
    assert run(["explain", "x", "--socket", path]) == 69
    assert "Connection refused" in capsys.readouterr().err


def test_a_socket_of_somebody_else_is_77(listener, capsys):
    os.chmod(listener[1], 0)
    is_root = os.geteuid() == 0
    if is_root:
        os.chmod(os.path.dirname(listener[1]), 0)
        os.seteuid(65534)
    try:
        code = run(["status", "--socket", listener[1]])
    finally:
        if is_root:
            os.seteuid(0)
            os.chmod(os.path.dirname(listener[1]), 0o700)
    assert code == 77
    assert "only root and the socket's group may speak to the agent" in capsys.readouterr().err


def test_the_socket_may_come_from_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CPUMOND_SOCKET", str(tmp_path / "other.sock"))
    assert run(["job", "list"]) == 69
    assert "other.sock" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_64(tmp_path, capsys):
    assert run(["job", "add", "--cgroup", "a\udcff", "--socket", str(tmp_path / "x")]) == 64
    assert "not readable text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["job", "add"], 64),
        (["job", "add", "--cgroup", "a", "--cpu-limit", "-1"], 64),
        (["job", "add", "--cgroup", "a", "--mode", "on"], 64),
        (["job", "add", "--cgroup", "a", "--set", "nonsense=1"], 78),
        (["pin", "a", "--for", "soon"], 64),
        (["pin", "a", "--cpu-limit", "nan"], 64),
        (["explain"], 64),
        (["explain", "a", "--last", "-1"], 64),
        (["top", "--interval", "1ms"], 64),
        (["top", "--interval", "99ms"], 64),
        (["top", "--interval", "3601"], 64),
        (["top", "--interval", "1d"], 64),
        (["job", "add", "--cgroup", "a", "--set", "vote_window_size"], 64),
        (["job", "add", "--cgroup", "a", "--set", "vote_window_size=7\nx=1"], 78),
        (["top", "--sort", "colour"], 64),
        (["status", "more"], 64),
        (["job", "nonsense"], 64),
    ],
)
def test_a_wrong_command_line_is_said_before_the_agent_is_asked(arguments, code, capsys):
    assert run([*arguments, *([] if arguments[-1] == "nonsense" else ["--socket", "/nowhere/x"])]) == code
    assert capsys.readouterr().err.startswith("cpumond: ")


def test_a_status_reads_the_same_from_a_file(tmp_path: Path):
    # Whatever a newer agent adds is left aside.
    path = tmp_path / "status.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(make_status({})), "added_later": {"x": 1}}))
    assert msgspec.json.decode(path.read_bytes(), type=StatusAnswer) == make_status({})


# rule peak


def test_what_is_told_of_rule_peak_comes_from_the_agent():
    told = {**PEAK, "because": "3.2 = 3.05 (highest use) + 5 %. The half-life is 40 s.", "next": "hold: that"}
    answer = make_explain(peak=told, limit_rule="peak")
    assert explain.describe_why(answer) == (
        "The limit of steady-low is 3.2 of 10 ordered cores: 3.2 = 3.05 (highest use) + 5 %. The half-life is 40 s."
    )
    assert explain.describe_next(answer) == "hold: that"
    facts = dict(explain.list_facts(answer))
    assert facts["held back"] == "9 times, 1.9 s of 10 min watched = 0.31 %, budget 0.40 %"
    assert facts["rule"] == "peak: 3.05 cores remembered, half-life 40 s, caution 3.00 of 0 to 7"
    assert "votes against" not in explain.draw_explain(answer, None, None, False)
    assert "votes against" in explain.draw_explain(make_explain(), None, None, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "shrink", "votes_sum": None}, "its highest use of late fades, use 1.75"),
        ({"kind": "grow", "votes_sum": None}, "its highest use of late asks for more, use 1.75"),
        ({"kind": "restore", "throttled_ratio": 0.0}, "use 1.75 above the limit, so all was given back at once"),
        (
            {"kind": "restore", "throttled_ratio": 0.5, "by_look": True},
            "50% of the periods throttled at a look between two checks, so all was given back at once",
        ),
    ],
)
def test_reasons_of_rule_peak_and_of_looks(changes, text):
    decision = msgspec.convert({**SHRINK, **changes}, DecisionAnswer)
    assert explain.describe_reason(decision) == text
