"""What ``explain`` prints: why a job's limit is what it is, in words and numbers.

Every function is pure but for the time zone: from the agent's answer ``e`` to text. With ``width`` None (a pipe) no
line is wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from cpumond.cli.client import DecisionAnswer, ExplainAnswer, PeakAnswer, Quota
from cpumond.cli.tables import (
    STYLES,
    count,
    draw,
    measure,
    show_cores,
    show_left,
    show_measured,
    show_name,
    show_option,
    show_time,
    show_votes,
)
from cpumond.units import format_span

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

KIND_REASONS: Final = {
    "foreign-raise": "somebody else raised it",
    "foreign-lower": "somebody else lowered it",
    "reapply": "brought to what is meant: another write, a reload or a restart had left something else",
    "adopt": "found as an earlier run of the agent left it",
    "pin": "pinned by an operator",
    "mode": "its mode changed",
}


class Coefficients(msgspec.Struct, frozen=True):
    """The options of ``job-cpu-monitor`` that a next step follows from."""

    relative_lower_bound: float
    relative_upper_bound: float
    increase_coefficient: float
    decrease_coefficient: float
    min_cpu_limit: float
    min_limit_ratio: float = 0.0
    headroom_ratio: float = 0.0
    vote_mode: str = "document"
    direction: str = "both"
    actuator: str = "quota"


def draw_explain(
    e: ExplainAnswer, last: int | None, width: int | None, colour: bool, unpin: str = "cpumond unpin"
) -> str:
    """``cpumond explain``: the answer, the facts behind it, the window, the next step, options, ``last`` decisions.

    ``unpin`` is the command that, followed by the job's name, gives the job back to the monitor.
    """
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in list_facts(e):
        facts.add_row(Text(name, "bold"), Text(text))
    parts: list[RenderableType] = [Text(describe_why(e, unpin), "bold"), "", facts, ""]
    if e.peak is None:
        parts += [Text(line) for line in list_votes(e)]
    parts += [Text(f"next check: {describe_next(e)}"), "", Text("job-cpu-monitor in force:", "bold"), draw_options(e)]
    shown = e.decisions if last is None else e.decisions[max(len(e.decisions) - last, 0) :]
    if not e.decisions:
        parts += ["", Text("no decision yet")]
    elif shown:
        parts += ["", Text(f"last {len(shown)} of {count(len(e.decisions), 'decision')}, local time:", "bold")]
        wide = make_decisions(shown, 2)
        parts.append(wide if width is None or measure(wide) <= width else make_decisions(shown, 1))
    return draw(parts, width, colour)


def describe_why(e: ExplainAnswer, unpin: str = "cpumond unpin") -> str:
    """One or two sentences: why the limit is what it is; ``unpin`` as in ``draw_explain``."""
    name, limit = show_name(e.job_id), show_cores(e.current_cpu_limit)
    stands = f"The limit of {name} is {limit} of {show_cores(e.cpu_limit)} ordered cores"
    if e.refused:
        return f"{stands}: nothing is ever written to its cgroup, because {e.refused}."
    if e.status == "contested":
        return (
            f"{stands}, as another program left it: that one changed the limit back {e.contested_losses} times, so the "
            f"agent writes no more. End the other program's writes, then `{unpin} {name}`."
        )
    if e.override_left_s is not None:
        who = f"{e.override_by} ordered it" if e.override_by else "somebody else set it"
        return (
            f"{stands}: {who}, which is respected for {show_left(e.override_left_s)} more. "
            f"`{unpin} {name}` gives it back to the monitor now."
        )
    if e.pinned_cpu_limit is not None:
        until = f"until `{unpin} {name}`" if e.pinned_until is None else f"until {show_time(e.pinned_until)}"
        return f"{stands}: an operator pinned it {until}."
    if e.mode == "off":
        return f"{stands}: its mode is off, it is neither measured nor changed."
    if e.mode == "shadow":
        because = f": {e.peak.because}" if e.peak else f"{_because(e)}."
        return (
            f"{stands}: its mode is shadow, so nothing is written. In mode reclaim it would be "
            f"{show_cores(e.monitor_cpu_limit)} now{because}"
        )
    paused = " Writes are paused, so it stays there." if e.paused else ""
    if e.peak is not None and e.bounds.floor < e.bounds.cap:
        if e.start_left_s > 0:
            return f"{stands}: it is not measured before start_delay is over, in {show_left(e.start_left_s)}.{paused}"
        whole = ", all it may have" if e.current_cpu_limit >= e.bounds.cap else ""
        return f"{stands}{whole}: {e.peak.because}{_describe_cap(e) if whole else ''}{paused}"
    if e.current_cpu_limit < e.bounds.cap:
        floor = f" This is its floor ({_floor_reason(e)})." if e.current_cpu_limit <= e.bounds.floor else ""
        return f"{stands}{_because(e)}.{_last_step(e)}{floor}{paused}"
    held = _describe_cap(e)
    if e.bounds.floor >= e.bounds.cap:
        floor = f"its floor is as high ({_floor_reason(e)})"
        return f"{stands}, all it may have, and never goes below: {floor}.{held}{paused}"
    return f"{stands}, all it may have{_last_step(e) or ': it was not lowered so far.'}{held}{paused}"


def _because(e: ExplainAnswer) -> str:
    if e.smoothed_cpu_usage is None:
        return ""
    return f", because it lately used about {show_cores(e.smoothed_cpu_usage)} (smoothed)"


def _last_step(e: ExplainAnswer) -> str:
    """A sentence about the newest change that was written, with a space before it; "" when there was none."""
    step = next((decision for decision in reversed(e.decisions) if decision.result == "applied"), None)
    if step is None:
        return ""
    lead = "." if e.current_cpu_limit >= e.bounds.cap else ""
    change = f"{show_cores(step.old_cores)} -> {show_cores(step.applied_cores)}"
    return f"{lead} The last change, {change} at {show_time(step.at)}: {_tell_reason(step, e)}."


def _tell_reason(step: DecisionAnswer, e: ExplainAnswer) -> str:
    """Why the newest change was made, for somebody who does not know about votes."""
    c = msgspec.convert(e.job_cpu_monitor, Coefficients)
    votes = f"(votes {show_votes(step.votes_sum)}, more than {e.window.threshold} are needed)"
    if step.kind == "shrink":
        return f"use stayed below {c.relative_lower_bound:g} of the limit {votes}"
    if step.kind == "grow":
        return f"use stayed above {c.relative_upper_bound:g} of the limit {votes}"
    return describe_reason(step)


def _describe_cap(e: ExplainAnswer) -> str:
    return f" {_cap_reason(e)} allows no more." if e.bounds.cap < e.cpu_limit else ""


def _cap_reason(e: ExplainAnswer) -> str:
    b = e.bounds
    if b.ancestor_cap is not None and b.ancestor_cap <= b.cap:
        return f"The quota of {show_name(b.ancestor) or '/'} above it, {show_cores(b.ancestor_cap)} cores,"
    if b.quota_found is not None and b.quota_found <= b.cap:
        return f"The quota its cgroup was found with, {show_cores(b.quota_found)} cores,"
    return "What it ordered"


def _floor_reason(e: ExplainAnswer) -> str:
    c, cap = msgspec.convert(e.job_cpu_monitor, Coefficients), e.bounds.cap
    reasons = {
        f"min_cpu_limit = {c.min_cpu_limit:g}": c.min_cpu_limit,
        f"min_limit_ratio = {c.min_limit_ratio:g} of the cap": c.min_limit_ratio * cap,
    }
    reason, cores = max(reasons.items(), key=lambda item: item[1])
    if c.headroom_ratio and e.bounds.floor > min(cores, cap):
        return f"headroom_ratio = {c.headroom_ratio:g} above the use of the window"
    return reason


def list_facts(e: ExplainAnswer) -> list[tuple[str, str]]:
    """(heading, text) of everything the limit follows from."""
    b = e.bounds
    found = "none" if b.quota_found is None else show_cores(b.quota_found)
    above = "none" if b.ancestor_cap is None else f"{show_cores(b.ancestor_cap)}, of {show_name(b.ancestor) or '/'}"
    facts = [
        ("job", f"{show_name(e.job_id)}, operation {show_name(e.operation_id) or '-'}, {_describe_source(e)}"),
        ("cgroup", show_name(e.directory or e.cgroup)),
        (
            "ordered",
            f"{show_cores(e.cpu_limit)} cores" + (", taken from its cgroup" if e.cpu_limit_given is None else ""),
        ),
        ("cap", f"{show_cores(b.cap)} cores: least of the order, the quota found ({found}), the least above ({above})"),
        ("floor", f"{show_cores(b.floor)} cores: {_floor_reason(e)}"),
        ("mode", _describe_mode(e)),
        ("in force", f"{_describe_quota(e.in_force)}; found: {_describe_quota(e.found)}"),
        (
            "use",
            f"{_describe_use(e)}, {e.throttled_ratio:.0%} of the periods throttled",
        ),
        ("pressure", _describe_pressure(e)),
        *_list_peak(e),
        ("last write", _describe_write(e)),
    ]
    if msgspec.convert(e.job_cpu_monitor, Coefficients).actuator == "weight":
        facts.append(("actuator", "weight: the limit is a share for when CPU is short, it never throttles"))
    if e.notes:
        facts.append(("held by", "; ".join(e.notes)))
    if e.aggregated is not None:
        a = e.aggregated
        facts.append(
            (
                "so far",
                (
                    f"core-seconds: {a.max_cpu_s:.0f} ordered, {a.smoothed_cpu_s:.0f} used (smoothed), "
                    f"{a.preempted_cpu_s:.0f} reclaimed"
                    + (f"; the full limit given back at once {e.fast_restores} x" if e.fast_restores else "")
                    + (
                        f"; its threads were held back for {a.throttled_cpu_s:.1f} s, {a.late_cpu_s:.1f} s of it while "
                        "its limit was lowered"
                        if a.throttled_cpu_s
                        else ""
                    )
                ),
            )
        )
    return facts


def _list_peak(e: ExplainAnswer) -> list[tuple[str, str]]:
    """What rule peak remembers, and how much of its budget is used up."""
    p = e.peak
    if p is None:
        return []
    peak = "none yet" if p.peak_cores is None else f"{show_measured(p.peak_cores)} cores"
    return [
        ("rule", f"peak: {peak} remembered, half-life {format_span(p.half_life_s)}, caution {p.caution:.2f} of 0 to 7"),
        ("held back", describe_budget(p)),
    ]


def describe_budget(p: PeakAnswer) -> str:
    """How often a lowered limit held the job back, against the budget for it."""
    times = count(p.held_count, "time")
    return (
        f"{times}, {format_span(p.held_s)} of {format_span(p.watched_s)} watched = {100 * p.held_ratio:.2f} %, "
        f"budget {100 * p.throttle_budget:.2f} %"
    )


def _describe_use(e: ExplainAnswer) -> str:
    usage, smoothed = show_measured(e.usage), show_measured(e.smoothed_cpu_usage)
    return f"{usage} cores in the last check, smoothed {smoothed}"


def _describe_source(e: ExplainAnswer) -> str:
    if e.source.startswith("ordered by the scheduler"):
        return show_name(e.source)
    return f"from source {show_name(e.source)}" if e.source else "added by `cpumond job add`"


def _describe_mode(e: ExplainAnswer) -> str:
    words = [e.mode]
    if e.xattr_mode is not None:
        words.append(f"xattr user.cpumond.mode asks for {show_name(e.xattr_mode)}")
    if e.refused:
        words.append(f"refused: {e.refused}")
    if e.paused:
        words.append("all writes paused by the pause file")
    if e.status not in (e.mode, "refused"):
        words.append(e.status)
    if e.contested_losses:
        words.append(f"limit lowered by somebody else {e.contested_losses} x")
    return ", ".join(words)


def _describe_quota(q: Quota) -> str:
    if q.quota_us is None:
        text = f"no quota (period {q.period_us} us)"
    else:
        text = f"{q.quota_us} us of each {q.period_us} us = {show_cores(q.quota_us / q.period_us)} cores"
    if q.burst_us:
        text += f", burst {q.burst_us} us"
    return text if q.weight is None else f"{text}, weight {q.weight}"


def _describe_pressure(e: ExplainAnswer) -> str:
    p = e.pressure
    if p is None:
        return "not known (no PSI for this cgroup)"
    return f"some task waited for CPU {p.some_10s_ratio:.1%} of the last 10 s, {p.some_60s_ratio:.1%} of the last 60 s"


def _describe_write(e: ExplainAnswer) -> str:
    text = e.last_result or "none so far"
    if e.write_errors:
        text += f", {count(e.write_errors, 'error')} so far"
    return f"{text}; {show_name(e.last_error)}" if e.last_error else text


def list_votes(e: ExplainAnswer) -> list[str]:
    """The window: each value and its vote, their sum against the threshold."""
    b, w, c = e.bounds, e.window, msgspec.convert(e.job_cpu_monitor, Coefficients)
    limit = show_cores(e.monitor_cpu_limit)
    lines = [
        (
            f"votes against the limit of {limit}: -1 below {c.relative_lower_bound:g} x {limit} = "
            f"{show_cores(b.lower_bound)}, +1 above {c.relative_upper_bound:g} x {limit} = {show_cores(b.upper_bound)}"
        )
    ]
    for value, vote in zip(w.values, w.votes, strict=False):
        if c.vote_mode == "ytsaurus":
            lines.append(f"  {'vote of its check':>18}  {show_votes(vote):>2}")
        else:
            lines.append(f"  {'throttled' if value is None else f'{value:.3f}':>9}  {show_votes(vote):>2}")
    if not w.votes:
        lines.append("  none yet")
    return lines


def describe_next(e: ExplainAnswer) -> str:
    """What the next check does if its vote is like the others: the sum, the threshold, and the step."""
    b, w, c = e.bounds, e.window, msgspec.convert(e.job_cpu_monitor, Coefficients)
    if e.mode == "off":
        return "none in mode off"
    if e.start_left_s > 0:
        return f"measured after start_delay, in {show_left(e.start_left_s)}"
    if e.peak is not None:
        return e.peak.next
    limit, total, size = e.monitor_cpu_limit, sum(w.votes), len(w.votes)
    if c.vote_mode == "ytsaurus" and size == w.size - 1:
        return _describe_last_vote(e, c, total)
    if size < w.size:
        return f"decides when the window has {w.size} votes; now {size}, sum {show_votes(total)}"
    low, high = w.votes.count(-1), w.votes.count(1)
    shown = show_cores(limit)
    below = f"{low} of {size} below {c.relative_lower_bound:g} x {shown} = {show_cores(b.lower_bound)} cores"
    above = f"{high} of {size} above {c.relative_upper_bound:g} x {shown} = {show_cores(b.upper_bound)} cores"
    needs = f"needs |sum| > {w.threshold}, has {show_votes(total)}"
    if total > w.threshold:
        return f"{needs}: {above} -> {_describe_grow(e, c)}"
    if total < -w.threshold:
        return f"{needs}: {below} -> {_describe_shrink(e, c)}"
    votes = " and ".join(text for text, number in ((below, low), (above, high)) if number)
    return f"{needs}: {votes or 'all between the bounds'} -> hold"


def _describe_last_vote(e: ExplainAnswer, c: Coefficients, total: int) -> str:
    """The form of ytsaurus keeps one vote less than it needs between two checks."""
    threshold = e.window.threshold
    needs = f"needs |sum| > {threshold}, has {show_votes(total)} and one vote to come"
    if total - 1 < -threshold:
        return f"{needs}: -> {_describe_shrink(e, c)}, if that is {'not +1' if total < -threshold else '-1'}"
    if total + 1 > threshold:
        return f"{needs}: -> {_describe_grow(e, c)}, if that is {'not -1' if total > threshold else '+1'}"
    return f"{needs} -> hold"


def _describe_grow(e: ExplainAnswer, c: Coefficients) -> str:
    limit, cap = e.monitor_cpu_limit, e.bounds.cap
    if limit >= cap:
        return f"would grow, but {show_cores(limit)} is its cap already"
    if c.direction == "down-only":
        return "would grow, but direction is down-only"
    text = f"grow to {show_cores(min(limit * c.increase_coefficient, cap))} (x {c.increase_coefficient:g})"
    return text + _describe_hindrance(e)


def _describe_shrink(e: ExplainAnswer, c: Coefficients) -> str:
    limit, floor = e.monitor_cpu_limit, e.bounds.floor
    if limit <= floor:
        return f"would shrink, but {show_cores(limit)} is its floor ({_floor_reason(e)})"
    if c.direction == "up-only" or e.mode == "up-only":
        return f"would shrink, but its {'direction' if c.direction == 'up-only' else 'mode'} is up-only"
    if e.held_s > 0:
        return f"would shrink, but restore_hold or startup_boost keep it for {show_left(e.held_s)} more"
    to = show_cores(max(limit * c.decrease_coefficient, floor))
    return f"shrink to {to} (x {c.decrease_coefficient:g})" + _describe_hindrance(e)


def _describe_hindrance(e: ExplainAnswer) -> str:
    """Why a step is not written even when it is decided."""
    if e.status in ("refused", "contested", "overridden", "pinned"):
        return f", not written: it is {e.status}"
    if e.mode == "shadow":
        return ", not written in mode shadow"
    return ", not written while writes are paused" if e.paused else ""


def draw_options(e: ExplainAnswer) -> RenderableType:
    """The resulting section, two options a line."""
    from rich.table import Table
    from rich.text import Text

    texts = [f"{key} = {show_option(key, value)}" for key, value in e.job_cpu_monitor.items()]
    half = (len(texts) + 1) // 2
    grid = Table.grid(padding=(0, 3, 0, 0))
    for left, right in zip(texts[:half], [*texts[half:], ""], strict=False):
        grid.add_row(Text(f"  {left}"), Text(right))
    return grid


def make_decisions(decisions: Sequence[DecisionAnswer], padding: int) -> Table:
    """The ring, the newest decision last."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, show_header=False)
    for index in range(5):
        table.add_column(justify="right" if index == 2 else "left", no_wrap=index < 3)
    for decision in decisions:
        change = f"{show_measured(decision.old_cores)} -> {show_measured(decision.new_cores)}"
        result = decision.result
        if result == "applied" and not _same(decision.applied_cores, decision.new_cores):
            result = f"applied as {show_measured(decision.applied_cores)}"
        when = datetime.fromtimestamp(decision.at).astimezone().strftime("%b %d %H:%M:%S")
        cells = (when, decision.kind, change, result, describe_reason(decision))
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in cells))
    return table


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) < 0.005)


def describe_reason(decision: DecisionAnswer) -> str:
    """Why a limit moved, in words."""
    if decision.kind in ("grow", "shrink") and decision.votes_sum is None:
        high = "its highest use of late asks for more" if decision.kind == "grow" else "its highest use of late fades"
        return f"{high}, use {show_measured(decision.usage_cores)}"
    if decision.kind in ("grow", "shrink"):
        votes = show_votes(decision.votes_sum)
        usage, smoothed = show_measured(decision.usage_cores), show_measured(decision.smoothed_cores)
        return f"votes {votes}, use {usage}, smoothed {smoothed}"
    if decision.kind == "restore":
        signs = []
        if decision.throttled_ratio:
            signs.append(f"{decision.throttled_ratio:.0%} of the periods throttled")
        if decision.pressure_ratio:
            signs.append(f"some task waited for CPU {decision.pressure_ratio:.0%} of the time")
        if not signs:
            signs.append(f"use {show_measured(decision.usage_cores)} above the limit")
        looked = " at a look between two checks" if decision.by_look else ""
        return f"{', '.join(signs)}{looked}, so all was given back at once"
    return KIND_REASONS.get(decision.kind, decision.kind)
