"""Work of the scheduler's child processes: predict when operations start and end, and simulate a change.

The state is the child's own copy. A simulation changes it, so each one runs in a child of the child."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cpumond.core.measures import format_span
from cpumond.core.words import count
from cpumond.scheduler.answers.calibration import PARTS, quantile
from cpumond.scheduler.decide.run_times import UNKNOWN_S
from cpumond.scheduler.model import CommandError, OperationRecord, PreemptionRecord
from cpumond.scheduler.model.forecast import Forecast, PredictedShare, PredictedStart, PredictedStop, Simulation
from cpumond.scheduler.state import State, changes
from cpumond.scheduler.state.commands import Command, prepare
from cpumond.scheduler.trial.at_once import describe_starts
from cpumond.scheduler.trial.fork import ASKED_NICENESS, Child, Send, ask_at_once
from cpumond.scheduler.trial.forward import Course, Forward, Pace
from cpumond.scheduler.trial.load import Drawn, Expected, Experience
from cpumond.scheduler.trial.rounds import settle

LEAST_RUNS: Final = 5
MOST_RUNS: Final = 40
LEAST_RUN_S: Final = 0.2
FIRST_RUN_S: Final = 1.0
MOST_RUN_S: Final = 20.0
"""The limit of one run's CPU time: its minimum; its maximum in the first round; its maximum in later rounds."""
PATIENCE: Final = 3.0
"""If operations still wait, a run ends after this many times the CPU time that passed until the last start of one of
them: an operation that can never start must not delay the forecasts of others."""
COMPARED_S: Final = 12.0
"""CPU time of each of two compared runs; if it is not enough, their horizon becomes shorter."""
COMPARED_CLOCK_S: Final = 50.0
"""Longest wall-clock time of each compared run, for a host so busy that a run gets less than a fourth of a core."""
SAME_S: Final = 1.0
"""Moments less than this apart count as equal."""
MOST_LISTED: Final = 200
CHUNK: Final = 500

Moments = dict[str, tuple[float | None, float | None]]
"""Operation -> its first start and its end; None if the run did not reach that moment."""


@dataclass(frozen=True, slots=True)
class RunBudget:
    """Limits of forecasts. ``horizon_s``: how far they look ahead. ``budget_s``: CPU time of all runs; LEAST_RUNS runs
    are made in any case. ``run_s``: CPU time of each run."""

    horizon_s: float
    budget_s: float
    run_s: float = MOST_RUN_S


class RunResult(msgspec.Struct):
    """Result of a run: the part of a ``Course`` that is needed, or the reason why a command was refused."""

    moments: Moments = {}
    stops: list[PredictedStop] = []
    core_seconds: list[tuple[str, str, float, float]] = []
    began: float = 0.0
    until: float = 0.0
    is_cut: bool = False
    """Whether the run ended before its horizon because it took too long."""
    ids: list[str] = []
    names: dict[str, tuple[str, str, str]] = {}
    """Operation created by the commands -> title, tree, pool."""
    refusal: str = ""
    unknown: int = 0
    """Number of operations whose run times are guessed because no similar job has completed."""


def send_forecasts(
    state: State, now: float, pace: Pace, limits: RunBudget, seed: int, send: Send, only: Collection[str] | None = None
) -> None:
    """Send forecasts of all live operations, or of those in ``only``, in chunks (msgpack of ``list[Forecast]``)."""
    experience = Experience(state, now)
    watched = frozenset(state.operations if only is None else only)
    records = [state.operations[each].record for each in watched]
    waiting = frozenset(each.id for each in records if not each.suspended and when_started(state, each) is None)
    horizon = now + limits.horizon_s
    run_budget_s = max(limits.budget_s / LEAST_RUNS, LEAST_RUN_S)
    runs: list[Moments] = []
    begun = time.process_time() + _children_s()
    while len(runs) < MOST_RUNS:
        number = len(runs)

        def run(number: int = number) -> tuple[float, Moments]:
            load = Drawn(experience, random.Random(f"{seed} {number}"))  # noqa: S311 - not for secrets
            forward = Forward(state, now, pace, load)
            told, left, moved_s = forward.course, waiting, 0.0

            def is_enough() -> bool:
                nonlocal left, moved_s
                spent_s = time.process_time()
                if still := left - told.first_starts.keys():
                    left, moved_s = still, spent_s if len(still) < len(left) else moved_s
                    return spent_s > patience_s(run_budget_s, moved_s, limits.run_s)
                return only is not None or watched <= told.ends.keys() or spent_s > run_budget_s

            course = forward.run(now + limits.horizon_s, enough=is_enough)
            return course.until, moments_of(course, watched)

        until, moments = ask_at_once(run, tuple[float, Moments], None)
        runs.append(moments)
        horizon = min(horizon, until) if until < now + limits.horizon_s and waiting - _started(moments) else horizon
        if len(runs) >= LEAST_RUNS and time.process_time() + _children_s() - begun > limits.budget_s:
            break
    found = make_forecasts(state, experience, runs, now, horizon, watched)
    for first in range(0, len(found), CHUNK):
        send(msgspec.msgpack.encode(found[first : first + CHUNK]))


