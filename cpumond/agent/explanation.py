"""Explain in sentences why a job has its limit: the texts of ``cpumond explain``, at the scheduler and on all pages.

Pure except for the time zone: times are local times of the host, with the zone, since readers may be elsewhere."""

from __future__ import annotations

from typing import Final

import msgspec

from cpumond.core.answers import DecisionAnswer, ExplainAnswer, PeakAnswer, Quota
from cpumond.core.measures import count_cores, format_cores, format_span
from cpumond.core.words import count, format_left, format_measured, format_time, format_votes
from cpumond.monitor.model import MonitorSettings

KIND_REASONS: Final = {
    "foreign-raise": "another program raised it",
    "foreign-lower": "another program lowered it",
    "order": "its engine set it",
    "reapply": "written again: another write, a reload or a restart had left another limit",
    "adopt": "adopted as an earlier run of the agent left it",
    "pin": "pinned by an operator",
    "mode": "its mode changed",
}


def add_sentences(e: ExplainAnswer, s: MonitorSettings, unpin: str) -> ExplainAnswer:
    """Add all sentences to an explanation.

    ``s`` are the job's options. ``unpin`` is a command: followed by the job's name, it lets the monitor decide again.
    """
    return msgspec.structs.replace(
        e,
        why=_describe_why(e, s, unpin),
        next=_describe_next(e, s),
        facts=_list_facts(e, s),
        window=msgspec.structs.replace(e.window, meaning=_describe_votes(e, s)),
        decisions=[msgspec.structs.replace(each, reason=_describe_reason(each)) for each in e.decisions],
    )


def _describe_why(e: ExplainAnswer, s: MonitorSettings, unpin: str) -> str:
    name, limit = e.job_id, format_cores(e.current_cpu_limit)
    noun = "limit" if s.is_ceiling else "job guarantee"
    stands = f"The {noun} of {name} is {limit} of {format_cores(e.cpu_limit)} requested cores"
    if e.refused:
        return f"{stands}: nothing is ever written to its cgroup, because {e.refused}."
    if e.status == "contested":
        return (
            f"{stands}, as another program left it: it changed the limit back {e.contested_losses} times, so the "
            f"agent no longer writes it. Stop the other program's writes, then `{unpin} {name}`."
        )
    if e.override_left_s is not None:
        who = f"{e.override_by} set it" if e.override_by else "another program set it"
        return (
            f"{stands}: {who}, which is respected for another {format_left(e.override_left_s)}. "
            f"`{unpin} {name}` returns it to the monitor now."
        )
    if e.pinned_cpu_limit is not None:
        until = f"until `{unpin} {name}`" if e.pinned_until is None else f"until {format_time(e.pinned_until)}"
        return f"{stands}: an operator pinned it {until}."
    if e.mode == "off":
        return f"{stands}: its mode is off, so it is neither measured nor changed."
    if e.unlimited:
        return (
            f"{name} requested no CPU limit from {e.engine}, so nothing is written: there is no limit to "
            f'reclaim from. Give it one there, or set unlimited = "host" in its source to count the CPUs of this host.'
        )
    if e.engine and not e.labels and e.mode == "shadow":
        return f"{stands}: {e.engine} has not named it, so nothing is written; see the problems of `cpumond status`."
    if e.mode == "shadow":
        why = "it is in the control group (control_group_ratio)" if e.status == "control" else "its mode is shadow"
        return (
            f"{stands}: {why}, so nothing is written. In mode reclaim it would be "
            f"{format_cores(e.monitor_cpu_limit)} now{_describe_shadow(e, s)}"
        )
    paused = " Writes are paused, so it stays as it is." if e.paused else ""
    if e.peak is not None and e.bounds.floor < e.bounds.cap:
        if e.start_left_s > 0:
            return f"{stands}: it is measured after start_delay, in {format_left(e.start_left_s)}.{paused}"
        whole = ", its maximum" if e.current_cpu_limit >= e.bounds.cap else ""
        return f"{stands}{whole}: {e.peak.because}{_describe_cap(e) if whole else ''}{paused}"
    if e.current_cpu_limit < e.bounds.cap:
        floor = f" This is its floor ({_floor_reason(e, s)})." if e.current_cpu_limit <= e.bounds.floor else ""
        return f"{stands}{_because(e)}.{_last_step(e, s)}{floor}{paused}"
    held = _describe_cap(e)
    if e.bounds.floor >= e.bounds.cap:
        floor = f"its floor is equally high ({_floor_reason(e, s)})"
        return f"{stands}, its maximum, and never less: {floor}.{held}{paused}"
    return f"{stands}, its maximum{_last_step(e, s) or ': it has not been lowered so far.'}{held}{paused}"


