"""Why a job's limit is what it is, in sentences, for each state that a job can be in."""

import time

import pytest
from explained import PEAK, RESTORE, SHRINK, make_explain


def when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"refused": "it is outside managed_roots", "status": "refused"},
     ": nothing is ever written to its cgroup, because it is outside managed_roots."),
    ({"status": "contested", "contested_losses": 5},
     (", as another program left it: it changed the limit back 5 times, so the agent no longer writes it. "
      "Stop the other program's writes, then `cpumond unpin steady-low`.")),
    ({"status": "overridden", "override_left_s": 570.2},
     (": another program set it, which is respected for another 9m30s. "
      "`cpumond unpin steady-low` returns it to the monitor now.")),
    ({"status": "pinned", "pinned_cpu_limit": 3.2}, ": an operator pinned it until `cpumond unpin steady-low`."),
    ({"status": "pinned", "pinned_cpu_limit": 3.2, "pinned_until": 1795223999.0},
     f": an operator pinned it until {when(1795223999.0)}."),
    ({"status": "off", "mode": "off"}, ": its mode is off, so it is neither measured nor changed."),
    ({"status": "shadow", "mode": "shadow", "monitor_cpu_limit": 2.5},
     (": its mode is shadow, so nothing is written. In mode reclaim it would be 2.5 now, "
      "because its recent usage is about 1.8 (smoothed).")),
    ({"status": "shadow", "mode": "shadow", "smoothed_cpu_usage": None},
     ": its mode is shadow, so nothing is written. In mode reclaim it would be 3.2 now."),
])  # fmt: skip
def test_why_the_monitor_does_not_decide(changes, sentence):
    assert make_explain(**changes).why == (f"The limit of steady-low is 3.2 of 10 requested cores{sentence}")