def patience_s(least_s: float, moved_s: float, most_s: float) -> float:
    """Return the CPU time that a run may take while operations wait. ``moved_s``: CPU time at its last start. Pure."""
    return min(max(least_s, FIRST_RUN_S, PATIENCE * moved_s), most_s)


def _children_s() -> float:
    times = os.times()
    return float(times.children_user + times.children_system)


def _started(moments: Moments) -> frozenset[str]:
    return frozenset(each for each, (start, _) in moments.items() if start is not None)


def moments_of(course: Course, operation_ids: Iterable[str]) -> Moments:
    return {each: (course.first_starts.get(each), course.ends.get(each)) for each in operation_ids}


def make_forecasts(
    state: State, experience: Experience, runs: Sequence[Moments], now: float, horizon: float, watched: Collection[str]
) -> list[Forecast]:
    """Combine the starts and ends of operations in all runs into intervals. Pure."""
    found = []
    for record in [each.record for each in state.operations.values() if each.id in watched]:
        started_at = when_started(state, record)
        moments = [run.get(record.id, (None, None)) for run in runs]
        starts = sorted(math.inf if start is None else start for start, _ in moments)
        ends = sorted(math.inf if end is None else end for _, end in moments)
        knows_end = all(experience.run_times(record, task) for task in record.tasks)
        start = [None if started_at is not None else _from(quantile(starts, part), now) for part in PARTS]
        end = [_from(quantile(ends, part), now) if knows_end else None for part in PARTS]
        forecast = Forecast(
            operation_id=record.id, started_at=started_at, start_p10=start[0], start_p50=start[1], start_p90=start[2],
            end_p10=end[0], end_p50=end[1], end_p90=end[2], as_of=now, horizon=horizon, runs=len(runs),
        )  # fmt: skip
        found.append(msgspec.structs.replace(forecast, lines=describe(forecast, record, experience)))
    return found


def _from(at: float | None, now: float) -> float | None:
    return None if at is None else max(at, now)


def when_started(state: State, record: OperationRecord) -> float | None:
    """Return when the operation's first job started, as far as its jobs are known; None if none has started."""
    operation = state.operations.get(record.id)
    live = [] if operation is None else [
        job.start_time for element in operation.elements.values() for job in element.jobs.values()
    ]  # fmt: skip
    ended = [job.start_time for job in state.finished_jobs.get(record.id, {}).values()]
    return min((*live, *ended), default=None)


def describe(forecast: Forecast, record: OperationRecord, experience: Experience) -> list[str]:
    lines = []
    span_s = forecast.horizon - forecast.as_of
    if forecast.started_at is None:
        if record.suspended:
            lines.append("it is suspended: no job of it starts until it is resumed")
        elif forecast.start_p90 is None:
            part = "half" if forecast.start_p50 is None else "some"
            runs = count(forecast.runs, "simulation")
            lines.append(f"in {part} of {runs} it does not start within {format_span(span_s)}")
    if forecast.end_p50 is None:
        known = any(experience.run_times(record, task) for task in record.tasks)
        why = f"it is more than {format_span(span_s)} away" if known else "no job like its own has completed yet"
        lines.append(f"its end is not known: {why}")
    else:
        number = len(experience.run_times(record, record.tasks[0]))
        lines.append(f"run times are taken from {count(number, 'job')} like its own")
    return lines


# --- what-if simulations