def _because(e: ExplainAnswer) -> str:
    if e.smoothed_cpu_usage is None:
        return ""
    return f", because its recent usage is about {format_cores(e.smoothed_cpu_usage)} (smoothed)"


def _describe_shadow(e: ExplainAnswer, s: MonitorSettings) -> str:
    """Explain the monitor's limit in words that end a sentence; if the limit is at its floor, explain the floor too."""
    if e.bounds.floor >= e.bounds.cap:
        return f" and never less: its floor is equally high ({_floor_reason(e, s)})."
    if e.peak is not None:
        return f": {e.peak.because}"
    floor = f" This is its floor ({_floor_reason(e, s)})." if e.monitor_cpu_limit <= e.bounds.floor else ""
    return f"{_because(e)}.{floor}"


def _last_step(e: ExplainAnswer, s: MonitorSettings) -> str:
    """Return a space and a sentence about the newest change that was written; "" if there was no such change."""
    step = next((decision for decision in reversed(e.decisions) if decision.result == "applied"), None)
    if step is None:
        return ""
    lead = "." if e.current_cpu_limit >= e.bounds.cap else ""
    change = f"{format_cores(step.old_cores)} -> {format_cores(step.applied_cores)}"
    return f"{lead} The last change, {change} at {format_time(step.at)}: {_explain_step(step, e, s)}."


def _explain_step(step: DecisionAnswer, e: ExplainAnswer, s: MonitorSettings) -> str:
    """Explain the newest change to a reader who does not know about votes."""
    votes = f"(votes {format_votes(step.votes_sum)}; more than {e.window.threshold} are needed)"
    if step.kind == "shrink":
        return f"usage stayed below {s.relative_lower_bound:g} of the limit {votes}"
    if step.kind == "grow":
        return f"usage stayed above {s.relative_upper_bound:g} of the limit {votes}"
    return _describe_reason(step)


def _describe_cap(e: ExplainAnswer) -> str:
    """Return a space and a sentence that explains why the limit stays below the request; "" if there is no reason."""
    b = e.bounds
    if b.cap >= e.cpu_limit:
        return ""
    what = "Its request"
    if b.ancestor_cap is not None and b.ancestor_cap <= b.cap:
        what = f"The quota of {b.ancestor or '/'} above it, {count_cores(b.ancestor_cap)},"
    elif b.quota_found is not None and b.quota_found <= b.cap:
        what = f"The quota its cgroup was found with, {count_cores(b.quota_found)},"
    return f" {what} allows no more."


def _floor_reason(e: ExplainAnswer, s: MonitorSettings) -> str:
    cap = e.bounds.cap
    reasons = {
        f"min_cpu_limit = {s.min_cpu_limit:g}": s.min_cpu_limit,
        f"min_limit_ratio = {s.min_limit_ratio:g} of the cap": s.min_limit_ratio * cap,
    }
    reason, cores = max(reasons.items(), key=lambda item: item[1])
    if s.headroom_ratio and e.bounds.floor > min(cores, cap):
        return f"headroom_ratio = {s.headroom_ratio:g} above the usage of the window"
    return reason