LOWERED = (
    "3.2 of 10 requested cores, because its recent usage is about 1.8 (smoothed). The last change, 3.3 -> 3.2 at "
    f"{when(1795223773.1)}: usage stayed below 0.6 of the limit (votes -4; more than 3 are needed)."
)
FLOOR = "This is its floor (min_cpu_limit = 3.2). Writes are paused, so it stays as it is."
NEVER_BELOW = "its maximum, and never less: its floor is equally high (min_cpu_limit = 1)."
GIVEN_BACK = (
    f"The last change, 3.2 -> 10 at {when(1795223773.1)}: 80% of the periods throttled, "
    "so the full request was restored at once."
)
SHADOW = "3.2 of 10 requested cores: its mode is shadow, so nothing is written. In mode reclaim it would be"
NOT_LOWERED = "its maximum: it has not been lowered so far."
WHY: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "lowered": ({}, {}, LOWERED),
    "at its floor and paused": (
        {"floor": 3.2},
        {"section": {"min_cpu_limit": 3.2}, "decisions": [], "paused": True},
        f"3.2 of 10 requested cores, because its recent usage is about 1.8 (smoothed). {FLOOR}",
    ),
    "in shadow, at its floor": (
        {"floor": 2.5},
        {"section": {"min_cpu_limit": 2.5}, "mode": "shadow", "status": "shadow", "monitor_cpu_limit": 2.5},
        f"{SHADOW} 2.5 now, because its recent usage is about 1.8 (smoothed). This is its floor (min_cpu_limit = 2.5).",
    ),
    "in shadow, with a floor as high as its order": (
        {"floor": 10.0},
        {"section": {"min_cpu_limit": 10.0}, "mode": "shadow", "status": "shadow", "monitor_cpu_limit": 10.0},
        f"{SHADOW} 10 now and never less: its floor is equally high (min_cpu_limit = 10).",
    ),
    "never lowered": ({}, {"current_cpu_limit": 10.0, "decisions": []}, f"10 of 10 requested cores, {NOT_LOWERED}"),
    "given back": (
        {},
        {"current_cpu_limit": 10.0, "decisions": [SHRINK, {**RESTORE, "throttled_ratio": 0.8}]},
        f"10 of 10 requested cores, its maximum. {GIVEN_BACK}",
    ),
    "can never be lowered": (
        {"floor": 1.0, "cap": 1.0},
        {"cpu_limit": 1.0, "current_cpu_limit": 1.0},
        f"1 of 1 requested cores, {NEVER_BELOW}",
    ),
    "below the quota of others": (
        {"cap": 4.0, "ancestor_cap": 4.0, "ancestor": "jobs"},
        {"current_cpu_limit": 4.0, "decisions": []},
        f"4 of 10 requested cores, {NOT_LOWERED} The quota of jobs above it, 4 cores, allows no more.",
    ),
    "found with a quota": (
        {"cap": 4.0, "quota_found": 4.0},
        {"current_cpu_limit": 4.0, "decisions": []},
        f"4 of 10 requested cores, {NOT_LOWERED} The quota its cgroup was found with, 4 cores, allows no more.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("bounds", "changes", "sentences"), WHY.values(), ids=WHY)
def test_why_a_limit_is_where_it_is(bounds, changes, sentences):
    assert make_explain(bounds, **changes).why == f"The limit of steady-low is {sentences}"


NEEDS = "needs |sum| > 3, has "
BELOW, ABOVE = "below 0.6 x 3.2 = 1.92 cores", "above 0.9 x 3.2 = 2.88 cores"


@pytest.mark.parametrize(("votes", "text"), [
    ([0, -1, -1, -1, -1], f"{NEEDS}-4: 4 of 5 {BELOW} -> shrink to 3.1 (x 0.97)"),
    ([1] * 5, f"{NEEDS}+5: 5 of 5 {ABOVE} -> grow to 4.64 (x 1.45)"),
    ([0] * 5, f"{NEEDS}0: all between the bounds -> hold"),
    ([-1, -1, -1, 1, 0], f"{NEEDS}-2: 3 of 5 {BELOW} and 1 of 5 {ABOVE} -> hold"),
    ([-1, -1, -1, 0, 0], f"{NEEDS}-3: 3 of 5 {BELOW} -> hold"),
    ([-1, -1], "decides once the window has 5 votes; now 2, sum -2"),
    ([], "decides once the window has 5 votes; now 0, sum 0"),
])  # fmt: skip
def test_the_next_check_says_how_the_votes_stand(votes, text):
    assert make_explain(window={"votes": votes}).next == text


@pytest.mark.parametrize(("changes", "end"), [
    ({"bounds": {"floor": 3.2}, "section": {"min_cpu_limit": 3.2}}, "but 3.2 is its floor (min_cpu_limit = 3.2)"),
    ({"section": {"direction": "up-only"}}, "but its direction is up-only"),
    ({"mode": "up-only"}, "but its mode is up-only"),
    ({"held_s": 61.0}, "but restore_hold or startup_boost keeps it for another 1m1s"),
    ({"status": "pinned"}, "shrink to 3.1 (x 0.97), not written: it is pinned"),
    ({"mode": "shadow", "status": "shadow"}, "shrink to 3.1 (x 0.97), not written in mode shadow"),
    ({"paused": True}, "shrink to 3.1 (x 0.97), not written while writes are paused"),
    ({"window": {"votes": [1] * 5}, "bounds": {"cap": 3.2}}, "would grow, but 3.2 is its cap already"),
    ({"window": {"votes": [1] * 5}, "section": {"direction": "down-only"}}, "but direction is down-only"),
    ({"window": {"votes": [1] * 5}, "bounds": {"cap": 4.0}}, "-> grow to 4 (x 1.45)"),
    ({"mode": "off"}, "none in mode off"),
    ({"start_left_s": 5.0}, "measured after start_delay, in 5s"),
])  # fmt: skip
def test_the_next_check_names_what_keeps_it_from_moving(changes, end):
    assert make_explain(**changes).next.endswith(end)


@pytest.mark.parametrize(("votes", "end"), [
    ([-1] * 4, "has -4 and one vote to come: -> shrink to 3.1 (x 0.97), if that is not +1"),
    ([-1, -1, -1, 0], "has -3 and one vote to come: -> shrink to 3.1 (x 0.97), if that is -1"),
    ([1, 1, 1, 0], "has +3 and one vote to come: -> grow to 4.64 (x 1.45), if that is +1"),
    ([1] * 4, "has +4 and one vote to come: -> grow to 4.64 (x 1.45), if that is not -1"),
    ([1, -1, 0, 0], "has 0 and one vote to come -> hold"),
    ([1], "decides once the window has 5 votes; now 1, sum +1"),
])  # fmt: skip
def test_the_form_of_ytsaurus_decides_with_the_next_vote(votes, end):
    e = make_explain(window={"values": votes, "votes": votes}, section={"vote_mode": "ytsaurus"})
    assert e.next.endswith(end)


@pytest.mark.parametrize(("section", "floor", "said"), [
    ({}, 1.0, "1 core: min_cpu_limit = 1"),
    ({"min_limit_ratio": 0.25}, 2.5, "2.5 cores: min_limit_ratio = 0.25 of the cap"),
    ({"headroom_ratio": 0.5}, 2.7, "2.7 cores: headroom_ratio = 0.5 above the usage of the window"),
])  # fmt: skip
def test_the_floor_is_said_with_its_reason(section, floor, said):
    assert make_explain({"floor": floor}, section=section).facts["floor"] == said


SUMS = {
    "smoothed_cpu_s": 20.0, "preemptible_cpu_s": 60.0, "preempted_cpu_s": 60.0, "max_cpu_s": 100.0,
    "throttled_cpu_s": 4.25, "late_cpu_s": 1.5,
}  # fmt: skip


def test_explain_tells_what_bounds_and_others_did():
    e = make_explain(
        {"quota_found": 12.0, "ancestor_cap": 11.0, "ancestor": "jobs"}, section={"actuator": "weight"},
        notes=["held to 11 cores, the quota of jobs"], xattr_mode="up-only", paused=True, status="contested",
        contested_losses=5, source="", cpu_limit_given=None, last_result="failed", last_error="cannot write",
        write_errors=2, fast_restores=3, aggregated=SUMS, actuator="weight",
        pressure={"some_10s_ratio": 0.0123, "some_60s_ratio": 0.5, "some_total_s": 1.0},
        in_force={"quota_us": 320000, "period_us": 100000, "burst_us": 1000, "weight": None, "cores": 3.2},
    )  # fmt: skip
    facts = e.facts
    assert facts["job"].endswith("added by `cpumond job add`")
    assert facts["ordered"] == "10 cores, taken from its cgroup"
    assert facts["cap"] == "10 cores: least of its request, the quota found (12), the quotas above (11, of jobs)"
    assert facts["mode"] == (
        "reclaim, xattr user.cpumond.mode asks for up-only, all writes paused by the pause file, contested, "
        "limit lowered by another program 5 x"
    )
    assert facts["in force"].startswith("320000 us of each 100000 us = 3.2 cores, burst 1000 us; found: ")
    assert facts["pressure"] == "some task waited for CPU 1.2% of the last 10 s, 50.0% of the last 60 s"
    assert facts["last write"] == "failed, 2 errors so far; cannot write"
    assert facts["actuator"].startswith("weight: ")
    assert facts["held by"] == "held to 11 cores, the quota of jobs"
    assert facts["so far"].endswith(
        "60 reclaimed; the full limit restored at once 3 x; its threads were throttled for 4.2 s, "
        "1.5 s of it while its limit was lowered"
    )


ALL_BACK = "so the full request was restored at once"
WAITED = "some task waited for CPU 62% of the time"


@pytest.mark.parametrize(("decision", "reason"), [
    ({"kind": "foreign-raise"}, "another program raised it"),
    ({"kind": "foreign-lower"}, "another program lowered it"),
    ({"kind": "reapply"}, "written again: another write, a reload or a restart had left another limit"),
    ({"kind": "adopt"}, "adopted as an earlier run of the agent left it"),
    ({"kind": "pin"}, "pinned by an operator"),
    ({"kind": "mode"}, "its mode changed"),
    ({"kind": "new-kind"}, "new-kind"),
    ({"votes_sum": None}, "its recent maximum fades, usage 1.75"),
    ({"kind": "grow", "votes_sum": None}, "its recent maximum needs more, usage 1.75"),
    ({"kind": "restore"}, f"usage 1.75 above the limit, {ALL_BACK}"),
    ({"kind": "restore", "throttled_ratio": 0.5, "by_look": True},
     f"50% of the periods throttled at a look between two checks, {ALL_BACK}"),
    ({**RESTORE, "throttled_ratio": 0.0, "pressure_ratio": 0.625}, f"{WAITED}, {ALL_BACK}"),
    ({**RESTORE, "throttled_ratio": 0.3, "pressure_ratio": 0.625},
     f"30% of the periods throttled, {WAITED}, {ALL_BACK}"),
])  # fmt: skip
def test_each_kind_of_decision_has_its_reason(decision, reason):
    assert make_explain(decisions=[{**SHRINK, **decision}]).decisions[0].reason == reason


def test_what_is_told_of_rule_peak_comes_from_the_agent():
    told = {**PEAK, "because": "3.2 = 3.05 (highest usage) + 5 %. The half-life is 40 s.", "next": "hold: that"}
    answer = make_explain(peak=told, limit_rule="peak")
    assert answer.why == (
        "The limit of steady-low is 3.2 of 10 requested cores: 3.2 = 3.05 (highest usage) + 5 %. The half-life is 40 s."
    )
    assert answer.next == "hold: that"
    late = make_explain(peak=told, limit_rule="peak", start_left_s=5.0).why
    assert late.endswith(" requested cores: it is measured after start_delay, in 5s.")
    facts = answer.facts
    assert facts["held back"] == "9 times, 1.9 s of 10 min watched = 0.31 %, budget 0.40 %"
    assert facts["rule"] == "peak: 3.05 cores remembered, half-life 40 s, caution 3.00 of 0 to 7"