def compare(
    state: State, now: float, pace: Pace, horizon_s: float, commands: tuple[Command, ...], user: str,
    on_progress: Callable[[float], None],
) -> Simulation:  # fmt: skip
    """Compare two runs with the usual load, without and with the commands. Raises CommandError."""
    experience = Experience(state, now)
    known = {each.id: each.record for each in state.operations.values()}
    # The runs follow each other: the host's second core belongs to the scheduler.
    after = _run(state, now, pace, horizon_s, experience, commands, user, lambda part: on_progress(part / 2.0))
    if after.refusal:
        raise CommandError(after.refusal)
    span_s = after.until - now if after.is_cut else horizon_s
    before = _run(state, now, pace, span_s, experience, (), user, lambda part: on_progress((1.0 + part) / 2.0))
    if before.is_cut:
        after = cut(after, before.until)
    # If no run was shortened, the runs ended because no work was left.
    is_over = not after.is_cut and after.until < now + horizon_s - SAME_S

    def apply(state: State) -> None:
        numbers = itertools.count(1)
        for command in commands:
            changes.apply(state, prepare(state, command, user, now, lambda: f"asked-for-{next(numbers)}"), now)
            settle(state, now)

    return make_simulation(known, before, after, now, describe_starts(state, now, apply), is_over=is_over)


def cut(told: RunResult, until: float) -> RunResult:
    """Return the part of a result that happens before the moment ``until``. Pure."""

    def seen(at: float | None) -> float | None:
        return None if at is None or at > until else at

    moments = {each: (seen(start), seen(end)) for each, (start, end) in told.moments.items()}
    stops = [each for each in told.stops if each.at <= until]
    part = (until - told.began) / max(told.until - told.began, 1e-9)
    sums = [(tree, pool, share * part, used * part) for tree, pool, share, used in told.core_seconds]
    return msgspec.structs.replace(told, moments=moments, stops=stops, core_seconds=sums, until=until, is_cut=True)


def _run(
    state: State, now: float, pace: Pace, horizon_s: float, experience: Experience, commands: tuple[Command, ...],
    user: str, on_progress: Callable[[float], None],
) -> RunResult:  # fmt: skip
    def work(send: Send) -> None:
        forward = Forward(state, now, pace, Expected(experience), lambda part: send(msgspec.msgpack.encode(part)))
        over, clock_over = time.process_time() + COMPARED_S, time.monotonic() + COMPARED_CLOCK_S
        asked = forward.course.ids
        # Operations that have begun: a restart of one of their jobs, such as after a drain, is not their start.
        begun = {each.id for each in state.operations.values() if any(part.jobs for part in each.elements.values())}
        is_cut, quiet_since = False, math.inf

        def is_enough() -> bool:
            nonlocal is_cut, quiet_since
            # If nothing runs or is queued for a whole round, all jobs and requested operations have ended.
            if forward.state.jobs or any(tree.queue for tree in state.trees.values()):
                quiet_since = math.inf
            else:
                quiet_since = min(quiet_since, forward.now)
                if forward.now - quiet_since > forward.round_s:
                    return True
            is_cut = time.process_time() > over or time.monotonic() > clock_over
            return is_cut

        try:
            course = forward.run(now + horizon_s, commands, user, enough=is_enough)
        except CommandError as error:
            send(msgspec.msgpack.encode(RunResult(refusal=str(error))))
            return
        watched = {*course.first_starts, *course.ends, *asked}
        records = [record for each in watched if (record := state.record_of(each)) is not None]
        send(
            msgspec.msgpack.encode(
                RunResult(
                    {
                        each: (None if each in begun else start, end)
                        for each, (start, end) in moments_of(course, watched).items()
                    },
                    [_stop_of(each) for each in course.stops],
                    [(*key, *sums) for key, sums in course.core_seconds.items()],
                    now,
                    course.until,
                    is_cut,
                    course.ids,
                    {each: _name(state, each) for each in asked if state.record_of(each) is not None},
                    unknown=sum(not all(experience.run_times(each, task) for task in each.tasks) for each in records),
                )
            )
        )

    told: RunResult | None = None
    for message in Child(work, ASKED_NICENESS).read_each():
        found = msgspec.msgpack.decode(message, type=float | RunResult)
        if isinstance(found, RunResult):
            told = found
        else:
            on_progress(found)
    assert told is not None
    return told


def _name(state: State, operation_id: str) -> tuple[str, str, str]:
    record = state.find_record(operation_id)
    tree, options = next(iter(record.trees.items()), ("", None))
    return record.title, tree, "" if options is None else options.pool


def _stop_of(record: PreemptionRecord) -> PredictedStop:
    return PredictedStop(
        record.job_id, record.operation_id, record.tree, record.pool, record.node_id, record.at, record.kind,
        record.lost_core_seconds / 3600.0, record.preemptor_operation_id, record.why,
    )  # fmt: skip