def _list_facts(e: ExplainAnswer, s: MonitorSettings) -> dict[str, str]:
    b = e.bounds
    found = "none" if b.quota_found is None else format_cores(b.quota_found)
    above = "none" if b.ancestor_cap is None else f"{format_cores(b.ancestor_cap)}, of {b.ancestor or '/'}"
    ordered = ", taken from its cgroup" if e.cpu_limit_given is None else ""
    ordered = f", as {e.engine} says" if e.engine and ordered == "" else ordered
    order = "no limit requested" if e.unlimited else f"{count_cores(e.cpu_limit)}{ordered}"
    use, smoothed = format_measured(e.usage), format_measured(e.smoothed_cpu_usage)
    facts = {
        "job": f"{e.job_id}, operation {e.operation_id or '-'}, {_describe_source(e)}",
        "cgroup": e.directory or e.cgroup,
        "ordered": order,
        "cap": f"{count_cores(b.cap)}: least of its request, the quota found ({found}), the quotas above ({above})",
        "floor": f"{count_cores(b.floor)}: {_floor_reason(e, s)}",
        "mode": _describe_mode(e),
        "in force": f"{_describe_quota(e.in_force)}; found: {_describe_quota(e.found)}",
        "use": f"{use} cores in the last check, {smoothed} smoothed, {e.throttled_ratio:.0%} of the periods throttled",
        "pressure": "unknown (no PSI for this cgroup)",
    }
    if (psi := e.pressure) is not None:
        ratios = f"{psi.some_10s_ratio:.1%} of the last 10 s, {psi.some_60s_ratio:.1%} of the last 60 s"
        facts["pressure"] = f"some task waited for CPU {ratios}"
    if (p := e.peak) is not None:
        peak = "none yet" if p.peak_cores is None else f"{format_measured(p.peak_cores)} cores"
        half_life = format_span(p.half_life_s)
        facts["rule"] = f"peak: {peak} remembered, half-life {half_life}, caution {p.caution:.2f} of 0 to 7"
        facts["held back"] = _describe_budget(p)
    if e.labels:
        facts["labels"] = ", ".join(f"{name} {text}" for name, text in e.labels.items())
    facts["last write"] = _describe_write(e)
    if e.actuator == "weight":
        facts["actuator"] = "weight: it follows the job guarantee, its share when CPU is short; it never throttles"
    elif e.actuator == "guarantee":
        facts["actuator"] = "guarantee: nothing is written to its cgroup; it may use more while CPU is free"
    if e.notes:
        facts["held by"] = "; ".join(e.notes)
    if (a := e.aggregated) is not None:
        facts["so far"] = (
            f"core-seconds: {a.max_cpu_s:.0f} requested, {a.smoothed_cpu_s:.0f} used (smoothed), "
            f"{a.preempted_cpu_s:.0f} reclaimed"
        )
        if e.fast_restores:
            facts["so far"] += f"; the full limit restored at once {e.fast_restores} x"
        if a.throttled_cpu_s:
            facts["so far"] += (
                f"; its threads were throttled for {a.throttled_cpu_s:.1f} s, {a.late_cpu_s:.1f} s of it while its "
                "limit was lowered"
            )
    return facts


def _describe_budget(p: PeakAnswer) -> str:
    """Describe how often a lowered limit throttled the job, compared with the budget for that."""
    times = count(p.held_count, "time")
    return (
        f"{times}, {format_span(p.held_s)} of {format_span(p.watched_s)} watched = {100 * p.held_ratio:.2f} %, "
        f"budget {100 * p.throttle_budget:.2f} %"
    )


def _describe_source(e: ExplainAnswer) -> str:
    if e.source.startswith("started by the scheduler"):
        return e.source
    return f"from source {e.source}" if e.source else "added by `cpumond job add`"


def _describe_mode(e: ExplainAnswer) -> str:
    clauses = (
        (True, e.mode),
        (e.xattr_mode is not None, f"xattr user.cpumond.mode asks for {e.xattr_mode}"),
        (e.told_level, f"the scheduler allows at most {e.told_level} on this host (may_set_mode)"),
        (e.refused, f"refused: {e.refused}"),
        (e.paused, "all writes paused by the pause file"),
        (e.status == "control", "as one of the control group (control_group_ratio)"),
        (e.status not in (e.mode, "refused", "control"), e.status),
        (e.contested_losses, f"limit lowered by another program {e.contested_losses} x"),
    )
    return ", ".join(text for holds, text in clauses if holds)


def _describe_quota(q: Quota) -> str:
    text = f"no quota (period {q.period_us} us)"
    if q.quota_us is not None:
        text = f"{q.quota_us} us of each {q.period_us} us = {count_cores(q.quota_us / q.period_us)}"
    if q.burst_us:
        text += f", burst {q.burst_us} us"
    return text if q.weight is None else f"{text}, weight {q.weight}"


def _describe_write(e: ExplainAnswer) -> str:
    text = e.last_result or "none so far"
    if e.write_errors:
        text += f", {count(e.write_errors, 'error')} so far"
    return f"{text}; {e.last_error}" if e.last_error else text


def _describe_votes(e: ExplainAnswer, s: MonitorSettings) -> str:
    limit, low, high = map(format_cores, (e.monitor_cpu_limit, e.bounds.lower_bound, e.bounds.upper_bound))
    return (
        f"votes compare with the limit of {limit}: -1 below {s.relative_lower_bound:g} x {limit} = {low}, "
        f"+1 above {s.relative_upper_bound:g} x {limit} = {high}"
    )