def make_simulation(
    known: Mapping[str, OperationRecord], before: RunResult, after: RunResult, now: float, starts_at_once: str = "", *,
    is_over: bool = False,
) -> Simulation:  # fmt: skip
    """Return the differences of two runs. ``is_over``: no job was left before the horizon. Pure."""
    starts: list[PredictedStart] = []
    left_out = 0
    for operation_id in {**dict.fromkeys(after.ids), **dict.fromkeys(before.moments), **dict.fromkeys(after.moments)}:
        was = before.moments.get(operation_id, (None, None))
        will = after.moments.get(operation_id, (None, None))
        record = known.get(operation_id)
        if operation_id not in after.names and (
            record is None or (_is_same(was[0], will[0]) and _is_same(was[1], will[1]))
        ):
            continue
        if record is not None:
            tree, options = next(iter(record.trees.items()), ("", None))
            name = record.title, tree, "" if options is None else options.pool
        else:
            name = after.names[operation_id]
        if len(starts) == MOST_LISTED:
            left_out += 1
            continue
        starts.append(PredictedStart(operation_id, *name, was[0], will[0], was[1], will[1]))
    then = {(stop.job_id, stop.kind) for stop in before.stops}
    stops = [stop for stop in after.stops if (stop.job_id, stop.kind) not in then]
    shares = _compare_shares(before, after, now)
    operation_id = next((each for each in after.ids if each in after.names), "")
    simulation = Simulation(now, after.until, operation_id, starts, stops, shares, [], left_out)
    lines = list(_describe_simulation(simulation, starts_at_once, is_over))
    if after.unknown:
        of, least = count(after.unknown, "operation"), format_span(UNKNOWN_S)
        guess = f"of {of} no job like {'its' if after.unknown == 1 else 'their'} own has completed yet"
        lines.append(f"{guess}: each job is assumed to run for {least} more, or for as long again as it has")
    if after.is_cut:
        lines.append(f"the simulation ends {format_span(after.until - now)} from now: more would take too long")
    return msgspec.structs.replace(simulation, lines=lines)


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) < SAME_S)


def _compare_shares(before: RunResult, after: RunResult, now: float) -> list[PredictedShare]:
    was = {(tree, pool): (share, used) for tree, pool, share, used in before.core_seconds}
    # A run that ended early because no work was left would only have continued without usage.
    span_s = max(before.until - now, after.until - now, 1e-9)
    found = []
    for tree, pool, share, used in after.core_seconds:
        share_before, used_before = was.get((tree, pool), (0.0, 0.0))
        each = PredictedShare(tree, pool, share_before / span_s, share / span_s, used_before / span_s, used / span_s)
        if max(abs(each.fair_share_after - each.fair_share_before), abs(each.used_after - each.used_before)) > 0.01:
            found.append(each)
    return found


def _describe_simulation(found: Simulation, starts_at_once: str, is_over: bool) -> Iterable[str]:
    looked = format_span(found.horizon - found.as_of)
    asked = next((each for each in found.starts if each.operation_id == found.operation_id), None)
    if asked is not None:
        if asked.start_after is None:
            yield (
                "it does not start, even when all jobs have ended" if is_over else f"it does not start within {looked}"
            )
        else:
            text = f"its first job starts after {format_span(max(asked.start_after - found.as_of, 0.0))}"
            ends = asked.end_after
            yield text if ends is None else f"{text} and it ends after {format_span(ends - found.as_of)}"
    if starts_at_once:
        yield starts_at_once
    others = [each for each in found.starts if each.operation_id != found.operation_id]
    later = [each for each in others if _moves(each) > SAME_S]
    sooner = [each for each in others if _moves(each) < -SAME_S]
    if later:
        worst = max(later, key=_moves)
        span = "beyond the simulated time" if math.isinf(_moves(worst)) else f"by {format_span(_moves(worst))} at most"
        yield f"{count(len(later), 'operation')} would start later, {span}"
    if sooner:
        yield f"{count(len(sooner), 'operation')} would start sooner"
    if found.stops:
        lost = sum(stop.lost_core_hours for stop in found.stops)
        yield f"{count(len(found.stops), 'job')} would be stopped, losing {lost:.3g} core-hours of work"
    elif found.operation_id or found.starts or found.shares:
        yield "no job would be stopped"
    if not found.starts and not found.stops and not found.shares and not starts_at_once:
        yield "nothing would change until all jobs have ended" if is_over else f"nothing would change within {looked}"


def _moves(each: PredictedStart) -> float:
    """Return by how many seconds the change delays the operation's start."""
    if each.start_before is None and each.start_after is None:
        return 0.0
    if each.start_before is None or each.start_after is None:
        return math.inf if each.start_after is None else -math.inf
    return each.start_after - each.start_before