def _describe_next(e: ExplainAnswer, s: MonitorSettings) -> str:
    """Describe what the next check does if its vote is like the last ones: the sum, the threshold, and the step."""
    b, w = e.bounds, e.window
    if e.mode == "off":
        return "none in mode off"
    if e.start_left_s > 0:
        return f"measured after start_delay, in {format_left(e.start_left_s)}"
    if e.peak is not None:
        return e.peak.next
    limit, total, size = e.monitor_cpu_limit, sum(w.votes), len(w.votes)
    if s.vote_mode == "ytsaurus" and size == w.size - 1:
        return _describe_last_vote(e, s, total)
    if size < w.size:
        return f"decides once the window has {w.size} votes; now {size}, sum {format_votes(total)}"
    low, high = w.votes.count(-1), w.votes.count(1)
    shown = format_cores(limit)
    below = f"{low} of {size} below {s.relative_lower_bound:g} x {shown} = {count_cores(b.lower_bound)}"
    above = f"{high} of {size} above {s.relative_upper_bound:g} x {shown} = {count_cores(b.upper_bound)}"
    needs = f"needs |sum| > {w.threshold}, has {format_votes(total)}"
    if total > w.threshold:
        return f"{needs}: {above} -> {_describe_grow(e, s)}"
    if total < -w.threshold:
        return f"{needs}: {below} -> {_describe_shrink(e, s)}"
    votes = " and ".join(text for text, number in ((below, low), (above, high)) if number)
    return f"{needs}: {votes or 'all between the bounds'} -> hold"


def _describe_last_vote(e: ExplainAnswer, s: MonitorSettings, total: int) -> str:
    """Describe how the next vote decides: between two checks, vote mode ytsaurus keeps one vote less than it needs."""
    threshold = e.window.threshold
    needs = f"needs |sum| > {threshold}, has {format_votes(total)} and one vote to come"
    if total - 1 < -threshold:
        return f"{needs}: -> {_describe_shrink(e, s)}, if that is {'not +1' if total < -threshold else '-1'}"
    if total + 1 > threshold:
        return f"{needs}: -> {_describe_grow(e, s)}, if that is {'not -1' if total > threshold else '+1'}"
    return f"{needs} -> hold"


def _describe_grow(e: ExplainAnswer, s: MonitorSettings) -> str:
    limit, cap = e.monitor_cpu_limit, e.bounds.cap
    if limit >= cap:
        return f"would grow, but {format_cores(limit)} is its cap already"
    if s.direction == "down-only":
        return "would grow, but direction is down-only"
    text = f"grow to {format_cores(min(limit * s.increase_coefficient, cap))} (x {s.increase_coefficient:g})"
    return text + _describe_hindrance(e)


def _describe_shrink(e: ExplainAnswer, s: MonitorSettings) -> str:
    limit, floor = e.monitor_cpu_limit, e.bounds.floor
    if limit <= floor:
        return f"would shrink, but {format_cores(limit)} is its floor ({_floor_reason(e, s)})"
    if s.direction == "up-only" or e.mode == "up-only":
        return f"would shrink, but its {'direction' if s.direction == 'up-only' else 'mode'} is up-only"
    if e.held_s > 0:
        return f"would shrink, but restore_hold or startup_boost keeps it for another {format_left(e.held_s)}"
    to = format_cores(max(limit * s.decrease_coefficient, floor))
    return f"shrink to {to} (x {s.decrease_coefficient:g})" + _describe_hindrance(e)


def _describe_hindrance(e: ExplainAnswer) -> str:
    """Explain why a step that was decided is not written."""
    if e.status in ("refused", "contested", "overridden", "pinned"):
        return f", not written: it is {e.status}"
    if e.mode == "shadow":
        return ", not written in mode shadow"
    return ", not written while writes are paused" if e.paused else ""


def _describe_reason(decision: DecisionAnswer) -> str:
    if decision.kind == "grow" and decision.by_look:
        return f"usage {format_measured(decision.usage_cores)} above the limit, before it held the job back"
    if decision.kind in ("grow", "shrink") and decision.votes_sum is None:
        high = "its recent maximum needs more" if decision.kind == "grow" else "its recent maximum fades"
        return f"{high}, usage {format_measured(decision.usage_cores)}"
    if decision.kind in ("grow", "shrink"):
        votes = format_votes(decision.votes_sum)
        usage, smoothed = format_measured(decision.usage_cores), format_measured(decision.smoothed_cores)
        return f"votes {votes}, usage {usage}, smoothed {smoothed}"
    if decision.kind == "restore":
        signs = []
        if decision.throttled_ratio:
            signs.append(f"{decision.throttled_ratio:.0%} of the periods throttled")
        if decision.pressure_ratio:
            signs.append(f"some task waited for CPU {decision.pressure_ratio:.0%} of the time")
        if not signs:
            signs.append(f"usage {format_measured(decision.usage_cores)} above the limit")
        looked = " at a look between two checks" if decision.by_look else ""
        return f"{', '.join(signs)}{looked}, so the full request was restored at once"
    return KIND_REASONS.get(decision.kind, decision.kind)
